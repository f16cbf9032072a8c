"""One configuration, from the keywords of a call or style to the text that operators are told.

An option stands here, with its type, default and documentation, and where it is implemented.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from wallfacer_dt.algorithms.blocks import Captured
from wallfacer_dt.algorithms.recorded import MaskMod
from wallfacer_dt.algorithms.schedule import check_schedule
from wallfacer_dt.algorithms.volume import check_rotate
from wallfacer_dt.compiler import as_text, from_text
from wallfacer_dt.layout import check_length, shard_sizes
from wallfacer_dt.mesh import ContextGroups, Coordinate
from wallfacer_dt.order import TokenOrder, check_token_order

Window = tuple[int | None, int | None]
_ALONE = ContextGroups(Coordinate(1, 1, 0, 0), ("", "", ""))
_shard_sizes = lru_cache(maxsize=256)(shard_sizes)


class WayKeywords(TypedDict, total=False):
    """Those of :class:`AttentionKeywords` that say how attention is computed, where the model says which it is."""

    schedule: str
    rotate: str
    rotate_forward: str
    kernel: str


class AttentionKeywords(WayKeywords, total=False):
    """The fields of :class:`AttentionOptions`, for who types keywords."""

    is_causal: bool
    window_size: Window | None
    prefix_length: int
    mask_mod: MaskMod | BlockMask | None
    scale: float | None
    softcap: float | None
    length: int | None
    kv_length: int | None
    replicated: int
    order: TokenOrder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The options of attention, which :func:`context_parallel_attention` and the styles take as keywords.

    Attributes:
        is_causal: a query sees the keys up to its own position.
        window_size: (left, right): a query at i sees keys from i - left to i + right; None or -1 for no bound. Hugging
            Face's ``sliding_window=W`` is ``(W - 1, 0)``.
        prefix_length: with ``is_causal``, keys before this position are seen by all queries.
        mask_mod: any other mask, in place of all these: a function of (batch, head, query position, key position) or
            a ``BlockMask`` of flex_attention.
        scale: factor of the scores; 1 / sqrt(H) by default, or what a style's module has or is called with.
        softcap: scores s become softcap * tanh(s / softcap).
        length: N, for a sequence whose shards are not equal.
        kv_length: the number of keys, where it is another one.
        replicated: the first T rows of q, k, v and of the output are tokens before the sequence that every rank holds
            (the text in joint attention). Of masks they go with ``mask_mod`` alone, to which they are positions 0 to
            T - 1 and the sequence's count from T: so padding of the text is said. Gradients of the output's rows are
            summed over ranks, those of the inputs' rows are a rank's part of a sum.
        order: in which tokens were dealt out: what :func:`shard_sequence` or the loader was given. Under a mask, and
            within documents, there is no default on several ranks.
        schedule: ``"2d"``; ``"rings"``, where a team's rows go round in a ring, too, for teams on slow links; or
            ``"published"`` for WallFacer's Algorithms 1 to 3 (team must divide ring).
        rotate: which side moves round the ring in the backward: ``"kv"``, ``"q"``, or ``"auto"`` for what has the
            smaller payload without a mask (see :func:`attention_volume`).
        rotate_forward: the same for the forward, where with queries goes what has been computed of the output.
        kernel: ``"auto"``, or the name of one, see docs/kernels.md and :func:`register_kernel`; what a kernel cannot do
            is refused.
    """

    is_causal: bool = False
    window_size: Window | None = None
    prefix_length: int = 0
    mask_mod: MaskMod | BlockMask | None = None
    scale: float | None = None
    softcap: float | None = None
    length: int | None = None
    kv_length: int | None = None
    replicated: int = 0
    order: TokenOrder | None = None
    schedule: str = "2d"
    rotate: str = "auto"
    rotate_forward: str = "auto"
    kernel: str = "auto"

    def check(self) -> None:
        """Refuse (TypeError, ValueError) options that mean nothing, or do not go together."""
        if self.order is not None:
            check_token_order(self.order)
        if not isinstance(self.kernel, str):  # whether there is such a one, ranks ask together, on a mesh
            raise TypeError(f"kernel must be a name, got {self.kernel!r}")
        check_schedule(self.schedule, 1, 1)
        check_rotate(self.rotate, self.rotate_forward, self.schedule)
        check_scale(self.scale)
        if not isinstance(self.is_causal, bool):
            raise TypeError(f"is_causal must be a bool, got {self.is_causal!r}")
        check_window(self.window_size, self.is_causal)
        for name in ("prefix_length", "replicated"):
            check_length(getattr(self, name), name, least=0)
        for name in ("length", "kv_length"):
            if getattr(self, name) is not None:
                check_length(getattr(self, name), name)
        check_scale(self.softcap, "softcap")
        if self.mask_mod is not None and not callable(self.mask_mod) and not isinstance(self.mask_mod, BlockMask):
            raise TypeError(f"mask_mod must be a function or a BlockMask, got {type(self.mask_mod).__name__}")
        self._check_together()

    def _check_together(self) -> None:
        has_window = self.window != (-1, 0 if self.is_causal else -1)
        if self.prefix_length and (not self.is_causal or has_window):
            raise ValueError("prefix_length goes with is_causal=True and without window_size")
        named = {"is_causal": self.is_causal, "window_size": has_window, "prefix_length": self.prefix_length}
        masks = [name for name, value in named.items() if value]
        if self.mask_mod is not None and masks:
            raise ValueError(f"mask_mod must say everything by itself, got {', '.join(masks)} as well")
        if self.replicated and masks:
            raise ValueError(
                "replicated tokens have no place in the sequence: they go without a mask but mask_mod, to which they "
                f"are positions 0 to {self.replicated - 1} and the sequence comes after them"
            )
        if self.kv_length is not None and self.length is None:
            raise ValueError("kv_length is given without length")
        if self.kv_length not in (None, self.length) and self.has_mask:
            raise ValueError("under a mask queries and keys are the same tokens: kv_length must be left out")

    @property
    def has_mask(self) -> bool:
        """Whether not all queries see all keys."""
        return self.is_causal or self.mask_mod is not None or self.window != (-1, -1)

    @property
    def order_name(self) -> str:
        """Of the token order; empty where there is none, which only attention without a mask can do without."""
        return "" if self.order is None else self.order.name

    @property
    def window(self) -> tuple[int, int]:
        """How far back and ahead a query sees, -1 for any distance."""
        left, right = self.window_size or (None, None)
        return -1 if left is None else left, 0 if self.is_causal else -1 if right is None else right


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Options on a mesh: what does not change from call to call. By default there is one rank."""

    # As they were told. An operator knows the two that are objects, order and mask_mod, by name only.
    options: AttentionOptions
    order: str = ""  # name of the token order; empty where there is none
    mask_key: int = 0  # of the mask_mod, 0 for none: its number in this process
    mesh: str = ""  # its name, by which ranks compare their calls; empty for none
    device_type: str = "cpu"
    groups: ContextGroups = _ALONE  # without ``context`` where the schedule does not use it

    def __hash__(self) -> int:
        """Of what is seldom another, since it is asked for at every call."""
        return hash(self.mesh)

    @property
    def place(self) -> Coordinate:
        """This rank's."""
        return self.groups.coordinate

    @property
    def has_mask(self) -> bool:
        """Whether not all queries see all keys."""
        return bool(self.mask_key) or self.options.has_mask

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the whole sequence, queries and keys; empty where shards are equal."""
        length, kv_length = self.options.length, self.options.kv_length
        return () if length is None else (length, length if kv_length is None else kv_length)

    def whole(self, q: Sequence[int], k: Sequence[int], *, shards: bool = True) -> tuple[int, int]:
        """Queries and keys in the whole sequence, from the shapes of shards, or of all of it."""
        if self.lengths:
            return self.lengths[0], self.lengths[1]
        ranks, replicated = self.place.size if shards else 1, self.options.replicated
        # A compiler takes a length for a symbol, of which there is no text: it becomes a number.
        return index(q[2] - replicated) * ranks, index(k[2] - replicated) * ranks

    def check_shards(self, q: Sequence[int], k: Sequence[int]) -> None:
        """Refuse (ValueError) shards of these shapes that a rank does not hold of the lengths that were told."""
        replicated, order = self.options.replicated, self.order or "contiguous"
        for name, shape, length in zip("qk", (q, k), self.lengths, strict=False):
            sizes = shard_sizes if torch.compiler.is_compiling() else _shard_sizes  # of a cache it would warn
            holds = sizes(length, self.place.axes, order)[self.place.index]
            if shape[2] - replicated != holds:
                raise ValueError(
                    f"of {length} tokens this rank holds {holds} in {order} order, got {name} "
                    f"{tuple(map(index, shape))} (B, N, L, H) with {replicated} replicated; deal them out by "
                    "shard_sequence, in an order of this mesh"
                )

    def seen_by_mask(self, q: Sequence[int], k: Sequence[int], *, shards: bool = True) -> tuple[int, int]:
        """:meth:`whole`, and the replicated tokens before it, which to a ``mask_mod`` are the first."""
        queries, keys = self.whole(q, k, shards=shards)
        return queries + self.options.replicated, keys + self.options.replicated


Told = tuple[float, float, int, str, list[Tensor]]


class Options(NamedTuple):
    """What an operator is told beside its tensors, see Note [Options as text]."""

    scale: float
    softcap: float  # 0 for none
    # With nothing left to choose: which side moves, and how long a sequence is whose shards are not equal. Of a mask
    # there is the key in a compiled graph only, which asks it whether it still does the same.
    setting: Setting
    code: str  # `wallfacer_dt.compiler.SOURCES`
    mask: str = ""  # name of an arbitrary mask's recording, or empty
    gradients: bool = False  # whether some of the tensors need one, so that there will be a backward
    # The tensors that an arbitrary mask reads, in order, which an operator with masks takes after the text.
    captured: Captured = Captured()

    def told(self) -> Told:
        """As operators take them after their tensors: :data:`SCHEMA`, and with masks :data:`MASK_SCHEMA`."""
        setting = self.setting
        values = _values(setting.options, _IN_TEXT), _values(setting.place, _PLACE), _values(setting, _SETTING)
        text = as_text((*values, setting.groups[1:], *self[3:-1]))
        return self.scale, self.softcap, setting.options.length or 0, text, list(self.captured)

    @classmethod
    def of(cls, scale: float, softcap: float, length: int, text: str, captured: Sequence[Tensor] = ()) -> "Options":
        """What :meth:`told` gave."""
        found = _options(scale, softcap, length, text)
        return found._replace(captured=Captured(captured)) if captured else found

    @classmethod
    def of_text(cls, text: str) -> "Options":
        """The same, but for numbers, which may be a compiler's symbols, and for what a mask reads."""
        return _options(1.0, 0.0, 0, text)

    @property
    def compared(self) -> dict[str, Hashable]:
        """By name all options, which ranks must have alike; of order and mask_mod the names."""
        values = dict(zip(OPTIONS, _values(self.setting.options, OPTIONS), strict=True))
        values |= {"scale": self.scale, "softcap": self.softcap or None}
        return values | {"order": self.setting.order, "mask_mod": self.mask}


