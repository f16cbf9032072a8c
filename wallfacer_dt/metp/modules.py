"""Reading a module that METP is to take over: its projections, and what else it must not have."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from wallfacer_dt.metp.holding import TENSOR_AXIS

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the forward's positional arguments; the first is x."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds) or ("x",)


def the_input(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """x, as a call gives it, by position or taken out of the names."""
    if not args:
        if name not in kwargs:
            raise TypeError(f"called without {name}")
        return kwargs.pop(name)
    return args[0]


def linear(module: nn.Module, name: str) -> nn.Linear:
    """A projection by its name, which :func:`check_projections` has seen."""
    projection = module.get_submodule(name)
    assert isinstance(projection, nn.Linear), name
    return projection


def check_names(names: Mapping[str, Any]) -> None:
    """Refuse (TypeError, ValueError) names of submodules that are none, or of one submodule twice; by option."""
    for option, name in names.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"{option} must be the name of a submodule, got {name!r}")
    if len(set(names.values())) != len(names):
        raise ValueError(f"{', '.join(names)} must be different submodules, got {', '.join(names.values())}")


def check_projections(module: nn.Module, names: Sequence[str], who: str) -> None:
    """Refuse (ValueError) a module that is not linear projections of these names and nothing else that is trained.

    Args:
        module: the module.
        names: of its projections.
        who: the style.
    """
    kind = type(module).__name__
    for name in names:
        try:
            projection = module.get_submodule(name)
        except AttributeError:
            raise ValueError(f"{who}: {kind} has no submodule {name!r}") from None
        if not isinstance(projection, nn.Linear):
            raise ValueError(f"{who}: {name!r} must be an nn.Linear, got {type(projection).__name__}")
        if isinstance(projection.weight, DTensor):
            raise ValueError(
                f"{who}: {name}.weight is a DTensor already; METP comes before FSDP, and tensor parallelism is an axis "
                f"{TENSOR_AXIS!r} of its mesh"
            )
    known = {f"{name}.{part}" for name in names for part in ("weight", "bias")}
    present = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tied = set(present) - {name for name, _ in module.named_parameters()}
    if tied:
        raise ValueError(f"{who}: {', '.join(sorted(tied))} is another parameter as well, and METP would untie them")
    others = [name for name in present if name not in known]
    if others:
        raise ValueError(f"{who} knows of {', '.join(names)}, but {kind} has {others[0]} as well")
    dropout = [name for name, child in module.named_modules() if isinstance(child, _DROPOUTS) and child.p]
    if dropout:
        raise ValueError(f"{who} does not implement dropout, which must not differ when computed anew: {dropout[0]}")
