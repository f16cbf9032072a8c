"""What the styles do with everything they may be asked for: run on ranks, and written down in docs/features.md.

``python -m tests.features > docs/features.md`` writes the document. A feature is a row, a column is a style and what
runs it; a cell is tried out on four ranks, and works (output and gradients equal those of one process) or is refused.
"""

import copy
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.cases import (
    MASK_MODS,
    Case,
    Inner,
    documents_of,
    draw,
    draw_extras,
    held,
    index_of,
    mask_of,
    mesh_of,
    oracle,
    share_of,
)
from wallfacer_dt import RingParallel, TokenOrder, UlyssesParallel, WallFacerParallel, sequence_positions
from wallfacer_dt.checkpoint import save_attention
from wallfacer_dt.kernels import flash_attn, flex
from wallfacer_dt.kernels.block import Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.testing import IncomparableError, RankPool, worst_error

RANKS = 4
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-2}
REFUSALS = ("TypeError", "ValueError", "NotImplementedError")
# The sequence is of 16 tokens, and in two rows of documents.
PACKED = {"documents": ((5, 11), (16,))}
SHIFTED = {"documents": ((6, 10), (16,))}
LENGTHS = {"documents": ((3, 9, 4),), "packed": "cu_seqlens"}
UNEVEN = {"documents": ((3, 8, 3),)}
BLOCKS = {"mask": "blockmask"}
CAUSAL = {"is_causal": True}


@dataclass(frozen=True)
class Column:
    """A style on a mesh, and what runs it.

    Attributes:
        name: heading.
        style: its class.
        mesh: sizes of the axes.
        options: of the style.
        how: "eager", "compiled" or "DTensors".
        names: what the column's own refusals say.
    """

    name: str
    style: type
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "eager"
    names: str = ""


HYBRID = {"ring": 2, "team": 1, "ulysses": 2}
STYLES = (
    Column("RingParallel", RingParallel, {"ring": 4, "team": 1}),
    Column("WallFacerParallel", WallFacerParallel, {"ring": 2, "team": 2}),
    Column("WallFacerParallel, published", WallFacerParallel, {"ring": 2, "team": 2}, {"schedule": "published"}),
    Column("UlyssesParallel", UlyssesParallel, {"ring": 1, "team": 1, "ulysses": 4}),
    Column("WallFacerParallel, Ulysses x ring", WallFacerParallel, HYBRID),
)
COMPILED = Column("torch.compile", WallFacerParallel, HYBRID, how="compiled")
FLASH = Column("flash", WallFacerParallel, HYBRID, {"kernel": "flash"})
REFERENCE = Column("reference", WallFacerParallel, HYBRID, {"kernel": "reference"})
BACKENDS = (
    FLASH,
    REFERENCE,
    Column("flex", WallFacerParallel, HYBRID, {"kernel": "flex"}, names="kernel='flex'"),
    Column("DTensors", WallFacerParallel, HYBRID, how="DTensors", names="DTensor"),
    COMPILED,
)
CUDA = {"CUDA, bfloat16": torch.bfloat16, "CUDA, float32": torch.float32}
EAGER = (*STYLES, FLASH, REFERENCE)


@dataclass(frozen=True)
class Feature:
    """Something that a user may ask for.

    Attributes:
        name: as the document calls it.
        names: what a refusal must say; empty if none is to be expected.
        case: fields of :class:`Case`: shapes and masks, which style and oracle are told of. Documents go to the call.
        style: told the style beside them.
        call: told the call beside q, k, v, documents, sinks and shared keys.
        renamed: names under which what :class:`Case` has goes to the call.
        module: under the style.
        made: makes the module parallel.
        around: the styled module as it is called.
        within: context of the call.
        change: of q, k, v.
        gradients: how often to differentiate.
        compiled: whether it is tried out under torch.compile, where a cell takes a second.
        dynamic: a compiler takes all sizes for symbols.
        alone: the only rank that asks for ``style``, ``call`` and ``change``.
        kinds: types of a refusal.
        columns: where the feature has a meaning; everywhere if empty.
    """

    name: str
    names: str = ""
    case: dict[str, Any] = field(default_factory=dict)
    style: Callable[[Case], dict[str, Any]] = lambda case: {}
    call: Callable[[Case], dict[str, Any]] = lambda case: {}
    renamed: dict[str, str] = field(default_factory=dict)
    module: Callable[[], nn.Module] = Inner
    made: Callable[[nn.Module, DeviceMesh, ParallelStyle], nn.Module] = parallelize_module
    around: Callable[[nn.Module], Callable[..., Tensor]] = lambda module: module
    within: Callable[[], AbstractContextManager] = nullcontext
    change: Callable[..., Sequence[Tensor]] = lambda *qkv: qkv
    gradients: int = 1
    compiled: bool = False
    dynamic: bool | None = None
    alone: int | None = None
    kinds: tuple[str, ...] = REFUSALS
    columns: tuple[Column, ...] = ()

    @property
    def asks_here(self) -> bool:
        """Whether this rank asks for it."""
        return self.alone in (None, dist.get_rank())


