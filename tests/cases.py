"""What ranks run: one attention case, forward and backward, on seeded inputs.

Sharding is written out here once more, so that the tests do not trust the package's own.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import wallfacer_dt
from wallfacer_dt import TokenOrder
from wallfacer_dt.comparison import Values, comparable
from wallfacer_dt.testing import AttentionResult, attention_oracle, count_collectives, worst_error


class Inner(nn.Module):
    """Something for a style to replace."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        raise NotImplementedError


def checker(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Every other block of 3 x 3: block sparse."""
    return (q // 3 + kv // 3) % 2 == 0


def coarse(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The same of 150 x 150, which no block of a power of two fits."""
    return (q // 150 + kv // 150) % 2 == 0


def per_head(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Another stride for each head, in both directions."""
    return (q - kv) % (h + 2) != 1


def per_row(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Another reach for each row of the batch."""
    return (q - kv).abs() <= 2 * b + 1  # no comparison: a mask


def blind(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Some queries see nothing at all, and some keys are seen by none."""
    return (kv <= q) & (q % 3 != 1) & (kv % 4 != 2)


def captured(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """By what a tensor says of the tokens, as masks of real batches do."""
    return (TAGS[q] == TAGS[kv]) | (kv == 0)


def padded_text(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Of the text in joint attention, each row of the batch has another number of tokens; keys behind it are none."""
    return (kv < 2 - b) | (kv >= 3) | (q < 0)  # of all queries alike


TAGS = torch.arange(4096) * 7919 % 3
MASK_MODS = {f.__name__: f for f in (checker, coarse, per_head, per_row, blind, captured, padded_text)}
BLOCK_MASKS = {"blockmask": checker, "blockmask_per_head": per_head}  # of blocks of 4 x 4
Window = tuple[int | None, int | None]
Nans = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Case:
    """One call: mesh, shapes (B, N, L, H), options and how the inputs are drawn.

    ``shard`` tokens on every rank, or ``length`` in all, dealt out as evenly as may be. Beside them every rank holds
    the ``replicated`` tokens. ``documents``: lengths, for each row of the batch, or one row for all of them; told as
    ``packed`` says ("document_ids", or of one row "cu_seqlens"). ``mask``: a name from MASK_MODS or BLOCK_MASKS,
    or "blocks_alone". ``nans``: (tensor, place in it) of what is not a number in q, k, v or grad_out.
    """

    ring: int = 2
    team: int = 2
    placement: str = "team_in_node"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    shard: int = 4
    head_dim: int = 16
    dtype: str = "float64"
    is_causal: bool = False
    order: str = "contiguous"
    schedule: str = "2d"
    rotate: str = "auto"
    rotate_forward: str = "auto"
    kernel: str = "auto"
    scale: float | None = None
    inputs: str = "normal"
    ulysses: int = 1
    length: int | None = None
    kv_length: int | None = None
    window_size: Window | None = None
    prefix_length: int = 0
    documents: tuple[tuple[int, ...], ...] = ()
    packed: str = "document_ids"
    mask: str = ""
    sinks: bool = False
    shared_dim: int = 0
    value_dim: int | None = None
    softcap: float | None = None
    replicated: int = 0
    nans: Nans = field(default=(), repr=False)

    @property
    def size(self) -> int:
        return self.ulysses * self.ring * self.team

    @property
    def axes(self) -> tuple[int, int, int]:
        """Axes of the mesh in the order in which they cut the sequence."""
        return self.ulysses, self.ring, self.team

    @property
    def total(self) -> int:
        """Queries that are dealt out."""
        return self.shard * self.size if self.length is None else self.length

    @property
    def kv_total(self) -> int:
        """Keys that are dealt out."""
        return self.kv_length or self.total

    @property
    def masks(self) -> dict[str, Any]:
        """What is asked for of who sees whom, as the package and the oracle are told it."""
        asked: dict[str, Any] = {"is_causal": self.is_causal}
        if self.window_size is not None:
            asked["window_size"] = self.window_size
        if self.prefix_length:
            asked["prefix_length"] = self.prefix_length
        if self.mask:
            asked["mask_mod"] = mask_of(self)
        if self.documents:
            asked[self.packed] = documents_of(self)
        return asked

    @property
    def options(self) -> dict[str, Any]:
        """What the attention call is told, but the order; only what is asked for, of what there need not be."""
        names = ("schedule", "rotate", "rotate_forward", "kernel", "scale")
        told = self.masks | {name: getattr(self, name) for name in names}
        if self.softcap is not None:
            told["softcap"] = self.softcap
        if self.replicated:
            told["replicated"] = self.replicated
        # Shards of equal length need nothing said.
        if self.length is not None or self.kv_total % self.size:
            told["length"] = self.total
            if self.kv_length is not None:
                told["kv_length"] = self.kv_length
        return told

    def order_on(self, mesh: DeviceMesh) -> TokenOrder | None:
        """The order as an object; None where there need not be one."""
        is_masked = self.is_causal or self.window_size or self.mask or self.documents
        return TokenOrder(self.order, mesh) if is_masked or self.order != "contiguous" else None

    def options_on(self, mesh: DeviceMesh) -> dict[str, Any]:
        """What the attention call is told on a mesh."""
        return self.options | {"order": self.order_on(mesh)}


def mask_of(case: Case) -> Callable[..., Tensor] | BlockMask:
    """The mask by name; a BlockMask is made for the case's length."""
    if case.mask == "blocks_alone":
        return _blocks_alone(case.total)
    return (
        _block_mask(case.mask, case.batch, case.heads, case.total) if case.mask in BLOCK_MASKS else MASK_MODS[case.mask]
    )


@lru_cache
def _block_mask(name: str, batch: int, heads: int, length: int) -> BlockMask:
    return create_block_mask(BLOCK_MASKS[name], batch, heads, length, length, device="cpu", BLOCK_SIZE=4)


def _blocks_alone(length: int) -> BlockMask:
    """A BlockMask that has no function to ask: lists every other block of 4 x 4."""
    blocks = torch.arange(-(-length // 4))
    seen = (blocks[:, None] + blocks) % 2 == 0
    counts, indices = seen.sum(1), seen.int().argsort(dim=1, descending=True, stable=True)
    lists = (x.int()[None, None] for x in (counts, indices))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=4, seq_lengths=(length, length))


def documents_of(case: Case) -> Tensor:
    """Cumulative lengths (documents + 1,), or ids (B, N), or (N,) where one row is that of all."""
    if case.packed == "cu_seqlens":
        (row,) = case.documents
        return torch.tensor([0, *np.cumsum(row)], dtype=torch.int32)
    # Where they change a document begins; they may come again.
    ids = torch.tensor([[7 - i % 3 for i, n in enumerate(row) for _ in range(n)] for row in case.documents])
    return ids[0] if len(ids) < case.batch else ids


def draw(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and grad_out of the whole sequence, the same wherever they are drawn.

    Replicated tokens come first.
    """
    generator = _generator(case)
    value_dim = case.value_dim or case.head_dim

    def normal(heads: int, length: int, dim: int) -> Tensor:
        shape = (case.batch, heads, case.replicated + length, dim)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q = normal(case.heads, case.total, case.head_dim + case.shared_dim)
    k = normal(case.kv_heads, case.kv_total, case.head_dim)
    v = normal(case.kv_heads, case.kv_total, value_dim)
    grad_out = normal(case.heads, case.total, value_dim)
    if case.inputs == "huge":  # scores of about +-1e4
        q, k = q * 1000, k.sign() * 40 / case.head_dim**0.5
    if case.inputs == "equal":  # all scores equal
        k = torch.ones_like(k)
    if case.inputs == "tiny_grad":  # squares of the gradient underflow
        grad_out = grad_out * 1e-25
    if case.inputs == "zero_grad":
        grad_out = torch.zeros_like(grad_out)
    drawn = {"q": q, "k": k, "v": v, "grad_out": grad_out}
    return tuple(with_nans({name: x.to(getattr(torch, case.dtype)) for name, x in drawn.items()}, case.nans).values())


def with_nans(tensors: dict[str, Tensor], nans: Nans) -> dict[str, Tensor]:
    """Tensors, or copies of them, in which these places, counted round and round, are not a number."""
    if not nans:
        return tensors
    copies = {name: x.clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    for name, place in nans:
        copies[name].view(-1)[place % copies[name].numel()] = torch.nan
    return copies


def draw_extras(case: Case) -> dict[str, Tensor]:
    """Sinks (N,) and shared keys (B, 1, L, Hs) of the whole sequence, where the case has them."""
    generator = _generator(case, "extras")
    shapes = {
        "sinks": (case.heads,) if case.sinks else None,
        "k_shared": (case.batch, 1, case.replicated + case.kv_total, case.shared_dim) if case.shared_dim else None,
    }
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
        if shape is not None
    }
    if case.inputs == "faint_sinks":  # that take a millionth of the weight
        drawn["sinks"] -= 12
    return {name: x.to(getattr(torch, case.dtype)) for name, x in drawn.items()}


def _generator(case: Case, what: str = "") -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32((repr(replace(case, dtype="")) + what).encode()))


def shard_sizes(length: int, axes: tuple[int, ...]) -> list[int]:
    """Tokens of each sequence index: cut as torch.chunk does over the first axis, each part over the next, ..."""
    sizes = [length]
    for parts in axes:
        steps = [(n, -(-n // parts)) for n in sizes]
        sizes = [min(max(n - i * step, 0), step) for n, step in steps for i in range(parts)]
    return sizes


def held(index: int, axes: int | tuple[int, ...], order: str, length: int) -> list[int]:
    """Global positions that sequence index ``index`` holds, on that many ranks or a mesh of these axes."""
    sizes = np.array(shard_sizes(length, (axes,) if isinstance(axes, int) else axes))
    if order == "contiguous":
        return list(np.split(np.arange(length), sizes.cumsum())[index])
    turns = head_tail_turns(axes)
    sizes = sizes[turns]
    heads, tails = (sizes + 1) // 2, sizes // 2
    chunks = np.split(np.arange(length), np.concatenate([heads, tails[::-1]]).cumsum())
    turn = turns.index(index)
    return [*chunks[turn], *chunks[2 * len(sizes) - 1 - turn]]


def head_tail_turns(axes: int | tuple[int, ...]) -> list[int]:
    """Sequence indices in the order of their heads: those along the first of three axes come one after the other."""
    numbers = np.arange(np.prod(axes)).reshape(axes)
    return (np.moveaxis(numbers, 0, -1) if numbers.ndim == 3 else numbers).flatten().tolist()


def rows_of(case: Case, index: int, length: int) -> list[int]:
    """Rows of the whole tensors that sequence index ``index`` holds: the replicated ones and its own."""
    positions = held(index, case.axes, case.order, length)
    return [*range(case.replicated), *(case.replicated + p for p in positions)]


@cache
def _made(rank: int, ring: int, team: int, placement: str, ulysses: int) -> DeviceMesh:
    """One for every rank: threads of one process share what is remembered."""
    further = {"ulysses": ulysses} if ulysses > 1 else {}
    return wallfacer_dt.context_mesh("cpu", ring, team, placement=placement, **further)


def mesh_of(ring: int, team: int, placement: str = "team_in_node", ulysses: int = 1) -> DeviceMesh:
    """A mesh of this world, made once."""
    return _made(dist.get_rank(), ring, team, placement, ulysses)


def told(mesh: DeviceMesh, order: str = "contiguous", **options: Any) -> dict[str, Any]:
    """Options of attention whose order is named, with the object of this mesh."""
    return {"order": TokenOrder(order, mesh)} | options


def index_of(case: Case) -> int:
    """This rank's sequence index, from its rank and the placement."""
    # Places by rank, numbered as the sequence runs, with the axis whose neighbours are neighbouring ranks last.
    places = np.arange(case.size).reshape(case.axes)
    last = {"team_in_node": (0, 1, 2), "ring_in_node": (0, 2, 1), "ulysses_in_node": (1, 2, 0)}[case.placement]
    return int(places.transpose(last).flatten()[dist.get_rank()])


def share_of(case: Case, index: int) -> float:
    """Which part of the replicated tokens' loss is this rank's: a half, a quarter, ..., all of them 1 exactly."""
    return 2.0 ** -min(index + 1, case.size - 1)


def prepare(case: Case) -> tuple[int, DeviceMesh, list[Tensor], Tensor]:
    """This rank's sequence index, mesh, leaves [q, k, v, then what draw_extras has] and gradient of the output."""
    mesh = mesh_of(case.ring, case.team, case.placement, case.ulysses)
    index = index_of(case)
    rows, kv_rows = (rows_of(case, index, length) for length in (case.total, case.kv_total))
    q, k, v, grad_out = draw(case)
    q, k, v, grad_out = q[:, :, rows], k[:, :, kv_rows], v[:, :, kv_rows], grad_out[:, :, rows]
    grad_out[:, :, : case.replicated] *= share_of(case, index)
    extras = draw_extras(case)
    if "k_shared" in extras:
        extras["k_shared"] = extras["k_shared"][:, :, kv_rows]
    if case.inputs == "strided":  # last dims whose stride is not 1
        q, grad_out = (x.mT.contiguous().mT for x in (q, grad_out))
        k, v = (torch.stack([x, x], -1)[..., 0] for x in (k, v))
    return index, mesh, [x.requires_grad_() for x in (q, k, v, *extras.values())], grad_out


def attend(case: Case, mesh: DeviceMesh, leaves: list[Tensor], grad_out: Tensor) -> list[np.ndarray]:
    """[out, dq, dk, dv, then of what draw_extras has] of this rank's shard in float64."""
    extras = dict(zip(draw_extras(case), leaves[3:], strict=True))
    out = wallfacer_dt.context_parallel_attention(*leaves[:3], mesh, **case.options_on(mesh), **extras)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return [x.detach().double().numpy() for x in (out, *grads)]


def run(case: Case) -> tuple[int, list[np.ndarray], dict[str, int]]:
    """Sequence index, results and the bytes counted."""
    index, mesh, leaves, grad_out = prepare(case)
    with count_collectives(mesh) as traffic:
        results = attend(case, mesh, leaves, grad_out)
    counted = {"forward": traffic.forward.received_bytes, "backward": traffic.backward.received_bytes}
    return index, results, counted


def run_uncounted(case: Case) -> tuple[int, list[np.ndarray]]:
    """The same through the operators as users run them, without a dispatch mode."""
    index, mesh, leaves, grad_out = prepare(case)
    return index, attend(case, mesh, leaves, grad_out)


def whole(case: Case, shards: list[tuple[int, list[np.ndarray]]]) -> AttentionResult:
    """Shards of all ranks put back in sequence order; gradients of what all ranks hold are summed."""
    given = dict(zip(("q", "k", "v"), draw(case), strict=False)) | draw_extras(case)
    value_dim = case.value_dim or case.head_dim
    shapes = {"out": (*given["q"].shape[:-1], value_dim)} | {f"d{name}": x.shape for name, x in given.items()}
    wholes = {name: np.full(shape, 0.0 if name == "dsinks" else np.nan) for name, shape in shapes.items()}
    for index, results in shards:
        for (name, target), shard in zip(wholes.items(), results, strict=False):
            if name == "dsinks":
                target += shard
                continue
            rows = rows_of(case, index, case.total if name in ("out", "dq") else case.kv_total)
            target[:, :, rows[case.replicated :]] = shard[:, :, case.replicated :]
    for i, (name, target) in enumerate(wholes.items()):
        if case.replicated and name != "dsinks" and i < len(shards[0][1]):
            copies = np.stack([results[i][:, :, : case.replicated] for _, results in shards])
            target[:, :, : case.replicated] = one_of(case, copies) if name == "out" else copies.sum(0)
    return AttentionResult(**{name: torch.from_numpy(x) for name, x in wholes.items()})


def one_of(case: Case, copies: np.ndarray) -> np.ndarray:
    """The output of the tokens that every rank holds, refusing (AssertionError) ranks that disagree on it."""
    # Sinks are each rank's to apply, and how a row is rounded depends on how many others there are.
    unit = torch.finfo(getattr(torch, case.dtype)).eps if case.sinks else 0
    ones = np.repeat(copies[:1], len(copies), axis=0)
    found, expected = copies, ones
    if case.nans:
        assert np.array_equal(np.isnan(copies), np.isnan(ones))
        found, expected = np.nan_to_num(copies), np.nan_to_num(ones)
    assert worst_error({"replicated out": (found, expected)}, relative_to="each") <= 4 * unit
    return copies[0]


def oracle(case: Case, **kwargs: Any) -> AttentionResult:
    """The same case in one process."""
    options = case.masks | {"scale": case.scale, "softcap": case.softcap}
    return attention_oracle(*draw(case), **(options | draw_extras(case) | kwargs))


def rms(found: Values, expected: Values | None = None) -> float:
    """Root mean square of the difference, or of a tensor; what cannot be compared is refused as by worst_error."""
    mine, its = comparable("rms", found, 0 * found if expected is None else expected)
    return float((mine - its).square().mean().sqrt())  # no comparison: of what has been found comparable
