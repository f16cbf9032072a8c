"""Rotary positions as models hand them to their attention: where a call's cos and sin are, and what else it brings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wallfacer_dt.compiler import sizes
from wallfacer_dt.kernels.merge import accumulation_dtype
from wallfacer_dt.metp.modules import Parameters, described

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
Rotation = Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], tuple[Tensor, Tensor]]
Form = Literal["complex", "by element", "by pair"]

PAIRS = ("interleaved", "half")
"""Elements of a head that are turned together: neighbours (RoFormer, Llama's complex numbers), or one of the first half
and one of the second (GPT-NeoX, Hugging Face)."""

# What calls hand through, and was seen to do nothing where a module was tried with some.
_POSITIONS = ("position_ids",)
DOCUMENTS = ("document_ids", "cu_seqlens")
"""What attention is told by name at a call, whatever the module takes."""

_NOTHING_NAMED = Parameters("x", (), (), {}, any_positional=False, any_named=False)


@dataclass(frozen=True, slots=True)
class Rotary:
    """How calls of a module say by which angles heads are turned.

    Attributes:
        pairs: which elements are turned together, or None: none are.
        head_dim: H.
        rotation: what finds cos and sin in a call; None: a pair of tensors, or a complex one, is looked for.
        forms: in which angles may come that are looked for: complex (L, H / 2), or cos and sin, (L, H) or (L, H / 2).
            A module that turns a part of every head has another of these than one that turns all of it, so once it has
            been tried only that in which it was.
        parameters: of the module's forward.
        found_in: names of the arguments in which ``rotation`` finds something.
        tried: the other arguments of the call that the module was tried with, by name; it knows of no other values.
    """

    pairs: str | None
    head_dim: int
    rotation: Rotation | None
    forms: tuple[Form, ...] = ("complex", "by element", "by pair")
    parameters: Parameters = _NOTHING_NAMED
    found_in: tuple[str, ...] = ()
    tried: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.pairs is not None and (self.pairs not in PAIRS or self.head_dim % 2):
            raise ValueError(
                f"rotary must be None or one of {PAIRS}, with an even head_dim, got {self.pairs!r} and {self.head_dim}"
            )
        if self.pairs is None and self.rotation is not None:
            raise ValueError("rotation is given, but not rotary: which elements does it turn together?")

    def of(self, module: nn.Module) -> "Rotary":
        """The same, for a module whose arguments have these names."""
        parameters = Parameters.of(module)
        return replace(
            self, parameters=replace(parameters, defaults={**dict.fromkeys(DOCUMENTS), **parameters.defaults})
        )

    def as_in(self, module: nn.Module, call: Arguments) -> "Rotary":
        """The same, for calls of a module like this one."""
        given = {name: value for name, value in self.parameters.given(*call).items() if name not in DOCUMENTS}
        if self.rotation is not None:
            found_in = tuple(name for name in given if self._is_read(module, call, name))
            tried = {name: value for name, value in given.items() if name not in found_in}
            return replace(self, found_in=found_in, tried=tried)
        angles = [value for value in given.values() if _as_angles(value) is not None]
        forms = tuple(form for value in angles[:1] if (form := self._form(value)) is not None)
        tried = {name: value for name, value in given.items() if _as_angles(value) is None}
        return replace(self, forms=forms or self.forms, tried=tried)

    def angles(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], x: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin (1 or B, L, H / 2) of a call, or None for both.

        Args:
            module: the module called.
            args: what it was called with after x.
            kwargs: by name.
            x: something of this rank's tokens' shape (B, L, D).

        Returns:
            The angles.

        Raises:
            TypeError: the module itself takes no such call; or cos and sin are no pair of floating-point tensors.
            ValueError: there are none of this shape, or something else that is not implemented.
            NotImplementedError: they want a gradient.
        """
        found = self._found(module, args, kwargs)
        if found is None:
            return None, None
        for name, angle in zip(("cos", "sin"), found, strict=True):
            self._check(name, angle, x)
        cos, sin = (self._by_pair(angle) for angle in found)
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
        given = self.parameters.given(args, kwargs)
        asked = self.parameters.differing(given, self.tried)
        positions = [name for name in _POSITIONS if isinstance(self.tried.get(name), Tensor)]
        asked = {name: value for name, value in asked.items() if name not in positions}
        if self.rotation is not None:
            self._refuse({name: value for name, value in asked.items() if name not in self.found_in})
            found = _as_angles(self.rotation(module, args, kwargs))
            if found is None:
                raise TypeError("rotation= must give cos and sin, a pair of tensors, or a complex one")
            return found
        self._refuse({name: value for name, value in asked.items() if _as_angles(value) is None})
        if self.pairs is not None and not asked:
            raise ValueError(
                f"attention was called without cos and sin, which rotary={self.pairs!r} takes: pass them with the "
                "call, a pair of tensors or a complex one, or give rotation= and example="
            )
        if len(asked) > (self.pairs is not None):
            raise ValueError(
                f"attention was called with {', '.join(asked)}, by the looks of it cos and sin, of which "
                f"rotary={self.pairs!r} takes {'one pair' if self.pairs else 'none'}"
            )
        for value in asked.values():
            form = self._form(value)
            if form is not None and form not in self.forms:
                raise ValueError(
                    f"cos and sin come {form} of H = {self.head_dim}, where they were {self.forms[0]} when the module "
                    "was tried: pass example= or rotation="
                )
            return _as_angles(value)
        return None

    def _refuse(self, unknown: Mapping[str, Any]) -> None:
        """Refuse (ValueError) arguments that are not as they were when the module was tried."""
        for name, value in unknown.items():
            usual = self.tried if name in self.tried else self.parameters.defaults
            was = f" but {described(name, usual[name])}" if name in usual else ""
            raise ValueError(
                f"attention was called with {described(name, value)}, where METPAttentionParallel knows of nothing{was}"
                ": a mask is for its style attention=, cos and sin in another form are for rotation=, and what else "
                "every call brings is for example="
            )

    def _is_read(self, module: nn.Module, call: Arguments, name: str) -> bool:
        """Whether ``rotation`` makes anything of an argument: then it finds no angles where that is no number."""
        assert self.rotation is not None
        args, kwargs = call
        names = self.parameters.names(len(args))
        args = tuple(object() if its == name else value for its, value in zip(names, args, strict=True))
        kwargs = {key: object() if key == name else value for key, value in kwargs.items()}
        try:
            return _as_angles(self.rotation(module, args, kwargs)) is None
        except Exception:  # whatever comes of computing with no number
            return True

    def _form(self, value: Any) -> Form | None:
        """In which form angles come; None for none, which their shape is refused for."""
        if isinstance(value, Tensor):
            return "complex"
        by_size: dict[int, Form] = {self.head_dim: "by element", self.head_dim // 2: "by pair"}
        return by_size.get(value[0].shape[-1] if value[0].ndim else 0)

    def _check(self, name: str, angle: Tensor, x: Tensor) -> None:
        if not angle.is_floating_point():
            raise TypeError(f"cos and sin must be floating point, got {name} of {angle.dtype}")
        if isinstance(angle, DTensor):
            raise TypeError(
                f"cos and sin must be plain tensors of this rank's tokens, got a DTensor: {name}.to_local()"
            )
        batch, length = x.shape[:2]
        *leading, tokens, size = (0, *angle.shape) if angle.ndim < 2 else angle.shape
        is_one_of_both = size in (self.head_dim, self.head_dim // 2)
        is_for_batch = len(leading) < 2 and all(rows in (1, batch) for rows in leading)
        if tokens != length or not is_one_of_both or not is_for_batch:
            raise ValueError(
                "cos and sin must be those of this rank's tokens, (L, H / 2) or (B, L, H / 2), or H for H / 2, with "
                f"B = {index(batch)}, L = {index(length)} and H = {self.head_dim}, got {name} {sizes(angle)}"
            )
        if angle.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError("METP has no gradient of cos and sin, which require one; detach them")

    def _by_pair(self, angle: Tensor) -> Tensor:
        """An angle for every pair, which a model may have for every element."""
        if angle.shape[-1] == self.head_dim:
            angle = angle[..., : self.head_dim // 2] if self.pairs == "half" else angle[..., ::2]
        return angle.unsqueeze(0) if angle.ndim == 2 else angle


def _as_angles(value: Any) -> tuple[Tensor, Tensor] | None:
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(x, Tensor) for x in value):
        return value[0], value[1]
    if isinstance(value, Tensor) and value.is_complex():
        return value.real, value.imag
    return None


def turned(x: Tensor, cos: Tensor, sin: Tensor, pairs: str, *, back: bool = False) -> Tensor:
    """Turn every head of x (B, N, L, H) by angles (1 or B, L, H / 2), or ``back`` as a gradient is.

    In the accumulation dtype.
    """
    cos, sin = (angle.to(accumulation_dtype(x.dtype)).unsqueeze(1) for angle in (cos, sin))
    if back:
        sin = -sin
    if pairs == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2).to(x.dtype)
