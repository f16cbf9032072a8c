"""Token orders: which positions of the sequence a rank holds, as numbers made on the host.

``contiguous`` cuts the sequence in P chunks; sequence index d holds chunk d. ``head_tail`` (zigzag; WallFacer
section 3.5) cuts it in 2P and gives d the chunks d and 2P-1-d, after which causal attention is the same work on
every rank. Chunk order follows the sequence index of the mesh, whatever the placement.
"""

from typing import Literal, NamedTuple, get_args

Order = Literal["contiguous", "head_tail"]
ORDERS: tuple[str, ...] = get_args(Order)


class Span(NamedTuple):
    """Global positions ``start`` to ``stop`` (exclusive)."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.stop - self.start


def check_order(order: str) -> None:
    """Refuse (ValueError) an order that is not one of ORDERS."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {ORDERS}, got {order!r}")


def chunks_per_rank(order: str) -> int:
    """How many chunks a rank holds: 1, or 2 for ``head_tail``."""
    return 2 if order == "head_tail" else 1


def check_length(length: int, size: int, order: str) -> None:
    """Refuse (TypeError, ValueError) a sequence that the order cannot deal out evenly over ``size`` ranks."""
    if not isinstance(length, int) or isinstance(length, bool):
        raise TypeError(f"sequence length must be an int, got {length!r}")
    check_order(order)
    parts = chunks_per_rank(order) * size
    if length < 1 or length % parts:
        raise ValueError(
            f"sequence length must be a positive multiple of {parts} (order={order!r} on {size} ranks), "
            f"got {length}; pad or cut it to {max(1, length // parts) * parts}"
        )


def rank_spans(index: int, size: int, order: str, shard_length: int) -> tuple[Span, ...]:
    """The positions of sequence index ``index``, in the order in which its shard stores them (ascending).

    >>> rank_spans(1, 4, "head_tail", 4)
    (Span(start=2, stop=4), Span(start=12, stop=14))
    """
    per_rank = chunks_per_rank(order)
    chunk = shard_length // per_rank
    held = (index, 2 * size - 1 - index)[:per_rank]
    return tuple(Span(c * chunk, (c + 1) * chunk) for c in held)
