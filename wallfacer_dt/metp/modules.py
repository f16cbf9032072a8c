"""Reading a module that METP is to take over: its projections, what else it must not have, and how it is called."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from types import FunctionType
from typing import Any, NamedTuple, get_origin

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wallfacer_dt.metp.holding import TENSOR_AXIS

_DROPOUTS = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a module's forward takes, so that METP in its place drops nothing of a call.

    Attributes:
        x: name of the first.
        positional: names of those after it that a call may give by position.
        named: names of those after it that a call may give by name.
        defaults: by name, of those that a call may leave out.
        any_positional: whether a call may give more by position.
        any_named: whether a call may give more by name.
    """

    x: str
    positional: tuple[str, ...]
    named: tuple[str, ...]
    defaults: Mapping[str, Any]
    any_positional: bool
    any_named: bool

    @classmethod
    def of(cls, module: nn.Module) -> "Parameters":
        """Those of a module that has no style yet."""
        parameters = inspect.signature(module.forward).parameters.values()
        kind = inspect.Parameter

        def of_kind(*kinds: Any) -> tuple[str, ...]:
            return tuple(p.name for p in parameters if p.kind in kinds)

        x, *positional = of_kind(kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) or ("x",)
        named = tuple(name for name in of_kind(kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY) if name != x)
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        more = bool(of_kind(kind.VAR_POSITIONAL)), bool(of_kind(kind.VAR_KEYWORD))
        return cls(x, tuple(positional), named, defaults, *more)

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """x, None where a call does not give it; what else the call gives by position, and by name."""
        if args:
            return args[0], args[1:], dict(kwargs)
        return kwargs.get(self.x), (), {name: value for name, value in kwargs.items() if name != self.x}

    def names(self, count: int) -> tuple[str, ...]:
        """Names of so many arguments after x that are given by position."""
        more = (f"argument {i + 1}" for i in range(len(self.positional), count))
        return (*self.positional[:count], *more)

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What a call gives after x, by name; refuses (TypeError) what the module itself would not take."""
        if len(args) > len(self.positional) and not self.any_positional:
            raise TypeError(
                f"called with {1 + len(args)} positional arguments, of which it takes {1 + len(self.positional)}"
            )
        found = dict(zip(self.names(len(args)), args, strict=True))
        for name, value in kwargs.items():
            if name in found or name == self.x:
                raise TypeError(f"called with multiple values for argument {name!r}")
            if name not in self.named and not self.any_named:
                raise TypeError(f"called with an unexpected keyword argument {name!r}")
            found[name] = value
        missing = [n for n in (*self.positional, *self.named) if n not in found and n not in self.defaults]
        if missing:
            raise TypeError(f"called without the required argument {missing[0]!r}")
        return found

    def differing(self, given: Mapping[str, Any], tried: Mapping[str, Any]) -> dict[str, Any]:
        """What a call makes other than the call that was tried, by name; None asks for nothing where it is no default.

        Args:
            given: as the call gives it.
            tried: as the call that was tried gave it; what it left out had its default.

        Returns:
            Values that METP must know what to do with, be they a call's or a default.
        """
        asked = {name: self.defaults.get(name) for name in tried} | dict(given)
        return {
            name: value
            for name, value in asked.items()
            if not _is_same(value, tried.get(name, self.defaults.get(name)))
        }


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    # Tensors compare elementwise, and True is not what a module may take 1 for.
    plain = isinstance(value, int | float | str) and isinstance(other, int | float | str)
    return value is other or (plain and isinstance(value, bool) == isinstance(other, bool) and value == other)


def described(name: str, value: Any) -> str:
    """An argument, for a message."""
    # A compiler may take a number for a symbol, which has no text.
    if isinstance(value, float):
        value = float(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        value = index(value)
    if value is None or isinstance(value, int | float | str):
        return f"{name}={value!r}"
    return f"{name}, a {type(value).__name__}"


Attribute = tuple[str, str, Any]
"""Name of a submodule, of a value in it, and this, as :func:`_plain` has it."""


def attributes_of(module: nn.Module) -> tuple[Attribute, ...]:
    """What a module and its submodules hold that is a number, text or None, or tuples, lists and dicts of such.

    As far as torch does not look after it. What holds anything else, or nothing yet, may be a cache.
    """
    return tuple(
        (path, name, plain)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in _TORCHS and (plain := _plain(value)) is not _OTHER and plain != ()
    )


_TORCHS = vars(nn.Module()).keys()
_OTHER = object()


def _plain(value: Any, depth: int = 4) -> Any:
    """A number, text or None, or a tuple of such, whatever it is a tuple, list or dict of."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, dict):
        value = tuple(value.items())
    if not depth or not isinstance(value, tuple | list):
        return _OTHER
    plain = tuple(_plain(item, depth - 1) for item in value)
    return _OTHER if any(item is _OTHER for item in plain) else plain


