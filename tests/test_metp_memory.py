"""METP's memory: the paper's formulas, and what tensors hold on fake and on real ranks.

Bounds are derived from what an algorithm must have at a time: its formula, its buffers by name, and nothing else.
"""

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from recipes.benchmarks.memory.__main__ import table
from recipes.benchmarks.memory.formulas import KINDS, METHODS, Kind, Layer, overhead
from recipes.benchmarks.memory.layers import CONTENDERS, Contender, FeedForward, make, mesh_of
from recipes.benchmarks.memory.measure import Case, measure, on_fake_ranks, plain
from recipes.benchmarks.report import Table
from tests.papers import assert_shown
from tests.papers.metp import (
    MODELS,
    longest,
    longest_table,
    model_peak,
    overhead_table,
    peak_ratio,
    ratios_table,
    scores_table,
    stacked_ratio,
    surcharges_table,
)
from wallfacer_dt.collectives.functional import all_gather, wait
from wallfacer_dt.planning.alive import Alive
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

RANKS = (2, 4)
TOLD = 16  # bytes of a call's number and contents, which its backward is told
LAYERS = st.builds(
    lambda b, s, head_dim, n, p: Layer(b, s * p, head_dim * n, n, p),
    *(st.integers(1, 8), st.integers(1, 10**5), st.integers(1, 256), st.integers(1, 128), st.integers(1, 128)),
)


@given(LAYERS)
def test_equation_3(layer: Layer) -> None:
    """METP needs less than every other method, after the forward and at its peak; as much on one rank at most."""
    for kind, method, flash in product(KINDS, METHODS[:-1], (True, False)):
        ours, theirs = (overhead(kind, m, layer, flash=flash) for m in ("metp", method))
        assert ours.memory < theirs.memory
        # One rank's feed-forward has the whole hidden at a time: x and 4bsh, either way.
        if layer.ranks > 1:
            assert ours.peak_memory < theirs.peak_memory
        else:
            assert ours.peak_memory <= theirs.peak_memory


def test_equation_10() -> None:
    assert peak_ratio(2) == Fraction(7, 12)
    assert round(1 - peak_ratio(2), 3) == Fraction(417, 1000)
    for p in range(1, 65):
        layer = Layer(3, 7 * p, 20, 5, p)
        ours, theirs = (overhead("attention", m, layer).peak for m in ("metp", "tp"))
        assert ours / theirs == peak_ratio(p)
        assert p == 1 or peak_ratio(p) <= peak_ratio(2)


def test_equation_11() -> None:
    """One layer at its peak, the others after their forward."""
    for p, layers in product((2, 5, 8), (1, 2, 96)):
        layer = Layer(1, 12 * p, 8, 2, p)
        ours, theirs = (overhead("attention", m, layer) for m in ("metp", "tp"))
        after = ours.kept / theirs.kept
        assert after == Fraction(2, 5)  # 60% less
        assert stacked_ratio(p, layers) == (peak_ratio(p) + (layers - 1) * after) / layers


def test_tables_by_hand() -> None:
    """b = 1, s = 8, h = 4, n = 2, p = 4: bsh / p = 8, h^2 = 16, b n s^2 = 128."""
    layer = Layer(1, 8, 4, 2, 4)
    rows = {
        ("feed-forward", "tp"): (168, 192, 120), ("feed-forward", "rsa"): (552, 552, 0),
        ("feed-forward", "fsdp"): (168, 216, 288), ("feed-forward", "metp"): (136, 144, 288),
        ("attention", "tp"): (104, 128, 120), ("attention", "fsdp"): (104, 140, 192),
        ("attention", "metp"): (80, 86, 528),
    }  # fmt: skip
    for (kind, method), expected in rows.items():
        row = overhead(kind, method, layer)
        assert (row.memory, row.peak_memory, row.communication) == expected
    stored = {method: overhead("attention", method, layer, flash=False).peak_memory for method in METHODS}
    assert stored == {"tp": 160, "rsa": 328, "fsdp": 172, "metp": 88}


@pytest.mark.parametrize("flash", [True, False])
@given(st.sampled_from([*MODELS.values()]), st.sampled_from(METHODS), st.integers(1, 16), st.integers(0, 10**12))
def test_longest_fits_and_no_longer_one_does(flash: bool, model, method, ranks: int, budget: int) -> None:
    def needed(tokens: int) -> Fraction:
        return 2 * model_peak(model, method, tokens, ranks, flash=flash)

    tokens = longest(needed, budget)
    assert tokens == 0 or needed(tokens) <= budget
    assert needed(tokens + 1) > budget


