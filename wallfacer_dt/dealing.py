"""What this rank has noticed of sequences that are dealt out, by the ranks that share them.

Note [Noticing]
Two mistakes show in no single call. A plan whose path matches no module leaves a model in which every rank attends its
own tokens alone; torch only warns. And ranks that were handed whole sequences of their own attend to each other's, as
to shards of one. So it is noticed where tokens are dealt out, and where a path matched nothing; what has been noticed
lives as long as the world.
"""

import warnings
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from wallfacer_dt.agreement.worlds import World, this_world
from wallfacer_dt.unmatched import Place


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
    """Of some ranks."""

    are_dealt: bool = False  # tokens, to them
    others_deal: bool = False  # tokens out to them, who are not seen
    has_warned: bool = False
    missed: list[_Missed] = field(default_factory=list)  # what has not been made up for since


_by_world: weakref.WeakKeyDictionary[World, dict[frozenset[int], _Noticed]] = weakref.WeakKeyDictionary()


def _noticed(ranks: Iterable[int]) -> _Noticed:
    world = this_world()
    return _Noticed() if world is None else _by_world.setdefault(world, {}).setdefault(frozenset(ranks), _Noticed())


def notice_dealt(ranks: Iterable[int]) -> None:
    """Tokens are dealt out; refused (ValueError), once, where a plan on these ranks matched nothing in a model."""
    noticed = _noticed(ranks)
    noticed.are_dealt = True
    missed, noticed.missed = noticed.missed, []
    if missed:
        raise ValueError(missed[-1].what)


def notice_others_deal(ranks: Iterable[int]) -> None:
    """Others deal tokens out to these ranks."""
    _noticed(ranks).others_deal = True


def notice_missed(ranks: Iterable[int], what: str, place: Place | None, *, at_once: bool) -> None:
    """A plan's path matched nothing: refused (ValueError) where tokens were dealt out, otherwise when they are."""
    noticed = _noticed(ranks)
    if at_once and (noticed.are_dealt or noticed.others_deal):
        raise ValueError(what)
    model, path = (None, "") if place is None else (place.model(), place.path)
    noticed.missed.append(_Missed(what, model, path))


def notice_applied(ranks: Iterable[int], place: Place | None, module: nn.Module) -> None:
    """A style was applied to a module: a path that was missed in its model, and that is not asked for again, is made up
    for, and so is one that matches here.
    """
    noticed = _noticed(ranks)
    noticed.missed = [x for x in noticed.missed if not x.is_made_up_for(place, module)]


def warn_undealt(ranks: Collection[int]) -> None:
    """Warn, once, that ranks attend to whose sequences nothing is known of."""
    noticed = _noticed(ranks)
    if len(ranks) < 2 or noticed.are_dealt or noticed.others_deal or noticed.has_warned:
        return
    if dist.get_backend() == "fake":  # ranks that are only imagined hold nothing
        return
    noticed.has_warned = True
    warnings.warn(
        f"attention on {len(ranks)} ranks, to which no sequence was dealt out in this process: each must hold its "
        "shard of the same sequences, and what a data-parallel loader gives them are different ones; use "
        "shard_sequence, or leave this unheeded if code of your own deals tokens out",
        stacklevel=3,
    )


@contextmanager
def dealing_by_hand(ranks: Iterable[int]) -> Iterator[None]:
    """While it lasts tokens are dealt out to these ranks without :func:`notice_dealt`."""
    noticed = _noticed(ranks)
    before, noticed.others_deal = noticed.others_deal, True
    try:
        yield
    finally:
        noticed.others_deal = before
