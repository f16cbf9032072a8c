"""ParallelStyles: attention of a model made context parallel by a ``parallelize_module`` plan.

A style goes on the *inner* attention, a module without parameters that is called ``attention(q, k, v, **kwargs)``
and computes softmax(scale * q k^T) v. The style replaces its forward by context-parallel attention. Whatever else the
module was called with, or has as a default, is what the style was told, or is handed to attention (documents, sinks,
shared keys, a mask), or is refused by name; what stands in its code is found by ``check_equivalence``.
"""

import copy
import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from operator import index
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.agreement.agree import agree, refusing_together, tell
from wallfacer_dt.agreement.progress import Within
from wallfacer_dt.algorithms.recorded import MaskMod
from wallfacer_dt.attention import ContextAttention, under_autocast
from wallfacer_dt.compiler import is_exporting, sizes
from wallfacer_dt.equivalence.check import check_once
from wallfacer_dt.equivalence.trial import CAUSAL_NAMES, SCALE_NAMES, SOFTCAP_NAMES
from wallfacer_dt.inputs import INPUTS, AttentionInputs
from wallfacer_dt.matching import AttentionStyle
from wallfacer_dt.mesh import context_groups, name_of
from wallfacer_dt.options import AttentionKeywords, AttentionOptions, check_scale, options_of, with_options
from wallfacer_dt.unmatched import name_in_plan
from wallfacer_dt.validation import check_call, refuse_in_graph

LAYOUTS = ("BLNH", "BNLH")

_MASKS = ("attention_masks", "block_mask", "mask_mod")
# Names of a call's tensors, and what attention calls them.
_TENSORS = {name: name for name in INPUTS[3:]} | {"s_aux": "sinks"}
_TOLD = (
    *(*CAUSAL_NAMES, *SCALE_NAMES, *SOFTCAP_NAMES, *_MASKS, *_TENSORS),
    *("window_size", "sliding_window", "prefix_length"),
)
_ALIASES = {"sliding_window": "window_size"} | dict.fromkeys(SOFTCAP_NAMES, "softcap")
# Options that ask for nothing when they have one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dropout": (None, 0),
    "dropout_p": (None, 0),
    "enable_gqa": (None, True, False),
} | dict.fromkeys(("alibi_slopes", "attention_mask", "attn_mask", "mask", "score_mod", *_TOLD), (None,))

_NAMES = frozenset(_NEUTRAL)
_NO_OPTIONS = (nn.Module, object)


class _Call(NamedTuple):
    """What a call, or a module, asks for beside q, k and v."""

    scale: float | None
    tensors: dict[str, Tensor]
    mask: MaskMod | BlockMask | None
    length: int | None = None


