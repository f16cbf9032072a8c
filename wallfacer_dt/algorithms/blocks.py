"""An arbitrary mask as a table of blocks: which blocks of queries and keys are empty, full, or partly visible.

A ``mask_mod`` in flex_attention's sense is a function of (batch, head, query position, key position). It is asked
about every pair of a sequence, anew when what it depends on has changed; what it answered about partial blocks is kept,
a bit each.

Note [Masks by name]
An operator takes no functions, so it takes the mask's name: the digest of its answers. Whoever has the name (another
rank, a compiled graph, a cache on disk, a backward after the mask's tensors have changed) means the same answers; a
process that was never given them is refused.
"""

import hashlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.algorithms.captured import fingerprint
from wallfacer_dt.compiler import constant
from wallfacer_dt.layout import Spans, positions
from wallfacer_dt.mesh import outside_modes

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

EMPTY_BLOCK, PARTIAL_BLOCK, FULL_BLOCK = 0, 1, 2
SIZE = 128
"""Positions in a block."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Blocks:
    """A mask's answers; compared and hashed by their digest.

    Attributes:
        name: the digest.
        table: (rows, query blocks, key blocks) of EMPTY_BLOCK, PARTIAL_BLOCK or FULL_BLOCK.
        by_head: whether heads differ.
        bits: of a partial block (row, query block, key block) the answers (heads or 1, queries, keys / 8), packed.
    """

    name: str
    table: np.ndarray = field(compare=False, repr=False)
    by_head: bool = field(compare=False)
    bits: dict[tuple[int, int, int], np.ndarray] = field(compare=False, repr=False)

    @property
    def rows(self) -> int:
        """How many rows of the batch differ; one stands for all."""
        return self.table.shape[0]

    def sees(self, q: Spans, k: Spans) -> bool:
        """Whether some query sees some key, or a neighbour of it in a block."""
        return bool((self.table[:, _touched(q)][:, :, _touched(k)] != EMPTY_BLOCK).any())

    def visible(self, heads: range, q: Spans, k: Spans) -> Tensor:
        """The answers about queries and keys: boolean (rows, heads or 1, q, k)."""
        i, j = positions(q), positions(k)
        full = self.table[:, i // SIZE][:, :, j // SIZE] == FULL_BLOCK
        shown = np.repeat(full[:, None], len(heads) if self.by_head else 1, 1)
        some = slice(heads.start, heads.stop) if self.by_head else slice(None)
        for row, block, other in itertools.product(range(self.rows), _touched(q).tolist(), _touched(k).tolist()):
            if (row, block, other) in self.bits:
                answers = np.unpackbits(self.bits[row, block, other][some], axis=-1).astype(bool)
                within, columns = np.flatnonzero(i // SIZE == block), np.flatnonzero(j // SIZE == other)
                pairs = np.ix_(range(len(answers)), i[within] - block * SIZE, j[columns] - other * SIZE)
                shown[row][:, within[:, None], columns] = answers[pairs]
        return torch.from_numpy(shown)


def _touched(spans: Spans) -> np.ndarray:
    return np.unique(positions(spans) // SIZE)


_keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_masks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_count = itertools.count(1)
# Answers by shape, of the states that a mask was in last. They live as long as it, or as who needs them for a backward.
_answers: weakref.WeakKeyDictionary[Any, dict[Hashable, dict[Any, Blocks]]] = weakref.WeakKeyDictionary()
_STATES, _SHAPES = 4, 32
_known: weakref.WeakValueDictionary[str, Blocks] = weakref.WeakValueDictionary()


def mask_key(mask: Any) -> int:
    """A number for a mask_mod or BlockMask, by identity; 0 for None.

    Args:
        mask: the mask.

    Returns:
        The number, the same for as long as the mask lives.

    Raises:
        TypeError: it cannot be hashed, is a classmethod, or depends on what cannot be seen.
    """
    if mask is None:
        return 0
    try:
        hash(mask)
    except TypeError:
        raise TypeError(f"mask_mod must be hashable, got a {type(mask).__name__}; wrap it in a function") from None
    if mask not in _keys:
        fingerprint(mask)
        if isinstance(mask, MethodType):
            raise TypeError(
                "mask_mod is a method of a class, made anew at every access: pass a function or staticmethod"
            )
        _keys[mask] = next(_count)
        _masks[_keys[mask]] = mask
    return _keys[mask]


@constant
def mask_name(
    key: int, batch: int, heads: int, q_length: int, k_length: int, device_type: str, *, by_row: bool, by_head: bool
) -> str:
    """The name under which operators know a mask's answers; asks it about all pairs if it has not been in this state.

    Args:
        key: the mask's, see :func:`mask_key`.
        batch: rows of the batch.
        heads: query heads.
        q_length: queries in the whole sequence.
        k_length: keys in the whole sequence.
        device_type: where to ask it.
        by_row: whether it may depend on the row of the batch: not where a rank has only some of them.
        by_head: whether it may depend on the head, likewise.

    Returns:
        The name.

    Raises:
        ValueError: the mask depends on what it may not depend on.
        TypeError: it depends on what cannot be seen, or answers no booleans.
    """
    blocks = _blocks_of(_masks[key], batch, heads, q_length, k_length, torch.device(device_type))
    for may, does, what in ((by_row, blocks.rows > 1, "batch"), (by_head, blocks.by_head, "head")):
        if does and not may:
            raise ValueError(
                f"mask_mod depends on the {what}, which DTensors shard on another axis of their mesh: pass local "
                "tensors, whose numbers it then sees"
            )
    return blocks.name


def check_mask(key: int, name: str, batch: int, heads: int, q_length: int, k_length: int, device_type: str) -> None:
    """Refuse (ValueError) a mask that no longer gives the answers of that name, which a compiled graph holds.

    Args:
        key: the mask's.
        name: what :func:`mask_name` said when the graph was compiled.
        batch: rows of the batch that this rank has.
        heads: query heads that this rank has.
        q_length: queries in the whole sequence.
        k_length: keys in the whole sequence.
        device_type: where to ask it.
    """
    mask = _masks.get(key)
    if mask is None or _blocks_of(mask, batch, heads, q_length, k_length, torch.device(device_type)).name != name:
        raise ValueError(
            "mask_mod's state has changed, or mask_mod has gone, since the graph was compiled, of which masks are "
            "constants: compile again after torch.compiler.reset(), or say it with document_ids, which are an input"
        )


def _blocks_of(mask: Any, batch: int, heads: int, q_length: int, k_length: int, device: torch.device) -> Blocks:
    shape, state = (batch, heads, q_length, k_length, device), fingerprint(mask)
    states = _answers.setdefault(mask, {})
    known = states[state] = states.pop(state, {})  # the latest comes last
    if len(states) > _STATES:
        states.pop(next(iter(states)), None)
    if shape not in known:
        with outside_modes(), torch.no_grad():
            function = _by_table(mask, (q_length, k_length), device) if isinstance(mask, BlockMask) else mask
            blocks = blocks_of(function, *shape)
            known[shape] = _known.setdefault(blocks.name, blocks)
        if len(known) > _SHAPES:
            known.pop(next(iter(known)))
    return known[shape]


def _by_table(mask: BlockMask, lengths: tuple[int, int], device: torch.device) -> MaskMod:
    """What flex_attention takes a BlockMask to say: its mask_mod in listed blocks, all of those listed as full."""
    if tuple(mask.seq_lengths) != lengths:
        raise ValueError(
            f"the BlockMask is for {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys, the whole sequence "
            f"has {lengths[0]} and {lengths[1]}"
        )
    q_size, k_size = mask.BLOCK_SIZE
    columns = -(-lengths[1] // k_size)
    asked = _listed(mask.kv_num_blocks, mask.kv_indices, columns).to(device)
    full = torch.zeros_like(asked)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed(mask.full_kv_num_blocks, mask.full_kv_indices, columns).to(device)

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # A table that is one for all rows, or heads, does not depend on them.
        place = (
            b if len(asked) > 1 else b[:1] * 0,
            h if asked.shape[1] > 1 else h[:, :1] * 0,
            q // q_size,
            k // k_size,
        )
        return (asked[place] & mask.mask_mod(b, h, q, k)) | full[place]

    return function


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Which key blocks are among the first ``counts`` of each block row's ``indices``."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    dense = torch.zeros((*counts.shape, columns + 1), dtype=torch.bool, device=indices.device)
    dense.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    return dense[..., :columns]


def blocks_of(function: MaskMod, batch: int, heads: int, q_length: int, k_length: int, device: torch.device) -> Blocks:
    """Ask a mask about all pairs; see Note [Masks by name].

    Time grows with q_length * k_length; memory with SIZE * k_length, and a bit for each pair of a partial block.

    Args:
        function: the mask.
        batch: rows of the batch.
        heads: query heads.
        q_length: queries in the whole sequence.
        k_length: keys in the whole sequence.
        device: where to ask.

    Returns:
        Its answers.
    """
    digest = hashlib.sha256(repr((q_length, k_length)).encode())
    strips, by_head, bits = [], False, {}
    for start in range(0, q_length, SIZE):
        queries = range(start, min(start + SIZE, q_length))
        answers = _ask(function, (range(batch), range(heads), queries, range(k_length)), device)
        kinds, packed = _kinds(answers), np.packbits(answers.cpu().numpy(), axis=-1)
        digest.update(repr(tuple(answers.shape)).encode())
        digest.update(packed.tobytes())
        by_head |= answers.shape[1] > 1
        for row, j in np.argwhere(kinds == PARTIAL_BLOCK).tolist():
            block = packed[row, :, :, j * SIZE // 8 : (j + 1) * SIZE // 8]
            bits[row, start // SIZE, j] = np.pad(block, ((0, 0), (0, 0), (0, SIZE // 8 - block.shape[-1])))
        strips.append(kinds)
    rows = max(strip.shape[0] for strip in strips)
    if rows > 1 or by_head:
        bits = _for_all(bits, strips, rows, heads if by_head else 1)
    table = np.stack([np.broadcast_to(strip, (rows, strip.shape[1])) for strip in strips], axis=1)
    return Blocks(digest.hexdigest()[:16], table, by_head, bits)


def _for_all(
    bits: dict[tuple[int, int, int], np.ndarray], strips: list[np.ndarray], rows: int, heads: int
) -> dict[tuple[int, int, int], np.ndarray]:
    """The same with answers by row and head everywhere, where some blocks' were one for all."""
    return {
        (each, i, j): np.broadcast_to(block, (heads, *block.shape[1:]))
        for (row, i, j), block in bits.items()
        for each in (range(rows) if len(strips[i]) == 1 else [row])
    }


