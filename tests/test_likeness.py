"""Modules are alike by what they hold; what cannot be looked through is like no other."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from wallfacer_dt.equivalence.likeness import likeness


class Holding(nn.Module):
    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return x


def everything() -> Holding:
    module = Holding(
        config=SimpleNamespace(window=8, kinds=["causal"]), one=1, array=np.ones(3), mask=torch.ones(2),
        weight=nn.Parameter(torch.ones(2, 3)), child=nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)),
        function=torch.nn.functional.silu, dtype=torch.half,
    )  # fmt: skip
    module.register_buffer("rows", torch.ones(3, dtype=torch.bfloat16))
    module.register_buffer("none", None)
    for x in module.parameters():
        x.data.fill_(1)
    return module


def change_in_place(x: torch.Tensor) -> None:
    x.data[0] = 7


CHANGES: dict[str, Callable[[Holding], Any]] = {
    "a config": lambda m: setattr(m.config, "window", 16),
    "within a config": lambda m: m.config.kinds.append("full"),
    "1 and True": lambda m: setattr(m, "one", True),
    "1 and 1.0": lambda m: setattr(m, "one", 1.0),
    "an array": lambda m: m.array.fill(2),
    "a tensor": lambda m: change_in_place(m.mask),
    "a tensor's dtype": lambda m: setattr(m, "mask", m.mask.double()),
    "a buffer": lambda m: change_in_place(m.rows),
    "a buffer's name": lambda m: m.register_buffer("more", m._buffers.pop("rows")),
    "a parameter": lambda m: change_in_place(m.weight),
    "a child's option": lambda m: setattr(m.child[0], "p", 0.5),
    "a child's parameter": lambda m: change_in_place(m.child[1].bias),
    "a child's type": lambda m: m.child.__setitem__(0, nn.Identity()),
    "a child's mode": lambda m: m.child[0].eval(),
    "a child that is another's": lambda m: m.child.append(m.child[1]),
    "a mode": lambda m: m.eval(),
}

UNLIKE: dict[str, Callable[[Holding], Any]] = {
    "a hook": lambda m: m.register_forward_hook(print),
    "a child's hook": lambda m: m.child.register_forward_pre_hook(print),
    "a function of no module": lambda m: setattr(m, "function", lambda x: x),
    "a module in a list": lambda m: setattr(m, "others", [nn.Linear(2, 2)]),
    "a large tensor": lambda m: setattr(m, "mask", torch.zeros(1).expand(2**20 + 1)),
    "a large array": lambda m: setattr(m, "array", np.broadcast_to(np.ones(1), 2**18)),
    "a large list": lambda m: setattr(m, "one", list(range(2**20))),
    "the meta device": lambda m: m.to("meta"),
    "itself": lambda m: setattr(m, "child", m),
}


def test_copies_are_alike() -> None:
    module, other = everything(), everything()
    assert likeness(module) is not None
    assert likeness(module) == likeness(other) == likeness(copy.deepcopy(module))
    assert likeness(module, without_parameters=True) == likeness(other, without_parameters=True) != likeness(module)


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_place_is_seen(change: str) -> None:
    module, changed = everything(), everything()
    CHANGES[change](changed)
    assert None is not likeness(module) != likeness(changed) is not None
    is_seen = likeness(module, without_parameters=True) != likeness(changed, without_parameters=True)
    assert is_seen == ("parameter" not in change)


@pytest.mark.parametrize("change", UNLIKE)
def test_what_cannot_be_looked_through_is_like_no_other(change: str) -> None:
    module = everything()
    UNLIKE[change](module)
    assert likeness(module) is None


def test_parameters_without_contents_may_be_large_and_nowhere() -> None:
    def linear(*sizes: int, **options: Any) -> Any:
        return likeness(nn.Linear(*sizes, device="meta", **options), without_parameters=True)

    assert linear(2**12, 2**12) is not None
    assert linear(8, 8) == linear(8, 8)
    assert len({linear(8, 8), linear(8, 8, bias=False), linear(8, 8, dtype=torch.half)}) == 3
    assert linear(8, 16) != linear(8, 8)
