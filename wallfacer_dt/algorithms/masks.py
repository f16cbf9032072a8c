"""Masks: which keys a query sees, as numbers on the host; any other, ``mask_mod``, see ``blocks``.

Within a row of the batch the keys that query i sees are an interval whose ends never move back as i grows: a band
around the diagonal (causal, sliding window), cut at the ends of i's document; or the keys up to a prefix or to i,
whichever is later.
"""

from dataclasses import dataclass, field

import numpy as np

from wallfacer_dt.layout import Spans, begun, positions

UNBOUNDED = 1 << 62
_FAR = UNBOUNDED >> 1


@dataclass(frozen=True, slots=True)
class Mask:
    """What a query at position i sees: keys in [i - left, i + right] of its own document; None is no bound."""

    left: int | None = None  # how far back
    right: int | None = None  # how far ahead; 0 is causal
    prefix: int = 0  # keys before this position are seen by all queries; with ``right`` 0 only
    # For every row of the batch the positions where documents begin, and the sequence's length; one row stands for all.
    # Empty: one document.
    documents: tuple[tuple[int, ...], ...] = ()
    asked: bool = False  # an arbitrary mask instead of all these, which ``blocks.Answers`` asks
    _bounds: list[np.ndarray] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Bring bounds beyond any position to where positions can be added to them in 64 bits."""
        for name in ("left", "right", "prefix"):
            bound = getattr(self, name)
            object.__setattr__(self, name, bound if bound is None else min(bound, _FAR))

    @property
    def rows(self) -> int:
        """How many rows of the batch differ; one stands for all."""
        return max(1, len(self.documents))

    @property
    def spares_hops(self) -> bool:
        """Whether there may be whole shards that nobody needs."""
        return self.left is not None or bool(self.documents) or self.right not in (None, 0)

    def bounds(self, row: int) -> np.ndarray:
        """Where a row's documents begin, and where the last one ends."""
        if not self._bounds:  # of thousands of documents it takes as long as what it is asked for
            self._bounds[:] = map(np.array, self.documents or ((0, UNBOUNDED),))
            for bounds in self._bounds:
                bounds.setflags(write=False)
        return self._bounds[row if self.documents else 0]

    def seen(self, row: int, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of queries at ascending positions, those from which on, and those before which, each sees keys."""
        bounds = self.bounds(row)
        document = begun(bounds, queries)
        first, stop = bounds[document - 1], bounds[document]
        if self.left is not None:
            first = np.maximum(first, queries - self.left)
        if self.right is not None:
            stop = np.minimum(stop, np.maximum(queries + self.right + 1, self.prefix))
        return first, stop

    def reach(self, row: int, queries: Spans) -> Spans:
        """By span of queries, the positions of all keys that some of them see: of those and no other."""
        return np.stack([self.seen(row, queries[:, 0])[0], self.seen(row, queries[:, 1] - 1)[1]], -1)


def pairs_of(reach: Spans, keys: Spans) -> tuple[np.ndarray, np.ndarray]:
    """By number, each of ascending spans with those of keys that have positions in it, ascending."""
    first = begun(keys[:, 1], reach[:, 0])
    stop = np.maximum(first, begun(keys[:, 0], reach[:, 1] - 1))
    return np.repeat(np.arange(len(reach)), stop - first), positions(np.stack([first, stop], -1))
