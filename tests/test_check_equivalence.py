"""Modules that compute something else than the style are found out, with the cause, on all ranks; honest ones pass."""

import copy
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import create_block_mask

from tests.cases import Inner, mesh_of, told
from tests.pairwise import few, tiers
from wallfacer_dt import (
    EquivalenceError,
    RingParallel,
    TokenOrder,
    UlyssesParallel,
    WallFacerParallel,
    check_equivalence,
    context_mesh,
    shard_sequence,
)
from wallfacer_dt.attention import AttentionOptions
from wallfacer_dt.equivalence.cause import Row, _hint
from wallfacer_dt.equivalence.inputs import Sizes, _spread, draw, heads_to_try, shortened
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]
STYLES = {"ring": RingParallel, "wallfacer": WallFacerParallel, "ulysses": UlyssesParallel}


def causal(length: int, window: int | None = None) -> Tensor:
    back = torch.arange(length).unsqueeze(1) - torch.arange(length)
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention on (B, N, L, H), as models write it out."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : v.shape[2]] @ v


class Causal(nn.Module):
    """Causal attention in (B, L, N, H) with a secret or none; ``without`` is a rank that has no secret."""

    def __init__(self, secret: str = "", value: Any = None, without: int | None = None) -> None:
        super().__init__()
        self.secret = "" if without is not None and dist.get_rank() == without else secret
        self.value = value

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = None if self.secret == "no mask" else causal(q.shape[2], self.value if self.secret == "window" else None)
        options = {self.secret: self.value} if self.secret in ("scale", "softcap", "sinks") else {}
        if self.secret == "keys of itself":
            k = q[:, : k.shape[1]]
        if self.secret == "v":
            v = v * self.value
        if self.secret == "rotary":
            angles = torch.arange(q.shape[2]).unsqueeze(1) / 10.0 ** torch.arange(q.shape[3] // 2)
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (
                torch.view_as_real(torch.view_as_complex(x.unflatten(3, (-1, 2)).contiguous()) * turn).flatten(3)
                for x in (q, k)
            )
        if self.secret == "learned":
            v = v * self.value[0]
        if self.secret == "norm":
            q = F.normalize(q, dim=-1)
        if self.secret == "heads":
            k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
        if self.secret == "detached":
            k = k.detach()
        if self.secret == "swapped":
            k, v = v, k
        if self.secret == "raises":
            raise RuntimeError("not on this machine")
        if self.secret == "nan gradient":
            q = q + 0 * (0 * q).sqrt()
        out = written_out(q, k, v, mask, **options)
        if self.secret == "nan":
            out = out.index_fill(2, torch.tensor(self.value), torch.nan)
        if self.secret == "dropout":
            out = F.dropout(out, self.value, self.training)
        if self.secret == "flattened":
            return out.transpose(1, 2).flatten(2)
        return (out.transpose(1, 2), None) if self.secret == "tuple" else out.transpose(1, 2)


class AcrossRows(nn.Module):
    """Causal attention in (B, L, N, H) of rows that see each other, or of one length, which has a mask that large."""

    def __init__(self, way: str, length: int | None = None) -> None:
        super().__init__()
        self.way, self.length = way, length

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length = q.shape[:2]
        if self.way == "one row" and batch > 1:
            raise ValueError("one row")
        if self.way == "first row":
            k, v = (x[:1].expand_as(x) for x in (k, v))
        elif self.way == "last row, detached":
            v = v + (v[-1:] - v).detach()
        mask = causal(self.length or length)
        if self.way == "one sequence":
            q, k, v = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v))
            mask = causal(batch * length)
        out = written_out(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)
        return out.reshape(batch, length, *out.shape[2:])


class MaskOfRow(nn.Module):
    """Every row is masked in its way, as the style is told, too."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, b = torch.arange(q.shape[1]), torch.arange(q.shape[0]).view(-1, 1, 1, 1)
        mask = further_by_row(b, i, i.unsqueeze(1), i)
        return written_out(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)


def further_by_row(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k - b


class InBNLH(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class InBNLHWithoutGroups(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Deaf(nn.Module):
    """Takes an option and does not listen."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
        return Causal("no mask")(q, k, v)


def refusal(module: nn.Module, style: Any, mesh: DeviceMesh, **options: Any) -> tuple[str, str]:
    """What a check raises on this rank."""
    try:
        check_equivalence(module, style, mesh, **options)
    except Exception as error:  # the type is what is tested
        return type(error).__name__, str(error)
    return "", ""


