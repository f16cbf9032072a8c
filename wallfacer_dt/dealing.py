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
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from wallfacer_dt.agreement.worlds import World, this_world
from wallfacer_dt.unmatched import Place

Ranks = tuple[int, ...]  # ascending


class _Missed(NamedTuple):
    """A path that matched nothing: in words, which, and in which model, that is kept until this is made up for or told.

    Were it not kept, whether it is still there would be up to each rank's garbage collector.
    """

    what: str
    model: nn.Module | None  # None where it is not known: then whatever is applied makes up for it
    path: str

    def is_made_up_for(self, place: Place | None, module: nn.Module) -> bool:
        """Whether a style that is applied to a part of the model shows that this was a first try, or does match."""
        is_asked_for = place is not None and place.path != self.path and self.path in place.plan
        parts = (module,) if self.model is None else self.model.modules()
        return not is_asked_for and any(part is module for part in parts)


@dataclass
class _Noticed:
    """By ranks of a mesh."""

    dealt: set[Ranks] = field(default_factory=set)  # to which tokens were dealt out
    others: set[Ranks] = field(default_factory=set)  # to which others deal tokens out, who are not seen
    # On which paths matched nothing, that have not been made up for since.
    missed: dict[Ranks, list[_Missed]] = field(default_factory=dict)
    warned: set[Ranks] = field(default_factory=set)


_by_world: weakref.WeakKeyDictionary[World, _Noticed] = weakref.WeakKeyDictionary()


def _noticed() -> _Noticed:
    world = this_world()
    return _Noticed() if world is None else _by_world.setdefault(world, _Noticed())


def notice_dealt(ranks: Ranks) -> None:
    """Tokens are dealt out; refused (ValueError), once, where a plan on these ranks matched nothing in a model."""
    noticed = _noticed()
    noticed.dealt.add(ranks)
    if missed := noticed.missed.pop(ranks, None):
        raise ValueError(missed[-1].what)


def notice_others_deal(ranks: Ranks) -> None:
    """Others deal tokens out to these ranks."""
    _noticed().others.add(ranks)


def notice_missed(ranks: Ranks, what: str, place: Place | None, *, at_once: bool) -> None:
    """A plan's path matched nothing: refused (ValueError) where tokens were dealt out, otherwise when they are."""
    noticed = _noticed()
    if at_once and ranks in noticed.dealt | noticed.others:
        raise ValueError(what)
    model, path = (None, "") if place is None else (place.model(), place.path)
    noticed.missed.setdefault(ranks, []).append(_Missed(what, model, path))


def notice_applied(ranks: Ranks, place: Place | None, module: nn.Module) -> None:
    """A style was applied to a module: a path that was missed in its model, and that is not asked for again, is made up
    for, and so is one that matches here.
    """
    missed = _noticed().missed
    missed[ranks] = [x for x in missed.get(ranks, ()) if not x.is_made_up_for(place, module)]


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
