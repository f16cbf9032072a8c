"""An arbitrary mask by block: what some queries see of some keys, as the BlockMask that flex_attention takes.

A rank asks only about the queries and keys that it computes, through torch's own ``create_block_mask``, with their
positions in the whole sequence.

Note [Masks by name]
An operator takes no functions, so it takes the name of a mask's recording (Note [Recording a mask]), and the tensors
that this reads. Whoever has both (another rank, a compiled graph, a cache on disk, a backward after the mask's state
has changed) means the same answers; a process that has not recorded it is refused.
"""

import hashlib
import itertools
import weakref
from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.weak import WeakIdKeyDictionary

from wallfacer_dt.agreement.meeting import kept, outside_dispatch
from wallfacer_dt.algorithms.recorded import MaskMod, Recording, record
from wallfacer_dt.comparison import bytes_of
from wallfacer_dt.compiler import constant
from wallfacer_dt.kernels.visible import strips
from wallfacer_dt.layout import Spans, length_of, positions

SIZE = 128
"""Positions in a block."""

_RECORDINGS, _ANSWERS, _BLOCKS = 4, 4, 1024  # that are kept of a mask, of a recording, of answers

_keys: Any = WeakIdKeyDictionary()
_masks: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_count = itertools.count(1)
# They live as long as their mask, or as who needs them for a backward.
_latest: Any = WeakIdKeyDictionary()
_known: weakref.WeakValueDictionary[str, Recording] = weakref.WeakValueDictionary()
_digests: Any = WeakIdKeyDictionary()


def mask_key(mask: Any) -> int:
    """A number for a mask_mod or BlockMask, for as long as it lives; 0 for None."""
    if mask is None:
        return 0
    try:
        weakref.ref(mask)
    except TypeError:
        raise TypeError(f"mask_mod is a {type(mask).__name__} of slots only; wrap it in a function") from None
    if mask not in _keys:
        _keys[mask] = next(_count)
        _masks[_keys[mask]] = mask
    return _keys[mask]


def recorded_mask(
    mask: MaskMod | BlockMask,
    lengths: tuple[int, int] | None,
    device_type: str,
    *,
    by_row: bool = True,
    by_head: bool = True,
) -> tuple[str, tuple[Tensor, ...]]:
    """The name under which operators know what a mask does now, and the tensors that it reads.

    ``lengths``: of queries and keys in the whole sequence, where they are known. ``by_row`` and ``by_head``: whether it
    may depend on the row of the batch, and the head (otherwise a ValueError): not where a rank has only some of them.
    """
    recording, captured = record(mask, torch.device(device_type), lengths)
    for may, does, what in ((by_row, recording.by_row, "batch"), (by_head, recording.by_head, "head")):
        if does and not may:
            raise ValueError(
                f"mask_mod depends on the {what}, which DTensors shard on another axis of their mesh: pass local "
                "tensors, whose numbers it then sees"
            )
    recording = _known.setdefault(recording.name, recording)
    kept(_latest.setdefault(mask, {}), recording.name, _RECORDINGS, lambda: recording)
    return recording.name, captured


@constant
def mask_name(key: int, lengths: tuple[int, int], device_type: str, *, by_row: bool, by_head: bool) -> str:
    """The name alone, of a mask by its number; see :func:`recorded_mask`. What it reads is in :func:`read_by` then."""
    name, tensors = recorded_mask(_masks[key], lengths, device_type, by_row=by_row, by_head=by_head)
    read_by(key, device_type).tensors = tensors
    return name


class Read:
    """What a mask read when a graph of it was last traced: where graphs find their inputs.

    At first what it read when it was given. But a module may be moved after that, or get its contents.
    """

    tensors: tuple[Tensor, ...] = ()


# They live as long as an attention that has them.
_reads: weakref.WeakValueDictionary[tuple[int, str], Read] = weakref.WeakValueDictionary()


def read_by(key: int, device_type: str) -> Read:
    """Of a mask, by its number, on devices of one type always the same."""
    return _reads.setdefault((key, device_type), Read())


def check_mask(key: int, name: str, captured: Sequence[Tensor], lengths: tuple[int, int], device_type: str) -> None:
    """Refuse (ValueError) a mask, by its number, that no longer does what a compiled graph holds.

    That is what :func:`mask_name` said when it was compiled, and the tensors that the graph hands over.
    """
    mask = _masks.get(key)
    now, read = ("", ()) if mask is None else recorded_mask(mask, lengths, device_type)
    if now != name or [*map(_memory, read)] != [*map(_memory, captured)]:
        raise ValueError(
            "mask_mod's state has changed, or mask_mod has gone, since the graph was compiled, of which masks are "
            "constants but for the contents of captured tensors: write into these outside of the graph, compile again "
            "after torch.compiler.reset(), or say it with document_ids, which are an input"
        )


def _memory(x: Tensor) -> tuple[Hashable, ...]:
    """Where a tensor's contents are."""
    return x.device, x.dtype, x.data_ptr(), tuple(x.shape), x.stride()


