"""A forward that a style binds to a module, so that a copy of the module uses its own weights."""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from wallfacer_dt.agreement.progress import Within


class BoundForward:
    """What a styled module does when it is called, by a function that takes it first; ``forward`` is to be its own.

    A method bound to the module itself would be found again in a pickled one by its name, and be the class's: without
    the style.
    """

    def __init__(self, function: Callable[..., Tensor], module: nn.Module, style: str, name: str = "") -> None:
        self.function, self.module, self.style, self.name = function, module, style, name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The style's forward of this module, which messages call by its name in the model."""
        if torch.compiler.is_compiling():
            return self.function(self.module, *args, **kwargs)
        with Within(self.name):
            return self.function(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "BoundForward":
        """That of the module's copy."""
        return BoundForward(self.function, copy.deepcopy(self.module, memo), self.style, self.name)

    def __reduce__(self) -> NoReturn:
        """Refuse (TypeError) to be pickled."""
        raise TypeError(
            f"a module under {self.style} cannot be pickled: save its state_dict(), and apply the style to a new module"
        )
