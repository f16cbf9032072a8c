"""The check as callers have it: one module and one style, or a module that is like one that has passed.

What the ranks of a mesh find they tell each other, so that all of them go on or all of them raise.
"""

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import hear_all, refusing_together
from wallfacer_dt.autocast import computed_dtype
from wallfacer_dt.dealing import dealing_by_hand
from wallfacer_dt.equivalence.cause import compare
from wallfacer_dt.equivalence.inputs import Sizes, heads_to_try, mask_shape, shortened
from wallfacer_dt.equivalence.likeness import likeness
from wallfacer_dt.equivalence.together import random_state_kept, run_together
from wallfacer_dt.equivalence.trial import AttentionStyle, Trial, assembled
from wallfacer_dt.layout import BY_DOCUMENT, check_length
from wallfacer_dt.mesh import mesh_ranks, name_of
from wallfacer_dt.order import TokenOrder


def check_equivalence(
    module: nn.Module,
    style: AttentionStyle,
    mesh: DeviceMesh,
    *,
    length: int | None = None,
    heads: tuple[int, int] | None = None,
    head_dim: int = 16,
    dtype: torch.dtype | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Compare a module with what a style would put in its place: outputs, gradients and which key each query sees.

    Every rank runs the module on a whole random sequence and the style on its shard; all ranks of the mesh call it
    together, before the style is applied. Both are called with ``kwargs`` and with what the module's signature names
    of the style's options (``is_causal``, ``scale``, ``window_size``, ``sliding_window``, ``softcap``, ``enable_gqa``,
    masks), under autocast where the caller is under it. Whether rows of a batch see each other is tried with two rows
    of a few tokens, if the module takes them. The module and the random state are left as they are. Nothing
    is compared under fake tensors and on fake process groups. A module whose output needs no gradient is compared in
    its output alone.

    Differences are relative to the largest entry of each channel: 1e-3 in float32 (2e-2 off the CPU, where matrix
    products may be rounded to TF32), 1e-5 in float64, 8e-2 in half precision, where a module may round scores. Under
    autocast the dtype that it casts to counts, in which the output must be.

    Args:
        module: the inner attention as the model has it, in the mode (``train()`` or ``eval()``) it will be used in.
        style: :class:`RingParallel`, :class:`WallFacerParallel` or :class:`UlyssesParallel`.
        mesh: that the style is to be applied on.
        length: tokens of the sequence; 1152 and more by default, so that windows up to 1024 are seen, or the style's
            own ``length`` where that is shorter. A style whose order deals tokens out by document is tried in
            ``"head_tail"``: what a query sees is the same.
        heads: heads of q and of k and v; by default 4 and 2 or, where the module refuses that, 4 and 4 (more on more
            than 4 ranks of Ulysses).
        head_dim: H of v, and of k without ``k_shared``; at least 2.
        dtype: of q, k and v; by default float32 on the CPU and under autocast, and bfloat16 elsewhere.
        kwargs: what the model calls the module with besides q, k, v; ``k_shared`` (1, 1, length, Hs), like all else,
            of the whole sequence.

    Raises:
        EquivalenceError: on every rank, naming the first difference and what may have caused it; or the module could
            not be run.
        ValueError: the style refuses the module, or to be called with these options.
        TypeError: as ValueError, or an argument of the wrong type.
    """
    _check(module, style, mesh, length, heads, head_dim, dtype, kwargs)


def _check(
    module: nn.Module,
    style: AttentionStyle,
    mesh: DeviceMesh,
    length: int | None = None,
    heads: tuple[int, int] | None = None,
    head_dim: int = 16,
    dtype: torch.dtype | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> bool:
    """:func:`check_equivalence`, and whether the module computes something else in its other mode."""
    name = name_of(mesh)
    with refusing_together(name):
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
        if length is not None:
            check_length(length, "length")
        check_length(head_dim, "head_dim", least=2)
        options, lengths = shortened(style.options, length, mesh.size())
    if options.order_name == BY_DOCUMENT:
        style.attention_on(mesh, options)  # which may refuse it
        # It would need documents. What a query sees is the same in every order.
        options = replace(options, order=TokenOrder("head_tail", mesh))
    attention = style.attention_on(mesh, options)
    if _is_pretended(mesh):
        return False
    cast_to = computed_dtype(torch.float32, mesh.device_type)
    dtype = dtype or (torch.float32 if mesh.device_type == "cpu" or cast_to != torch.float32 else torch.bfloat16)
    computed = computed_dtype(dtype, mesh.device_type)
    heads_tried = heads_to_try(heads, options, attention.place.ulysses)
    batch, _ = mask_shape(options.mask_mod)
    sizes = [Sizes(*lengths, *some, head_dim, dtype, computed, batch) for some in heads_tried]
    trial = Trial(module, style, mesh, attention, sizes, dict(kwargs or {}))
    # Gradients on, which they are without inference mode under no_grad, too; and tensors on the mesh's device.
    with (
        random_state_kept(mesh), torch.inference_mode(False), torch.device(mesh.device_type),
        dealing_by_hand(mesh_ranks(mesh)),
    ):  # fmt: skip
        reference = run_together("check_equivalence", name, trial.run_module)
        shard = run_together("check_equivalence", name, trial.run_style, reference)
        heard = hear_all("check_equivalence's results", (shard, reference.by_mode), name).values()
        whole = assembled(reference.results, (shard for shard, _ in heard))
        run_together("check_equivalence", name, lambda: compare(trial, reference, whole))
    return any(by_mode for _, by_mode in heard)


def check_once(module: nn.Module, style: AttentionStyle, mesh: DeviceMesh, passed: dict[Hashable, bool]) -> bool:
    """:func:`check_equivalence`, but for a module that is like one of those that have passed with this style.

    As the style is now, on this mesh, under this autocast. It is added to them.

    Args:
        module: as there, in one mode.
        style: as there.
        mesh: as there.
        passed: what has, with what was returned.

    Returns:
        Whether the module computes something else in its other mode, in training or in evaluation.
    """
    if _is_pretended(mesh):
        return False
    told = mesh, computed_dtype(torch.float32, mesh.device_type), style.options, style.layout
    this = likeness(module, told)
    known = this is not None and this in passed
    # Ranks that differ in what they know would wait for each other.
    if all(hear_all("whether check_equivalence has passed", known, name_of(mesh)).values()):
        return passed[this]
    by_mode = _check(module, style, mesh)
    if this is not None:
        passed[this] = by_mode
    return by_mode


def _is_pretended(mesh: DeviceMesh) -> bool:
    """Whether tensors or ranks hold nothing that could be compared."""
    fake = any(dist.get_backend(group) == "fake" for group in mesh.get_all_groups())
    return fake or isinstance(torch.empty(0), FakeTensor)
