"""What ``context_parallel`` of a library leaves on a model: found again, undone, and left out for a while."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, Self, TypeVar

from torch import nn

from wallfacer_dt.agreement.agree import refusing_together

Model = TypeVar("Model", bound=nn.Module)

_NAME = "_wallfacer_dt"
_COPY = "this model is a copy of one that context_parallel was given: copy it before that, or after remove()"


class Handle(ABC, Generic[Model]):
    """Of one model, which it does not keep alive; it is an attribute of the model while that is set up.

    Args:
        model: to be set up.
    """

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._hooks: list[Any] = []

    @abstractmethod
    def _turn_on(self, model: Model) -> None:
        """Set the model up, with hooks; :meth:`_leave_on` is a part of it."""

    @abstractmethod
    def _turn_off(self, model: Model) -> None:
        """Give the model back what it had; :meth:`_remove_hooks` is a part of it."""

    def remove(self) -> None:
        """Give the model the attention back that it had."""
        model = self._model()
        if model is not None and found_on(model) is self:
            self._turn_off(model)
            delattr(model, _NAME)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Of the one model, of which a copy is not: it says so when it is called."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse (TypeError) to be pickled."""
        raise TypeError(
            "a model that context_parallel was given cannot be pickled: save its state_dict(), or remove() first"
        )

    def _check_is_of(self, model: Model) -> None:
        if self._model() is not model:
            raise ValueError(_COPY)

    def _set_up_model(self) -> Model:
        """The model, or a refusal (ValueError)."""
        model = self._model()
        if model is None or found_on(model) is not self:
            raise ValueError("the model is gone, or context_parallel has been undone on it")
        return model

    @contextmanager
    def _turned_off(self, **how: Any) -> Iterator[Model]:
        model = self._set_up_model()
        try:
            self._turn_off(model, **how)
            yield model
        finally:
            if found_on(model) is self:  # or it has been removed, or set up otherwise, meanwhile
                self._turn_on(model)

    def _leave_on(self, model: Model) -> None:
        setattr(model, _NAME, self)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def found_on(model: Any) -> Handle[Any] | None:
    """The handle that a model has, or that a copy of it has from the model."""
    return getattr(model, _NAME, None)


def make_way(model: Any, mesh: str) -> None:
    """Undo what was set up on a model before; refuse (ValueError) a copy, on all ranks of a mesh (its name)."""
    earlier = found_on(model)
    if earlier is None:
        return
    with refusing_together(mesh):
        earlier._check_is_of(model)
    earlier.remove()