class Holding(Inner):
    """An inner attention with something in it."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        for name, thing in held.items():
            setattr(self, name, thing)


class CausalByDefault(Inner):
    """One whose signature says what it computes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True) -> Tensor:
        raise NotImplementedError


def call(**given: Any) -> Callable[[Case], dict[str, Any]]:
    """What does not depend on the case."""
    return lambda case: given


def pickled(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> nn.Module:
    return parallelize_module(module, mesh, pickle.loads(pickle.dumps(style)))


def copied(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> nn.Module:
    return copy.deepcopy(parallelize_module(module, mesh, style))


def twice(module: nn.Module, mesh: DeviceMesh, style: ParallelStyle) -> nn.Module:
    return parallelize_module(parallelize_module(module, mesh, copy.copy(style)), mesh, style)


def checkpointed(module: nn.Module) -> Callable[..., Tensor]:
    return lambda *tensors, **given: checkpoint(
        module, *tensors, use_reentrant=False, context_fn=save_attention(), **given
    )


def with_tangent(q: Tensor, k: Tensor, v: Tensor) -> Sequence[Tensor]:
    return forward_ad.make_dual(q, torch.zeros_like(q)), k, v


def one_longer(*qkv: Tensor) -> Sequence[Tensor]:
    return [torch.cat([x, x[:, :, :1]], 2) for x in qkv]


def ids(case: Case) -> Tensor:
    return documents_of(Case(**({"length": case.total, "batch": case.batch} | PACKED)))


SECTIONS: dict[str, tuple[Feature, ...]] = {
    "Masks": (
        Feature("none: every query sees every key", compiled=True),
        Feature("causal", case=CAUSAL),
        Feature("causal, `is_causal=True` at the call as well", case=CAUSAL, call=call(is_causal=True)),
        Feature("`is_causal=True` at the call, not in the style", "is_causal=True", call=call(is_causal=True)),
        Feature("sliding window to the left, causal", case=CAUSAL | {"window_size": (5, 0)}),
        Feature("sliding window to both sides", case={"window_size": (3, 2)}, compiled=True),
        Feature(
            "Hugging Face's `sliding_window=6` at the call, in the style `window_size=(5, 0)`",
            case=CAUSAL | {"window_size": (5, 0)},
            call=call(sliding_window=6),
        ),
        Feature("`window_size` at the call, not in the style", "window_size=(5, 0)", call=call(window_size=(5, 0))),
        Feature("prefix seen by all, causal (`prefix_length`)", case=CAUSAL | {"prefix_length": 6}, compiled=True),
        Feature(
            "prefix with a window",
            "prefix_length",
            CAUSAL | {"prefix_length": 6},
            style=call(window_size=(5, 0)),
        ),
        Feature("`mask_mod` in the style", case={"mask": "per_head"}, compiled=True),
        Feature("`mask_mod` of which some queries see nothing", case={"mask": "blind"}),
        Feature(
            "`mask_mod` at the call", "mask_mod", {"mask": "per_head"}, renamed={"mask_mod": "mask_mod"}, compiled=True
        ),
        Feature("`BlockMask` in the style", case=BLOCKS),
        Feature(
            "`BlockMask` at the call (`block_mask`)",
            "block_mask",
            BLOCKS,
            renamed={"mask_mod": "block_mask"},
            compiled=True,
        ),
        Feature(
            "`BlockMask` at the call, torchtitan's name (`attention_masks`)",
            "attention_masks",
            BLOCKS,
            renamed={"mask_mod": "attention_masks"},
        ),
        Feature("`mask_mod` with `is_causal`", "mask_mod", {"mask": "per_head"}, style=call(is_causal=True)),
        Feature(
            "a tensor as mask (`attn_mask`)", "attn_mask", call=call(attn_mask=torch.ones(16, 16).bool()), compiled=True
        ),
        Feature("a tensor as mask (`attention_mask`)", "attention_mask", call=call(attention_mask=torch.ones(2, 16))),
    ),
    "Packed documents": (
        Feature("`document_ids`, rows that differ", case=PACKED, compiled=True),
        Feature("`document_ids`, causal with a window", case=PACKED | CAUSAL | {"window_size": (4, 0)}),
        Feature("`cu_seqlens`", case=LENGTHS, compiled=True),
        Feature(
            "`document_ids` and `cu_seqlens`",
            "document",
            PACKED,
            call=lambda case: {"cu_seqlens": torch.tensor([0, 16])},
        ),
        Feature("documents with a prefix", "documents", PACKED | CAUSAL, style=call(prefix_length=6)),
        Feature("documents with a `mask_mod`", "documents", PACKED, style=call(mask_mod=MASK_MODS["per_head"])),
        Feature(
            "FlashAttention's names (`cu_seq_lens_q`)", "cu_seq_lens_q", call=call(cu_seq_lens_q=torch.tensor([0, 16]))
        ),
    ),
    "Token orders": (
        Feature("contiguous, causal", case=CAUSAL),
        Feature("head_tail, causal", case=CAUSAL | {"order": "head_tail"}, compiled=True),
        Feature("head_tail, odd shards", case=CAUSAL | {"order": "head_tail", "shard": 3}),
        Feature("head_tail, window", case={"order": "head_tail", "window_size": (3, 2)}),
        Feature("head_tail, `mask_mod`", case={"order": "head_tail", "mask": "per_head"}),
        Feature("head_tail, documents", case=PACKED | CAUSAL | {"order": "head_tail"}),
        Feature(
            "document_head_tail, `document_ids`", case=PACKED | CAUSAL | {"order": "document_head_tail"}, compiled=True
        ),
        Feature("document_head_tail, `cu_seqlens`", case=LENGTHS | CAUSAL | {"order": "document_head_tail"}),
        Feature(
            "document_head_tail without documents", "document_head_tail", CAUSAL, style=call(order="document_head_tail")
        ),
        Feature("none, without a mask", style=call(order=None), compiled=True),
        Feature("none, causal", "TokenOrder", CAUSAL, style=call(order=None)),
        Feature("none, documents", "TokenOrder", PACKED, style=call(order=None), compiled=True),
    ),
    "Lengths": (
        Feature("ranks do not divide it (`length`)", case=CAUSAL | {"length": 14}),
        Feature("ranks do not divide it, head_tail", case=CAUSAL | {"length": 15, "order": "head_tail"}, compiled=True),
        Feature(
            "ranks do not divide it, document_head_tail",
            "document_head_tail",
            UNEVEN | CAUSAL | {"length": 14, "order": "document_head_tail"},
        ),
        Feature(
            "ranks do not divide it, `length` at the call",
            "length",
            CAUSAL | {"length": 14},
            call=call(length=14),
            style=call(length=None),
        ),
        Feature("ranks do not divide it, `length` left out", "q", CAUSAL | {"length": 14}, style=call(length=None)),
        Feature("fewer tokens than ranks", case=CAUSAL | {"length": 3}, compiled=True),
        Feature("cross attention", case={"kv_length": 20}, compiled=True),
        Feature("cross attention, ranks do not divide the keys (`kv_length`)", case={"length": 16, "kv_length": 7}),
        Feature("cross attention under a mask", "length", {"kv_length": 20}, style=call(is_causal=True)),
        Feature("joint attention, text on all ranks (`replicated`)", "replicated", {"replicated": 3}, compiled=True),
        Feature(
            "joint attention, padded text (`replicated`, `mask_mod`)",
            "replicated",
            {"replicated": 3, "mask": "padded_text", "order": "head_tail"},
        ),
        Feature("`replicated` under a mask", "replicated", {"replicated": 3}, style=call(is_causal=True)),
        Feature("symbolic under a compiler", case=CAUSAL, dynamic=True, columns=(COMPILED,), compiled=True),
        Feature("symbolic under a compiler, documents", case=PACKED, dynamic=True, columns=(COMPILED,), compiled=True),
        Feature(
            "symbolic under a compiler, `mask_mod`",
            case={"mask": "per_head"},
            dynamic=True,
            columns=(COMPILED,),
            compiled=True,
        ),
    ),
    "Heads": (
        Feature("grouped queries, 4 heads on 2 of keys", case={"heads": 4, "kv_heads": 2}, compiled=True),
        Feature("multi-query, 4 heads on 1 of keys", case={"heads": 4, "kv_heads": 1}),
        Feature("6 heads on 3 of keys, which ranks do not divide", case={"heads": 6, "kv_heads": 3}),
        Feature("5 heads, which ranks do not divide", case={"heads": 5, "kv_heads": 5}),
        Feature("1 head", "cp_ulysses", case={"heads": 1, "kv_heads": 1}, compiled=True),
        Feature("values wider than keys", case={"value_dim": 12}),
        Feature("MLA: values narrower, rotary keys shared (`k_shared`)", case={"shared_dim": 4, "value_dim": 6}),
        Feature(
            "MLA, causal, head_tail",
            case=CAUSAL | {"order": "head_tail", "shared_dim": 4, "value_dim": 6},
            compiled=True,
        ),
        Feature("MLA, multi-query", case={"shared_dim": 4, "value_dim": 6, "kv_heads": 1}),
    ),
    "Scores": (
        Feature("scale in the style", case={"scale": 0.3}),
        Feature("scale at the call", case={"scale": 0.3}, renamed={"scale": "scale"}, compiled=True),
        Feature("another scale at the call", "scale=0.5", {"scale": 0.3}, call=call(scale=0.5)),
        Feature("a learned scale (a tensor)", "scale", call=lambda case: {"scale": torch.tensor(0.3)}),
        Feature("sinks", case={"sinks": True}),
        Feature(
            "sinks, causal with a window (`s_aux`)",
            case=CAUSAL | {"window_size": (5, 0), "sinks": True},
            renamed={"sinks": "s_aux"},
            compiled=True,
        ),
        Feature("soft cap (`softcap`)", "kernel='reference'", {"softcap": 2.0}, compiled=True),
        Feature(
            'soft cap, `kernel="reference"`', case={"softcap": 2.0}, style=call(kernel="reference"), columns=STYLES
        ),
        Feature("soft cap at the call, not in the style", "softcap=30.0", call=call(softcap=30.0)),
        Feature("dropout (`dropout_p=0.1`)", "dropout_p=0.1", call=call(dropout_p=0.1), compiled=True),
        Feature("no dropout (`dropout_p=0.0`)", call=call(dropout_p=0.0)),
        Feature("`score_mod`", "score_mod", call=lambda case: {"score_mod": MASK_MODS["per_head"]}),
        Feature("ALiBi (`alibi_slopes`)", "alibi_slopes", call=lambda case: {"alibi_slopes": torch.ones(case.heads)}),
    ),
    "Calls, modules, gradients": (
        Feature("a keyword that nobody knows", "temperature", call=call(temperature=0.5)),
        Feature("cached keys (`past_key_value`)", "past_key_value", call=call(past_key_value=(None, None))),
        Feature("module that is causal by default", case=CAUSAL, module=CausalByDefault),
        Feature("module that is causal by default, style that is not", "is_causal=True", module=CausalByDefault),
        Feature(
            "module with another window as an attribute", "sliding_window", module=lambda: Holding(sliding_window=6)
        ),
        Feature("module with dropout", "drop", module=lambda: Holding(drop=nn.Dropout(0.1))),
        Feature("module with parameters", "weight", module=lambda: Holding(norm=nn.LayerNorm(8))),
        Feature("a second style on a module", "already", made=twice),
        Feature("a style that was pickled", case=CAUSAL | {"window_size": (5, 0)}, made=pickled),
        Feature("a styled module that was copied (`deepcopy`)", case=CAUSAL, made=copied),
        Feature("activation checkpoint (`save_attention`)", case=CAUSAL, around=checkpointed, compiled=True),
        Feature("no gradient (`torch.no_grad`)", case=CAUSAL, within=torch.no_grad, gradients=0),
        Feature(
            "forward-mode differentiation",
            "forward-mode",
            within=forward_ad.dual_level,
            change=with_tangent,
            columns=EAGER,
        ),
        Feature(
            "a second derivative",
            "context-parallel attention has no second derivative",
            gradients=2,
            columns=EAGER,
        ),
        Feature("float32", case=CAUSAL | {"dtype": "float32"}, columns=(*STYLES, *BACKENDS[:-1])),
        Feature("bfloat16", case=CAUSAL | {"dtype": "bfloat16"}, columns=(*STYLES, *BACKENDS[:-1])),
        Feature(
            "float32 under autocast to bfloat16 (`torch.autocast`)",
            case=CAUSAL | {"dtype": "bfloat16"},
            within=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
            change=lambda *qkv: [x.float() for x in qkv],
            compiled=True,
        ),
        Feature("integers", "int64", change=lambda *qkv: [x.long() for x in qkv], compiled=True),
    ),
}

ALONE: tuple[Feature, ...] = (
    Feature("dropout", "dropout_p", call=call(dropout_p=0.1), compiled=True),
    Feature("a tensor as mask", "attn_mask", call=call(attn_mask=torch.ones(16, 16).bool())),
    Feature("`score_mod`", "score_mod", call=call(score_mod=MASK_MODS["per_head"])),
    Feature("a learned scale", "scale", call=lambda case: {"scale": torch.tensor(0.3)}),
    Feature("another scale", "scale", style=call(scale=0.5)),
    Feature("another window", "window_size", CAUSAL, style=call(window_size=(5, 0))),
    Feature("another mask", "is_causal", style=call(is_causal=True)),
    Feature("another `mask_mod`", "mask", {"mask": "per_head"}, style=call(mask_mod=MASK_MODS["checker"])),
    Feature(
        "a `BlockMask` at the call",
        "mask",
        call=lambda case: {"block_mask": mask_of(Case(**BLOCKS, batch=2, heads=4))},
        compiled=True,
    ),
    Feature("another token order", "order", CAUSAL, style=call(order="head_tail")),
    Feature("another kernel", "kernel", style=call(kernel="reference")),
    Feature("a soft cap", "softcap", style=call(softcap=2.0)),
    Feature("documents", "ids", call=lambda case: {"document_ids": ids(case)}, compiled=True),
    Feature(
        "other documents",
        "document",
        PACKED,
        call=lambda case: {"document_ids": documents_of(Case(length=16, batch=2, **SHIFTED))},
    ),
    Feature(
        "documents of another length", "document_ids", PACKED, call=lambda case: {"document_ids": ids(case)[:, 1:]}
    ),
    Feature(
        "cumulative lengths that are none",
        "cu_seqlens",
        LENGTHS,
        call=lambda case: {"cu_seqlens": torch.tensor([0, 9, 3, 16])},
    ),
    Feature("sinks", "sinks", call=lambda case: {"sinks": torch.zeros(case.heads)}),
    Feature("sinks of another shape", "sinks", {"sinks": True}, call=lambda case: {"sinks": torch.zeros(3)}),
    Feature("a shard of another length", "the shape of q", change=one_longer, compiled=True),
    Feature("another dtype", "dtype", change=lambda *qkv: [x.float() for x in qkv]),
    Feature("integers", "int64", change=lambda *qkv: [x.long() for x in qkv]),
    Feature("another `length`", "length", CAUSAL | {"length": 14}, style=call(length=15)),
    Feature("more `replicated` tokens", "replicated", {"replicated": 3}, style=call(replicated=2)),
)


Key = tuple[str, str, str]
"""Section, feature and column of a cell."""

ON_ONE_RANK = "On rank 2 alone"
FEATURES = {(section, f.name): f for section, rows in SECTIONS.items() for f in rows}
FEATURES |= {(ON_ONE_RANK, f.name): replace(f, alone=2) for f in ALONE}
COLUMNS = {column.name: column for column in (*STYLES, *BACKENDS)}


def cells() -> dict[str, list[Key]]:
    """All that is tried out, by column: ranks are to do one column at a time."""
    listed: dict[str, list[Key]] = {name: [] for name in COLUMNS}
    for (section, name), feature in FEATURES.items():
        # As DTensors, what one rank does the others know.
        for column in feature.columns or ((*STYLES, COMPILED) if feature.alone is not None else COLUMNS.values()):
            if feature.compiled or column is not COMPILED:
                listed[column.name].append((section, name, column.name))
    return listed


class Outcome(NamedTuple):
    """What one rank saw of a cell.

    Attributes:
        error: largest difference to one process; NaN where something was raised, or nothing can be compared.
        raised: type of what was raised, or empty.
        message: its text, or why nothing can be compared.
        sent: collectives of attention that started before.
    """

    error: float
    raised: str
    message: str
    sent: tuple[str, ...]


def try_out(keys: Sequence[Key]) -> list[Outcome]:
    """Try cells out, on this rank of four."""
    return [outcome(FEATURES[section, name], COLUMNS[column]) for section, name, column in keys]


def outcome(feature: Feature, column: Column) -> Outcome:
    """Try one cell out, on this rank of four."""
    if column.how == "compiled":
        torch._dynamo.reset()
    error, raised, message, compare = float("nan"), "", "", None
    with recorded() as sent:
        try:
            compare = attempt(feature, column, sent)
        except Exception as refusal:  # the type is what is tested
            raised, message = type(refusal).__name__, str(refusal)
    everyone: list[str] = [""] * RANKS
    # After a refusal, this fails where ranks no longer find each other.
    dist.all_gather_object(everyone, raised)
    if compare is not None and not any(everyone):
        try:
            error = compare()
        except IncomparableError as wrong:
            message = str(wrong)
    return Outcome(error, raised, message, tuple(sent))


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Names of the collectives that attention, or a redistribution, starts; comparing calls is none of them."""
    ops, sent = torch.ops._c10d_functional, []

    class Recording:
        """A collective that leaves a note."""

        def __init__(self, name: str) -> None:
            self.name, self.op = name, getattr(ops, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            sent.append(self.name)
            return self.op(*args, **kwargs)

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.op, attribute)

    names = ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "reduce_scatter_tensor", "broadcast")
    with mock.patch.multiple(ops, **{name: Recording(name) for name in names}):
        yield sent


def attempt(feature: Feature, column: Column, sent: list[str]) -> Callable[[], float]:
    """Make the call and differentiate it; what is returned compares the results with those of one process."""
    case = case_of(feature, column)
    mesh = mesh_of(case.ring, case.team, ulysses=case.ulysses)
    style = column.style(**told(feature, column, case, mesh), layout="BNLH", check=False)
    attend = feature.around(feature.made(feature.module(), mesh, style))
    shards = Shards(case, mesh)
    with feature.within():
        leaves = shards.leaves(feature.change if feature.asks_here else lambda *qkv: qkv, column.how == "DTensors")
        extras = {feature.renamed.get(name, name): x for name, x in list(leaves.items())[3:]}
        given = extras | asked(feature, case)

        def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, **given)

        if column.how == "compiled":
            model = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=feature.dynamic)
        results = [model(*list(leaves.values())[:3])]
    for order in range(feature.gradients):
        again = order + 1 < feature.gradients
        grad_outs = [shards.grad_out_like(results[0])] if order == 0 else [torch.ones_like(x) for x in results]
        grads = torch.autograd.grad(results, list(leaves.values()), grad_outs, create_graph=again)
        results = [*results, *grads] if order == 0 else results
        if again:
            sent.clear()
            results = list(grads)
    return lambda: shards.error(dict(zip(("out", *(f"d{name}" for name in leaves)), results, strict=False)))


def case_of(feature: Feature, column: Column) -> Case:
    """Shapes, masks and inputs of a cell: 4 tokens on each rank unless the feature is another length."""
    return Case(**(column.mesh | {"batch": 2, "heads": 4, "kv_heads": 4, "head_dim": 8} | feature.case))


def told(feature: Feature, column: Column, case: Case, mesh: DeviceMesh) -> dict[str, Any]:
    """What the style is given."""
    left_out = {"schedule", "rotate", "rotate_forward", "kernel", "document_ids", "cu_seqlens", *feature.renamed}
    if column.how == "DTensors":  # they know
        left_out |= {"length", "kv_length"}
    options = {name: value for name, value in case.options.items() if name not in left_out}
    options |= {"order": case.order} | column.options | (feature.style(case) if feature.asks_here else {})
    if options["order"] is not None:
        options["order"] = TokenOrder(options["order"], mesh)
    return options


def asked(feature: Feature, case: Case) -> dict[str, Any]:
    """What the call is given beside tensors that are sharded."""
    documents = {case.packed: documents_of(case)} if case.documents else {}
    renamed = {new: case.options[name] for name, new in feature.renamed.items() if name in case.options}
    return documents | renamed | (feature.call(case) if feature.asks_here else {})


class Shards:
    """What this rank holds of a case's tensors, and how it compares with one process.

    Args:
        case: the case.
        mesh: its mesh.
    """

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.mesh, self.index = case, mesh, index_of(case)
        q, k, v, self.grad_out = draw(case)
        self.whole = {"q": q, "k": k, "v": v} | draw_extras(case)

    def leaves(self, change: Callable[..., Sequence[Tensor]], distributed: bool) -> dict[str, Tensor]:
        """q, k, v and the extras, by name."""
        shards = {name: x if name == "sinks" else self._own(x, name) for name, x in self.whole.items()}
        shards |= dict(zip("qkv", change(*list(shards.values())[:3]), strict=True))
        if distributed:
            shards = {name: self._distributed(x, name) for name, x in shards.items()}
        return {name: x.requires_grad_(x.is_floating_point()) for name, x in shards.items()}

    def grad_out_like(self, out: Tensor) -> Tensor:
        """The gradient of this rank's output."""
        grad = self._own(self.grad_out, "q")
        grad[:, :, : self.case.replicated] *= share_of(self.case, self.index)
        if not isinstance(out, DTensor):
            return grad
        return DTensor.from_local(
            grad, self.mesh, out.placements, run_check=False, shape=out.shape, stride=out.stride()
        )

    def error(self, results: dict[str, Tensor]) -> float:
        """The largest difference; all ranks call it together."""
        expected, pairs = one_process(self.case), {}
        for name, got in results.items():
            if isinstance(got, DTensor):
                got = got.full_tensor() if name == "dsinks" else got.to_local()
            elif name == "dsinks":
                got = summed(got)
            got, want = got.detach().double(), expected[name]
            if name != "dsinks":
                want = self._own(want, "q" if name == "out" else name[1:])
                replicated = self.case.replicated
                if replicated and name != "out":
                    got = torch.cat([summed(got[:, :, :replicated].contiguous()), got[:, :, replicated:]], 2)
            if got.numel() or want.numel():  # a rank may hold no token
                pairs[name] = got, want
        return worst_error(pairs) if pairs else 0.0

    def _own(self, x: Tensor, name: str) -> Tensor:
        rows_BL = self._rows("q" if name == "q" else "kv")[:, None, :, None]
        return x.gather(2, rows_BL.expand(x.shape[0], x.shape[1], -1, x.shape[3]))

    def _rows(self, side: str) -> Tensor:
        """Rows (B or 1, L) of the whole tensors, the replicated ones first."""
        case, length = self.case, self.case.total if side == "q" else self.case.kv_total
        if case.order == "document_head_tail":
            order = TokenOrder(case.order, self.mesh)
            positions = sequence_positions(length, order, **{case.packed: documents_of(case)})
        else:
            positions = torch.tensor(held(self.index, case.axes, case.order, length), dtype=torch.int64)
        positions = positions if positions.ndim == 2 else positions[None]
        first = torch.arange(case.replicated).expand(len(positions), -1)
        return torch.cat([first, case.replicated + positions], 1)

    def _distributed(self, shard: Tensor, name: str) -> Tensor:
        whole, placement = self.whole[name], Replicate() if name == "sinks" else Shard(2)
        return DTensor.from_local(
            shard, self.mesh, [placement] * self.mesh.ndim, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


@cache
def one_process(case: Case) -> dict[str, Tensor]:
    """What it computes; columns with one mesh have the same cases."""
    return oracle(case).by_name()


class BrokenError(AssertionError):
    """A cell that neither works nor is refused as it should be."""


def verdict(feature: Feature, column: Column, outcomes: Sequence[Outcome]) -> str:
    """What a cell comes to.

    Args:
        feature: its row.
        column: its column.
        outcomes: by rank.

    Returns:
        Empty if it works, otherwise the telling part of the refusal.

    Raises:
        BrokenError: results are wrong, or ranks were refused differently, too late, or for another reason.
    """
    raised = {seen.raised for seen in outcomes}

    def insist(condition: bool, what: str) -> None:
        if not condition:
            raise BrokenError(f"{feature.name} / {column.name}: {what}: {list(outcomes)}")

    if raised == {""}:
        insist(feature.alone is None, "accepted though one rank alone asked for it")
        tolerance = TOLERANCE[case_of(feature, column).dtype]
        insist(all(seen.error <= tolerance for seen in outcomes), "wrong")
        insist(any(seen.sent for seen in outcomes), "nothing was sent, so refusals are not told from works")
        return ""
    # Others than the rank that is alone with it are told so by a ValueError.
    insist("" not in raised and raised <= {*feature.kinds}, "not refused on every rank")
    insist(len(raised) == 1 or feature.alone is not None, "ranks raised different errors")
    insist(not any(seen.sent for seen in outcomes), "sent before it was refused")
    declared = [names for names in (feature.names, column.names) if names]
    for seen in outcomes:
        insist(any(names in seen.message for names in declared), "refused without naming what")
    if feature.kinds != REFUSALS:
        return feature.names
    return telling(outcomes[feature.alone or 0].message)


def telling(message: str) -> str:
    """A refusal without what differs from column to column or run to run, in one line of a document."""
    message = re.sub(r"^call \d+ on this mesh: ", "", message)
    message = re.sub(r"^rank \d of the mesh cannot make this call: ", "", message)
    message = re.sub(r"^\w+Parallel:? ", "", message)
    message = re.sub(r"<(?:function )?(\w+) at 0x[0-9a-f]+>", r"\1", message)
    message = re.sub(r"\b([0-9a-f]{16}|\d{7,10})\b", "…", message)
    message = " ".join(message.split())
    return message if len(message) <= 180 else f"{message[:177]}..."


def try_all(pool: RankPool, wanted: Collection[Key]) -> dict[Key, list[Outcome]]:
    """What all ranks saw of these cells."""
    seen: dict[Key, list[Outcome]] = {}
    for keys in ([key for key in column if key in wanted] for column in cells().values()):
        for part in (keys[i : i + 16] for i in range(0, len(keys), 16)):  # a call has a time limit
            by_rank = pool.run(try_out, part)
            seen |= {key: list(outcomes) for key, outcomes in zip(part, zip(*by_rank, strict=True), strict=True)}
    return seen


def verdicts(seen: dict[Key, list[Outcome]]) -> dict[Key, str]:
    """What cells come to: see :func:`verdict`."""
    return {key: verdict(FEATURES[key[:2]], COLUMNS[key[2]], outcomes) for key, outcomes in seen.items()}


HEAD = """\
# What works with what

Generated by `python -m tests.features > docs/features.md`; `tests/test_features.py` fails when it is out of date.

**yes** was run for this table: on four ranks, output and gradients of the shards are those of one process, in float64
to 1e-10. **refused** was run too: every rank raised what is quoted below the table, which names what cannot be done,
had sent nothing but the comparison of calls, and met the others afterwards. **–** was not tried, or has no meaning.

Sequences are of 16 tokens, 4 on each rank, unless the row says otherwise. What options mean is in the docstring of
`context_parallel_attention`. What stands in a module's code, and no call asks for, `check_equivalence` finds.
"""

BY_STYLE = """\
## By style

Eager, plain tensors on the CPU, `kernel="auto"`. RingParallel has a ring of 4, WallFacerParallel rings of 2 and teams
of 2, UlyssesParallel an axis of 4; the last column is WallFacerParallel on a mesh `ulysses=2, ring=2`.
"""

BY_BACKEND = """\
## By kernel, compiler and device

WallFacerParallel on a mesh `ulysses=2, ring=2`. The first three columns are eager on the CPU with that `kernel=`;
DTensors and `torch.compile(fullgraph=True, backend="aot_eager")` have `kernel="auto"`. Under CUDA stands which kernel
`"auto"` is there, or the refusal, both of which are decided from names and dtypes: **nothing in these two columns was
run**. Rows that all columns refuse in the same words are left out here.
"""

BY_RANK = """\
## Asked for on one rank alone

Rank 2 asks for it and the others do not. All of them refuse.
"""


def document(found: dict[Key, str]) -> str:
    """docs/features.md, from all verdicts."""
    sections = {name: [f.name for f in rows] for name, rows in SECTIONS.items()}
    by_style = _table(sections, [c.name for c in STYLES], found)
    by_kernel = {
        name: [row for row in rows if not _is_one_refusal(found, (name, row))] for name, rows in sections.items()
    }
    by_backend = _table(by_kernel, [c.name for c in BACKENDS] + list(CUDA), found | _on_cuda(found))
    alone = _table({ON_ONE_RANK: [f.name for f in ALONE]}, [c.name for c in (*STYLES, COMPILED)], found)
    return "\n".join([HEAD, BY_STYLE, by_style, BY_BACKEND, by_backend, BY_RANK, alone])


def entries(document: str) -> dict[Key, str]:
    """What a document says of cells: nothing where they work, otherwise the refusal; without the rows it leaves out."""
    found: dict[Key, str] = {}
    for table in document.split("\n## ")[1:]:
        notes = {f"refused ({number})": text for number, text in re.findall(r"^(\d+)\. `(.*)`$", table, re.MULTILINE)}
        lines = [line for line in table.splitlines() if line.startswith("|")]
        (_, *columns), _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
        section = ON_ONE_RANK
        for name, *texts in rows:
            section = name.strip("*") if name.startswith("**") else section
            for column, text in zip(columns, texts, strict=True):
                if column in COLUMNS and text not in ("", "–"):
                    found[section, name, column] = "" if text == "yes" else notes[text]
    return found


def _is_one_refusal(found: dict[Key, str], row: tuple[str, str]) -> bool:
    """Whether what runs a feature does not matter, since all refuse it alike."""
    texts = {found[*row, column.name] for column in BACKENDS if (*row, column.name) in found}
    return len(texts) == 1 and "" not in texts


def _table(sections: dict[str, list[str]], columns: list[str], found: dict[Key, str]) -> str:
    notes: dict[str, int] = {}

    def cell(key: Key) -> str:
        text = found.get(key)
        if text is None or text.startswith("("):
            return "–" if text is None else text.strip("()")
        return f"refused ({notes.setdefault(text, len(notes) + 1)})" if text else "yes"

    lines = [f"| | {' | '.join(columns)} |", "|" + " --- |" * (len(columns) + 1)]
    for section, rows in sections.items():
        lines += [f"| **{section}** |" + " |" * len(columns)] if len(sections) > 1 else []
        for row in rows:
            filled = [cell((section, row, column)) for column in columns]
            if set(filled) != {"–"}:
                lines.append(f"| {row} | {' | '.join(filled)} |")
    return "\n".join([*lines, "", *(f"{number}. `{text}`" for text, number in notes.items()), ""])


def _on_cuda(found: dict[Key, str]) -> dict[Key, str]:
    """The refusal that every kernel has, or what becomes of "auto" there."""
    cuda: dict[Key, str] = {}
    for (section, name), feature in FEATURES.items():
        on_cpu = [found.get((section, name, column.name)) for column in (FLASH, REFERENCE)]
        for column, dtype in CUDA.items():
            if None not in on_cpu and "dtype" not in feature.case:
                always = all(on_cpu)
                cuda[section, name, column] = str(on_cpu[0]) if always else _kernel_on_cuda(feature, dtype)
    return cuda


def _kernel_on_cuda(feature: Feature, dtype: torch.dtype) -> str:
    case = case_of(feature, FLASH)
    head_dim = case.head_dim + case.shared_dim
    need = Need("cuda", dtype, head_dim, case.value_dim or head_dim, bool(case.mask), case.softcap or 0.0)
    try:
        # Installed or not; and heads are narrower here than models'.
        with mock.patch.object(flash_attn, "_missing", return_value=""), mock.patch.object(flex, "_LEAST", 1):
            kernel = select_kernel("auto", need)
    except ValueError as refusal:
        return telling(str(refusal))
    return f"({kernel.name}, not run)"


def write() -> None:
    """Try everything out and print the document."""
    pool = RankPool(RANKS, timeout=300)
    print(document(verdicts(try_all(pool, [key for keys in cells().values() for key in keys]))), end="")
    pool.close()


if __name__ == "__main__":
    # Ranks import what they run by its module's name.
    from tests import features

    features.write()