def known_recording(name: str) -> Recording:
    """The recording of that name; refused (ValueError) if not made in this process, or forgotten with its mask."""
    found = _known.get(name)
    if found is None:
        raise ValueError(
            f"what the mask {name!r} does is forgotten, or was never known here: pass mask_mod on every rank, and keep "
            "it until the backward"
        )
    return found


class Captured(tuple[Tensor, ...]):
    """The tensors that a mask reads, in order, for the time of one call."""

    @cached_property
    def contents(self) -> int:
        """A number that is the same for tensors of the same contents, above 0; 0 for none.

        Tensors on the CPU are read by every call, once. Of a device's, which it would have to wait for, what they were
        is known as long as torch counts no writing; writing through ``.data`` it does not count.
        """
        if not self:
            return 0
        digest = hashlib.sha1(b"".join(map(_digest, self)), usedforsecurity=False).digest()
        return int.from_bytes(digest[:8]) >> 1 or 1


def _digest(x: Tensor) -> bytes:
    version, digest = _digests.get(x, (-1, b""))
    if x.is_cpu or x.is_inference() or version != x._version:
        with outside_dispatch(), torch.no_grad():
            said = repr((x.dtype, tuple(x.shape))).encode()
            # The fastest of hashlib where processors have instructions for it; nobody is to be kept from colliding.
            digest = hashlib.sha1(said + bytes_of(x.cpu()).numpy().tobytes(), usedforsecurity=False).digest()
        if not x.is_cpu and not x.is_inference():
            _digests[x] = x._version, digest
    return digest


class Answers:
    """What a rank's queries see of keys, under a mask that reads these tensors now."""

    def __init__(
        self, recording: Recording, captured: Captured, batch: int, heads: Sequence[range], device: torch.device
    ) -> None:
        self._mask_mod, self._device = recording.mask_mod(captured), device
        self._batch = batch if recording.by_row else None
        self._heads = [some for some in heads if some] if recording.by_head else [None]
        self._blocks: dict[Hashable, BlockMask] = {}
        self._seen: dict[Hashable, bool] = {}
        # What has been made of it, by whoever keeps it here.
        self.kept: dict[Hashable, Any] = {}

    @classmethod
    def of(cls, name: str, captured: Captured, batch: int, heads: Sequence[range], device: torch.device) -> "Answers":
        """Those of a mask by its name, made now or kept from before; see :func:`known_recording`."""
        recording = known_recording(name)
        # While they are kept nothing else has the tensors' memory; their contents may be others than they were.
        key = (captured.contents, *map(_memory, captured), batch, *heads, device)
        return kept(recording.kept, key, _ANSWERS, lambda: cls(recording, captured, batch, heads, device))

    def block(self, heads: range, queries: Spans, keys: Spans) -> BlockMask:
        """The mask of queries and keys at these positions, for some query heads."""
        chosen = heads if self._heads != [None] else None
        key = (chosen, queries.tobytes(), keys.tobytes())
        make = partial(_block, self._mask_mod, self._batch, chosen, queries, keys, self._device)
        return kept(self._blocks, key, _BLOCKS, make)

    def sees(self, queries: Spans, keys: Spans) -> bool:
        """Whether, for some head of this rank, some query sees some key."""
        blocks = (self.block(heads or range(0), queries, keys) for heads in self._heads)
        key = (queries.tobytes(), keys.tobytes())
        return kept(self._seen, key, _BLOCKS, lambda: any(block.sparsity() < 100 for block in blocks))


def _block(
    whole: MaskMod, batch: int | None, heads: range | None, queries: Spans, keys: Spans, device: torch.device
) -> BlockMask:
    """A BlockMask of rows and columns whose positions in the whole sequence are these."""
    rows, columns = length_of(queries), length_of(keys)
    first = 0 if heads is None else heads.start
    shape = batch, None if heads is None else len(heads)

    def local(q_at: Tensor) -> MaskMod:
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return whole(b, h + first, q_at[q], k_at[k])

        return mask_mod

    # What is kept in an evaluation is for training, too.
    with outside_dispatch(), torch.inference_mode(False), torch.no_grad():
        q_at, k_at = (torch.from_numpy(positions(spans).astype(np.int64)).to(device) for spans in (queries, keys))
        # torch asks about all pairs at once.
        parts = [
            create_block_mask(local(q_at[some]), *shape, len(q_at[some]), columns, device=device, BLOCK_SIZE=SIZE)
            for some in strips(rows, columns * (batch or 1) * (shape[1] or 1), SIZE)
        ]
        lists = [
            torch.cat([getattr(part, f"{full}kv_{name}") for part in parts], dim)
            for full in ("", "full_")
            for name, dim in (("num_blocks", -1), ("indices", -2))
        ]
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=SIZE, mask_mod=local(q_at), seq_lengths=(rows, columns))
