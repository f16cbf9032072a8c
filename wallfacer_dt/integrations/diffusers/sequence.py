"""What is known of one forward of a model, and how it reaches attention."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from wallfacer_dt.integrations.carried import carried
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import shard_sequence

PASSED = "sharded_sequence"
"""The keyword by which attention is told, where models hand keywords down to it."""


@dataclass(frozen=True)
class Alike:
    """Samples of a batch of whose text the same tokens are valid.

    Attributes:
        samples: which of the batch; None for all.
        tokens: which of the text.
    """

    samples: Tensor | None
    tokens: Tensor


@dataclass(frozen=True)
class Texts:
    """What attention is to see of the texts of a batch.

    Attributes:
        alike: all samples; nothing where all tokens of all texts are valid.
        back: where in these, one after the other, each sample of the batch is; None where they are in order.
    """

    alike: tuple[Alike, ...] = ()
    back: Tensor | None = None

    @classmethod
    def of(cls, valid: Tensor) -> "Texts":
        """Of bool (B, T)."""
        rows: dict[tuple[bool, ...], list[int]] = {}
        for sample, row in enumerate(valid.tolist()):
            rows.setdefault(tuple(row), []).append(sample)
        if all(map(all, rows)):
            return cls()
        device = valid.device
        alike = [
            Alike(
                torch.tensor(samples, device=device) if len(rows) > 1 else None,
                torch.tensor(row, device=device).nonzero()[:, 0],
            )
            for row, samples in rows.items()
        ]
        back = torch.tensor([*chain(*rows.values())], device=device).argsort() if len(rows) > 1 else None
        return cls(tuple(alike), back)


@carried
@dataclass
class ForwardPass:
    """One forward of a model, whose tokens are dealt out on the way.

    It goes with the arguments of blocks, so that blocks which are computed again in a backward have that of their own.

    Attributes:
        order: in which tokens are dealt out.
        text: T, tokens of the text that attention sees beside them, all of them on every rank.
        length: N, of the sequence that is dealt out; 0 until it is.
        calls: of attention on the mesh, as yet, by the path of its module.
        has_rotary: whether tables of the image's tokens have been made.
        gathered: whether the output has been put together.
    """

    order: TokenOrder
    text: int = 0
    length: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    has_rotary: bool = False
    gathered: bool = False
    _read: tuple[Tensor, Texts] | None = None
    _among_own: dict[int, int] = field(default_factory=dict)

    def shard(self, x: Tensor, dim: int, what: str) -> Tensor:
        """This rank's part of something with a place for every token, or a refusal (ValueError) of what has not."""
        length = x.shape[dim]
        if self.length not in (0, length):
            raise ValueError(f"{what} are of {length} tokens, where the model has {self.length}")
        sizes = shard_sizes(length, self.order.axes)
        if 0 in sizes:
            raise ValueError(
                f"{length} tokens are too few for {len(sizes)} ranks: dealt out as {sizes} some hold none, which "
                "diffusers' attention cannot reshape"
            )
        self.length = length
        return shard_sequence(x, self.order, dim=dim)

    def among_own(self, first: int) -> int:
        """How many of this rank's tokens are among the first of the sequence, as they are in its shard, too."""
        if first not in self._among_own:
            places = self.shard(torch.arange(self.length, device="cpu"), 0, "tokens")
            self._among_own[first] = int((places < first).sum())
        return self._among_own[first]

    def texts(self, mask: Tensor, text: slice, batch: int, path: str) -> Texts:
        """What attention is to see of texts. A mask is read once, though all blocks are given it, again in a backward.

        Args:
            mask: bool (B, T), or (B, 1, 1, T + L) of text and this rank's tokens; of keys, true where they are seen.
            text: where the text's T are in it.
            batch: B.
            path: of the attention that was given it.

        Returns:
            It.

        Raises:
            ValueError: a mask of another form, or one that hides tokens of the image.
        """
        if self._read is None or not self._read[0].is_set_to(mask):
            flat = mask.flatten(1)
            others = flat.clone()
            others[:, text] = True
            is_right = mask.dtype == torch.bool and len(mask) == batch and mask.shape[1:-1] in ((), (1, 1))
            if not is_right or not others.all():
                raise ValueError(
                    f"{path} was given a mask {tuple(mask.shape)} of {mask.dtype}, which must be bool, (B, T) or "
                    "(B, 1, 1, T + L), and let all of the image be seen"
                )
            self._read = mask, Texts.of(flat[:, text])
        return self._read[1]


def forward_of(given: Iterable[Any], path: str) -> ForwardPass:
    """The forward that arguments of a module, by its path, tell of; or a refusal (ValueError)."""
    for x in given:
        if isinstance(x, ForwardPass | RotaryTables):
            return x if isinstance(x, ForwardPass) else x.forward_pass
    raise ValueError(
        f"{path} was called outside a forward of the model that context_parallel was given, or by a hook that makes "
        "tuples of rotary tables, or again in a checkpoint that is not diffusers' own, which some models need: call "
        "that model, not a part of it"
    )


class RotaryTables:
    """Cosines and sines of this rank's tokens, which blocks hand down to attention, and what it needs beside them.

    No tuple, which hooks that move or cast tensors would make anew: they are where tokens are, in the dtype they were
    made in. Nor a class for each forward, for which compiled blocks would be compiled again.

    Args:
        tables: each (T + L, H) or (B, T + L, H), or without the text's T, as the model has them.
        forward_pass: of which they are.
    """

    def __init__(self, tables: Iterable[Tensor], forward_pass: ForwardPass) -> None:
        self._tables, self.forward_pass = tuple(tables), forward_pass

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tables)

    def __getitem__(self, number: int) -> Tensor:
        return self._tables[number]
