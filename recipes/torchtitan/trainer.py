"""torchtitan's Trainer; its configuration has the fields of this recipe and refuses what does not go with them."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchtitan.trainer import Trainer

from recipes.torchtitan.check import check_config
from recipes.torchtitan.checkpointing import ActivationCheckpointing, SelectiveACSavingAttention
from recipes.torchtitan.settings import BY_DOCUMENT, ContextParallelism
from recipes.torchtitan.text import TextLoader
from wallfacer_dt import TokenOrder, shard_sequence
from wallfacer_dt.agreement.agree import refusing_together
from wallfacer_dt.integrations.torchtitan import Documents


class ContextTrainer(Trainer):
    """torchtitan's Trainer, which tells context-parallel attention where documents begin in whole sequences."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration with this recipe's fields; `check_config` says what it refuses."""

        # Narrower than torchtitan's, for the command line to offer these alone.
        # pyrefly: ignore[bad-override-mutable-attribute]
        parallelism: ContextParallelism = field(default_factory=ContextParallelism)
        """torchtitan's parallelisms, and the shape of context parallelism's mesh."""

        # pyrefly: ignore[bad-override-mutable-attribute]
        activation_checkpoint: ActivationCheckpointing = field(default_factory=SelectiveACSavingAttention.Config)
        """What is computed again in the backward; attention never is."""

        # pyrefly: ignore[bad-override-mutable-attribute]
        dataloader: TextLoader.Config = field(default_factory=TextLoader.Config)
        """The text: `dataset_path` is a file, None the source of Python's standard library; `dataset` is not used."""

        def __post_init__(self) -> None:
            # Not super(): a dataclass with slots is another class than the one whose body this is.
            Trainer.Config.__post_init__(self)
            check_config(self)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # What it is told of a step is a part: torchtitan accumulates gradients, and cuts batches for pipelines.
        if isinstance(self.dataloader, TextLoader):
            a_rank = config.training.local_batch_size * self.gradient_accumulation_steps
            self.dataloader.check_step(a_rank * self.dataloader.dp_world_size)

    def state_dict(self) -> dict[str, Any]:
        """As torchtitan's, but for the tokens seen, which are those of all ranks: they may be others later."""
        told = super().state_dict()
        return told | {"ntokens_seen": told["ntokens_seen"] * self._loss_ranks()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Likewise."""
        super().load_state_dict(state_dict | {"ntokens_seen": state_dict["ntokens_seen"] // self._loss_ranks()})

    def _loss_ranks(self) -> int:
        dims = self.parallel_dims
        return dims.dp_replicate * dims.dp_shard * dims.cp

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """This rank's tokens, labels and what else the model is called with.

        Raises:
            ValueError: the loader gives no positions, from which documents are known.
        """
        if "positions" not in input_dict:
            raise ValueError(
                f"{type(self.dataloader).__name__} gives no positions, of which a model needs the sequence's"
            )
        if not self.parallel_dims.cp_enabled:
            return super().post_dataloading_process(input_dict, labels)
        # Of the part that is called first, where others hear of what a rank refuses here.
        order = self.model_parts[0].token_order
        assert isinstance(order, TokenOrder)
        with refusing_together(order.mesh_name):
            if self.config.parallelism.context_parallel_load_balancer == BY_DOCUMENT:
                return self._dealt_by_document(input_dict, labels, order)
            inputs, labels, others = super().post_dataloading_process(input_dict, labels)
            if "attention_masks" in others:  # where torchtitan makes masks of its own
                others["attention_masks"] = Documents.of(input_dict["positions"])
        return inputs, labels, others

    def _dealt_by_document(
        self, input_dict: dict[str, Tensor], labels: Tensor, order: TokenOrder
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """The same in an order that none of torchtitan's load balancers has: every document head-tail by itself."""
        documents = Documents.of(input_dict["positions"])
        dealt = input_dict | {"labels": labels}
        for name in ("input", "positions", "labels"):
            dealt[name] = shard_sequence(dealt[name], order, dim=1, document_ids=documents.ids)
        inputs, labels = dealt.pop("input"), dealt.pop("labels")
        self.ntokens_seen += labels.numel()
        return inputs, labels, {**dealt, "attention_masks": documents}
