"""What ranks run to show that calls which differ are found out, on every rank, and by name."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.func import grad
from torch.utils.checkpoint import checkpoint

import wallfacer_dt as w
from tests.cases import Inner, mesh_of, told
from tests.metp_refusals import Attention as Projections
from tests.metp_refusals import D, FeedForward, H, WithOptions, attention, metp, with_tp
from wallfacer_dt.agreement.agree import agree, hear_all, refusing_together, settle
from wallfacer_dt.agreement.meeting import Meeting
from wallfacer_dt.agreement.progress import Within
from wallfacer_dt.calls import Call
from wallfacer_dt.checkpoint import save_attention
from wallfacer_dt.kernels.block import Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.mesh import name_of
from wallfacer_dt.metp.boundary import _compare_along_tp
from wallfacer_dt.testing import worst_error

ODD = 2  # the rank that differs


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Ranks do not wait for each other at once, as where tensors are on a device."""
    with mock.patch("wallfacer_dt.agreement.agree.waits_at_once", return_value=False):
        yield


@contextmanager
def only_queued() -> Iterator[None]:
    """As on a device the host does not wait for what is sent; here nothing is."""

    def forward(self: Call, q: Tensor, keys: Any, sinks: Any) -> tuple[Tensor, Tensor]:
        return q * 0, q[..., 0] * 0

    with as_on_a_device(), mock.patch.object(Call, "forward", forward):
        yield


def is_odd() -> bool:
    return dist.get_rank() == ODD


def x(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*(shape or (1, 2, 4, 8)), **options)


def mesh() -> DeviceMesh:
    return mesh_of(2, 2)


def attend(q: Tensor | None = None, on: DeviceMesh | None = None, **options: Any) -> Tensor:
    q, on = x() if q is None else q, mesh() if on is None else on
    if options.get("is_causal") or "document_ids" in options:
        options |= told(on)
    return w.context_parallel_attention(q, q, q, on, **options)


def seen_before(*options: dict[str, Any], **given: Any) -> None:
    """All ranks make the same calls; then one makes another of them than the rest."""
    for each in options:
        attend(**given, **each)
    attend(**given, **options[is_odd()])


def causal_on_one_rank() -> None:
    with as_on_a_device():
        seen_before({"is_causal": False}, {"is_causal": True})


def refused_by_one_rank() -> None:
    with only_queued():
        attend()
        attend(x(1, 2, 4, 8, dtype=torch.int64) if is_odd() else x())


def another_version() -> None:
    """Ranks whose packages differ find so at their first call together, which is not one of attention."""
    with mock.patch("wallfacer_dt.agreement.agree._VERSIONS", "2.13.0, old" if dist.get_rank() == 2 else "2.13.0, new"):
        w.context_mesh("cpu", 4)


def another_version_of_a_kernel() -> None:
    kernel = select_kernel("reference", Need("cpu", torch.float32, 8, 8))
    w.register_kernel("theirs", kernel.forward, kernel.backward, kernel.supports, "2" if is_odd() else "1")
    attend(kernel="theirs")


def kernel_that_one_rank_does_not_know() -> None:
    kernel = select_kernel("reference", Need("cpu", torch.float32, 8, 8))
    if not is_odd():
        w.register_kernel("known to most", kernel.forward, kernel.backward, kernel.supports)
    parallelize_module(Inner(), mesh(), w.WallFacerParallel(check=False, kernel="known to most"))


def kernel_that_refuses_a_backward() -> None:
    kernel, tired = select_kernel("reference", Need("cpu", torch.float32, 8, 8)), []

    def supports(need: Need) -> bool:
        return not (is_odd() and tired)

    w.register_kernel("tired", kernel.forward, kernel.backward, supports)
    out = attend(x(requires_grad=True), kernel="tired")
    tired.append(True)
    out.sum().backward()


def two_losses(around: Callable[..., Tensor] = attend, forwards: bool = False, backwards: bool = True) -> None:
    """Of two calls that are alike, one rank makes the forwards or the backwards in another order."""
    leaves = [x(requires_grad=True), x(requires_grad=True)]
    order = [1, 0] if is_odd() else [0, 1]
    made = {i: around(leaves[i]) for i in (order if forwards else [0, 1])}
    for i in order if backwards else [0, 1]:
        made[i].sum().backward()


