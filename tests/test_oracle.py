"""The oracle against loops over single numbers, and its gradients against finite differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.cases import MASK_MODS, Case, draw, draw_extras, held, oracle, shard_sizes
from wallfacer_dt.testing import AttentionResult, attention_oracle, worst_error
from wallfacer_dt.testing.oracle import visibility

LENGTH = 7
IDS = torch.tensor([[0, 0, 0, 1, 1, 4, 4], [2, 3, 3, 3, 3, 3, 2]])
# An id that comes again is another document.
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])


@dataclass(frozen=True)
class Rule:
    """One way to ask who sees whom, and what it means for one query and one key."""

    options: dict[str, Any]
    sees: Callable[[int, int, int, int], bool]


def by(name: str) -> Callable[[int, int, int, int], bool]:
    """A mask_mod on plain numbers."""
    return lambda *at: bool(MASK_MODS[name](*(torch.tensor(x) for x in at)))


RULES = {
    "all": Rule({}, lambda b, h, i, j: True),
    "causal": Rule({"is_causal": True}, lambda b, h, i, j: j <= i),
    "window": Rule({"window_size": (2, 1)}, lambda b, h, i, j: -2 <= j - i <= 1),
    "window of nothing": Rule({"window_size": (0, 0)}, lambda b, h, i, j: i == j),
    "window, left": Rule({"window_size": (1, None)}, lambda b, h, i, j: j >= i - 1),
    "window, right": Rule({"window_size": (-1, 1)}, lambda b, h, i, j: j <= i + 1),
    "causal window": Rule({"is_causal": True, "window_size": (2, 0)}, lambda b, h, i, j: i - 2 <= j <= i),
    "prefix": Rule({"is_causal": True, "prefix_length": 3}, lambda b, h, i, j: j <= i or j < 3),
    "documents": Rule({"document_ids": IDS}, lambda b, h, i, j: bool(DOCUMENTS[b, i] == DOCUMENTS[b, j])),
    "documents of all rows": Rule(
        {"document_ids": IDS[1]}, lambda b, h, i, j: bool(DOCUMENTS[1, i] == DOCUMENTS[1, j])
    ),
    "cumulative": Rule(
        {"cu_seqlens": torch.tensor([0, 3, 3, 5, 7])}, lambda b, h, i, j: bool(DOCUMENTS[0, i] == DOCUMENTS[0, j])
    ),
    "causal documents": Rule(
        {"document_ids": IDS, "is_causal": True, "window_size": (1, 0)},
        lambda b, h, i, j: bool(DOCUMENTS[b, i] == DOCUMENTS[b, j]) and i - 1 <= j <= i,
    ),
} | {name: Rule({"mask_mod": mask_mod}, by(name)) for name, mask_mod in MASK_MODS.items()}


def by_hand(case: Case, rule: Rule) -> np.ndarray:
    """The output, number by number."""
    q, k, v, _ = (x.numpy() for x in draw(case))
    extras = {name: x.numpy() for name, x in draw_extras(case).items()}
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        g = h * k.shape[1] // q.shape[1]
        weights = {}
        for j in range(k.shape[2]):
            key = np.concatenate([k[b, g, j], extras["k_shared"][b, 0, j]]) if case.shared_dim else k[b, g, j]
            score = float(q[b, h, i] @ key) * (case.scale or len(key) ** -0.5)
            score = case.softcap * math.tanh(score / case.softcap) if case.softcap else score
            if rule.sees(b, h, i, j):
                weights[j] = math.exp(score)
        total = sum(weights.values()) + (math.exp(extras["sinks"][h]) if case.sinks else 0)
        out[b, h, i] = sum((w / total * v[b, g, j] for j, w in weights.items()), np.zeros(v.shape[3]))
    return out


def ask(case: Case, rule: Rule) -> AttentionResult:
    return attention_oracle(*draw(case), **draw_extras(case), **rule.options, scale=case.scale, softcap=case.softcap)


PLAIN = Case(1, 1, batch=2, heads=4, kv_heads=2, shard=LENGTH, head_dim=3)
VARIANTS = {
    "plain": PLAIN,
    "sinks": replace(PLAIN, sinks=True),
    "shared keys": replace(PLAIN, shared_dim=2, value_dim=5),
    "softcap": replace(PLAIN, softcap=0.7, scale=0.9),
    "all of them": replace(PLAIN, sinks=True, shared_dim=2, value_dim=5, softcap=0.7),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", RULES)
def test_output_is_that_of_loops(name: str, variant: str) -> None:
    case = VARIANTS[variant]
    assert worst_error([(ask(case, RULES[name]).out.numpy(), by_hand(case, RULES[name]))]) <= 1e-14


@pytest.mark.parametrize("is_causal", [False, True])
def test_keys_of_another_length(is_causal: bool) -> None:
    """Only the oracle takes a mask there: positions count from the first of either."""
    case = replace(PLAIN, kv_length=11)
    rule = Rule({"is_causal": is_causal}, lambda b, h, i, j: not is_causal or j <= i)
    assert worst_error([(ask(case, rule).out.numpy(), by_hand(case, rule))]) <= 1e-14


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["causal", "window", "documents", "blind"])
def test_gradients_are_those_of_finite_differences(name: str, variant: str) -> None:
    case, rule = VARIANTS[variant], RULES[name]
    q, k, v, grad_out = draw(case)
    leaves = {"q": q, "k": k, "v": v} | draw_extras(case)
    gradients = ask(case, rule).by_name()

    def loss(**changed: Tensor) -> float:
        given = leaves | changed
        options = rule.options | {"scale": case.scale, "softcap": case.softcap}
        return float((attention_oracle(**given, grad_out=grad_out, **options).out * grad_out).sum())

    generator = torch.Generator().manual_seed(0)
    for leaf, x in leaves.items():
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        step = 1e-5
        numeric = (loss(**{leaf: x + step * direction}) - loss(**{leaf: x - step * direction})) / (2 * step)
        assert float((gradients[f"d{leaf}"] * direction).sum()) == pytest.approx(numeric, abs=1e-7), leaf
    assert gradients.keys() == {"out", *(f"d{leaf}" for leaf in leaves)}


@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_that_see_nothing_are_zero_with_gradient_zero(has_sinks: bool) -> None:
    got = ask(replace(PLAIN, sinks=has_sinks), RULES["blind"])
    assert all(x.isfinite().all() for x in got.by_name().values())
    sees = torch.tensor([any(RULES["blind"].sees(0, 0, i, j) for j in range(LENGTH)) for i in range(LENGTH)])
    assert got.out[:, :, ~sees].eq(0).all()
    assert got.dq[:, :, ~sees].eq(0).all()
    assert got.out[:, :, sees].ne(0).all()
    seen = torch.tensor([any(RULES["blind"].sees(0, 0, i, j) for i in range(LENGTH)) for j in range(LENGTH)])
    assert got.dk[:, :, ~seen].eq(0).all()
    assert got.dv[:, :, ~seen].eq(0).all()


@pytest.mark.parametrize("name", ["checker", "per_head", "per_row", "blind"])
def test_a_block_mask_is_its_mask_mod(name: str) -> None:
    length = 21
    mask = create_block_mask(MASK_MODS[name], 2, 4, length, length, device="cpu", BLOCK_SIZE=4)
    seen = visibility(2, 4, length, length, mask_mod=MASK_MODS[name])
    assert visibility(2, 4, length, length, mask_mod=mask).equal(seen.broadcast_to(2, 4, length, length))


def test_a_mask_is_asked_on_the_device_of_its_tensors() -> None:
    asked = set()

    def mask(*positions: torch.Tensor) -> torch.Tensor:
        asked.update(x.device.type for x in positions)
        return torch.ones(1, 1, 4, 4, dtype=torch.bool)

    visibility(1, 1, 4, 4, mask_mod=mask, device=torch.device("meta"))
    visibility(1, 1, 4, 4, mask_mod=mask)
    assert asked == {"meta", "cpu"}


def test_the_blocks_of_a_block_mask_count() -> None:
    """As in compiled flex_attention: its mask_mod is asked in partial blocks alone, and says nothing of full ones."""
    partial = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    full = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=8, mask_mod=MASK_MODS["blind"])
    seen = visibility(1, 2, 16, 16, mask_mod=mask)
    blind = visibility(1, 1, 16, 16, mask_mod=MASK_MODS["blind"])
    assert not seen[:, :, :8, :8].any()
    assert seen[:, :, :8, 8:].equal(blind[:, :, :8, 8:])
    assert seen[:, :, 8:, :8].equal(blind[:, :, 8:, :8])
    assert seen[:, :, 8:, 8:].all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["all", "causal", "documents", "blind"])
def test_in_low_precision(name: str, variant: str, dtype: str) -> None:
    """What others are measured against is itself near the truth, and finite."""
    case, options = replace(VARIANTS[variant], dtype=dtype), RULES[name].options
    options = options | draw_extras(case) | {"scale": case.scale, "softcap": case.softcap}
    exact = attention_oracle(*draw(case), **options)
    rounded = attention_oracle(*draw(case), **options, dtype=None, backend=SDPBackend.FLASH_ATTENTION)
    unit = torch.finfo(getattr(torch, dtype)).eps
    for want, got in zip(exact.by_name().values(), rounded.by_name().values(), strict=True):
        assert got.dtype == getattr(torch, dtype)
        assert worst_error([(got.double(), want)], relative_to="largest") <= 10 * unit


def test_unpacks_as_the_four_that_every_call_has() -> None:
    result = oracle(replace(PLAIN, sinks=True))
    out, dq, dk, dv = result
    assert [x.shape[1] for x in (out, dq, dk, dv)] == [4, 4, 2, 2]
    assert result.dsinks is not None
    assert result.dsinks.shape == (4,)
    assert result.dk_shared is None
    assert list(result.by_name()) == ["out", "dq", "dk", "dv", "dsinks"]


@pytest.mark.parametrize("order", ["contiguous", "head_tail"])
@pytest.mark.parametrize("axes", [(1, 1, 1), (2, 1, 1), (1, 4, 2), (2, 3, 1), (2, 2, 2), (3, 2, 4)])
def test_dealing_out_holds_every_token_once(axes: tuple[int, ...], order: str) -> None:
    size = int(np.prod(axes))
    for length in range(1, 5 * size):
        shards = [held(index, axes, order, length) for index in range(size)]
        assert sorted(position for shard in shards for position in shard) == list(range(length))
        assert all(shard == sorted(shard) for shard in shards)
        assert [len(shard) for shard in shards] == shard_sizes(length, axes)
        # As DTensor's Shard does: torch.chunk over the first axis, each part over the next, ...
        parts = [torch.arange(length)]
        for n in axes:
            parts = [piece for part in parts for piece in (*part.chunk(n), *[part[:0]] * n)[:n]]
        assert [len(part) for part in parts] == shard_sizes(length, axes)
        if order == "contiguous":
            assert all(part.tolist() == shard for part, shard in zip(parts, shards, strict=True))


def test_dealing_out_by_hand() -> None:
    assert shard_sizes(9, (2, 2, 2)) == [2, 1, 1, 1, 1, 1, 1, 1]
    assert shard_sizes(5, (1, 4, 1)) == [2, 2, 1, 0]
    assert [held(i, 4, "head_tail", 16) for i in range(2)] == [[0, 1, 14, 15], [2, 3, 12, 13]]
    assert [held(i, 2, "head_tail", 5) for i in range(2)] == [[0, 1, 4], [2, 3]]
    assert [held(i, 4, "head_tail", 5) for i in range(4)] == [[0, 4], [1, 3], [2], []]


def test_a_scale_of_0_is_one() -> None:
    """Without sinks as with them, it weighs all keys alike."""
    q, k, v = (torch.randn(1, 2, LENGTH, 4, dtype=torch.float64) for _ in range(3))
    for options in ({}, {"window_size": (LENGTH, LENGTH)}):
        out = attention_oracle(q, k, v, torch.zeros_like(q), scale=0.0, **options).out
        assert worst_error([(out, v.mean(2, keepdim=True).expand_as(out))]) < 1e-12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"document_ids": IDS, "cu_seqlens": torch.tensor([0, 3, 7])}, "documents must be given once"),
        ({"prefix_length": 3}, "prefix_length must go with is_causal=True, got 3"),
    ],
)
def test_options_that_would_be_dropped_are_refused(options: dict, said: str) -> None:
    q = torch.zeros(2, 1, LENGTH, 4)
    with pytest.raises(ValueError, match=said):
        attention_oracle(q, q, q, q, **options)