# 0 for the length of a sequence whose shards are equal.
SCHEMA = "float scale, float softcap, SymInt length, str options"
MASK_SCHEMA = f"{SCHEMA}, Tensor[] captured"
OPTIONS = tuple(field.name for field in fields(AttentionOptions))
NOT_WAYS = tuple(name for name in OPTIONS if name not in WayKeywords.__annotations__)
# Beside the text are numbers that a compiler may take for symbols.
_IN_TEXT = tuple(name for name in OPTIONS if name not in ("scale", "softcap", "length", "order", "mask_mod"))
_PLACE = tuple(field.name for field in fields(Coordinate))
_SETTING = tuple(field.name for field in fields(Setting) if field.name not in ("options", "groups"))


def _values(data: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(data, name) for name in names)


@lru_cache(1024)
def _options(scale: float, softcap: float, length: int, text: str) -> Options:
    options, place, others, names, *rest = from_text(text)
    known = AttentionOptions(**dict(zip(_IN_TEXT, options, strict=True)), length=length or None)
    named, groups = dict(zip(_SETTING, others, strict=True)), ContextGroups(Coordinate(*place), *names)
    return Options(scale, softcap, Setting(options=known, groups=groups, **named), *rest)


def options_of(
    who: str, told: AttentionKeywords, *, without: Collection[str] = (), own: Collection[str] = ()
) -> AttentionOptions:
    """The options that ``who`` was told by keywords, not checked yet; TypeError for one that is no option.

    Some may mean nothing to it (``without``), and other parameters of its may have been meant (``own``).
    """
    for name in told:
        if name in without or name not in OPTIONS:
            near = difflib.get_close_matches(name, [*own, *(known for known in OPTIONS if known not in without)], 1)
            why = ", which it does not take" if name in without else f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{who} got an unexpected keyword argument {name!r}{why}")
    return AttentionOptions(**told)