def compiled(q: Tensor) -> Tensor:
    inner = parallelize_module(Inner(), mesh(), w.WallFacerParallel(check=False, layout="BNLH"))
    return torch.compile(inner, backend="aot_eager", fullgraph=True)(q, q, q)


def distributed(q: Tensor) -> Tensor:
    whole = DTensor.from_local(q, mesh(), [Shard(2), Shard(2)], run_check=False)
    return attend(whole).to_local()


def checkpointed(q: Tensor, **options: Any) -> Tensor:
    return checkpoint(attend, q, use_reentrant=False, **options)


def two_feed_forwards() -> None:
    block = parallelize_module(FeedForward(), mesh(), metp(check=False), src_data_rank=None)
    two_losses(lambda q: block(q.flatten(0, 2)[:, :6].unsqueeze(0)))


def two_biases(module: nn.Module, style: ParallelStyle, around: Callable[..., Any] = lambda block: block) -> None:
    """Of a module of which nothing but the output's bias is trained."""
    block = parallelize_module(module, mesh(), style, src_data_rank=None)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name in ("down.bias", "o.bias"))
    two_losses(lambda q: around(block)(q.detach().flatten(0, 2)[:2, :6].unsqueeze(0)))


def an_error_after_metp(style: Callable[..., ParallelStyle] = metp) -> None:
    """One rank goes on to its next step, where the others are in the backward."""
    module = FeedForward() if style is metp else Projections()
    block = parallelize_module(module, mesh(), style(check=False), src_data_rank=None)
    y = block(x(1, 2, D))
    if is_odd():
        block(x(1, 2, D))
    y.sum().backward()


def an_error_after_metp_beside_tp(around: Callable[..., Any] = lambda block: block) -> None:
    """The same; here gradients are gathered along tp first."""
    layouts = {"input_layouts": Shard(1), "output_layouts": Shard(1)}
    block = around(parallelize_module(FeedForward(), with_tp(), metp(check=False, **layouts), src_data_rank=None))
    y = block(x(1, 2, D))
    if is_odd():
        block(x(1, 2, D))
    y.sum().backward()


def two_metp_attentions() -> None:
    block = parallelize_module(Projections(), mesh(), attention(check=False), src_data_rank=None)
    two_losses(lambda q: block(q.flatten(0, 2)[:2, :6].unsqueeze(0)))


def sampler(samples: int = 12, **options: Any) -> w.SequenceSampler:
    return w.SequenceSampler(range(samples), mesh(), **options)


def stream_cut_off() -> None:
    tokens = range(4 if is_odd() else 100)
    w.SequenceDataset(tokens, 8, w.TokenOrder("contiguous", mesh()))
    sampler()


def seed_seen_before() -> None:
    for seed in (0, 1):
        sampler(seed=seed)
    sampler(seed=int(is_odd()))


def state_seen_before() -> None:
    own = sampler()
    states = [own.state_after(consumed) for consumed in (2, 4)]
    for state in states:
        own.load_state_dict(state)
    own.load_state_dict(states[is_odd()])


def state_refused_by_one_rank() -> None:
    own = sampler()
    own.load_state_dict(own.state_after(2) | {"seed": int(is_odd())})


def unshard(given: Tensor | None = None, dim: int = 2, order: str = "contiguous", **documents: Any) -> Tensor:
    return w.unshard_sequence(x() if given is None else given, w.TokenOrder(order, mesh()), dim=dim, **documents)


def unshard_documents() -> None:
    bounds = [0, 3, 16] if is_odd() else [0, 5, 16]
    unshard(order="document_head_tail", cu_seqlens=torch.tensor(bounds))


def on_another_mesh(*meshes: DeviceMesh) -> None:
    attend(on=meshes[is_odd()])


def of_another_turn() -> None:
    on_another_mesh(mesh(), mesh_of(2, 2, "ring_in_node"))


def of_another_split() -> None:
    on_another_mesh(mesh(), mesh_of(4, 1))