def check_attributes(module: nn.Module, tried: Sequence[Attribute], who: str) -> None:
    """Refuse (ValueError) a module that holds another value than when it was tried, which METP would not see."""
    for path, name, value in tried:
        now = getattr(module.get_submodule(path), name, None)
        plain = _plain(now)
        if _is_same(plain, value) or (value is None and plain is _OTHER):  # a cache that has been filled
            continue
        whole = ".".join(filter(None, (path, name)))
        if isinstance(value, tuple):
            changed = f"what {whole} holds has changed since {who} was applied"
        else:
            changed = f"{whole} was {value!r} when {who} was applied, and now the module has {described(name, now)}"
        raise ValueError(f"{changed}: {who} computes what it did then; apply it to a new module")


class AsApplied(NamedTuple):
    """What a module was when a style was applied, which METP computes from then on without calling its submodules.

    Attributes:
        attributes: as of :func:`attributes_of`.
        forwards: by submodule.
    """

    attributes: Sequence[Attribute]
    forwards: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> "AsApplied":
        """As it is now."""
        return cls(attributes_of(module), {name: _forward_of(child) for name, child in module.named_modules() if name})

    def check(self, module: nn.Module, who: str, names: Sequence[str] | None = None) -> None:
        """Refuse (ValueError) a module that holds other values now, or whose submodules compute otherwise.

        That is hooks, and forwards that came later: of all submodules, or of these names, if others are called.
        """
        check_attributes(module, self.attributes, who)
        for name, child in module.named_modules():
            if name and (names is None or name in names):
                _check_hooks(name, child, who)
                if name in self.forwards and not _are_alike(_forward_of(child), self.forwards[name]):
                    raise ValueError(
                        f"{name}, a {type(child).__name__}, has another forward than when {who} was applied, which "
                        f"would not run, as {who} computes what it did then: adapters and wrappers go round the whole "
                        "module"
                    )


def _forward_of(module: nn.Module) -> Any:
    """Its class's, or of its own; not as it is bound, which of a copied module is to the copy."""
    return getattr(module.forward, "__func__", module.forward)


def _are_alike(forward: Any, other: Any) -> bool:
    """Whether they are the same function, or copies of what is none, or is generated anew, as torch.fx does."""
    if not isinstance(other, FunctionType):
        return type(forward) is type(other)
    return forward is other or getattr(forward, "__code__", None) == other.__code__


def _check_hooks(name: str, module: nn.Module, who: str) -> None:
    if any(getattr(module, hooks) for hooks in _HOOKS):
        raise ValueError(
            f"{name} has hooks, which would not run, as {who} computes what {name} does without calling it: remove "
            "them, or put them on the module itself"
        )


# Private names of torch; run on 2.11.0, 2.13.0, 2.14.1 and 2.15.0.
_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def linear(module: nn.Module, name: str) -> nn.Linear:
    """A projection by its name, which :func:`check_projections` has seen; refuses (ValueError) another in its place."""
    projection = module.get_submodule(name)
    if not isinstance(projection, nn.Linear):
        raise ValueError(
            f"{name} was an nn.Linear when METP was applied, and is a {type(projection).__name__} now, which would not "
            "run: adapters and wrappers go round the whole module"
        )
    return projection


def needing_gradients(x: Tensor, parts: Mapping[str, Tensor]) -> str:
    """Names of what needs a gradient, x and parts of projections: who communicates in a backward depends on them."""
    if not torch.is_grad_enabled():
        return ""
    return ", ".join(name for name, tensor in {"x": x, **parts}.items() if tensor.requires_grad)


def parts_of(module: nn.Module, projections: Sequence[str]) -> dict[str, Tensor]:
    """Weights and biases of projections, as far as there are any, by name."""
    parts = {}
    for name in projections:
        projection = linear(module, name)
        parts[f"{name}.weight"] = projection.weight
        if projection.bias is not None:
            parts[f"{name}.bias"] = projection.bias
    return parts


def check_names(names: Mapping[str, Any]) -> None:
    """Refuse (TypeError, ValueError) names of submodules that are none, or of one submodule twice; by option."""
    for option, name in names.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"{option} must be the name of a submodule, got {name!r}")
    if len(set(names.values())) != len(names):
        raise ValueError(f"{', '.join(names)} must be different submodules, got {', '.join(names.values())}")


def check_returns_one(module: nn.Module, who: str, remedy: str = "") -> None:
    """Refuse (ValueError) a module whose forward says that it returns a tuple, of what only a trial knows."""
    said = inspect.signature(module.forward).return_annotation
    if get_origin(said) is tuple or str(said).lower().startswith("tuple["):
        raise ValueError(
            f"{who}: with check=False a module must return a tensor, and {type(module).__name__} says that it returns "
            f"a {said}{remedy}"
        )


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
        if "forward" in vars(projection):
            raise ValueError(
                f"{who}: {name} has a forward of its own, which would not run: adapters go round the whole module"
            )
        if isinstance(projection.weight, DTensor):
            raise ValueError(
                f"{who}: {name}.weight is a DTensor already; METP is applied once, and before FSDP, and tensor "
                f"parallelism is an axis {TENSOR_AXIS!r} of its mesh"
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