def ways_of(who: str, told: WayKeywords, *, own: Collection[str] = ()) -> AttentionKeywords:
    """:func:`options_of`, checked, for who takes :class:`WayKeywords`: all of them, as ranks are to have them alike."""
    found = options_of(who, AttentionKeywords(**told), without=NOT_WAYS, own=own)
    found.check()
    return AttentionKeywords(
        schedule=found.schedule, rotate=found.rotate, rotate_forward=found.rotate_forward, kernel=found.kernel
    )


def with_options(function: Callable[..., Any], without: Collection[str] = ()) -> inspect.Signature:
    """A function's signature, or a method's, with the options that mean something to it for ``**options``."""
    found = inspect.signature(function)
    own = [p for p in found.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name != "self"]
    takes_options = any(p.kind is p.VAR_KEYWORD for p in found.parameters.values())
    told = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(AttentionOptions)
        if field.name not in without and takes_options
    ]
    return found.replace(parameters=[*own, *told])


def check_scale(scale: Any, name: str = "scale") -> None:
    """Refuse (TypeError, ValueError) a factor that is no finite number above 0."""
    # A tensor may want a gradient, which it would not get.
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"{name} must be a float or None, got {scale!r}")
    if scale is not None and not 0 < scale < math.inf:
        # A compiler may take it for a symbol, which has no text.
        raise ValueError(f"{name} must be finite and above 0, got {float(scale)}")


def check_window(window: Any, is_causal: bool) -> None:
    """Refuse (TypeError, ValueError) what is no window, or does not go with a causal mask."""
    if window is None:
        return
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window!r}")
    for n in window:
        if n is not None and (not isinstance(n, int) or isinstance(n, bool)):
            raise TypeError(f"window_size must be a pair of ints or None, got {window!r}")
        if n is not None and n < -1:
            raise ValueError(f"window_size must be at least 0, or -1 for no bound, got {window!r}")
    if is_causal and window[1] not in (None, -1, 0):
        raise ValueError(f"is_causal=True sees no later keys, got window_size={window!r}")