class _ContextParallel(AttentionStyle):
    """What the styles share: they differ in the meshes that they take."""

    _any_axis: ClassVar[str] = ""
    _without: ClassVar[tuple[str, ...]] = ()
    _of_size_1: ClassVar[tuple[str, ...]] = ()
    _remedy: ClassVar[str] = ""

    def __init__(self, *, layout: str = "BLNH", check: bool = True, **options: Unpack[AttentionKeywords]) -> None:
        super().__init__()
        told = options_of(type(self).__name__, options, without=self._without, own=("layout", "check"))
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
        if not isinstance(check, bool):
            raise TypeError(f"check must be a bool, got {check!r}")
        told.check()
        self.options, self.layout, self.check = told, layout, check
        self._passed: dict[Hashable, bool] = {}

    def __init_subclass__(cls) -> None:
        cls.__signature__ = with_options(cls.__init__, cls._without)

    def attention_on(self, mesh: DeviceMesh, options: AttentionOptions) -> ContextAttention:
        """Attention on a mesh with these options instead of the style's own; all ranks call it together."""
        name, who = name_of(mesh), type(self).__name__
        with refusing_together(name):
            attention = ContextAttention.on(mesh, options, any_axis=self._any_axis)
            for axis in self._of_size_1:
                size = getattr(attention.place, axis.removeprefix("cp_"))
                if size > 1:
                    raise ValueError(
                        f"{who} needs a mesh with {axis} of size 1, got {size}; use WallFacerParallel, or "
                        f"context_mesh(device_type, {self._remedy})"
                    )
            agree(f"attention of {who}", [("order", options.order)], name)
        return attention

    def forward_of(
        self, module: nn.Module, attention: ContextAttention, name: str = "", modes: tuple[bool, ...] = (True, False)
    ) -> Callable[..., Tensor]:
        """What the style gives a module as its forward, or a refusal (ValueError). Module and mesh stay as they are.

        ``name`` is the module's in its model, for messages; ``modes`` are those of training in which it computes what
        the style does.
        """
        names, defaults = self._read_module(module)
        held = {what: x for what, x in vars(module).items() if isinstance(x, Tensor)}
        forward = _Forward(attention, copy.copy(self), self, module, names, defaults, name, modes, held)
        return forward.of_qkv if names[:3] == ["q", "k", "v"] else forward.forward

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, who = name_of(device_mesh), type(self).__name__
        with refusing_together(name):
            # First, as what the style was told may be right on a slice of this mesh, and differ along its other axes.
            context_groups(device_mesh, any_axis=self._any_axis)
            told = {field.name: getattr(self.options, field.name) for field in fields(self.options)}
            told |= {"mask_mod": self.options.mask_mod is not None, "layout": self.layout, "check": self.check}
            is_styled = self._is_applied(module, name)
            agree(f"{who} applied", [*told.items(), ("to a module that has it", is_styled)], name)
            if is_styled:  # it is that of two layers
                self._notice_applied(module, device_mesh)
                return module
            attention = self.attention_on(device_mesh, self.options)
            by_mode = self.check and check_once(module, self, device_mesh, self._passed)
            modes = (module.training,) if by_mode else (True, False)
            forward = self.forward_of(module, attention, name_in_plan(module), modes)
            agree(f"{who} applied", [("module", type(module).__name__)], name)
        self._notice_applied(module, device_mesh)
        module.forward = forward
        return module

    def _is_applied(self, module: nn.Module, mesh: str) -> bool:
        """Whether a module has this very style, on the mesh of this name."""
        forward = getattr(module.forward, "__self__", None)
        if not isinstance(forward, _Forward) or forward.given is not self or forward.attention.mesh != mesh:
            return False
        return forward.style.options is self.options and forward.style.layout == self.layout

    def _read_module(self, module: nn.Module) -> tuple[list[str], dict[str, Any]]:
        """The names of what a module takes by position, q, k, v first, and its defaults, which a call may leave out.

        What is not plain attention is refused (ValueError).
        """
        name, kind = type(self).__name__, type(module).__name__
        if isinstance(getattr(module.forward, "__self__", None), _Forward):
            raise ValueError(f"{name}: the module {kind} already has a context-parallel style")
        parameters = list(inspect.signature(module.forward).parameters.values())
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        tensors = [what for what, _ in (*module.named_parameters(), *module.named_buffers())]
        if tensors and sum(p.default is p.empty for p in positional) == 1:
            raise ValueError(
                f"{name} replaces an inner attention called as attention(q, k, v), and {kind} projects its "
                f"{positional[0].name} by itself ({', '.join(tensors[:3])}): name the module inside it in the plan or, "
                "if it has none, give it one, self.inner = Inner(), without parameters, where Inner.forward(self, q, "
                "k, v) is the scaled_dot_product_attention that it calls now, and name that, as docs/modules.md shows"
            )
        self._check_held(module, tensors)
        if len(positional) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ValueError(
                f"{name} replaces a module called as attention(q, k, v), got {kind}{inspect.signature(module.forward)}"
            )
        self._read_attributes(module)
        options = positional[3:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        defaults = {p.name: p.default for p in options if p.default is not p.empty and p.default is not None}
        return [p.name for p in positional] if len(positional) >= 3 else ["q", "k", "v"], defaults

    def _check_held(self, module: nn.Module, tensors: Sequence[str] = ()) -> None:
        """Refuse (ValueError) a module that holds something: tensors of these names, or submodules."""
        children = {what: child for what, child in module._modules.items() if not _does_nothing(child)}
        held = [*tensors, *children]
        dropouts = [what for what, child in children.items() if isinstance(child, nn.Dropout)]
        if dropouts and len(dropouts) == len(held):
            raise ValueError(
                f"{type(self).__name__} does not implement dropout of attention; {type(module).__name__} has "
                f"{dropouts[0]}: set its p to 0"
            )
        if held:
            raise ValueError(
                f"{type(self).__name__} replaces an inner attention called as attention(q, k, v), which has no "
                f"parameters, buffers or submodules; {type(module).__name__} has {', '.join(held[:3])}: "
                + ("name the module inside it in the plan" if children else "keep that in the module around it")
            )

    def _read_attributes(self, module: nn.Module) -> dict[str, Any]:
        """Attributes that are named like an option, and ask for something; refuse (ValueError) another than told."""
        # Of a module's missing attributes torch looks up every one in three dicts; a compiler guards what it is asked.
        names: Collection[str] = _NEUTRAL
        if not torch.compiler.is_compiling():
            kinds = [vars(kind) for kind in type(module).__mro__ if kind not in _NO_OPTIONS]
            places = (vars(module), module._modules, *kinds)
            names = [name for held in places if not _NAMES.isdisjoint(held) for name in _NAMES & held.keys()]
        found = {key: getattr(module, key) for key in names if hasattr(module, key)}
        found = {key: value for key, value in found.items() if not _does_nothing(value)}
        if found:
            self._read_options(found, f"{type(self).__name__}: the module {type(module).__name__} has")
        return found

    def __getstate__(self) -> dict[str, Any]:
        """What has passed, it has on meshes of this process."""
        return super().__getstate__() | {"_passed": {}}

    def _read_options(self, options: dict[str, Any], where: str) -> _Call:
        """Take what attention implements, and refuse (ValueError) what this style was not told."""
        scale, length, said = self.options.scale, None, ""
        tensors: dict[str, Tensor] = {}
        masks: dict[str, Any] = {}
        for name, value in options.items():
            if value is None and name in (*_TOLD, "length"):
                continue
            if name in SCALE_NAMES:
                if isinstance(value, Tensor):  # which compares elementwise
                    check_scale(value)
                if said and scale != value:
                    raise ValueError(f"{where} {name}={value!r} and {said}={scale}: give one of them")
                if scale not in (None, value):
                    raise ValueError(f"{where} {name}={value!r}, the style was given scale={scale}")
                scale, said = value, name
            elif name == "length" and isinstance(value, int) and self.options.length in (None, value):
                length = value
            elif name in _TENSORS and isinstance(value, Tensor):
                _add(tensors, _TENSORS[name], value, where)
            elif name in _MASKS and (isinstance(value, BlockMask) or (name == "mask_mod" and callable(value))):
                if not self._is_own_mask(value, f"{where} {name}"):
                    _add(masks, "mask_mod", value, where)
            else:
                self._check_option(name, value, f"{where} {name}=")
        return _Call(scale, tensors, masks.get("mask_mod"), length)

    def _check_option(self, name: str, value: Any, where: str) -> None:
        """Refuse (ValueError) an option other than the style's."""
        told = self.options
        if name in CAUSAL_NAMES:
            if value is not told.is_causal:
                raise ValueError(f"{where}{value!r}, the style was given is_causal={told.is_causal}")
            return
        option, lacks = _ALIASES.get(name, name), "does not implement"
        if option in ("length", "prefix_length", "softcap", "window_size"):
            given = getattr(told, option) or None
            own, asked = given or 0, value
            if option == "window_size":
                own, asked = told.window, _asked_window(name, value, told.is_causal)
            if not isinstance(asked, Tensor) and asked == own:
                return
            lacks = f"{lacks} unless it is given {option}" if given is None else f"was not given: {option}={given}"
        # Tensors compare elementwise, so identity or plain values only.
        is_plain = isinstance(value, int | float | tuple)
        if not any(value is x or (is_plain and value == x) for x in _NEUTRAL.get(name, ())):
            raise ValueError(f"{where}{_short(value)}, which this style {lacks}")

    def _translated(self, module: nn.Module, told: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """What a call says beside q, k and v, in this package's words: for a style that knows a library's."""
        return told

    def _is_own_mask(self, mask: MaskMod | BlockMask, where: str) -> bool:
        """Whether a call's mask is the style's; refuse (ValueError) another one, and any that a compiler would see.

        A BlockMask of the style's mask_mod is not the style's, since it may hide more, but goes before it.
        """
        own = self.options.mask_mod
        if mask == own:  # of a bound method each access makes another
            return True
        if own is not None and not (isinstance(mask, BlockMask) and mask.mask_mod == own):
            raise ValueError(f"{where}={_short(mask)}, the style was given another mask_mod")
        if torch.compiler.is_compiling():
            raise ValueError(f"{where} under torch.compile, where masks are constants: give it to the style, mask_mod=")
        return False


@dataclass(frozen=True, slots=True)
class _Forward:
    """What a styled module does when it is called: plain data, so that it is pickled with the module."""

    attention: ContextAttention
    style: _ContextParallel  # as it was then
    given: _ContextParallel  # itself
    module: nn.Module  # whose attributes may change
    names: list[str]  # of what it takes by position, q, k, v first
    defaults: dict[str, Any]  # of its options
    name: str  # of the module in its model
    modes: tuple[bool, ...]  # of training, in which it computes what it did when it was tried
    held: dict[str, Tensor]  # what it had beside parameters and buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        """That of the module's copy, which is on the same mesh."""
        module, held = (copy.deepcopy(x, memo) for x in (self.module, self.held))
        return replace(self, module=module, held=held)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Attention on this rank's shards, laid out as the style was told, by place or by the module's names."""
        by_name = self.names[len(args) : 3]
        missing = [name for name in by_name if name not in kwargs]
        if missing:
            error = TypeError(f"attention is called without {', '.join(missing)}: pass q, k and v")
            if not torch.compiler.is_compiling():
                tell(error, self.attention.mesh)
            raise error
        q, k, v = *args[:3], *(kwargs.pop(name) for name in by_name)
        transposed = self.style.layout == "BLNH"
        if transposed:
            q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.ndim == 4 else x for x in (q, k, v))
        if torch.compiler.is_compiling():
            out = self._traced(q, k, v, args[3:], kwargs)
        else:
            with Within(self.name):
                out = self._eager(q, k, v, args[3:], kwargs)
        return out.transpose(1, 2) if transposed and out.ndim == 4 else out

    def of_qkv(
        self, q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The same of a module that has these names, by which ``torch.export`` knows its inputs."""
        if q is None or k is None or v is None:  # which is refused
            kwargs |= {name: x for name, x in zip("qkv", (q, k, v), strict=True) if x is not None}
            return self.forward(**kwargs)
        return self.forward(q, k, v, *args, **kwargs)

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        attention = self.attention
        try:
            self._check_still_holds()
            scale, tensors, mask, length = self._read(q, k, args, kwargs)
            attention = attention if length is None else attention.of_length(length)
            masked = attention if mask is None else attention.with_mask(mask)
            inputs = under_autocast(AttentionInputs(q, k, v, **tensors))
            told = masked.checked(inputs, scale)
        except Exception as error:  # a mask_mod may raise anything
            tell(error, attention.mesh)
            raise
        return masked.run(inputs, told)

    def _traced(self, q: Tensor, k: Tensor, v: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        attention = self.attention
        # A graph may hold what refuses tensors of one kind; and every rank exports by itself.
        kinds = {isinstance(x, DTensor) if isinstance(x, Tensor) else None for x in (q, k, v)}
        in_graph = kinds in ({False}, {True}) and not is_exporting()
        try:
            scale, tensors, _, length = self._read(q, k, args, kwargs)
            attention = attention if length is None else attention.of_length(length)
            inputs = under_autocast(AttentionInputs(q, k, v, **tensors))
            check_call(inputs, attention)
        except (TypeError, ValueError, NotImplementedError) as error:
            if in_graph:
                return refuse_in_graph(q, v.shape[-1], str(error), attention.mesh)
            raise
        return attention.run(inputs, attention.resolve(inputs, scale).told())

    def _check_still_holds(self) -> None:
        """Refuse (ValueError) what the module was given later to learn, as a bias; options are read at every call."""
        for what, x in vars(self.module).items():
            if isinstance(x, Tensor) and x.requires_grad and self.held.get(what) is not x and what not in _NAMES:
                raise ValueError(
                    f"{type(self.style).__name__}: {type(self.module).__name__} was given {what}, {_short(x)} that "
                    "needs a gradient, after the style was applied, and would be left out: hand tensors to attention "
                    "when it is called, where they are taken or refused by name; what a hook notes may be detached"
                )

    def _read(self, q: Tensor, k: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> _Call:
        told = self.style._translated(self.module, self._named(args, kwargs)) if args or kwargs else {}
        held = (*self.module._parameters.items(), *self.module._buffers.items())
        tensors = [what for what, x in held if x is not None]
        if tensors or self.module._modules:
            self.style._check_held(self.module, tensors)
        if self.module.training not in self.modes:
            now, tried = ("training", "evaluation")[:: 1 if self.module.training else -1]
            raise ValueError(
                f"{type(self.style).__name__} was applied in {tried} mode, and attention is called in {now} mode, in "
                f"which {type(self.module).__name__} gave another output, or could not be run; is there dropout? Set "
                f"it to 0 before the style is applied, or apply it to a new module in {now} mode"
            )
        own, asked = self.style._read_attributes(self.module), self.defaults | told
        asked = own | {name: value for name, value in asked.items() if value is not None or name not in own}
        if not asked:
            return _Call(self.style.options.scale, {}, None)
        call = self.style._read_options(asked, f"{type(self.style).__name__}: attention was called with")
        if told.get("enable_gqa") is False and q.shape[1] != k.shape[1]:
            raise ValueError(f"enable_gqa=False, but q has shape {sizes(q)} and k {sizes(k)}")
        check_scale(call.scale)
        shared = call.tensors.get("k_shared")
        if self.style.layout == "BLNH" and shared is not None and shared.ndim == 4:
            call.tensors["k_shared"] = shared.transpose(1, 2)
        return call

    def _named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What a call says beside q, k and v."""
        if len(args) > len(self.names) - 3:
            raise ValueError(f"attention takes q, k, v and options by name, got {3 + len(args)} positional arguments")
        told = dict(zip(self.names[3:], args, strict=False))
        if twice := [name for name in kwargs if name in told or name in self.names[:3]]:
            raise TypeError(f"attention got multiple values for argument {twice[0]!r}")
        return told | kwargs


class RingParallel(_ContextParallel):
    """Ring Attention (Liu et al.) for an inner attention module; WallFacer with teams of one.

    Keywords are those of :class:`WallFacerParallel`, but no ``schedule``. The mesh has axes ``("cp_ring",
    "cp_team")`` with a team of one, or one axis of any name.
    """

    _any_axis, _of_size_1, _remedy = "cp_ring", ("cp_team", "cp_ulysses"), "ring"
    _without = ("schedule",)


class WallFacerParallel(_ContextParallel):
    """WallFacer (teams and rings of ranks), alone or with Ulysses, for an inner attention module.

    Keyword Args:
        layout: of q, k, v and the output: ``"BLNH"`` (torchtitan) or ``"BNLH"`` (SDPA).
        check: compare the module with this style first, see :func:`check_equivalence`.
        **options: see :class:`AttentionOptions`.

    The mesh is any that :func:`context_mesh` makes, a slice of it, or its axis ``cp_ring`` or ``cp_ulysses`` alone.
    """


class UlyssesParallel(_ContextParallel):
    """Ulysses (Jacobs et al.) for an inner attention module: tokens are exchanged for heads.

    Keywords are those of :class:`WallFacerParallel`, but no ``schedule``, ``rotate`` and ``rotate_forward``. The mesh
    has an axis ``cp_ulysses`` and, if others, ``cp_ring`` and ``cp_team`` of size 1; or one axis of any name.
    """

    _any_axis, _of_size_1, _remedy = "cp_ulysses", ("cp_ring", "cp_team"), "ulysses=..."
    _without = ("schedule", "rotate", "rotate_forward")


def _add(known: dict[str, Any], name: str, value: Any, where: str) -> None:
    if known.get(name, value) is not value:
        raise ValueError(f"{where} {name} twice, under two names")
    known[name] = value


def _asked_window(name: str, value: Any, is_causal: bool) -> tuple[int, int] | None:
    """The window that a call asks for, -1 for any distance, or None if it is not one."""
    if name == "sliding_window":
        return (value - 1, 0) if isinstance(value, int) and value > 0 else None
    if isinstance(value, tuple | list) and len(value) == 2 and all(x is None or isinstance(x, int) for x in value):
        left, right = (-1 if side is None else side for side in value)
        return left, 0 if is_causal and right == -1 else right
    return None


def _does_nothing(thing: Any) -> bool:
    return thing is None or isinstance(thing, nn.Identity) or (isinstance(thing, nn.Dropout) and thing.p == 0)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {sizes(value)}"
    if isinstance(value, BlockMask):
        return f"a BlockMask of shape {tuple(value.shape)}"
    if isinstance(value, int) and not isinstance(value, bool):
        value = index(value)  # a compiler's symbol has no text
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