SECRETS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "window": (lambda: Causal("window", 25), {}, "query 76 sees key 0 under the style but not in the module: the "
               "module has a sliding window of 25, window_size=(24, 0), the style a causal mask (is_causal=True)"),
    "wide window": (lambda: Causal("window", 1024), {}, "the module has a sliding window of 1024"),
    "another window": (
        lambda: Causal("window", 25), {"window_size": (16, 0)},
        "the module has a sliding window of 25, window_size=(24, 0), the style a sliding window of 17",
    ),
    "no window": (lambda: Causal(), {"window_size": (1299, 0)}, "the style a sliding window of 1300"),
    "sinks": (lambda: Causal("sinks", torch.zeros(4)), {},
              "in the module the probabilities of a query add up to less than 1: attention sinks?"),
    "scale": (lambda: Causal("scale", 0.24), {}, "scores are 0.96 times the style's: another scale?"),
    "stated scale": (lambda: Causal(), {"scale": 0.5}, "scores are 0.5 times the style's: another scale?"),
    "soft cap": (lambda: Causal("softcap", 50.0), {}, "is there a soft cap"),
    "no mask": (lambda: Causal("no mask"), {},
                "query 0 sees key 1 in the module but not under the style: the module has no mask, the style a causal"),
    "deaf": (Deaf, {}, "the module has no mask, the style a causal mask"),
    "causal": (lambda: Causal(), {"is_causal": False}, "the module has a causal mask (is_causal=True), the style no"),
    "dropout": (lambda: Causal("dropout", 0.1), {}, "is there dropout?"),
    "a gate that is learned elsewhere, and is 1 as yet": (
        lambda: Causal("learned", [nn.Parameter(torch.ones(2, 1, 16))[:1]]), {},
        "the module's output has a gradient by a tensor of shape (2, 1, 16) beside q, k and v, which it finds outside",
    ),
    "keys of itself": (lambda: Causal("keys of itself"), {}, ""),
    "norm": (lambda: Causal("norm"), {}, "the same keys are seen, but"),
    "rotary": (lambda: Causal("rotary"), {}, "q k^T: is there a bias, or are q and k changed, as by rotary"),
    "layout": (InBNLH, {}, "the module's layout is 'BNLH', the style was given layout='BLNH'"),
    "layout, no grouped heads": (InBNLHWithoutGroups, {}, "the module's layout is 'BNLH', the style was given"),
    "other layout": (lambda: Causal(), {"layout": "BNLH"}, "the module's layout is 'BLNH'"),
    "heads": (lambda: Causal("heads"), {}, "query head 1 attends to key and value head 1 in the module, to 0 under"),
    "v": (lambda: Causal("v", 1.5), {}, "probabilities are 1.5 times the style's: are v or the output multiplied"),
    "faint": (lambda: Causal("v", 1e-8), {}, "the same keys are seen, as far as can be told"),
    "detached": (lambda: Causal("detached"), {}, "outputs agree, but not the gradient of k"),
    "nan": (lambda: Causal("nan", 3), {},
            "of 73728 numbers in the module are not finite, the first is nan at (0, 0, 3, 0)"),
    "nan gradient": (lambda: Causal("nan gradient"), {},
                     "the gradient of q: 73728 of 73728 numbers in the module are not finite, the first is nan"),
    "swapped": (lambda: Causal("swapped"), {}, "takes q, k, v in another order: given (q, v, k) it agrees"),
    "by document": (lambda: Causal("window", 25), {"order": BY_DOCUMENT}, "the module has a sliding window of 25"),
    "without gradient": (
        lambda: OutputAlone("window", 25), {},
        "; the same keys are seen, as far as can be told",
    ),
    "tuple": (lambda: Causal("tuple"), {}, "the module returns a tuple, a style a tensor"),
    "flattened": (lambda: Causal("flattened"), {}, "the module returns shape (1, 1152, 64) for q (1, 1152, 4, 16)"),
    "raises": (
        lambda: Causal("raises"), {},
        "could not be run on q, k, v of 1152 tokens, (4, 2) or (4, 4) heads of 16, layout 'BLNH': RuntimeError: not on",
    ),
    "of one length": (lambda: AcrossRows("", length=60), {}, "Call check_equivalence with length=, heads=,"),
    "rows in one sequence": (lambda: AcrossRows("one sequence"), {},
                             "rows of the batch see each other: what comes of row 0 depends on row 1"),
    "the first row's keys": (lambda: AcrossRows("first row"), {}, "rows of the batch see each other"),
    "the last row's values": (lambda: AcrossRows("last row, detached"), {}, "rows of the batch see each other"),
    "the first row's keys, of one length": (
        lambda: AcrossRows("first row", length=1152), {}, "rows of the batch see each other",
    ),
}  # fmt: skip


