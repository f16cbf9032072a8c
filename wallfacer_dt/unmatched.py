"""Have a style told of a path that matches no module, of which torch's ``parallelize_module`` only warns.

Private: that it warns by its module's ``warnings``, from a frame whose ``parallelize_style``, ``device_mesh`` and
``module_path`` say of what, and that its outermost frame has the ``module`` and the ``parallelize_plan``; run on torch
2.13.0 and 2.14.1. A torch that does otherwise warns as it would without this, and messages know no layer.
"""

import sys
import warnings
import weakref
from fnmatch import fnmatch
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor.parallel import api


class Place(NamedTuple):
    """Of what is being applied: the model, which this does not keep alive, the plan, and its path."""

    model: weakref.ref[nn.Module]
    plan: Any
    path: str


def place_in_plan() -> Place | None:
    """Where in a plan ``parallelize_module`` is, which calls itself for parts of paths; None where it is elsewhere."""
    told = _outermost()
    if not isinstance(told.get("module"), nn.Module):
        return None
    return Place(weakref.ref(told["module"]), told.get("parallelize_plan"), told["module_path"])


def matches(model: nn.Module, path: str) -> bool | None:
    """Whether a plan's path matches a module of a model, as ``parallelize_module`` looks for it, or may in other parts.

    So may that of a layer by its number, which another stage of a pipeline has. None where it asks for all layers of
    none, as a stage may have.
    """
    found = [model]
    for token in path.split("."):
        layers = [one for one in found if isinstance(one, nn.ModuleList | nn.ModuleDict)]
        if token == "*" and not all(map(len, layers)):
            return None
        found = [child for one in found for name, child in one.named_children() if fnmatch(name, token)]
        if not found:
            return bool(layers) and token.isdigit()
    return True


def name_in_plan(module: nn.Module) -> str:
    """What a module is called in the model to which a plan is being applied; empty where none is."""
    model = _outermost().get("module")
    if not isinstance(model, nn.Module):
        return ""
    return next((name for name, each in model.named_modules() if each is module), "")


def _outermost() -> dict[str, Any]:
    """What the outermost call of ``parallelize_module`` knows, of those that this one is in."""
    frame, found = sys._getframe(1), {}
    while frame is not None:
        told = frame.f_locals if frame.f_code is api.parallelize_module.__code__ else {}
        if "module_path" in told:
            found = told
        frame = frame.f_back
    return found


class _Warnings:
    """The module ``warnings`` as ``parallelize_module`` sees it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, *args: Any, stacklevel: int = 1, **kwargs: Any) -> None:
        """Warn, and tell the style."""
        frame = sys._getframe(1)
        told = frame.f_locals
        if hasattr(told.get("parallelize_style"), "matched_nothing"):
            # It calls itself for each module that the beginning of a path matches.
            is_part = frame.f_back is not None and frame.f_back.f_code is frame.f_code
            told["parallelize_style"].matched_nothing(told["module_path"], told["device_mesh"], is_part=is_part)
        warnings.warn(message, *args, stacklevel=stacklevel + 1, **kwargs)


# From now on `parallelize_module` calls a style's `matched_nothing` before it warns.
if getattr(api, "warnings", None) is warnings:
    api.warnings = _Warnings()  # pyrefly: ignore[bad-assignment]
