"""ParallelStyles: attention of a model made context parallel by a ``parallelize_module`` plan.

A style goes on the *inner* attention, a module without parameters that is called ``attention(q, k, v, **kwargs)``
and computes softmax(scale * q k^T) v. The style replaces its forward by context-parallel attention; whatever else
the module was called with, or has as a default, is either what the style was told or refused by name.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.algorithms import check_rotate
from wallfacer_dt.attention import ContextAttention, check_scale
from wallfacer_dt.kernels import check_kernel
from wallfacer_dt.layout import check_order
from wallfacer_dt.mesh import bind_order
from wallfacer_dt.refusal import check_tensors, refused_in_graph, refusing_together

LAYOUTS = ("BLNH", "BNLH")

_MARK = "_wallfacer_dt_attention"

_CAUSAL = ("is_causal", "causal")
_SCALE = ("scale", "softmax_scale")
# Options that ask for nothing when they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0),
    "dropout_p": (None, 0),
    "enable_gqa": (None, True, False),
    "softcap": (None, 0),
    "soft_cap": (None, 0),
    "window_size": (None, (-1, -1)),
} | dict.fromkeys(
    (
        "alibi_slopes", "attention_mask", "attention_masks", "attn_mask", "block_mask", "cu_seqlens",
        "document_ids", "mask", "mask_mod", "score_mod", "sinks", "sliding_window",
    ),
    (None,),
)  # fmt: skip


class RingParallel(ParallelStyle):
    """Ring Attention (Liu et al.) for an inner attention module; WallFacer with teams of one.

    Keyword Args:
        is_causal: a query sees the keys up to its own position.
        scale: factor of the scores; None takes the one the module is called with, or 1 / sqrt(H).
        order: in which order the loader dealt out tokens, ``"contiguous"`` or ``"head_tail"``.
        rotate: which side moves round the ring in the backward, ``"kv"``, ``"q"`` or ``"auto"``.
        kernel: ``"flash"``, ``"reference"`` or ``"auto"``.
        layout: of q, k, v and the output: ``"BLNH"`` (torchtitan) or ``"BNLH"`` (SDPA).

    The mesh has axes ``("cp_ring", "cp_team")`` with a team of one, or one axis of any name.
    """

    schedule = "2d"
    any_axis = True

    def __init__(
        self,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        order: str = "contiguous",
        rotate: str = "auto",
        kernel: str = "auto",
        layout: str = "BLNH",
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
        if not isinstance(is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
        check_order(order)
        check_kernel(kernel)
        check_scale(scale)
        check_rotate(rotate, self.schedule, 1, 1)
        self.is_causal, self.scale, self.order = is_causal, scale, order
        self.rotate, self.kernel, self.layout = rotate, kernel, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        names, defaults = self._read_module(module)
        attention = ContextAttention.on(
            device_mesh,
            is_causal=self.is_causal,
            scale=self.scale,
            order=self.order,
            schedule=self.schedule,
            rotate=self.rotate,
            kernel=self.kernel,
            any_axis=self.any_axis,
        )
        self._check_team(attention.place.team)
        if self.is_causal:
            bind_order(device_mesh, self.order, f"{type(self).__name__}(is_causal=True)")
        module.forward = self._forward(attention, names, defaults)
        return module

    def _check_team(self, team: int) -> None:
        if team > 1:
            raise ValueError(
                f"RingParallel needs a mesh with cp_team of size 1, got {team}; "
                "use WallFacerParallel, or context_mesh(device_type, ring)"
            )

    def _read_module(self, module: nn.Module) -> tuple[list[str], dict[str, Any]]:
        """Refuse a module that is not plain attention.

        Returns:
            The names of its positional options after q, k, v; and its defaults: of the options that a call leaves out,
            and of attributes that are named like an option.
        """
        name, kind = type(self).__name__, type(module).__name__
        if hasattr(module.forward, _MARK):
            raise ValueError(f"{name}: the module {kind} already has a context-parallel style")
        held = [what for what, _ in (*module.named_parameters(), *module.named_buffers())]
        held += [what for what, child in module.named_children() if not _does_nothing(child)]
        if held:
            raise ValueError(
                f"{name} replaces an inner attention called as attention(q, k, v), which has no parameters, buffers or "
                f"submodules; {kind} has {', '.join(held[:3])}: name the module inside it in the plan"
            )
        parameters = list(inspect.signature(module.forward).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ValueError(
                f"{name} replaces a module called as attention(q, k, v), got {kind}{inspect.signature(module.forward)}"
            )
        known = (*_CAUSAL, *_SCALE, *_NEUTRAL)
        attributes = {key: getattr(module, key) for key in known if hasattr(module, key)}
        attributes = {key: value for key, value in attributes.items() if value is not None and not _does_nothing(value)}
        self._check_options(attributes, f"{name}: the module {kind} has")
        options = positional[3:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        defaults = {p.name: p.default for p in options if p.default is not p.empty and p.default is not None}
        return [p.name for p in positional[3:]], attributes | defaults

    def _forward(
        self, attention: ContextAttention, names: list[str], defaults: dict[str, Any]
    ) -> Callable[..., Tensor]:
        transposed = self.layout == "BLNH"
        where = f"{type(self).__name__}: attention was called with"
        expected = attention.expected

        def scale_of(q: Tensor, k: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> float | None:
            if len(args) > len(names):
                raise ValueError(
                    f"attention takes q, k, v and options by name, got {3 + len(args)} positional arguments"
                )
            options = defaults | dict(zip(names, args, strict=False)) | kwargs
            scale = self._check_options(options, where)
            if kwargs.get("enable_gqa") is False and q.shape != k.shape:
                raise ValueError(f"enable_gqa=False, but q has shape {tuple(q.shape)} and k {tuple(k.shape)}")
            check_scale(scale)
            return scale

        def eager(q: Tensor, k: Tensor, v: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
            with refusing_together(expected):
                scale = scale_of(q, k, args, kwargs)
                check_tensors(q, k, v, expected)
            return attention(q, k, v, scale)

        def traced(q: Tensor, k: Tensor, v: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
            # DTensors say the same on all ranks, which therefore refuse alike.
            plain = all(isinstance(x, Tensor) and not isinstance(x, DTensor) for x in (q, k, v))
            try:
                scale = scale_of(q, k, args, kwargs)
            except (TypeError, ValueError) as error:
                if plain:
                    return refused_in_graph(q, k, v, str(error), expected)
                raise
            try:
                check_tensors(q, k, v, expected)
            except (TypeError, ValueError, NotImplementedError):
                if plain:
                    return refused_in_graph(q, k, v, "", expected)
                raise
            return attention(q, k, v, scale)

        def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if transposed:
                q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in (q, k, v))
            attend = traced if torch.compiler.is_compiling() else eager
            out = attend(q, k, v, args, kwargs)
            return out.transpose(1, 2) if transposed and out.ndim == 4 else out

        setattr(forward, _MARK, attention)
        return forward

    def _check_options(self, options: dict[str, Any], where: str) -> float | None:
        """Refuse options that this style does not implement as given; return the scale to use."""
        scale = self.scale
        for name, value in options.items():
            if name in _CAUSAL:
                if value is not None and value is not self.is_causal:
                    raise ValueError(f"{where} {name}={value!r}, the style was given is_causal={self.is_causal}")
            elif name in _SCALE:
                if value is not None and scale not in (None, value):
                    raise ValueError(f"{where} {name}={value!r}, the style was given scale={scale}")
                scale = scale if value is None else value
            elif not _is_one_of(value, _NEUTRAL.get(name, ())):
                raise ValueError(f"{where} {name}={_short(value)}, which this style does not implement")
        return scale


class WallFacerParallel(RingParallel):
    """WallFacer (teams and rings of ranks) for an inner attention module.

    Keyword Args:
        is_causal: a query sees the keys up to its own position.
        scale: factor of the scores; None takes the one the module is called with, or 1 / sqrt(H).
        order: in which order the loader dealt out tokens, ``"contiguous"`` or ``"head_tail"``.
        schedule: ``"2d"``, or ``"published"`` for WallFacer's Algorithms 1 to 3.
        rotate: which side moves round the ring in the backward, ``"kv"``, ``"q"`` or ``"auto"``.
        kernel: ``"flash"``, ``"reference"`` or ``"auto"``.
        layout: of q, k, v and the output: ``"BLNH"`` (torchtitan) or ``"BNLH"`` (SDPA).

    The mesh has axes ``("cp_ring", "cp_team")``.
    """

    any_axis = False

    def __init__(
        self,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        order: str = "contiguous",
        schedule: str = "2d",
        rotate: str = "auto",
        kernel: str = "auto",
        layout: str = "BLNH",
    ) -> None:
        self.schedule = schedule
        super().__init__(
            is_causal=is_causal,
            scale=scale,
            order=order,
            rotate=rotate,
            kernel=kernel,
            layout=layout,
        )

    def _check_team(self, team: int) -> None:
        pass


def _does_nothing(thing: Any) -> bool:
    return isinstance(thing, nn.Identity) or (isinstance(thing, nn.Dropout) and thing.p == 0)


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    # Tensors compare elementwise, so identity or plain values only.
    return any(value is a or (isinstance(value, int | float | tuple) and value == a) for a in allowed)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
