"""Rotary positions as models hand them to their attention: where a call's cos and sin are, and what else it brings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wallfacer_dt.algorithms import PAIRS
from wallfacer_dt.metp.modules import arguments_of

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
Rotation = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], tuple[Tensor, Tensor]]
Form = Literal["complex", "by element", "by pair"]


@dataclass(frozen=True, slots=True)
class Rotary:
    """How calls of a module say by which angles heads are turned.

    Attributes:
        pairs: which elements are turned together, or None: none are.
        head_dim: H.
        rotation: what finds cos and sin in a call; None: a pair of tensors, or a complex one, is looked for.
        forms: in which angles may come that are looked for: complex (L, H / 2), or cos and sin, (L, H) or (L, H / 2).
            A module that turns a part of every head has another of these than one that turns all of it.
        positional: names of the forward's positional arguments after x.
        named: names of the arguments that ``rotation`` may find something in; others must be None.
    """

    pairs: str | None
    head_dim: int
    rotation: Rotation | None
    forms: tuple[Form, ...] = ("complex", "by element")
    positional: tuple[str, ...] = ()
    named: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pairs is not None and (self.pairs not in PAIRS or self.head_dim % 2):
            raise ValueError(
                f"rotary must be None or one of {PAIRS}, with an even head_dim, got {self.pairs!r} and {self.head_dim}"
            )
        if self.pairs is None and self.rotation is not None:
            raise ValueError("rotation is given, but not rotary: which elements does it turn together?")

    def of(self, module: nn.Module) -> "Rotary":
        """The same, for a module whose arguments have these names."""
        return replace(self, positional=arguments_of(module)[1:])

    def as_in(self, call: Arguments) -> "Rotary":
        """The same, for calls like this one."""
        if self.rotation is not None:
            return replace(self, named=tuple(name for name, value in self._given(*call) if _is_something(value)))
        angles = [value for _, value in self._given(*call) if _as_angles(value) is not None]
        return replace(self, forms=(self._form(angles[0]),)) if angles else self

    def angles(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch: int, length: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin (1 or B, L, H / 2) of a call, or None for both.

        Args:
            module: the module called.
            args: what it was called with after x.
            kwargs: by name.
            batch: B.
            length: L, tokens of this rank.

        Returns:
            The angles.

        Raises:
            ValueError: there are none of this shape, or something else that is not implemented.
            NotImplementedError: they want a gradient.
        """
        found = self._found(module, args, kwargs)
        if found is None:
            return None, None
        cos, sin = (self._by_pair(angle) for angle in found)
        for angle in (cos, sin):
            if (
                angle.ndim != 3
                or tuple(angle.shape[1:]) != (length, self.head_dim // 2)
                or len(angle) not in (1, batch)
            ):
                raise ValueError(
                    "cos and sin must be those of this rank's tokens, (L, H / 2) or (B, L, H / 2) with "
                    f"L = {length} and H = {self.head_dim}, got {tuple(angle.shape)}"
                )
            if angle.requires_grad and torch.is_grad_enabled():
                raise NotImplementedError("METP has no gradient of cos and sin, which require one; detach them")
        return cos, sin

    def examples(self, length: int) -> Iterator[Arguments]:
        """What a module that is handed its angles may be called with after x: as models usually are."""
        if self.pairs is None:
            yield (), {}
            return
        angle = torch.rand(length, self.head_dim // 2, dtype=torch.float64, device="cpu")
        whole = torch.cat([angle, angle], -1) if self.pairs == "half" else angle.repeat_interleave(2, -1)
        yield ((whole.cos(), whole.sin()),), {}
        yield ((whole.cos()[None], whole.sin()[None]),), {}
        yield ((angle.cos(), angle.sin()),), {}
        yield (torch.polar(torch.ones_like(angle), angle),), {}

    def _found(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        given = [(name, value) for name, value in self._given(args, kwargs) if _is_something(value)]
        if self.rotation is not None:
            for name, value in given:
                if name not in self.named:
                    raise ValueError(f"attention was called with {name}, a {type(value).__name__}, which example= does "
                                     "not give it and METP does not implement")  # fmt: skip
            return self.rotation(module, args, kwargs)
        for name, value in given:
            if _as_angles(value) is None:
                raise ValueError(f"attention was called with {name}, a {type(value).__name__}, which METP does not "
                                 "implement without rotation=")  # fmt: skip
        if len(given) != (self.pairs is not None):
            raise ValueError(
                f"attention was called with {len(given)} pairs of cos and sin, METPAttentionParallel was given "
                f"rotary={self.pairs!r}"
            )
        if not given:
            return None
        value = given[0][1]
        if self._form(value) not in self.forms:
            raise ValueError(
                f"cos and sin come {self._form(value)} of H = {self.head_dim}, where they were "
                f"{' or '.join(self.forms)} when the module was tried: pass example= or rotation="
            )
        return _as_angles(value)

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
        names = [*self.positional, *(f"argument {i + 1}" for i in range(len(self.positional), len(args)))]
        return [*zip(names, args, strict=False), *kwargs.items()]

    def _form(self, value: Any) -> Form:
        if isinstance(value, Tensor):
            return "complex"
        return "by element" if value[0].shape[-1] == self.head_dim else "by pair"

    def _by_pair(self, angle: Tensor) -> Tensor:
        """An angle for every pair, which a model may have for every element."""
        if angle.shape[-1] == self.head_dim:
            angle = angle[..., : self.head_dim // 2] if self.pairs == "half" else angle[..., ::2]
        return angle.unsqueeze(0) if angle.ndim == 2 else angle


def _is_something(value: Any) -> bool:
    return value is not None and value is not False


def _as_angles(value: Any) -> tuple[Tensor, Tensor] | None:
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(x, Tensor) for x in value):
        return value[0], value[1]
    if isinstance(value, Tensor) and value.is_complex():
        return value.real, value.imag
    return None
