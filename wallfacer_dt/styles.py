"""ParallelStyles: attention of a model made context parallel by a ``parallelize_module`` plan.

A style goes on the *inner* attention, a module without parameters that is called ``attention(q, k, v, **kwargs)``
and computes softmax(scale * q k^T) v. The style replaces its forward by context-parallel attention; whatever else
the module was called with, or has as a default, is either what the style was told or refused by name.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from wallfacer_dt.attention import ContextAttention
from wallfacer_dt.kernels import check_kernel
from wallfacer_dt.layout import check_order

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
        check_order(order)
        check_kernel(kernel)
        self.is_causal, self.scale, self.order = is_causal, scale, order
        self.rotate, self.kernel, self.layout = rotate, kernel, layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        extra = self._check_module(module)
        attend = ContextAttention.on(
            device_mesh,
            is_causal=self.is_causal,
            scale=self.scale,
            order=self.order,
            schedule=self.schedule,
            rotate=self.rotate,
            kernel=self.kernel,
            any_axis=self.any_axis,
        )
        self._check_team(attend.place.team)
        module.forward = self._forward(attend, extra)
        return module

    def _check_team(self, team: int) -> None:
        if team > 1:
            raise ValueError(
                f"RingParallel needs a mesh with cp_team of size 1, got {team}; "
                "use WallFacerParallel, or context_mesh(device_type, ring)"
            )

    def _check_module(self, module: nn.Module) -> list[str]:
        """Refuse a module that is not plain attention; return the names of its positional options."""
        name = type(self).__name__
        if hasattr(module.forward, _MARK):
            raise ValueError(f"{name}: the module {type(module).__name__} already has a context-parallel style")
        held = [what for what, _ in module.named_parameters()]
        if held:
            raise ValueError(
                f"{name} replaces an inner attention called as attention(q, k, v), which has no parameters; "
                f"{type(module).__name__} has {', '.join(held[:3])}: name the module inside it in the plan"
            )
        parameters = list(inspect.signature(module.forward).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ValueError(
                f"{name} replaces a module called as attention(q, k, v), got {type(module).__name__}"
                f"{inspect.signature(module.forward)}"
            )
        options = positional[3:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        defaults = {p.name: p.default for p in options if p.default is not p.empty}
        # A scale or a mask that the module falls back to would be lost without a word.
        self._check_options(
            {key: value for key, value in defaults.items() if value is not None},
            f"{name}: by default {type(module).__name__} is called with",
        )
        return [p.name for p in positional[3:]]

    def _forward(self, attend: ContextAttention, extra: list[str]) -> Callable[..., Tensor]:
        transposed = self.layout == "BLNH"

        def forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if len(args) > len(extra):
                raise ValueError(
                    f"attention takes q, k, v and options by name, got {3 + len(args)} positional arguments"
                )
            options = dict(zip(extra, args, strict=False)) | kwargs
            scale = self._check_options(options, f"{type(self).__name__}: attention was called with")
            if options.get("enable_gqa") is False and q.shape != k.shape:
                raise ValueError(f"enable_gqa=False, but q has shape {tuple(q.shape)} and k {tuple(k.shape)}")
            if transposed:
                q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = attend.with_scale(scale)(q, k, v)
            return out.transpose(1, 2) if transposed else out

        setattr(forward, _MARK, attend)
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
        super().__init__(
            is_causal=is_causal,
            scale=scale,
            order=order,
            rotate=rotate,
            kernel=kernel,
            layout=layout,
        )
        self.schedule = schedule

    def _check_team(self, team: int) -> None:
        pass


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    # Tensors compare elementwise, so identity or plain values only.
    return any(value is a or (isinstance(value, int | float | tuple) and value == a) for a in allowed)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
