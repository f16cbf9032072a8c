"""torchtitan's activation checkpointing with attention saved, so that no backward runs the ring once more.

What is saved of attention, its output and log-sum-exp, is of one rank's size.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from wallfacer_dt.checkpoint import ATTENTION_SAVE_OPS, save_attention


class SelectiveACSavingAttention(SelectiveAC):
    """torchtitan's choice of what is saved, and attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """torchtitan's selective activation checkpointing, with attention saved."""

    def get_save_ops(self) -> set:
        """The operators whose outputs are saved."""
        return super().get_save_ops() | ATTENTION_SAVE_OPS


class FullACSavingAttention(FullAC):
    """A transformer block is computed again in the backward, but for its attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        """torchtitan's full activation checkpointing, but for attention, which is saved."""

    def _wrap_block(self, module: nn.Module, **_: Any) -> nn.Module:
        return checkpoint_wrapper(
            module,
            context_fn=save_attention(),
            preserve_rng_state=self.config.preserve_rng_state,
            determinism_check=self.config.determinism_check,
            early_stop=False,
            debug=self.config.debug,
        )


# What `activation-checkpoint:selective`, `:full` and `:none` mean on the command line.
ActivationCheckpointing = (
    Annotated[SelectiveACSavingAttention.Config, tyro.conf.subcommand("selective")]
    | Annotated[FullACSavingAttention.Config, tyro.conf.subcommand("full")]
    | Annotated[None, tyro.conf.subcommand("none")]
)
