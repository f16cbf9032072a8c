"""What is to be computed: the sizes of a model and of its sequences."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import accumulate
from operator import add, eq
from typing import Any, Literal

import numpy as np
import torch

from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.segments import pairs_seen
from wallfacer_dt.layout import check_length
from wallfacer_dt.options import check_window
from wallfacer_dt.planning.cluster import check_kind
from wallfacer_dt.planning.units import MOST_TOKENS
from wallfacer_dt.reading import DTYPES

MOST_HEADS = 2**16
"""Of which no model has a hundredth; heads are counted one by one."""

_MOST_DOCUMENTS = 2**13
_FEW = 5  # layers in a row that are written out

LayerKind = Literal["dense", "layer"]
"""Of a model with experts one of its first layers, that have none; any other layer."""

Kinds = tuple[tuple[LayerKind, int], ...]
"""Layers in their order: how many there are in a row of a kind."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes: layers of attention and, where ``ffn`` is not 0, a feed-forward, as Llama's are built.

    Attributes:
        hidden: model dim.
        heads: query heads.
        kv_heads: key and value heads, a divisor of ``heads``; None: as many.
        head_dim: of queries and keys, and of values, too; None: hidden / heads.
        ffn: hidden units of the feed-forward, of one expert where there are several, 0 for none.
        gated: it has a gate (SwiGLU): three projections instead of two; True where there is none.
        layers: how many.
        vocab: entries of the output projection, 0 to leave it and the embedding out.
        experts: among which a router deals tokens out (a mixture of experts), 0 for one feed-forward that takes all.
        experts_per_token: experts that each token goes to.
        windowed_layers: of ``layers``, those that a sequence's ``window_size`` is for, whatever their order; None: all.
        shared_ffn: hidden units of one more feed-forward, that takes all tokens beside the experts.
        value_dim: head dim of values, where it is another than of keys.
        kv_rank: of the latent that every head's key and value are projected from (multi-head latent attention;
            DeepSeek-V2, section 2.1), 0 for none.
        q_rank: likewise of queries; 0: they are projected from the tokens.
        rotary_dim: of ``head_dim``, the part of keys that has positions, and is not of the latent, but of all heads.
        dense_layers: of ``layers``, the first so many have one feed-forward that takes all tokens in place of experts
            (``first_k_dense_replace`` of transformers' configs).
        dense_ffn: hidden units of that.
    """

    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int = 0
    gated: bool = True
    layers: int = 1
    vocab: int = 0
    experts: int = 0
    experts_per_token: int = 0
    windowed_layers: int | None = None
    shared_ffn: int = 0
    value_dim: int | None = None
    kv_rank: int = 0
    q_rank: int = 0
    rotary_dim: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) sizes that are none, or do not divide."""
        for name in ("hidden", "heads", "layers"):
            check_length(getattr(self, name), name)
        for name in (
            "ffn", "vocab", "experts", "experts_per_token", "shared_ffn", "kv_rank", "q_rank", "rotary_dim",
            "dense_layers", "dense_ffn",
        ):  # fmt: skip
            check_length(getattr(self, name), name, least=0)
        for name in ("kv_heads", "head_dim", "value_dim"):
            if getattr(self, name) is not None:
                check_length(getattr(self, name), name)
        check_kind(self.gated, bool, "gated")
        if self.heads > MOST_HEADS:
            raise ValueError(f"heads must be at most {MOST_HEADS}, got {self.heads}")
        if self.heads % self.keys:
            raise ValueError(f"kv_heads must divide heads, got {self.keys} and {self.heads}")
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden unless head_dim is given, got {self.heads} and {self.hidden}")
        if bool(self.experts) != bool(self.experts_per_token) or self.experts_per_token > self.experts:
            given = f"{self.experts_per_token} and {self.experts}"
            raise ValueError(f"experts_per_token must be from 1 to experts, or both 0, got {given}")
        if self.experts and not self.ffn:
            raise ValueError(f"experts must be 0 where ffn is, got {self.experts}")
        if self.shared_ffn and not self.experts:
            raise ValueError(f"shared_ffn must be 0 where experts are, got {self.shared_ffn}")
        if self.dense_layers and not self.experts:
            raise ValueError(f"dense_layers must be 0 where experts are, got {self.dense_layers}")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers must be below layers, got {self.dense_layers} and {self.layers}")
        if bool(self.dense_ffn) != bool(self.dense_layers):
            given = f"{self.dense_ffn} and {self.dense_layers}"
            raise ValueError(f"dense_ffn must be above 0 where dense_layers are, or both 0, got {given}")
        if not self.kv_rank and (self.q_rank or self.rotary_dim):
            raise ValueError(f"q_rank and rotary_dim must be 0 where kv_rank is, got {self.q_rank}, {self.rotary_dim}")
        if self.kv_rank and self.keys != self.heads:
            raise ValueError(f"kv_heads must equal heads where keys come of a latent, got {self.keys} and {self.heads}")
        if self.kv_rank and self.rotary_dim >= self.dim:
            raise ValueError(f"rotary_dim must be below head_dim, got {self.rotary_dim} and {self.dim}")
        if self.windowed_layers is not None:
            check_length(self.windowed_layers, "windowed_layers", least=0)
            if self.windowed_layers > self.layers:
                raise ValueError(
                    f"windowed_layers must be at most layers, got {self.windowed_layers} and {self.layers}"
                )
        # Written out, so that the same sizes are equal.
        object.__setattr__(self, "kv_heads", self.keys)
        object.__setattr__(self, "head_dim", self.dim)
        object.__setattr__(self, "value_dim", None if self.value_dim == self.dim else self.value_dim)
        object.__setattr__(self, "gated", self.gated or not self.ffn)
        object.__setattr__(
            self, "windowed_layers", None if self.windowed_layers == self.layers else self.windowed_layers
        )

    @property
    def keys(self) -> int:
        """Key and value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def dim(self) -> int:
        """Head dim."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def dim_of_values(self) -> int:
        """Head dim of values."""
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of keys, and of values."""
        return self.dim, self.dim_of_values

    @property
    def attention_alone(self) -> "ModelShape":
        """The same attention, without layers round it."""
        of_experts = "experts", "experts_per_token", "shared_ffn", "dense_layers", "dense_ffn"
        none = dict.fromkeys(("ffn", "vocab", *of_experts), 0)
        return replace(self, **none, layers=1, windowed_layers=None)

    @property
    def kinds(self) -> Kinds:
        """How many layers there are of each kind, in their order."""
        return kinds_of(self.dense_layers, self.layers)

    def of(self, kind: LayerKind) -> "ModelShape":
        """Sizes of a layer of a kind, as if all were; what is said here of a feed-forward is one's of ``layer``."""
        return _dense(self) if kind == "dense" else self

    @property
    def attention_weights(self) -> int:
        """Elements of a layer's projections."""
        queries, keys, values = self.heads * self.dim, self.keys * self.dim, self.keys * self.dim_of_values
        if self.kv_rank:
            own = self.heads * (self.dim - self.rotary_dim) + values
            inward = self.hidden * (self.kv_rank + self.rotary_dim) + self.kv_rank * own
        else:
            inward = self.hidden * (keys + values)
        inward += self.q_rank * (self.hidden + queries) if self.q_rank else self.hidden * queries
        return inward + self.out_weights

    @property
    def out_weights(self) -> int:
        """Of these, those of the one back."""
        return self.hidden * self.heads * self.dim_of_values

    @property
    def ffn_weights(self) -> int:
        """Elements of a layer's feed-forward, of all experts, what is shared, and the router."""
        return (self.experts or 1) * self._feed_forward_weights + self._beside_experts

    @property
    def expert_weights(self) -> int:
        """Of these, those of all experts alone; 0 where there are none."""
        return self.experts * self._feed_forward_weights

    @property
    def ffn_products(self) -> int:
        """Those of them that a token is multiplied with."""
        return self.feed_forwards_per_token * self._feed_forward_weights + self._beside_experts

    @property
    def ffn_units(self) -> int:
        """Hidden units that a token has."""
        return self.feed_forwards_per_token * self.ffn + self.shared_ffn

    @property
    def feed_forwards_per_token(self) -> int:
        """Of a layer: a token's experts, or the one that takes all tokens."""
        return self.experts_per_token or 1

    @property
    def _feed_forward_weights(self) -> int:
        """Elements of one feed-forward."""
        return self._weights_of(self.ffn)

    @property
    def _beside_experts(self) -> int:
        """Elements of the router, and of what takes all tokens."""
        return self.hidden * self.experts + self._weights_of(self.shared_ffn)

    def _weights_of(self, units: int) -> int:
        return self.hidden * units * (3 if self.gated else 2)


@lru_cache(maxsize=64)
def _dense(model: ModelShape) -> ModelShape:
    none = {"experts_per_token": 0, "shared_ffn": 0, "dense_layers": 0, "dense_ffn": 0}
    return replace(model, ffn=model.dense_ffn, experts=0, **none)


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """The sequences that all ranks share.

    Attributes:
        length: N, tokens, at most 2^31: of more, pairs of a query and a key may be more than 64 bits count.
        batch: B.
        is_causal: a query sees the keys up to its own position.
        window_size: (left, right), as :func:`wallfacer_dt.context_parallel_attention` takes it.
        dtype: of activations.
        documents: tokens of the documents that are packed into each of them, in turn and round again until it is full,
            the last one cut; at most 8192. Empty: one.
    """

    length: int
    batch: int = 1
    is_causal: bool = False
    window_size: tuple[int | None, int | None] | None = None
    dtype: torch.dtype = torch.bfloat16
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what is no sequence."""
        check_length(self.length, "length")
        if self.length > MOST_TOKENS:
            raise ValueError(f"length must be at most 2^31, got {self.length}")
        check_length(self.batch, "batch")
        check_kind(self.is_causal, bool, "is_causal")
        check_kind(self.dtype, torch.dtype, "dtype")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        check_window(self.window_size, self.is_causal)
        if self.window_size is not None:
            hides_nothing = Mask(*self._band) == Mask(right=0 if self.is_causal else None)
            object.__setattr__(self, "window_size", None if hides_nothing else tuple(self.window_size))
        if not isinstance(self.documents, tuple | list):
            raise TypeError(f"documents must be a tuple of lengths, got {type(self.documents).__name__}")
        for tokens in self.documents:
            check_length(tokens, "documents")
        object.__setattr__(self, "documents", _in_short(self.documents, self.length))

    @property
    def dtype_name(self) -> str:
        """As people write it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def mask(self) -> Mask:
        """What is seen."""
        return _mask(*self._band, self.documents, self.length if self.documents else 0)

    @property
    def _band(self) -> tuple[int | None, int | None]:
        """How far back and ahead a query sees; None is no bound."""
        left, right = (None if n in (None, -1) else n for n in self.window_size or (None, None))
        return left, 0 if self.is_causal else right

    @property
    def cu_seqlens(self) -> torch.Tensor | None:
        """(documents + 1,), int64, on the CPU: the documents' cumulative lengths, where there are several."""
        return torch.tensor(self.mask.documents[0], device="cpu") if self.documents else None

    def pairs(self) -> int:
        """(query, key) pairs that are seen, of a row of the batch."""
        return pairs_seen(np.array([[0, self.length]]), self.mask, self.length)


def _in_short(documents: Sequence[int], length: int) -> tuple[int, ...]:
    """The fewest that in turn are the same documents of a sequence, at most :data:`_MOST_DOCUMENTS`; none for one.

    >>> _in_short([3, 4, 2, 7], 10), _in_short([3, 3, 2], 8), _in_short([3, 3], 7), _in_short([9, 1], 8)
    ((3, 4, 2), (3,), (3,), ())
    """
    ends = [*accumulate(documents)]
    if not ends or ends[0] >= length:
        return ()
    rounds, rest = divmod(length, ends[-1])
    number = rounds * len(ends) + (1 + bisect_left(ends, rest) if rest else 0)
    if number > _MOST_DOCUMENTS:
        raise ValueError(f"documents must be at most {_MOST_DOCUMENTS} in a sequence, got {number}")
    *some, last = (documents[i % len(ends)] for i in range(number))
    last = length - sum(some)  # it may be cut
    periods = (n for n in range(1, number) if all(map(eq, some[n:], some)) and last <= some[(number - 1) % n])
    return (*some, last)[: next(periods, number)]


@lru_cache(maxsize=64)
def _mask(left: int | None, right: int | None, documents: tuple[int, ...], length: int) -> Mask:
    if not documents:
        return Mask(left, right)
    ends = np.cumsum(np.resize(documents, -(-length // sum(documents)) * len(documents)))
    return Mask(left, right, documents=((0, *ends[ends < length].tolist(), length),))


def kinds_of_layers(model: ModelShape, sequence: SequenceShape) -> tuple[tuple[int, SequenceShape], ...]:
    """What layers attend, and how many of them that: first those that see most.

    Args:
        model: sizes.
        sequence: what a step takes.

    Returns:
        One; or, where some layers alone have the window, two, of which that is the second.
    """
    if model.windowed_layers is None or sequence.window_size is None:
        return ((model.layers, sequence),)
    every = (
        (model.layers - model.windowed_layers, replace(sequence, window_size=None)),
        (model.windowed_layers, sequence),
    )
    return tuple(kind for kind in every if kind[0])


def layers_of_stage(model: ModelShape, sequence: SequenceShape, own: int) -> list[int]:
    """Of each of :func:`kinds_of_layers` how many of its own a stage has, that has most of those that see most."""
    first, *others = (layers for layers, _ in kinds_of_layers(model, sequence))
    most = -(-first * own // model.layers)
    return [most, own - most] if others else [own]


def mean_of_layers(model: ModelShape, sequence: SequenceShape, some: Iterable[Any], own: int | None = None) -> Any:
    """The mean over all layers, or a stage's own, of what can be added up, of each of :func:`kinds_of_layers`."""
    own = model.layers if own is None else own
    layers = layers_of_stage(model, sequence, own)
    return reduce(add, [count / own * one for count, one in zip(layers, some, strict=True)])


def kinds_of(dense: int, layers: int) -> Kinds:
    """Layers of which the first so many are ``dense``."""
    every: Kinds = ("dense", dense), ("layer", layers - dense)
    return tuple(kind for kind in every if kind[1])


def in_short(kinds: Kinds) -> Kinds:
    """Layers in their order, each with how many it stands for: of many in a row the third for all but the last two.

    So what depends on the kinds of two layers before and two after is the same of all that it stands for.

    >>> in_short((("dense", 1), ("layer", 60)))
    (('dense', 1), ('layer', 1), ('layer', 1), ('layer', 56), ('layer', 1), ('layer', 1))
    """
    return tuple(
        (kind, times)
        for kind, layers in kinds
        for times in ([1] * layers if layers <= _FEW else [1, 1, layers - 4, 1, 1])
    )
