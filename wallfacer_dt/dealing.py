"""What this rank has noticed of sequences that are dealt out, by the ranks that share them.

Note [Noticing]
Two mistakes show in no single call. A plan whose path matches no module leaves a model in which every rank attends its
own tokens alone; torch only warns. And ranks that were handed whole sequences of their own attend to each other's, as
to shards of one. So it is noticed where tokens are dealt out, and where a path matched nothing; what has been noticed
lives as long as the world.
"""

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from wallfacer_dt.agreement.worlds import World, this_world
from wallfacer_dt.unmatched import Place

Ranks = tuple[int, ...]  # ascending


@dataclass
class _Noticed:
    """By ranks of a mesh.

    Attributes:
        dealt: to which tokens were dealt out.
        others: to which others deal tokens out, who are not seen.
        missed: on which a path matched nothing, and in words, which; nothing has been applied since.
        warned: who have been warned.
    """

    dealt: set[Ranks] = field(default_factory=set)
    others: set[Ranks] = field(default_factory=set)
    missed: dict[Ranks, tuple[str, Place | None]] = field(default_factory=dict)
    warned: set[Ranks] = field(default_factory=set)


_by_world: weakref.WeakKeyDictionary[World, _Noticed] = weakref.WeakKeyDictionary()


def _noticed() -> _Noticed:
    world = this_world()
    return _Noticed() if world is None else _by_world.setdefault(world, _Noticed())


def notice_dealt(ranks: Ranks) -> None:
    """Tokens are dealt out; refused (ValueError), once, where the last plan on these ranks matched nothing."""
    noticed = _noticed()
    noticed.dealt.add(ranks)
    if missed := noticed.missed.pop(ranks, None):
        raise ValueError(missed[0])


def notice_others_deal(ranks: Ranks) -> None:
    """Others deal tokens out to these ranks."""
    _noticed().others.add(ranks)


def notice_missed(ranks: Ranks, what: str, place: Place | None, *, at_once: bool) -> None:
    """A path matched nothing: refused (ValueError) where tokens were dealt out, otherwise when they are."""
    noticed = _noticed()
    if at_once and ranks in noticed.dealt | noticed.others:
        raise ValueError(what)
    noticed.missed[ranks] = what, place


def notice_applied(ranks: Ranks, place: Place | None) -> None:
    """A style was applied: what another plan missed before it was a first try, and its own path matches somewhere."""
    missed = _noticed().missed
    _, before = missed.get(ranks, ("", None))
    if before is None or place is None or before.plan is not place.plan or before.path == place.path:
        missed.pop(ranks, None)


def warn_undealt(ranks: Ranks) -> None:
    """Warn, once, that ranks attend to whose sequences nothing is known of."""
    noticed = _noticed()
    if len(ranks) < 2 or ranks in noticed.dealt | noticed.others | noticed.warned:
        return
    if dist.get_backend() == "fake":  # ranks that are only imagined hold nothing
        return
    noticed.warned.add(ranks)
    warnings.warn(
        f"attention on {len(ranks)} ranks, to which no sequence was dealt out in this process: each must hold its "
        "shard of the same sequences, and what a data-parallel loader gives them are different ones; use "
        "shard_sequence, or leave this unheeded if code of your own deals tokens out",
        stacklevel=3,
    )


@contextmanager
def dealing_by_hand(ranks: Ranks) -> Iterator[None]:
    """While it lasts tokens are dealt out to these ranks without :func:`notice_dealt`."""
    others = _noticed().others
    was_there = ranks in others
    others.add(ranks)
    try:
        yield
    finally:
        if not was_there:
            others.discard(ranks)