def alike() -> None:
    first, second = w.context_mesh("cpu", 2, 2), w.context_mesh("cpu", 2, 2)
    for each in (first, second):
        attend(on=each)
    on_another_mesh(first, second)


def of_swapped_axes() -> None:
    on_another_mesh(mesh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_team", "cp_ring")))


def made_otherwise() -> None:
    w.context_mesh("cpu", *((4, 1) if is_odd() else (2, 2)))


def split_otherwise() -> None:
    axis = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    w.split_context_axis(axis, *((4, 1) if is_odd() else (2, 2)))


def split_otherwise_elsewhere() -> None:
    """The ranks of one slice say the same, and those of the other."""
    axis = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
    w.split_context_axis(axis, *((1, 2) if dist.get_rank() < ODD else (2, 1)))


def split_along_another_axis() -> None:
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    w.split_context_axis(axes["dp" if is_odd() else "cp"], 2)


def told_by_all_but_one() -> None:
    name = name_of(mesh())
    with refusing_together(name):
        hear_all("something", iter(()) if not is_odd() else (nothing for nothing in ()), name)


def styled_otherwise(**options: Any) -> None:
    options = {"is_causal": True} | (options if is_odd() else {})
    parallelize_module(Inner(), mesh(), w.WallFacerParallel(check=False, **told(mesh(), **options)))


def styled_as_another_axis() -> None:
    axis = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    style = w.UlyssesParallel if is_odd() else w.RingParallel
    parallelize_module(Inner(), axis, style(check=False, layout="BNLH"))


def module_refused_by_one_rank() -> None:
    module = nn.Linear(2, 2) if is_odd() else Inner()
    parallelize_module(module, mesh(), w.WallFacerParallel(check=False))


def mask_refused_by_one_rank() -> None:
    mask = (lambda b, h, i, j: (i >= j) & bool(i)) if is_odd() else (lambda b, h, i, j: i >= j)
    style = w.WallFacerParallel(check=False, mask_mod=mask, **told(mesh()))
    parallelize_module(Inner(), mesh(), style)


def order_beside_tp() -> None:
    on = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "tp"))
    name = "head_tail" if is_odd() else "contiguous"
    inner = w.WallFacerParallel(is_causal=True, check=False, order=w.TokenOrder(name, on["cp_ring"]))
    module = Projections()
    module.q, module.k, module.v = (nn.Linear(D, 4 * H) for _ in range(3))
    module.o = nn.Linear(4 * H, D)
    parallelize_module(module, on, attention(check=False, attention=inner), src_data_rank=None)


def projections_swapped() -> None:
    names = {"up": "gate", "gate": "up"} if is_odd() else {}
    parallelize_module(FeedForward(), mesh(), metp(check=False, **names), src_data_rank=None)


def x_changed_by_one_rank(module: nn.Module, style: ParallelStyle, *, is_distributed: bool = False) -> None:
    block = parallelize_module(module, mesh(), style, src_data_rank=None)
    given = x(1, 2, D, requires_grad=True) * 1
    if is_distributed:
        given = DTensor.from_local(given, mesh(), [Shard(1)] * 2, run_check=False) * 1
    y = block(given)
    if is_odd():
        with torch.no_grad():
            given.mul_(2)
    y.sum().backward()


def weight_changed_by_one_rank() -> None:
    block = parallelize_module(FeedForward(), mesh(), metp(check=False), src_data_rank=None)
    y = block(x(1, 2, 6))
    if is_odd():
        with torch.no_grad():
            block.up.weight.mul_(2)
    y.sum().backward()


def eager_on_one_rank() -> None:
    """Which is no reason to refuse: what follows is."""
    layout = metp(check=False, input_layouts=Shard(1))
    module = parallelize_module(FeedForward(), with_tp(), layout, src_data_rank=None)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (2, 2 + dist.get_rank() % 2):
        (module if dist.get_rank() == 0 else compiled)(x(1, length, D)).sum().backward()