PAGE = (Path(__file__).parents[1] / "docs" / "benchmarks" / "memory.md").read_text()


def test_the_page_has_the_formulas() -> None:
    for made in (longest_table(), *map(overhead_table, KINDS)):
        assert_shown(made, PAGE)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("make", [ratios_table, scores_table, surcharges_table], ids=lambda make: make.__name__)
def test_the_page_has_what_is_measured(make: Callable[[], Table]) -> None:
    assert_shown(make(), PAGE)


def test_a_row_of_the_report() -> None:
    case = case_of("attention", "metp", 2, dtype="bfloat16")
    made, seen = table("", [case]), on_fake_ranks(case)
    numbers = (2 * case.formula.kept, seen.kept, 2 * case.formula.peak, seen.peak, seen.step_peak, seen.largest)
    assert made.rows == [["2,048 tokens, p = 2, METP", *(f"{float(n) / 2**20:,.1f}" for n in numbers)]]
    assert len(made.head) == 7


def test_alive_by_hand() -> None:
    """Views are no bytes, what is dropped leaves, what is resized counts as it is."""
    x = torch.zeros(100)
    with Alive(x) as alive:
        y = x + 1
        view = y[10:].view(9, 10)
        assert alive.now == 800
        z = torch.empty(50)
        z.untyped_storage().resize_(40)
        del y
        assert alive.now == 840
        del view, z
        assert alive.now == 400
        x + 1 + 1
        assert (alive.now, alive.peak, alive.largest) == (400, 1200, 400)
        alive.reset()
        assert (alive.peak, alive.largest) == (400, 0)


def test_what_is_sent_is_alive_until_waited_for() -> None:
    with fake_world(4), Alive() as alive:
        group = dist.group.WORLD.group_name
        pending = all_gather(torch.zeros(10), group)
        assert alive.now == 200
        arrived = wait(pending, "a gather", group)
        assert alive.now == 160
        del pending
        assert alive.now == 160
        del arrived
        assert alive.now == 0


def test_as_memtracker_sees_it_where_it_can() -> None:
    """On a plain module both say the same; METP's operator is opaque to MemTracker."""

    def peak_of(layer: torch.nn.Module, x: Tensor) -> int:
        tracker = MemTracker()
        tracker.track_external(layer, x)
        with tracker:
            layer(x)
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    x = torch.zeros(1, 64, 32, requires_grad=True)
    plainly = FeedForward(32, torch.float32)
    seen = measure(plainly, x, backward=False)
    assert peak_of(plainly, x) == seen.weights + seen.peak
    with fake_world(2):
        layer = Layer(1, 128, 32, 4, 2)
        metp = make("feed-forward", "metp", layer, mesh_of("metp", 2), dtype=torch.float32)
        seen = measure(metp, x, backward=False)
        assert peak_of(metp, x) < seen.weights + seen.peak


