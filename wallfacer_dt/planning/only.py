"""What is asked of a plan: values that parts of it must have, as ``ring=8`` or ``checkpoint="full"``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from wallfacer_dt.planning.cluster import PlanningError

ATTENTION = "ring", "team", "ulysses", "placement", "schedule", "rotate", "rotate_forward", "order"
LAYERS = "feed_forward", "projections", "checkpoint"
GROUPS = "context", "tensor", "shards", "replicas", "pipeline", "interleave", "expert", "microbatch"

Values = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, slots=True)
class Only:
    """Values by name.

    Attributes:
        attention: of an attention (:class:`Candidate`).
        layers: of its layers.
        groups: of a :class:`Division`; ``context`` is how many ranks share a sequence.
    """

    attention: Values = ()
    layers: Values = ()
    groups: Values = ()

    @classmethod
    def of(cls, given: Mapping[str, int | str] | None, *, divides: bool = False) -> "Only":
        """What was asked for; refuse (TypeError, ValueError) other types of values, and names that no plan has, as
        those of groups where no ranks are divided.

        >>> Only.of({"checkpoint": "full", "ring": 8})
        Only(attention=(('ring', 8),), layers=(('checkpoint', 'full'),), groups=())
        """
        kinds = [ATTENTION, LAYERS, GROUPS if divides else ()]
        known = [*kinds[2], *ATTENTION, *LAYERS]
        for name, value in (given or {}).items():
            if isinstance(value, bool) or not isinstance(value, int | str):
                raise TypeError(f"only: {name} must be an int or a str, got {value!r}")
            if name not in known:
                beside = ", which is of divided ranks: say how many sequences" * (name in GROUPS)
                raise ValueError(f"only must name some of {', '.join(known)}, got {name!r}{beside}")
        return cls(*[tuple((name, given[name]) for name in kind if given and name in given) for kind in kinds])

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in (*self.groups, *self.attention, *self.layers))


ANY = Only()


def has(one: object, values: Values) -> bool:
    """Whether an attention, or a division, has these."""
    return all(_value(one, name) == value for name, value in values)


def refuse(only: Only, there: Iterable[tuple[object, Values]]) -> PlanningError:
    """No plan has what is asked for, and why.

    Args:
        only: it.
        there: all there are to choose from, each with what is asked of such.

    Returns:
        The error.
    """
    found: dict[tuple[str, Any], set[Any]] = {}
    for one, values in there:
        for name, value in values:
            found.setdefault((name, value), set()).add(_value(one, name))
    for (name, value), others in found.items():
        if value not in others:
            return PlanningError(
                f"no plan has {name}={value!r}, but {', '.join(map(str, sorted(others)))}", about="only"
            )
    return PlanningError(f"no plan has all of {only}", about="only")


def _value(one: object, name: str) -> Any:
    return attrgetter("context.size" if name == "context" else name)(one)