def in_half_on_one_rank() -> None:
    """Which autocast computes as the others', and is gathered as such."""
    layout = metp(check=False, input_layouts=Shard(1))
    module = parallelize_module(FeedForward(), with_tp(), layout, src_data_rank=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module(x(1, 2, D, dtype=torch.bfloat16 if dist.get_rank() == 0 else torch.float32))
    module(x(1, 2 + dist.get_rank() % 2, D))


def another_along_tp_on_a_device(*seen: int) -> None:
    """Before x is gathered along tp, by which one pair of ranks differs; the other pair waits for it on the mesh."""
    on = with_tp()
    name, tp_name = name_of(on), name_of(on["tp"])

    def enter(length: int) -> None:
        _compare_along_tp(x(1, length, D), (1, length, D), "a kind", name, tp_name)
        agree("METP", (), name, x=x())
        settle()

    with as_on_a_device():
        for length in seen:
            enter(length)
        enter(3 if dist.get_rank() == 1 else 2)


def others_are_heard_while_a_pair_differs() -> None:
    """What the whole mesh does next waits at once, and hears in its place what a pair has not looked at yet."""
    on = with_tp()
    name, tp_name = name_of(on), name_of(on["tp"])
    with as_on_a_device():
        for length in (2, 3):
            agree("a pair's", [("the length", length)], tp_name, x=x())
            settle()
        agree("a pair's", [("the length", 3 if dist.get_rank() == 1 else 2)], tp_name, x=x())
        with refusing_together(name):
            hear_all("something else", dist.get_rank(), name)


def metp_on_one_rank() -> None:
    """Where METP would make a process group, which all make together."""
    on = w.context_mesh("cpu", 2, 2, placement="ring_in_node")
    module, style = (FeedForward(), metp(check=False)) if is_odd() else (Inner(), w.WallFacerParallel(check=False))
    parallelize_module(module, on, style, src_data_rank=None)


def attribute_changed(module: nn.Module, style: ParallelStyle, name: str, value: Any) -> None:
    applied = parallelize_module(module, mesh(), style, src_data_rank=None)
    applied(x(1, 2, D))
    owner, _, attribute = name.rpartition(".")
    setattr(applied.get_submodule(owner), attribute, value)
    applied(x(1, 2, D))


def with_dropout() -> nn.Module:
    module = FeedForward()
    module.drop = nn.Dropout(0.0)
    return module


def differentiated(q: Tensor) -> Tensor:
    return grad(lambda q: attend(q, scale=-1.0 if is_odd() else 1.0).sum())(q)


def groups_with_other_samples() -> None:
    axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    w.SequenceSampler(range(12), axes["cp"], data_parallel=axes["dp"], seed=axes.get_local_rank("dp"))


def another_kind() -> None:
    if is_odd():
        unshard()
    else:
        attend()


def backward_for_a_forward() -> None:
    out = attend(x(requires_grad=True))
    if is_odd():
        out.sum().backward()
    else:
        attend()


def layers_of_others(manager: Callable[[], Any] = nullcontext) -> Tensor:
    """Of three layers one rank leaves out the first, the others the second: all call as often, with what is alike."""
    layers = nn.ModuleList(Inner() for _ in range(3))
    parallelize_module(layers, mesh(), {"*": w.WallFacerParallel(layout="BNLH", check=False)})
    y = x(requires_grad=True)
    for layer in layers:  # as where all of them have been called
        y = layer(y, y, y)
    with manager():
        for number in (1, 2) if is_odd() else (0, 2):
            y = layers[number](y, y, y)
        return w.unshard_sequence(y, w.TokenOrder("contiguous", mesh()), dim=2)


DIFFERENCES: dict[str, Callable[[], Any]] = {
    "layers of others": layers_of_others,
    "layers of others, on a device, each seen before": partial(layers_of_others, as_on_a_device),
    "is_causal, on a device, each seen before": causal_on_one_rank,
    "a refusal on a device": refused_by_one_rank,
    "another version of the package": another_version,
    "another version of a kernel": another_version_of_a_kernel,
    "a kernel that one rank does not know": kernel_that_one_rank_does_not_know,
    "a kernel that refuses a backward on one rank": kernel_that_refuses_a_backward,
    "backwards in another order": two_losses,
    "backwards in another order on a device": lambda: run_as(as_on_a_device(), two_losses),
    "forwards in another order": partial(two_losses, forwards=True, backwards=False),
    "backwards in another order, compiled": partial(two_losses, compiled),
    "backwards in another order, DTensors": partial(two_losses, distributed),
    "backwards in another order, computed again": partial(two_losses, checkpointed),
    "backwards in another order, checkpointed": partial(
        two_losses, partial(checkpointed, context_fn=save_attention())
    ),
    "backwards in another order, METP's feed-forward": two_feed_forwards,
    "backwards in another order, METP's attention": two_metp_attentions,
    "backwards in another order, METP's bias": lambda: two_biases(FeedForward(), metp(check=False)),
    "backwards in another order, METP's attention's bias": lambda: two_biases(Projections(), attention(check=False)),
    "backwards in another order, METP's bias, compiled": lambda: two_biases(
        FeedForward(), metp(check=False), partial(torch.compile, backend="aot_eager", fullgraph=True)
    ),
    "a sampler's seed, each seen before": seed_seen_before,
    "a sampler's state, each seen before": state_seen_before,
    "a sampler's state that one rank refuses": state_refused_by_one_rank,
    "a stream that is cut off on one rank": stream_cut_off,
    "too few samples on one rank": lambda: sampler(0 if is_odd() else 12),
    "unsharding in another order": lambda: unshard(order="head_tail" if is_odd() else "contiguous"),
    "unsharding other documents": unshard_documents,
    "unsharding what one rank wants a gradient of": lambda: unshard(x(requires_grad=is_odd())),
    "unsharding along a dim that is none on one rank": lambda: unshard(dim=7 if is_odd() else 2),
    "unsharding what is elsewhere on one rank": lambda: unshard(x(device="meta" if is_odd() else "cpu")),
    "a sampler's seed along data_parallel": groups_with_other_samples,
    "a refusal under grad": lambda: differentiated(x()),
    "a mask that one rank refuses": mask_refused_by_one_rank,
    "METP's token order beside tp": order_beside_tp,
    "METP's projections": projections_swapped,
    "METP's x along tp, one rank in eager code": eager_on_one_rank,
    "METP's x along tp, one rank in half precision": in_half_on_one_rank,
    "METP's x along tp, on a device": partial(another_along_tp_on_a_device, 2),
    "METP's x along tp, on a device, each seen before": partial(another_along_tp_on_a_device, 2, 3),
    "METP on one rank": metp_on_one_rank,
    "a pair of ranks, while all hear each other": others_are_heard_while_a_pair_differs,
    "a factor that METP does not see": lambda: attribute_changed(WithOptions(), metp(check=False), "factor", 0.5),
    "dropout that comes later": lambda: attribute_changed(with_dropout(), metp(check=False), "drop.p", 0.5),
    "a code of attention that changes": lambda: attribute_changed(
        Projections(), attention(check=False), "hidden", "a norm"
    ),
    "METP's weight, changed on one rank": weight_changed_by_one_rank,
    "METP's x, changed on one rank": lambda: x_changed_by_one_rank(FeedForward(), metp(check=False)),
    "METP's attention's x, changed on one rank": lambda: x_changed_by_one_rank(Projections(), attention(check=False)),
    "METP's x, a DTensor, changed on one rank": lambda: x_changed_by_one_rank(
        FeedForward(), metp(check=False), is_distributed=True
    ),
    "METP's attention's x, a DTensor, changed on one rank": lambda: x_changed_by_one_rank(
        Projections(), attention(check=False), is_distributed=True
    ),
    "an error between METP's forward and backward": an_error_after_metp,
    "an error between METP's attention's forward and backward": lambda: an_error_after_metp(attention),
    "an error between METP's forward and backward, beside tp": an_error_after_metp_beside_tp,
    "an error between METP's forward and backward, beside tp, compiled": lambda: an_error_after_metp_beside_tp(
        partial(torch.compile, backend="aot_eager", fullgraph=True)
    ),
    "unsharding along another dim": lambda: unshard(x(4, 4, 4, 4), dim=1 + is_odd()),
    "a mesh of another placement": of_another_turn,
    "a mesh of other axes": of_another_split,
    "another mesh that is alike": alike,
    "a mesh that one rank refuses": of_swapped_axes,
    "context_mesh of other sizes": made_otherwise,
    "split_context_axis of other sizes": split_otherwise,
    "split_context_axis of other sizes on another slice": split_otherwise_elsewhere,
    "split_context_axis along another axis": split_along_another_axis,
    "what one rank cannot tell": told_by_all_but_one,
    "a style's window": partial(styled_otherwise, window_size=(4, 0)),
    "a style's schedule": partial(styled_otherwise, schedule="published"),
    "another style": styled_as_another_axis,
    "a module that one rank refuses": module_refused_by_one_rank,
    "a call of another kind": another_kind,
    "a backward where others are at a forward": backward_for_a_forward,
    "schedule": lambda: attend(schedule="published" if is_odd() else "2d"),
    "length": lambda: attend(length=16 if is_odd() else None),
}  # fmt: skip


def run_as(context: Any, function: Callable[[], None]) -> None:
    with context or nullcontext():
        function()


def outcome(name: str) -> tuple[str, str]:
    """Type and message of what this rank raises; then all of them make a call that is as it should be."""
    kind, said = "nothing", ""
    try:
        DIFFERENCES[name]()
    except Exception as error:  # the type is what is tested
        kind, said = type(error).__name__, str(error)
    attend()
    return kind, said


def some_know_their_layer() -> tuple[list[int], int]:
    """As where on one rank a compiler has given up, and attention runs as it does without; forward and backward.

    Calls' numbers, and how often ranks told each other all that they know.
    """
    numbers, on = [], name_of(mesh())
    with mock.patch.object(Meeting, "exchange", autospec=True, side_effect=Meeting.exchange) as exchanged:
        for _ in range(2):
            with Within("layers.0" if is_odd() else ""):
                number = agree("attention of some", [("scale", 1.0)], on)
            numbers += [number, agree("the backward of attention", [], on, forward=number)]
    return numbers, exchanged.call_count


def documents_of_other_integers() -> float:
    """The same documents, as int32 on one rank: how far attention is from that of one process."""
    ids, order = torch.arange(16) // 5, w.TokenOrder("contiguous", mesh())
    whole = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    out = attend(w.shard_sequence(whole, order, dim=2), document_ids=ids.int() if is_odd() else ids)
    expected = F.scaled_dot_product_attention(whole, whole, whole, attn_mask=ids.unsqueeze(-1) == ids)
    return worst_error([(out, w.shard_sequence(expected, order, dim=2))])


class Late(NamedTuple):
    """What ranks wait for in vain."""

    first: bool
    seconds: int = 4


def one_does_not_come(late: Late) -> str:
    """To the first call of a mesh, or to the second."""
    on = init_device_mesh("cpu", (3,), mesh_dim_names=("cp_ring",))
    with mock.patch("wallfacer_dt.agreement.worlds._timeout", return_value=timedelta(seconds=late.seconds)):
        try:
            if not late.first:
                attend(on=on)
            if not is_odd():
                attend(on=on, is_causal=True)
        except RuntimeError as error:
            return str(error)
    return ""


def in_a_forked_process() -> str:
    """What a process says that is forked from this one, as a data loader's worker is, when it wants to meet."""
    on, (read, write) = w.context_mesh("cpu", dist.get_world_size()), os.pipe()
    name = name_of(on)
    agree("before", (), name)
    if not os.fork():
        try:
            agree("in another process", (), name)
            said = "nothing"
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.wait()
    attend(on=on)
    return os.read(read, 1000).decode()


def in_a_new_world(folder: str) -> list[str]:
    """What a mesh says, and what was made for it, when its process groups have been destroyed and made anew."""
    on = w.context_mesh("cpu", dist.get_world_size())
    order = w.TokenOrder("contiguous", on)
    styled = parallelize_module(Inner(), on, w.WallFacerParallel(check=False, layout="BNLH"))
    q = x()
    styled(q, q, q)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    fresh = w.context_mesh("cpu", size)
    said = []
    unshard = partial(w.unshard_sequence, q, order, dim=2)
    for call in (lambda: styled(q, q, q), lambda: attend(on=on), unshard, lambda: attend(on=fresh)):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said
