"""What torchtitan 0.3.0 lacks on a CPU, and on torch 2.13; no other module of this recipe replaces anything of others.

Run with torchtitan 0.3.0 and torch 2.13.0. Where there is an accelerator, everything but `fit_to_torch` and
`fit_biases_to_tensor_parallelism` does nothing.
"""

import functools
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def is_cpu() -> bool:
    """Whether there is no accelerator, so that training is to run on CPUs with gloo."""
    return not torch.accelerator.is_available()


def fit_to_torch() -> None:
    """Give torch what torchtitan 0.3.0, which follows torch's nightly builds, calls and torch 2.13 has not.

    That is `torch.distributed.set_timeout`, after the first step, and steps of pipelines on microbatches that are cut
    already.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = _set_timeout  # pyrefly: ignore[missing-attribute]
    for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(kind.step).parameters:
            kind.step = _step_of_microbatches(kind.step)


def fit_to_cpu() -> None:
    """Tell torchtitan that its device is the CPU; call it before any other module of torchtitan is imported.

    torchtitan takes "cuda" where torch knows no accelerator, and asks the device's module for memory statistics, which
    there are none of.
    """
    from torchtitan.tools import utils

    if is_cpu():
        utils.device_type, utils.device_module = "cpu", _cpu_module()


def fit_attention_to_cpu() -> None:
    """Let inner attention that has no backward on a CPU compute what it would elsewhere, on one process.

    ``FlexAttention`` runs forward only there and ``VarlenAttention`` not at all. Their masks are torchtitan's own, made
    whole, without compiling what makes them; nothing is rounded to bfloat16, which varlen does.
    """
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    if is_cpu():
        attention._compiled_create_block_mask = create_block_mask
        attention.FlexAttention.forward = _flex_attention  # pyrefly: ignore[bad-assignment]
        attention.VarlenAttention.forward = _varlen_attention  # pyrefly: ignore[bad-assignment]


def fit_experts_to_float32() -> None:
    """Let GPT-OSS's experts, which compute in bfloat16, give what they were given, as those of other models do.

    Without, torchtitan adds their output to float32 and fails; in bfloat16, elsewhere, this changes nothing.
    """
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    if is_cpu() and not hasattr(GptOssGroupedExperts.forward, "__wrapped__"):
        GptOssGroupedExperts.forward = _as_given(GptOssGroupedExperts.forward)


def fit_biases_to_tensor_parallelism() -> None:
    """Give biases of GPT-OSS's output projections their whole gradient, of which torchtitan gives a tensor rank a part.

    Ranks add as much less of such a bias as they are, since what they give is summed; what comes back is of the sum.
    """
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear

    ScaledBiasRowwiseLinear.forward = _with_its_part_of_the_bias


def draw_whole(model_config: Any) -> None:
    """Let every rank draw whole parameters and keep its shards, in a torchtitan model's configuration.

    On CPU meshes DTensor has no random number generator of its own: ranks with one seed would all draw the same shard.
    """
    from torchtitan.models.common.param_init import skip_param_init
    from torchtitan.protocols.module import Module

    if not is_cpu():
        return
    for _, config, _, _ in model_config.traverse(Module.Config, recurse=True):
        if config.param_init is not None:
            config.param_init = {
                name: fill if fill is skip_param_init else _drawn_whole(fill)
                for name, fill in config.param_init.items()
            }


def fit_fsdp_to_gloo(model: nn.Module) -> None:
    """Have FSDP reduce gradients by sums, since gloo has no sum with a factor; a no-op with other backends."""
    if dist.get_backend() == "gloo":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _set_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    from torch.distributed.distributed_c10d import _set_pg_timeout  # noqa: TID251  it was this before

    _set_pg_timeout(timeout, group)


def _step_of_microbatches(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def run(
        self: Any,
        *args: Any,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Tensor] | None = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        if kwarg_mbs is None:
            return step(self, *args, losses=losses, loss_kwargs=loss_kwargs, **options)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)
        return None

    # torch asks for the parameters that it has been told of.
    run.__signature__ = inspect.signature(run, follow_wrapped=False)  # pyrefly: ignore[missing-attribute]
    return run


def _cpu_module() -> ModuleType:
    module = ModuleType("cpu_as_torchtitan_asks_for_it")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answers: dict[str, Callable[..., Any]] = {
        "set_device": lambda _: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda: None,
        "get_device_name": lambda _=None: "CPU",
        "get_device_properties": lambda _=None: SimpleNamespace(name="CPU", total_memory=memory),
        "reset_peak_memory_stats": lambda: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda _=None: {},
    }
    for name, answer in answers.items():
        setattr(module, name, answer)
    return module


def _as_given(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def experts(self: nn.Module, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return forward(self, x_RD, num_tokens_per_expert_E).type_as(x_RD)

    return experts


def _with_its_part_of_the_bias(self: Any, input: Tensor) -> Tensor:
    from torchtitan.models.gpt_oss.moe import ScaleBiasForward

    weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (self.weight, self.bias))
    return nn.functional.linear(input, weight, ScaleBiasForward.apply(bias, self.tp_degree, bias.dtype))


def _flex_attention(
    self: nn.Module,  # noqa: ARG001  a method that torchtitan reads the signature of
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    *,
    attention_masks: Any,
    score_mod: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001  heads are counted
    out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    if score_mod is not None:
        raise NotImplementedError("score_mod is not implemented on a CPU")
    batch, length = q_BLNH.shape[:2]
    heads = attention_masks.shape[1]
    visible_BNLL = create_mask(attention_masks.mask_mod, batch, heads, length, length, device="cpu")
    return _dense(q_BLNH, k_BLNH, v_BLNH, visible_BNLL, scale, out_transform)


def _varlen_attention(
    self: nn.Module,
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    *,
    attention_masks: Any,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001  heads are counted
    out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    batch, length = q_BLNH.shape[:2]
    left, right = self.window_size  # pyrefly: ignore[not-iterable]
    tokens = torch.arange(batch * length)
    ids_BL = torch.bucketize(tokens, attention_masks.cu_seq_q[1:-1], right=True).view(batch, length)
    behind_LL = tokens[:length, None] - tokens[:length]
    visible_BLL = ids_BL[:, :, None] == ids_BL[:, None]
    visible_BLL &= (behind_LL <= left) | (left < 0)
    visible_BLL &= (-behind_LL <= right) | (right < 0)
    return _dense(q_BLNH, k_BLNH, v_BLNH, visible_BLL[:, None], scale, out_transform)


def _dense(
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    visible_BNLL: Tensor,
    scale: float | None,
    out_transform: Callable[[Tensor, Tensor], Tensor] | None,
) -> Tensor:
    """Softmax of the visible scores, times values; heads of keys and values are repeated."""
    groups = q_BLNH.shape[2] // k_BLNH.shape[2]
    q_BNLH, k_BNLH, v_BNLH = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
    k_BNLH, v_BNLH = (x.repeat_interleave(groups, dim=1) for x in (k_BNLH, v_BNLH))
    scores_BNLL = q_BNLH @ k_BNLH.mT * (q_BLNH.shape[-1] ** -0.5 if scale is None else scale)
    scores_BNLL = scores_BNLL.masked_fill(~visible_BNLL, -torch.inf)
    out_BLNH = (scores_BNLL.softmax(-1) @ v_BNLH).transpose(1, 2)
    return out_BLNH if out_transform is None else out_transform(out_BLNH, scores_BNLL.logsumexp(-1).transpose(1, 2))


def _drawn_whole(fill: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    @functools.wraps(fill)
    def draw(parameter: torch.Tensor) -> None:
        if not isinstance(parameter, DTensor):
            fill(parameter)
            return
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        fill(whole)
        # Every rank drew the same, so that nothing need be sent.
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))

    return draw