def known_blocks(name: str) -> Blocks:
    """The mask of that name.

    Args:
        name: see :func:`mask_name`.

    Returns:
        Its answers.

    Raises:
        ValueError: it has not been made in this process, or its mask has gone and others have come.
    """
    blocks = _known.get(name)
    if blocks is None:
        raise ValueError(
            f"the answers of the mask {name!r} are gone, or were never here: pass mask_mod on every rank, and keep it "
            "until the backward"
        )
    return blocks


def _ask(function: MaskMod, ranges: Sequence[range], device: torch.device) -> Tensor:
    grids = [
        torch.arange(r.start, r.stop, device=device).view([-1 if dim == place else 1 for dim in range(4)])
        for place, r in enumerate(ranges)
    ]
    answers = function(*grids)
    if not isinstance(answers, Tensor) or answers.dtype != torch.bool:
        what = f"a tensor of {answers.dtype}" if isinstance(answers, Tensor) else f"a {type(answers).__name__}"
        raise TypeError(f"mask_mod must return a boolean tensor, as comparisons do, got {what}")
    return answers.to(device).expand(torch.broadcast_shapes(answers.shape, (1, 1, *map(len, ranges[2:]))))


def _kinds(answers: Tensor) -> np.ndarray:
    """(rows, key blocks) from the answers about one block of queries."""
    missing = -answers.shape[-1] % SIZE
    # What is beyond the last key is as the last key, so that it decides nothing.
    padded = torch.cat([answers, answers[..., -1:].expand(*answers.shape[:-1], missing)], -1)
    some, every = padded.any(2).any(1), padded.all(2).all(1)
    by_block = (x.unflatten(-1, (-1, SIZE)) for x in (some, every))
    some, every = next(by_block).any(-1), next(by_block).all(-1)
    return (some.int() + every.int()).to(torch.uint8).cpu().numpy()