def secret(name: str, dtype: torch.dtype | None = None) -> tuple[str, str]:
    module, options, _ = SECRETS[name]
    mesh = mesh_of(2, 1)
    style = WallFacerParallel(**told(mesh, **{"is_causal": True, "order": "head_tail"} | options))
    return refusal(module(), style, mesh, dtype=dtype)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_named_on_every_rank(ranks: Ranks, name: str) -> None:
    found = ranks(2).run(secret, name)
    assert found[0] == found[1]
    assert found[0][0] == "EquivalenceError"
    assert SECRETS[name][2] in found[0][1]


@pytest.mark.parametrize("name", few(["scale", "sinks", "window", "v", "soft cap"], {"window", "soft cap"}))
def test_secrets_show_in_half_precision(ranks: Ranks, name: str) -> None:
    for kind, text in ranks(2).run(secret, name, torch.bfloat16):
        assert kind == "EquivalenceError"
        assert name == "soft cap" or SECRETS[name][2] in text


class SDPA(nn.Module):
    """Called like torch's function, without grouped heads."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False
    ) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)


class Titan(nn.Module):
    """With torchtitan's signature."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        mask = None if attention_masks is None else attention_masks.mask_mod
        if mask is not None:
            i = torch.arange(q.shape[2])
            mask = mask(torch.tensor(0), torch.tensor(0), i.unsqueeze(1), i)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal and mask is None, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


class Telling(nn.Module):
    """Takes what it is told by name, in (B, N, L, H)."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = False,
        softmax_scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        document_ids: Tensor | None = None,
        k_shared: Tensor | None = None,
    ) -> Tensor:
        if k_shared is not None:
            k = torch.cat([k, k_shared.expand(-1, k.shape[1], -1, -1)], -1)
        mask = causal_mask(q.shape[2], sliding_window) if causal else None
        if document_ids is not None:
            same = document_ids.unsqueeze(1) == document_ids
            mask = same if mask is None else same & mask
        return written_out(q, k, v, mask, scale=softmax_scale, softcap=softcap, sinks=s_aux)


causal_mask = causal


class Windowed(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        left, right = window_size
        back = torch.arange(q.shape[2]).unsqueeze(1) - torch.arange(q.shape[2])
        mask = (back <= left if left >= 0 else back == back) & (-back <= right if right >= 0 else back == back)
        return written_out(q, k, v, mask)


class Plain(nn.Module):
    """No mask at all, in (B, L, N, H)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Causal("no mask")(q, k, v)


class Cast(nn.Module):
    """Probabilities of scores that were rounded."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~causal(q.shape[2]), torch.finfo(scores.dtype).min)
        return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


class OutputAlone(Causal):
    """A kernel for inference."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q, k, v).detach()