def case_of(kind: Kind, contender: Contender, ranks: int, tokens: int = 2048, **options) -> Case:
    return Case(kind, contender, Layer(2, tokens, 64, 8, ranks), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", RANKS)
def test_after_the_forward_only_what_the_backward_needs(ranks: int, dtype: str) -> None:
    """Of a feed-forward x; of attention x, A, and the lse, 4 bytes a token and head: the formula, and the lse."""
    for kind, lse in (("feed-forward", 0), ("attention", 4)):
        case = case_of(kind, "metp", ranks, dtype=dtype, backward=False)
        layer, size = case.layer, case.torch_dtype.itemsize
        tokens = layer.batch * layer.tokens // ranks
        assert overhead(kind, "metp", layer).kept == tokens * layer.hidden * (2 if lse else 1)
        seen = on_fake_ranks(case)
        assert seen.kept == size * overhead(kind, "metp", layer).kept + lse * tokens * layer.heads + TOLD
        matrices = 8 if kind == "feed-forward" else 4
        assert seen.weights == size * matrices * layer.hidden**2 // ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_peak_of_the_feed_forward(ranks: int) -> None:
    """The formula, x and one rank's hidden, and: the output in float32, two shards of weights, in 16 bits a product."""
    for dtype in ("float32", "bfloat16"):
        case = case_of("feed-forward", "metp", ranks, dtype=dtype, backward=False)
        layer, size, seen = case.layer, case.torch_dtype.itemsize, on_fake_ranks(case)
        formula = size * overhead("feed-forward", "metp", layer).peak
        narrow = 0 if dtype == "float32" else size * layer.activation
        named = 4 * layer.activation + 2 * seen.weights + narrow
        assert formula < seen.peak <= formula + named + TOLD


@pytest.mark.parametrize("tokens", [32, 2048])
@pytest.mark.parametrize("ranks", RANKS)
def test_peak_of_attention(ranks: int, tokens: int) -> None:
    """While attending: the formula, x, A, q, k and v of a group, and what it leaves out.

    That is: the output in float32, two groups' weights, two more (k, v) on their way (one that is computed with, one
    that arrives), the lse that is kept; and of a group of heads the output that is merged into, in float32, a tile's,
    in both dtypes, two lses and what the merge makes of them. While weights are sent, once more a group's: torch's
    broadcast copies what it is given.
    """
    for dtype in ("float32", "bfloat16"):
        case = case_of("attention", "metp", ranks, tokens, dtype=dtype, backward=False)
        layer, size, seen = case.layer, case.torch_dtype.itemsize, on_fake_ranks(case)
        group = layer.activation / ranks
        statistics = 4 * group * layer.heads / layer.hidden
        merged = (4 + 4 + size) * group + 6 * statistics
        formula = size * overhead("attention", "metp", layer).peak
        always = size * 2 * layer.activation + 4 * layer.activation + ranks * statistics
        attending = always + 3 * size * group + 4 * size * group + merged + 2 * seen.weights
        sending = always + 3 * seen.weights
        assert formula < seen.peak <= max(attending, sending) + TOLD


@pytest.mark.parametrize("ranks", [2, 8])
def test_less_than_the_others_at_long_sequences(ranks: int) -> None:
    for kind in KINDS:
        ours, *theirs = (on_fake_ranks(case_of(kind, c, ranks, 16384)) for c in ("metp", "tp", "fsdp"))
        for other, name in zip(theirs, ("tp", "fsdp"), strict=True):
            assert ours.kept < other.kept
            # On two ranks a group is half of all heads: too many for what the formulas do not count.
            few = kind == "attention" and ranks == 2
            assert (few and name == "fsdp") or ours.peak < other.peak
            assert few or ours.step_peak < other.step_peak


def test_scores_fall_as_the_cube_of_the_ranks() -> None:
    """The largest tensor is one rank's queries by another's keys, of one group's heads; so is the peak, nearly."""
    peaks = {}
    for ranks in (2, 4, 8):
        case = Case("attention", "metp", Layer(1, 8192, 64, 8, ranks), flash=False, backward=False)
        seen = on_fake_ranks(case)
        assert seen.largest == 4 * case.layer.scores / ranks**3
        peaks[ranks] = seen.peak
    assert 7.5 < peaks[2] / peaks[4] <= 8
    assert 7.5 < peaks[4] / peaks[8] <= 8
    tp = [on_fake_ranks(case_of("attention", "tp", p, flash=False, backward=False)) for p in (2, 4)]
    assert 1.9 < tp[0].peak / tp[1].peak <= 2


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_real_ranks_hold_what_fake_ones_do(ranks: Callable[[int], RankPool], kind: Kind) -> None:
    """And all contenders compute the same."""
    results = {}
    for contender in CONTENDERS:
        case = Case(kind, contender, Layer(1, 1024, 64, 8, 2))
        answers = ranks(2).run(on_rank, case)
        results[contender] = torch.cat([torch.tensor(y) for y, _ in answers], 1)
        fake = on_fake_ranks(case)
        # With gloo a collective's buffer may stay for a while after the wait: at most all tokens of x.
        late = 4 * case.layer.ranks * case.layer.activation
        for _, seen in answers:
            assert seen.weights == fake.weights
            for name in ("kept", "peak", "step_peak"):
                assert getattr(fake, name) <= getattr(seen, name) <= getattr(fake, name) + late
    for contender in ("tp", "fsdp"):
        assert worst_error([(results["metp"], results[contender])]) <= 1e-5


def on_rank(case: Case) -> tuple[list, object]:
    torch.manual_seed(0)
    layer = make(case.kind, case.contender, case.layer, mesh_of(case.contender, 2), dtype=case.torch_dtype)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(case.shape, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    layer.zero_grad()
    x.grad = None
    return plain(y).tolist(), measure(layer, x)
