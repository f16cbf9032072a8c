"""Reading a token stream so that each rank reads its own chunks of its own samples (WallFacer section 3.5).

Ranks of one context mesh take the same sample, data-parallel groups take different ones. Both classes are made for
``torch.utils.data.DataLoader`` and know nothing of models.
"""

import operator
import os
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, DistributedSampler

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.dealing import notice_dealt
from wallfacer_dt.layout import BY_DOCUMENT, check_length, deal
from wallfacer_dt.mesh import RING_AXIS, context_groups, name_of
from wallfacer_dt.order import TokenOrder, check_token_order
from wallfacer_dt.reading import shown


class TokenStream(Protocol):
    """A one-dimensional array of token ids: numpy array or memory map, tensor, bytes."""

    def __len__(self) -> int:
        """Number of tokens."""

    def __getitem__(self, rows: slice, /) -> Any:
        """A slice of tokens, as anything numpy can take."""


class SequenceDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a token stream, of which this rank reads only its own chunks.

    Sample i is the window of ``length`` tokens from i * length on, with the next token of each as its label.

    Args:
        tokens: the stream; only slices are read, so a memory map never comes into memory whole.
        length: tokens in a sequence, N.
        order: in which they are dealt out, and to which ranks; None on one process: then samples are whole.

    Raises:
        TypeError: order is no token order.
        ValueError: the stream has no whole window, or the order asks for documents; raised on every rank of the order's
            mesh where they next meet on it.
    """

    def __init__(self, tokens: TokenStream, length: int, order: TokenOrder | None = None) -> None:
        # What one rank refuses, as a file of which it has a part, the others hear of where they meet it.
        with refusing_together("" if order is None else check_token_order(order).mesh_name):
            check_length(length)
            if len(tokens) <= length:
                raise ValueError(
                    f"a sequence of {length} tokens and their labels needs {length + 1} tokens, "
                    f"the stream has {len(tokens)}"
                )
            held = np.array([[0, length]])
            if order is not None:
                if order.name == BY_DOCUMENT:
                    raise ValueError(f"order={order.name!r} needs documents, which a stream does not have")
                held = deal(length, order.axes, order.name)[order.groups.coordinate.index]
                notice_dealt(order.dealt)
        self.tokens, self.length = tokens, length
        self.spans: list[tuple[int, int]] = held.tolist()

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are not forked: of a memory map where it is, which numpy would write out whole."""
        return self.__dict__ | {"tokens": _Mapped.of(self.tokens) or self.tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As it was, the file opened again."""
        self.__dict__ |= state
        if isinstance(self.tokens, _Mapped):
            self.tokens = self.tokens.opened()

    def __len__(self) -> int:
        """Number of whole windows that also have their last label."""
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """This rank's inputs and labels of sample ``index``: two int64 tensors of its tokens' shape."""
        index = operator.index(index)  # one of 32 bits would overflow
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        begin = index % len(self) * self.length
        chunks = [self._read(begin + start, begin + stop + 1) for start, stop in self.spans]
        nothing = torch.empty(0, dtype=torch.int64)  # a short sequence may have no token for this rank
        return torch.cat([nothing, *(c[:-1] for c in chunks)]), torch.cat([nothing, *(c[1:] for c in chunks)])

    def _read(self, start: int, stop: int) -> Tensor:
        rows = self.tokens[start:stop]
        if isinstance(rows, bytes | bytearray):
            rows = np.frombuffer(rows, dtype=np.uint8)
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise TypeError(f"tokens must be a one-dimensional stream of integers, got {rows.ndim}-d {rows.dtype}")
        if len(rows) < stop - start:
            raise ValueError(f"the stream ends at token {start + len(rows)}, its length was {len(self.tokens)}")
        if rows.dtype == np.uint64 and (largest := rows.max()) > np.iinfo(np.int64).max:
            raise ValueError(f"token {largest} is none: more than 63 bits")
        return torch.as_tensor(rows.astype(np.int64))


class _Mapped(NamedTuple):
    """Which numbers of a file a memory map has."""

    file: str
    dtype: np.dtype
    offset: int
    length: int

    @classmethod
    def of(cls, tokens: Any) -> "_Mapped | None":
        """Those of a map, or of a slice of one, which a file has as it has them; None of anything else."""
        if not isinstance(tokens, np.memmap) or tokens.filename is None or tokens.strides != (tokens.itemsize,):
            return None
        if tokens.mode == "c" or not os.path.exists(tokens.filename):  # changed in memory alone, or let go of
            return None
        whole: Any = tokens
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        ahead = tokens.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        return cls(str(tokens.filename), tokens.dtype, whole.offset + ahead, len(tokens))

    def opened(self) -> np.memmap:
        """The map, to be read."""
        return np.memmap(self.file, self.dtype, "r", self.offset, (self.length,))


class SequenceSampler(DistributedSampler[int]):
    """Which samples this rank reads: other ones per data-parallel group, the same on all ranks of a context mesh.

    Resumable: ``state_after(consumed)`` says how far the trainer is, whatever a DataLoader has read ahead.

    Args:
        dataset: with a length.
        mesh: context mesh whose ranks compare, at once, that they would take the same samples.
        data_parallel: the data-parallel axis, a mesh of one axis, or None without data parallelism; its ranks compare
            that they would take different samples of the same epoch.
        shuffle: a new permutation every epoch, see ``set_epoch``.
        seed: of the permutations; the same on every rank.

    Raises:
        ValueError: ranks of the context mesh would read different samples, those of data_parallel would not deal out
            the same ones, that is no axis, the seed is none, or there are fewer samples than groups.
    """

    def __init__(
        self,
        dataset: Dataset,
        mesh: DeviceMesh | None = None,
        *,
        data_parallel: DeviceMesh | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._mesh = "" if mesh is None else name_of(mesh)
        self._data_parallel = "" if data_parallel is None else name_of(data_parallel)
        with refusing_together(self._data_parallel), refusing_together(self._mesh):
            if mesh is not None:
                context_groups(mesh, any_axis=RING_AXIS)
            if data_parallel is not None and data_parallel.ndim != 1:
                axes = data_parallel.mesh_dim_names
                raise ValueError(f'data_parallel must be a mesh of one axis, got {axes}; slice it first: mesh["dp"]')
            if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
                raise ValueError(f"seed must be a whole number from 0 to 2**63 - 1, got {shown(seed)}")
            seed, shuffle = int(seed), bool(shuffle)
            groups = 1 if data_parallel is None else data_parallel.size()
            group = 0 if data_parallel is None else data_parallel.get_local_rank()
            samples = len(dataset)  # type: ignore[arg-type]
            if samples < groups:
                raise ValueError(f"{groups} data-parallel groups need as many samples, the dataset has {samples}")
            signature = {"number of samples": samples, "seed": seed, "shuffle": shuffle, "data-parallel groups": groups}
            agree("SequenceSampler", (signature | {"data-parallel group": group}).items(), self._mesh)
            agree("SequenceSampler", signature.items(), self._data_parallel)
        super().__init__(dataset, num_replicas=groups, rank=group, shuffle=shuffle, seed=seed, drop_last=True)
        self._skip = 0

    def __iter__(self) -> Iterator[int]:
        """Sample indices of this epoch; after ``load_state_dict``, the ones not yet consumed."""
        # Not before the first is asked for: a DataLoader with workers makes an iterator that it leaves.
        skip, self._skip = self._skip, 0
        yield from islice(super().__iter__(), skip, None)

    def __len__(self) -> int:
        """Samples of this group left in this epoch."""
        return self.num_samples - self._skip

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; another epoch than the current one starts at its beginning."""
        if epoch != self.epoch:
            self._skip = 0
        super().set_epoch(epoch)

    def state_after(self, consumed: int) -> dict[str, Any]:
        """What resuming needs.

        Args:
            consumed: samples of this epoch that this group's trainer has used up.

        Returns:
            Plain values, the same on all ranks of a group.

        Raises:
            TypeError: it is no whole number.
            ValueError: the epoch has fewer samples than that.
        """
        consumed = operator.index(consumed)
        if not 0 <= consumed <= self.num_samples:
            raise ValueError(f"consumed must be from 0 to the epoch's {self.num_samples} samples, got {consumed}")
        return {"epoch": self.epoch, "consumed": consumed} | self._identity()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken: the next iteration skips the consumed samples of that epoch.

        Args:
            state: from ``state_after``.

        Raises:
            ValueError: the state is none, or of another dataset length, seed, shuffling or number of data-parallel
                groups, under which "the next sample" would be a different one; or ranks disagree.
        """
        with refusing_together(self._data_parallel), refusing_together(self._mesh):
            for name, mine in self._identity().items():
                saved = _part(state, name)
                saved = saved.item() if isinstance(saved, np.generic) else saved
                if not isinstance(saved, int) or saved != mine:
                    raise ValueError(f"the saved sampler had {name}={shown(saved)}, this one has {mine!r}")
            epoch = _count(state, "epoch", _MOST_EPOCHS)
            consumed = _count(state, "consumed", self.num_samples)
            signature = {"epoch": epoch, "consumed samples": consumed}
            for mesh in (self._mesh, self._data_parallel):
                agree("SequenceSampler.load_state_dict", signature.items(), mesh)
        self.set_epoch(epoch)
        self._skip = consumed

    def _identity(self) -> dict[str, Any]:
        return {
            "samples": len(self.dataset),  # type: ignore[arg-type]
            "groups": self.num_replicas,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }


_MOST_EPOCHS = 2**31 - 1


def _part(state: dict[str, Any], name: str) -> Any:
    if not isinstance(state, Mapping):
        raise ValueError(f"the saved sampler must be a mapping, got {shown(state)}")
    if name not in state:
        raise ValueError(f"the saved sampler has no {name}")
    return state[name]


def _count(state: dict[str, Any], name: str, most: int) -> int:
    """A number that was saved; ValueError if it is none."""
    given = _part(state, name)
    if type(given) is not int or not 0 <= given <= most:  # a bool is no number
        raise ValueError(f"the saved sampler's {name} must be a whole number from 0 to {most}, got {shown(given)}")
    return given