def blocky(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q // 16 % 3 != k // 16 % 3 + 1)


def mask_of(length: int) -> Any:
    return create_block_mask(blocky, None, None, length, length, device="cpu", BLOCK_SIZE=32)


HONEST: dict[str, tuple[nn.Module, dict[str, Any], dict[str, Any]]] = {
    "BLNH": (Causal(), {"is_causal": True}, {}),
    "BNLH": (InBNLH(), {"is_causal": True, "layout": "BNLH"}, {}),
    "full": (Plain(), {}, {}),
    "SDPA, causal": (SDPA(), {"is_causal": True, "layout": "BNLH"}, {}),
    "SDPA, full": (SDPA(), {"layout": "BNLH"}, {}),
    "SDPA, float64": (SDPA(), {"layout": "BNLH"}, {"dtype": torch.float64}),
    "torchtitan's": (Titan(), {"is_causal": True, "order": "head_tail"}, {}),
    "torchtitan's, bfloat16": (Titan(), {"is_causal": True}, {"dtype": torch.bfloat16}),
    "torchtitan's, full": (Titan(), {"scale": 0.3}, {}),
    "mask_mod": (Titan(), {"mask_mod": blocky}, {"length": 256}),
    "BlockMask": (Titan(), {"mask_mod": "BlockMask"}, {}),
    "rounded scores": (Cast(), {"is_causal": True}, {"dtype": torch.bfloat16}),
    "dropout in eval": (Causal("dropout", 0.1).eval(), {"is_causal": True}, {}),
    "sliding window": (Telling(), {"is_causal": True, "window_size": (24, 0), "layout": "BNLH"}, {}),
    "longer window": (Causal("window", 1300), {"is_causal": True, "window_size": (1299, 0)}, {}),
    "window": (Windowed(), {"window_size": (24, 7), "layout": "BNLH"}, {}),
    "soft cap and scale": (Telling(), {"softcap": 9.0, "scale": 0.1, "layout": "BNLH", "kernel": "reference"}, {}),
    "sinks": (Telling(), {"is_causal": True, "layout": "BNLH"}, {"kwargs": {"s_aux": torch.arange(4.0)}}),
    "sinks that are learned": (
        Telling(), {"is_causal": True, "layout": "BNLH"}, {"kwargs": {"s_aux": torch.arange(4.0).requires_grad_()}},
    ),
    "sinks that come of what is learned": (
        Telling(), {"is_causal": True, "layout": "BNLH"}, {"kwargs": {"s_aux": 2 * torch.arange(4.0).requires_grad_()}},
    ),
    "shared keys that are learned": (
        Telling(), {"is_causal": True, "layout": "BNLH"},
        {"length": 96, "kwargs": {"k_shared": torch.ones(1, 1, 96, 3).div(9).requires_grad_()}},
    ),
    "documents": (
        Telling(), {"is_causal": True, "layout": "BNLH"},
        {"length": 96, "kwargs": {"document_ids": torch.arange(96) // 40}},
    ),
    "shared keys": (
        Telling(), {"is_causal": True, "layout": "BNLH"},
        {"length": 96, "kwargs": {"k_shared": torch.ones(1, 1, 96, 3).cumsum(2) / 96}},
    ),
    "uneven": (Causal(), {"is_causal": True, "length": 12345, "order": "head_tail"}, {}),
    "very short": (Causal(), {"is_causal": True, "length": 7}, {}),
    "cross attention": (Plain(), {"length": 2000, "kv_length": 77}, {}),
    "replicated": (Plain(), {"replicated": 3}, {}),
    "uneven window": (
        Causal("window", 25), {"is_causal": True, "window_size": (24, 0), "order": "head_tail"}, {"length": 61},
    ),
    "fewer tokens than ranks": (Causal(), {"is_causal": True, "length": 3, "order": "head_tail"}, {}),
    "one token": (Plain(), {"length": 1}, {}),
    "fewer keys than ranks": (Plain(), {"length": 90, "kv_length": 3}, {}),
    "keys of the same stated length": (
        Causal(), {"is_causal": True, "length": 12345, "kv_length": 12345}, {"length": 61},
    ),
    "uneven and replicated": (Plain(), {"replicated": 3, "length": 45}, {}),
    "by document": (Causal(), {"is_causal": True, "order": BY_DOCUMENT}, {"length": 96}),
    "by document, uneven": (Causal(), {"is_causal": True, "order": BY_DOCUMENT, "length": 5}, {}),
    "by document, with documents": (
        Telling(), {"is_causal": True, "layout": "BNLH", "order": BY_DOCUMENT},
        {"length": 61, "kwargs": {"document_ids": torch.arange(61) // 27}},
    ),
    "other sizes": (Causal(), {"is_causal": True}, {"heads": (6, 3), "head_dim": 8, "length": 200}),
    "without gradient": (OutputAlone(), {"is_causal": True}, {}),
    "one row": (AcrossRows("one row"), {"is_causal": True}, {}),
    "one length": (AcrossRows("", length=1152), {"is_causal": True}, {}),
    "a mask for each row": (MaskOfRow(), {"mask_mod": further_by_row}, {"length": 96}),
}  # fmt: skip


def honest(names: list[str], style: str, mesh: Callable[[], DeviceMesh] | tuple[int, int]) -> dict[str, str]:
    """By name what the check says."""
    on = mesh_of(*mesh) if isinstance(mesh, tuple) else mesh()
    found = {}
    for name in names:
        module, options, check = HONEST[name]
        if options.get("mask_mod") == "BlockMask":
            options = options | {"mask_mod": mask_of(320)}
        found[name] = refusal(module, STYLES[style](**told(on, **options)), on, **check)[1]
    return found


@pytest.mark.parametrize("keys", [11, 13, 16, 24, 31, 48, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_all_probabilities_are_equal_they_have_no_slope(keys: int, dtype: torch.dtype) -> None:
    """But for rounding, of most numbers of keys."""
    even = torch.full((1, keys), 1 / keys, dtype=dtype)
    by_turns = torch.where(torch.arange(keys) % 2 == 0, 1.5 * even, 0.5 * even)
    assert _hint([Row(0, 0, 2 * even, even)], 1e-3).startswith("probabilities are 2 times the style's")
    assert "do not follow q k^T" in _hint([Row(0, 0, by_turns, even)], 1e-3)


def one_axis() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def ulysses_mesh() -> DeviceMesh:
    return context_mesh("cpu", ulysses=dist.get_world_size())


ON_MESHES = [
    ("ring", (4, 1)), ("ring", one_axis), ("wallfacer", (2, 2)), ("ulysses", one_axis), ("ulysses", ulysses_mesh)
]  # fmt: skip
HONEST_ON_MESHES = [
    "BLNH", "SDPA, full", "torchtitan's", "uneven", "very short", "replicated", "window", "uneven window",
    "fewer tokens than ranks", "one token", "fewer keys than ranks", "uneven and replicated", "by document",
    "by document, uneven", "by document, with documents",
]  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [HONEST.keys() - HONEST_ON_MESHES, pytest.param({*HONEST_ON_MESHES}, marks=pytest.mark.whole)],
    ids=["others", "those that every style is tried with"],
)
def test_nothing_is_said_of_honest_modules(ranks: Ranks, names: set[str]) -> None:
    for found in ranks(2).run(honest, sorted(names), "wallfacer", (2, 1)):
        assert found == dict.fromkeys(names, "")


def name_on_meshes(value: Any) -> str:
    return value if isinstance(value, str) else f"{value[0]} {getattr(value[1], '__name__', value[1])}"


@pytest.mark.parametrize(
    ("honest_one", "on"), tiers(product(HONEST_ON_MESHES, ON_MESHES), strength=1), ids=name_on_meshes
)
def test_every_style_on_its_meshes(ranks: Ranks, honest_one: str, on: tuple[str, Any]) -> None:
    assert ranks(4).run(honest, [honest_one], *on) == [{honest_one: ""}] * 4


def by_document(style: str, mesh: Callable[[], DeviceMesh] | tuple[int, int]) -> float:
    """How far a checked style is from its module where tokens are dealt out by document."""
    on = mesh_of(*mesh) if isinstance(mesh, tuple) else mesh()
    documents = torch.arange(61) // 27
    q, k, v = torch.randn(3, 1, 4, 61, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = Telling()(q, k, v, causal=True, document_ids=documents)

    def shard(x: Tensor) -> Tensor:
        return shard_sequence(x, order, dim=2, document_ids=documents)

    order = TokenOrder(BY_DOCUMENT, on)
    options = {"is_causal": True, "layout": "BNLH", "order": order, "length": 61}
    module = parallelize_module(Telling(), on, STYLES[style](**options))
    out = module(*(shard(x) for x in (q, k, v)), causal=True, document_ids=documents)
    return worst_error([(out, shard(expected))])


@pytest.mark.parametrize(
    ("style", "mesh"), [("ring", (4, 1)), ("wallfacer", (2, 2)), ("ulysses", one_axis), ("ulysses", ulysses_mesh)]
)
def test_a_style_by_document_is_checked_and_right(ranks: Ranks, style: str, mesh: Any) -> None:
    assert max(ranks(4).run(by_document, style, mesh)) < 1e-12


def shorter(size: int = 4, asked: int | None = None, **told: Any) -> tuple[int, int, int | None, int | None]:
    """Queries and keys that are tried, and the lengths that the style is told of them."""
    options, (length, kv_length) = shortened(AttentionOptions(**told), asked, size)
    options.check()
    return length, kv_length, options.length, options.kv_length


def test_what_is_tried_is_short_and_of_its_kind() -> None:
    """As uneven as what the style is told; longer than its windows; a mask's own length."""
    assert shorter() == (1152, 1152, None, None)
    assert shorter(size=5) == (1160, 1160, None, None)
    assert shorter(length=12345) == (1153, 1153, 1153, None)
    assert shorter(length=7) == (7, 7, 7, None)
    assert shorter(length=12345, asked=64) == (64, 64, 64, None)
    assert shorter(asked=64) == (64, 64, None, None)
    assert shorter(asked=68) == (68, 68, 68, None)
    assert shorter(is_causal=True, window_size=(1299, 0)) == (1432, 1432, None, None)
    assert shorter(window_size=(2000, 300)) == (2432, 2432, None, None)
    assert shorter(window_size=(1200, 60)) == (1392, 1392, None, None)
    assert shorter(window_size=(None, -1)) == (1152, 1152, None, None)
    assert shorter(is_causal=True, window_size=(100000, None)) == (4352, 4352, None, None)
    assert shorter(is_causal=True, prefix_length=2000) == (2128, 2128, None, None)
    assert shorter(length=20005, kv_length=77) == (1157, 77, 1157, 77)
    assert shorter(length=99, kv_length=1000007, asked=40) == (40, 1159, 40, 1159)
    assert shorter(is_causal=True, length=12345, kv_length=12345, asked=40) == (40, 40, 40, 40)
    assert shorter(mask_mod=mask_of(320)) == (320, 320, None, None)
    assert shorter(mask_mod=mask_of(316)) == (316, 316, 316, None)


def test_heads_that_are_tried() -> None:
    def tried(ulysses: int, mask: Any = None, asked: tuple[int, int] | None = None) -> list[tuple[int, int]]:
        return list(heads_to_try(asked, AttentionOptions(mask_mod=mask), ulysses))

    assert tried(1) == tried(4) == tried(4, mask=blocky) == [(4, 2), (4, 4)]
    assert tried(5) == tried(6) == [(6, 3), (6, 6)]
    assert tried(2, asked=(6, 3)) == [(6, 3)]
    per_head = create_block_mask(blocky, None, 3, 64, 64, device="cpu", BLOCK_SIZE=32)
    assert tried(1, mask=per_head) == [(3, 3)]


def test_what_is_drawn_is_the_same_whatever_device_is_the_default() -> None:
    """As that of the mesh is, under which modules are tried."""
    sizes, told_of = Sizes(64, 64, 4, 2, 8, torch.float32, torch.float32), AttentionOptions(is_causal=True)
    expected = draw(told_of, sizes, "cpu", None)
    with torch.device("meta"):
        found = draw(told_of, sizes, "cpu", None)
    assert found.queries == expected.queries
    assert worst_error(zip(found[:-1], expected[:-1], strict=True)) == 0


class WithoutGradient(WallFacerParallel):
    def forward_of(self, module: nn.Module, attention: Any) -> Callable[..., Tensor]:
        forward = super().forward_of(module, attention)
        return lambda *args, **kwargs: forward(*args, **kwargs).detach()


def without_gradient() -> str:
    mesh = mesh_of(2, 1)
    return refusal(Causal(), WithoutGradient(**told(mesh, is_causal=True)), mesh)[1]


def test_a_style_that_has_no_gradient_is_refused(ranks: Ranks) -> None:
    for said in ranks(2).run(without_gradient):
        assert "the output has a gradient in the module, but none under the style" in said


def wrong_length_on_one_rank() -> tuple[str, str]:
    mesh = mesh_of(2, 1)
    return refusal(Causal(), WallFacerParallel(**told(mesh, is_causal=True)), mesh, length=dist.get_rank())


def test_wrong_arguments_of_one_rank_are_refused_on_all(ranks: Ranks) -> None:
    for kind, said in ranks(2).run(wrong_length_on_one_rank):
        assert kind == "ValueError"
        assert "length must be at least 1, got 0" in said


def one_rank_alone(name: str) -> tuple[str, str]:
    module: nn.Module = Causal(name, 25, without=0)
    if name == "parameter" and dist.get_rank() == 1:
        module.weight = nn.Parameter(torch.ones(1))
    mesh = mesh_of(2, 1)
    return refusal(module, WallFacerParallel(**told(mesh, is_causal=True)), mesh)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("window", "EquivalenceError", "the module has a sliding window of 25"),
        ("raises", "EquivalenceError", "could not be run"),
        ("parameter", "ValueError", "Causal has weight: keep that in the module around it"),
    ],
)
def test_what_one_rank_finds_all_raise(ranks: Ranks, name: str, kind: str, text: str) -> None:
    other, found = ranks(2).run(one_rank_alone, name)
    assert other[0] == found[0] == kind
    assert text in found[1]
    assert other[1] == f"on rank 1 of the mesh {found[1]}"


class UnderAutocast(nn.Module):
    """SDPA, which under autocast does something else besides."""

    def __init__(self, secret: str = "") -> None:
        super().__init__()
        self.secret = secret

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        secret = self.secret if torch.is_autocast_enabled("cpu") else ""
        with torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu") and secret != "float32"):
            scale = 0.5 if secret == "scale" else None
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
        return (out.float() if secret == "upcast" else out).transpose(1, 2)


def under_autocast(secret: str, dtype: torch.dtype | None = None) -> list[tuple[str, str]]:
    """What a check raises, without autocast and under it."""
    module, mesh = UnderAutocast(secret), mesh_of(2, 1)
    style = WallFacerParallel(**told(mesh, is_causal=True))
    found = [refusal(module, style, mesh, dtype=dtype)] if not dtype else []
    with torch.autocast("cpu", torch.bfloat16):
        return [*found, refusal(module, style, mesh, dtype=dtype)]


AUTOCAST_SECRETS = {
    "scale": "the same keys are seen, but scores are 2 times the style's: another scale?",
    "float32": "the module returns torch.float32 for q of torch.float32, a style torch.bfloat16",
    "upcast": "the module returns torch.float32 for q of torch.float32, a style torch.bfloat16",
}


@pytest.mark.parametrize("secret", AUTOCAST_SECRETS)
def test_what_differs_under_autocast_alone_is_refused_there(ranks: Ranks, secret: str) -> None:
    for without, under in ranks(2).run(under_autocast, secret):
        assert without == ("", "")
        assert under[0] == "EquivalenceError"
        assert AUTOCAST_SECRETS[secret] in under[1]


def test_sdpa_passes_under_autocast(ranks: Ranks) -> None:
    assert ranks(2).run(under_autocast, "") == [[("", "")] * 2] * 2
    for dtype in (torch.bfloat16, torch.float64):
        assert ranks(2).run(under_autocast, "", dtype) == [[("", "")]] * 2


def applied_twice() -> list[str]:
    """The same style on two modules, the second under autocast."""
    errors = []
    mesh = mesh_of(2, 1)
    style = WallFacerParallel(**told(mesh, is_causal=True))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            try:
                parallelize_module(UnderAutocast("scale"), mesh, style)
            except EquivalenceError as error:
                errors.append(str(error))
    return errors


def test_a_module_is_tried_again_under_autocast(ranks: Ranks) -> None:
    for errors in ranks(2).run(applied_twice):
        assert len(errors) == 1
        assert "another scale?" in errors[0]


class ByMode(Causal):
    """Scales its scores in evaluation alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().forward(q if self.training else 2 * q, k, v)


MODES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "dropout, applied in evaluation": (lambda: Causal("dropout", 0.1), False),
    "a scale of evaluation, applied in training": (ByMode, True),
}


def said_in_modes(name: str, backend: str) -> list[str]:
    """What a module says to a call in the mode in which the style was applied, in the other one, and in the first."""
    made, training = MODES[name]
    mesh, module = mesh_of(2, 1), made().train(training)
    style = RingParallel(**told(mesh, is_causal=True))
    q = torch.randn(1, 8, 4, 16)
    said = []
    # The second time as one that is like a module which has passed.
    for styled in (parallelize_module(each, mesh, style) for each in (module, copy.deepcopy(module))):
        call = torch.compile(styled, backend=backend, fullgraph=True) if backend else styled
        for mode in (training, not training, training):
            styled.train(mode)
            try:
                call(q, q, q)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize("name", MODES)
def test_a_mode_in_which_a_module_was_not_tried_is_refused_if_it_is_another_there(
    ranks: Ranks, name: str, backend: str
) -> None:
    now = "evaluation" if MODES[name][1] else "training"
    for said in ranks(2).run(said_in_modes, name, backend):
        assert [bool(text) for text in said] == [False, True, False] * 2
        assert f"attention is called in {now} mode, in which" in said[1]


class Counting(Causal):
    """Has a state, and says how often it was called in this process."""

    calls: ClassVar[list[int]] = []

    def __init__(self, layer: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layer, self.seen = layer, []

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.seen.append(q.shape)
        self.calls.append(self.layer)
        return super().forward(q, k, v)


def left_alone() -> dict[str, bool]:
    mesh = mesh_of(2, 1)
    module = Counting(secret="dropout", value=0.5)
    style = WallFacerParallel(**told(mesh, is_causal=True))
    torch.manual_seed(7)
    state, forward, threads = torch.get_rng_state(), module.forward, torch.get_num_threads()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        caught = refusal(module, style, mesh)
        gradients = [refusal(Causal("detached"), style, mesh)[1]]
        honest = refusal(Causal(), style, mesh)
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), not torch.is_grad_enabled()
        device = torch.empty(0).device.type
    with torch.no_grad():
        gradients.append(refusal(Causal("detached"), style, mesh)[1])
        modes = (*modes, not torch.is_grad_enabled())
    return {
        "dropout was found": "dropout" in caught[1],
        "gradients were compared": all("gradient of k" in text for text in gradients),
        "an honest one passes under autocast": honest == ("", ""),
        "random state": torch.equal(torch.get_rng_state(), state),
        "modes": all(modes) and device == "meta",
        "module": not module.seen and module.forward == forward and module.training,
        "threads": torch.get_num_threads() == threads and torch.get_default_dtype() is torch.float32,
    }


def test_everything_is_left_as_it_was(ranks: Ranks) -> None:
    for found in ranks(2).run(left_alone):
        assert all(found.values()), found


def applied(layers: list[dict[str, Any]], check: bool = True) -> tuple[str, int, int]:
    """What applying one style to some layers raises; calls of modules; layers that it has replaced."""
    mesh = mesh_of(2, 1)
    Counting.calls.clear()
    model = nn.ModuleList(Counting(**options) for options in layers)
    error = ""
    try:
        parallelize_module(model, mesh, {"*": RingParallel(**told(mesh, is_causal=True, check=check))})
    except EquivalenceError as raised:
        error = str(raised)
    replaced = sum("forward" in vars(layer) for layer in model)
    return error, len(Counting.calls), replaced


def test_a_style_checks_a_module_before_it_replaces_it(ranks: Ranks) -> None:
    for error, _, replaced in ranks(2).run(applied, [{}, {"secret": "window", "value": 25}]):
        assert "the module has a sliding window of 25" in error
        assert replaced == 1
    for error, calls, replaced in ranks(2).run(applied, [{"secret": "window", "value": 25}], False):
        assert (error, calls, replaced) == ("", 0, 1)


def test_like_modules_are_checked_once(ranks: Ranks) -> None:
    (_, once, _), _ = ranks(2).run(applied, [{}])
    assert once > 0
    for _, calls, replaced in ranks(2).run(applied, [{}] * 5):
        assert (calls, replaced) == (once, 5)
    for _, calls, _ in ranks(2).run(applied, [{"layer": 0}, {"layer": 1}]):
        assert calls == 2 * once


class Config:
    window = 0


class Configured(Causal):
    """Reads its window from a config that it shares with others."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Causal("window" if self.config.window else "", self.config.window)(q, k, v)


def config_changed_between() -> str:
    mesh, config = mesh_of(2, 1), Config()
    style = RingParallel(**told(mesh, is_causal=True))
    parallelize_module(Configured(config), mesh, style)
    config.window = 25
    try:
        parallelize_module(Configured(config), mesh, style)
    except EquivalenceError as error:
        return str(error)
    return ""


def test_a_config_that_is_changed_in_place_is_checked_again(ranks: Ranks) -> None:
    for error in ranks(2).run(config_changed_between):
        assert "the module has a sliding window of 25" in error


def unlike_on_one_rank() -> str:
    """Rank 1 alone has another second layer, which only it would check."""
    window = {"secret": "window", "value": 25, "without": 0}
    return applied([{"value": 25}, window])[0]


def test_ranks_agree_on_what_is_left_to_check(ranks: Ranks) -> None:
    assert all("the module has a sliding window of 25" in error for error in ranks(2).run(unlike_on_one_rank))


def under_fake_tensors() -> tuple[str, str]:
    with FakeTensorMode():
        return refusal(Inner(), WallFacerParallel(), mesh_of(2, 1))


def test_nothing_is_compared_where_there_is_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(under_fake_tensors) == [("", "")] * 2
    with fake_world(4):
        mesh = context_mesh("cpu", 2, 2)
        assert refusal(Inner(), WallFacerParallel(), mesh) == ("", "")
        parallelize_module(Inner(), mesh, WallFacerParallel())


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"module": "attention"}, TypeError, "module must be an nn.Module, got str"),
        ({"length": 8.0}, TypeError, "length must be an int, got 8.0"),
        ({"length": 0}, ValueError, "length must be at least 1, got 0"),
        ({"mesh": "cpu"}, TypeError, "mesh must be a DeviceMesh, got str"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with fake_world(2):
        given = {"module": Causal(), "style": RingParallel(), "mesh": context_mesh("cpu", 2)} | options
        with pytest.raises(kind, match=text):
            check_equivalence(**given)


def with_another_mask() -> str:
    """What is said of a module that is like one that has passed, of a style that has become another since."""
    mesh = context_mesh("cpu", ring=2)
    style = RingParallel(is_causal=True, order=TokenOrder("contiguous", mesh))
    parallelize_module(Causal(), mesh, style)
    style.options = AttentionOptions(is_causal=False)
    try:
        parallelize_module(Causal(), mesh, style)
    except EquivalenceError as error:
        return str(error)
    return ""


def test_a_module_is_tried_anew_with_a_style_that_has_become_another(ranks: Ranks) -> None:
    assert all("query" in said for said in ranks(2).run(with_another_mask))


def test_queries_of_the_probe_are_distinct() -> None:
    assert all(len(set(_spread(1152, count))) == count for count in range(1, 260))


def test_a_head_dim_of_1_is_refused() -> None:
    with fake_world(1), pytest.raises(ValueError, match="head_dim must be at least 2, got 1"):
        check_equivalence(Causal(), RingParallel(is_causal=True), context_mesh("cpu"), head_dim=1)
