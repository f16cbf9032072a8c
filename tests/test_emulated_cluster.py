"""The emulated cluster: its clocked device, cases, record and report, what it refuses, and that nothing of it stays."""

import gzip
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from matplotlib.figure import Figure
from torch.nn.attention.flex_attention import create_block_mask
from typer.testing import CliRunner

from recipes.benchmarks.cluster import __main__ as command
from recipes.benchmarks.cluster import device, network, ranks, report_papers, run, watcher
from recipes.benchmarks.cluster.cases import (
    DTYPE,
    HYBRID,
    METP,
    METP_ATTENTION,
    PLAIN,
    PUBLISHED,
    RING,
    ULYSSES,
    USP,
    Case,
    Machines,
    cases,
    contenders,
)
from recipes.benchmarks.cluster.papers import OVERLAP, paper_cases
from recipes.benchmarks.cluster.record import Measured, Result, append, read
from recipes.benchmarks.cluster.report import over, regret, write
from recipes.benchmarks.cluster.run import PREDICTED, PROFILED
from recipes.benchmarks.cluster.watcher import environment
from recipes.benchmarks.pictures import Panel, draw
from recipes.benchmarks.report import commit
from tests.machines import needs_network
from wallfacer_dt import Cluster, Kernels, Link
from wallfacer_dt.collectives import functional
from wallfacer_dt.kernels.block import CAUSAL, FULL, Band, How, Need
from wallfacer_dt.kernels.registry import check_kernel, select_kernel
from wallfacer_dt.planning.attention import Costs, programs_of
from wallfacer_dt.planning.predict import attention_cost
from wallfacer_dt.planning.programs import Call, attended
from wallfacer_dt.reading import FileError
from wallfacer_dt.testing import RankPool

MACHINES = Machines(2, 4, (50.0, 25.0), inside=100.0)
CASE = Case(MACHINES, 16, 4, "causal", 1.0)
LINKS = Cluster(8, 4, Link(12.5e6, 1e-3), Link(6e6, 1e-3))
PREFIX = "wftest"
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "cluster.md"


def test_contenders_that_fit() -> None:
    names = list(contenders(Case(Machines(4, 4, (50.0,) * 4), 16, 16, "full", 1.0)))
    assert names[0] == RING
    assert {ULYSSES, USP, f"{PUBLISHED}, C = 2", f"{PUBLISHED}, C = 4", "2d, C = 4"} < set(names)
    few = list(contenders(Case(Machines(4, 4, (50.0,) * 4), 6, 6, "full", 1.0)))
    assert set(names) - set(few) == {ULYSSES}
    flat = list(contenders(Case(Machines(2, 1, (50.0,) * 2), 16, 16, "full", 1.0)))
    assert flat == [RING, "2d, C = 2", ULYSSES]


def test_cases_are_what_the_planner_is_held_to() -> None:
    every = list(cases())
    assert len(every) == len(set(every)) >= 60
    assert {case.machines.ranks for case in every} == {8, 12, 16}
    crossed = {(case.mask, case.ratio) for case in every}
    assert crossed == {*product(("full", "causal", "window"), (0.5, 1.0, 3.0))}
    assert len({case.machines for case in every if case.mask == "window"}) >= 4
    assert len({case.machines for case in every if case.machines.has_adapters}) >= 2
    assert {min(case.heads for case in every), max(case.heads for case in every)} == {1, 32}
    for case in every:
        for way in contenders(case).values():
            assert way.size == case.machines.ranks
            assert way.order == ("contiguous" if case.mask == "full" else "head_tail")


def test_cases_of_the_papers_are_in_proportion() -> None:
    every = {case.name: case for case in paper_cases()}
    assert len(every) == len(list(paper_cases()))
    assert {case.machines.ranks for case in every.values()} == {8, 16, 32}
    assert all(case.tokens % 2 == 0 for case in every.values())
    # DiT 1B on two nodes of sixteen A100s, 128K tokens: a hop's 2 x 4096 x 1536 elements over a sixteenth of 12.5 GB/s,
    # and a block's 4 x 4096 ** 2 x 1536 operations at the planner's 150 TFLOP/s.
    dit = next(case for name, case in every.items() if "figure 9, DiT, 128K: 2 x 16" in name)
    hop, block = 2 * 4096 * 1536 * 2 / (12.5e9 / 16), 4 * 4096**2 * 1536 / 150e12
    assert dit.ratio == pytest.approx(hop / block)
    assert dit.machines.inside == pytest.approx(dit.machines.rates[0] * 300 / 12.5)
    own = 4 * dit.tokens**2 * 1536 / dit.kernels.forward
    # What a call costs beside is to a block what it is with 4096 tokens and the rates of an H100.
    assert dit.kernels.overhead / own == pytest.approx(20e-6 / (4 * 4096**2 * 1536 / 500e12))
    # METP: weights of a rank come while its tokens are multiplied with them.
    for case in every.values():
        if case.figure == METP:
            share = case.machines.rates[0] * 1e6 / 8
            weights = 2 * case.model.hidden * case.model.ffn / 8
            assert weights * 2 / share / (2 * case.tokens * weights / case.kernels.linear) == pytest.approx(case.ratio)
            (way,) = contenders(case).values()
            assert way.feed_forward == "metp"


@pytest.mark.parametrize("heads", [1, 16, 32])
@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_a_block_takes_as_long_as_the_ratio_says(heads: int, ratio: float) -> None:
    case = Case(Machines(2, 4, (50.0, 25.0), inside=100.0), heads, heads, "full", ratio)
    hop = 2 * case.tokens * heads * case.head_dim * DTYPE.itemsize / (25e6 / 8 / 4)
    block = 4 * case.tokens**2 * heads * case.head_dim / case.kernels.forward
    assert hop / block == pytest.approx(ratio)


class Clock:
    """Time that passes when something sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: one.now)
    monkeypatch.setattr(time, "sleep", one.sleep)
    return one


def test_a_device_runs_in_order_and_after_what_was_waited_for(clock: Clock) -> None:
    def wait(seconds: float) -> None:
        assert one.wait(lambda: (clock.sleep(seconds), torch.ones(1))[1]) == 1

    one = device.Device()
    one.begin()
    one.compute(1.0)
    clock.sleep(0.3)  # the host's own work does not delay what follows
    one.compute(1.0)
    assert (clock.now, one.busy) == (2.0, 2.0)
    clock.sleep(0.1)
    wait(0.5)  # a transfer that is waited for does
    one.compute(1.0)
    assert clock.now == pytest.approx(3.6)
    clock.sleep(0.5)
    wait(1e-5)  # and one that has been there does not
    one.compute(1.0)
    assert clock.now == pytest.approx(4.6)
    clock.sleep(1.5)  # a host that comes late: the device catches up
    one.compute(1.0)
    assert clock.now == pytest.approx(6.1)
    assert (one.busy, one.held) == pytest.approx((5.0, 5.0))  # what the host was late is no kernel's
    one.compute(1.0)
    assert clock.now == pytest.approx(6.6)
    one.begin()
    assert (one.busy, one.held) == (0, 0)


def test_a_device_tells_for_how_long_its_rank_really_slept(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.sleep(seconds + 0.25))
    one = device.Device()
    one.begin()
    for _ in range(2):
        one.compute(1.0)  # of which the second makes up for what the first was too long
    assert (clock.now, one.busy, one.held) == (2.25, 2.0, 2.25)
    one.wait(lambda: (clock.sleep(1.0), torch.ones(1))[1])
    one.compute(1.0)
    assert (one.busy, one.held) == (3.0, 3.5)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that kernels take."""
    seconds: list[float] = []
    device.register()
    monkeypatch.setattr(device.DEVICE, "kernels", Kernels(1e9, 2e9, overhead=0.5, merge=1e6, half_rows=3.0))
    monkeypatch.setattr(device.DEVICE, "compute", seconds.append)
    return seconds


@pytest.mark.parametrize(("band", "area"), [(FULL, 6 * 8), (CAUSAL, 21), (Band(-1, 1), 17)])
@pytest.mark.parametrize("backward", [False, True])
def test_clocked_kernel_takes_what_the_planner_says(
    clocked: list[float], band: Band, area: int, *, backward: bool
) -> None:
    kernel = select_kernel(device.KERNEL, Need("cpu", DTYPE, 16, 16))
    q, k = torch.ones(2, 4, 6, 16, dtype=DTYPE), torch.ones(2, 2, 8, 16, dtype=DTYPE)
    out, lse = kernel.forward(q, k, k, How(band, 1.0))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    if backward:
        clocked.clear()
        grads = kernel.backward(q, q, k, k, out, lse, How(band, 1.0))
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    assert device.DEVICE.kernels is not None
    costs = Costs(device.DEVICE.kernels, 2, 4, 2, (16, 16), DTYPE, backward=backward)
    assert clocked == [costs.of_call(Call(area, 6, 8, area / 6))]


def test_clocked_kernel_counts_what_a_mask_shows(clocked: list[float]) -> None:
    kernel = select_kernel(device.KERNEL, Need("cpu", DTYPE, 16, 16, masked=True))
    x = torch.ones(1, 4, 8, 16, dtype=DTYPE)
    mask = create_block_mask(lambda b, h, i, j: (i + j + h) % 2 == 0, 1, 4, 8, 8, device="cpu")
    kernel.forward(x, x, x, How(FULL, 1.0, mask))
    assert device.DEVICE.kernels is not None
    costs = Costs(device.DEVICE.kernels, 1, 4, 4, (16, 16), DTYPE, backward=False)
    assert clocked == [costs.of_call(Call(32, 8, 8, 4.0))]


@pytest.mark.ranks
def test_clocked_kernel_is_not_there_by_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    device.register()
    monkeypatch.setattr(device.DEVICE, "kernels", None)
    with pytest.raises(ValueError, match="it is for benchmarks of the emulated cluster"):
        select_kernel(device.KERNEL, Need("cpu", DTYPE, 16, 16))
    # Where nobody has registered it, as in a process of its own, the name is unknown.
    pool = RankPool(1)
    with closing(pool), pytest.raises(RuntimeError, match="ValueError: kernel must be one of"):
        pool.run(check_kernel, device.KERNEL)


def measured(seconds: float, team: int = 1, predicted: float = 1.0) -> Measured:
    way = replace(contenders(CASE)[RING], ring=8 // team, team=team)
    rounds = tuple((0.25 * seconds * part, 0.75 * seconds * part) for part in (0.9, 1.1))
    return Measured(way, (0.25 * predicted, 0.75 * predicted), rounds, (0.1, 0.3), 1 << 20, (0.1, 0.3))


def result(**seconds: float) -> Result:
    names = {"ring": RING, "two": "2d, C = 2", "published": f"{PUBLISHED}, C = 2", "profiled": PROFILED}
    ways = {names[name]: measured(some, 1 + list(names).index(name)) for name, some in seconds.items()}
    return Result(CASE, "abc", "2 cores", ways | {PREDICTED: ways[RING]}, (0.2, 0.6), 9.0)


def test_gains_are_over_the_papers_ring(tmp_path: Path) -> None:
    """Which rotates keys and values; and pictures are made of what there is."""
    some = [case for case in paper_cases() if case.machines.ranks == 8]
    results = {}
    for case in some:
        names = [RING, PLAIN, "2d, C = 2", "2d, C = 4", f"{PUBLISHED}, C = 2", PREDICTED, PROFILED]
        alone = case.figure in (METP, METP_ATTENTION)
        names = [case.figure] if alone else names[:5] if case.figure == OVERLAP else names
        ways = {name: measured(2.0 / (1 + place), 1 + place, predicted=4.0) for place, name in enumerate(names)}
        results[case] = Result(case, "abc", "2 cores", ways, (0.2, 0.6), 9.0)
    one = next(result for case, result in results.items() if PROFILED in result.ways)
    assert report_papers.gain(one, PROFILED) == pytest.approx(1.0 / (2 / 7) - 1)
    assert report_papers.gain(one, PROFILED, predicted=True) == 0
    assert one.fastest(PUBLISHED) == f"{PUBLISHED}, C = 2"
    page = tmp_path / "papers.md"
    write(results, page)
    text = page.read_text()
    assert "| figure 9, DiT, 128K: 2 x 4 | 2 | +150% | +0% | not in the text | -50% | +0% | +250% | +0% |" in text
    assert "| 3 | 5.00 | 10.00 | 3.62 | 5.00 | 10.00 | 4.15 |" in text
    assert "| 3 | 5.00 | 10.00 | 5.00 | 10.00 |" in text
    assert page.with_name("papers_papers.png").stat().st_size > 10_000


def test_panels_of_a_picture_do_not_overlap(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of rows that have not as many."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    panel = Panel("of one curve", {"one": {1: 2.0, 2: 3.0}})
    draw(tmp_path / "some.png", [[panel] * 2, [panel] * 3], {"one": {}}, (9, 6))
    drawn[0].draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in drawn[0].axes]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_record_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "cluster.jsonl.gz"
    assert read(path) == {}
    first, other = result(ring=2.0, profiled=1.0), replace(result(ring=3.0), case=replace(CASE, mask="full"))
    append(path, first)
    append(path, other)
    assert read(path) == {CASE: first, other.case: other}
    append(path, again := replace(first, commit="def"))
    assert read(path) == {CASE: again, other.case: other}
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    line = json.loads(gzip.decompress(path.read_bytes()).splitlines()[0])
    del line["ways"]["ring"]["held"]
    for broken in (line, line | {"ways": []}):
        path.write_bytes(gzip.compress(f"{json.dumps(broken)}\n".encode()))
        with pytest.raises(FileError, match="line 1"):
            read(path)


def test_what_was_chosen_is_judged() -> None:
    one = result(ring=2.0, two=1.0, published=1.5, profiled=1.25)
    assert one.ways[RING].seconds == pytest.approx(2.0)
    assert one.ways[RING].spread == pytest.approx(0.2)
    assert one.ways[RING].error == pytest.approx(-0.5)
    assert regret(one, PROFILED) == pytest.approx(0.25)
    assert regret(one, PREDICTED) == pytest.approx(1.0)
    assert over(one, PUBLISHED) == pytest.approx(1.2)
    assert over(one, ULYSSES) is None
    hybrid = replace(one, ways=one.ways | {HYBRID: one.ways[RING]})
    assert over(hybrid, ULYSSES) is None
    assert over(hybrid, HYBRID) == over(one, RING) == pytest.approx(1.6)
    # What is the very same plan under another name is no regret.
    same = replace(one, ways=one.ways | {PROFILED: replace(one.ways["2d, C = 2"], way=one.ways["2d, C = 2"].way)})
    assert regret(same, PROFILED) == 0


@pytest.mark.parametrize("is_drawn", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_the_record_is_the_pages(is_drawn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in the repository makes it again, but for the line that says when."""
    if not is_drawn:
        monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    for suffix in (".md", ".jsonl.gz"):
        shutil.copy(PAGE.with_suffix(suffix), tmp_path)
    status, output = invoke("--report-only", tmp_path=tmp_path)
    assert status == 0, output
    lines = [(folder / PAGE.name).read_text().splitlines() for folder in (PAGE.parent, tmp_path)]
    assert len(lines[0]) == len(lines[1])
    differing = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert all("made in" in line for pair in differing for line in pair)


def test_what_a_page_is_made_of_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But what else was changed is."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    page = Path("docs/cluster.md")
    page.parent.mkdir()
    for name in (
        "docs/cluster.md",
        "docs/cluster.jsonl.gz",
        "docs/cluster_papers.png",
        "docs/clusters.md",
        "cluster.md",
    ):
        Path(name).write_text("one")
    who = ("-c", "user.name=one", "-c", "user.email=one@example.com")
    for words in (("init",), ("add", "."), (*who, "commit", "--message=one")):
        subprocess.run(["git", *words], check=True, capture_output=True)
    clean = commit(page)
    assert "dirty" not in clean
    for path in page.parent.glob("cluster[._]*"):
        path.write_text("other")
    Path("docs/cluster.jsonl.gz").unlink()
    assert commit(page) == clean
    assert commit() == f"{clean}-dirty"
    for name in ("docs/clusters.md", "cluster.md"):
        Path(name).write_text("other")
        assert commit(page) == f"{clean}-dirty"
        Path(name).write_text("one")


def test_report_keeps_what_people_wrote(tmp_path: Path) -> None:
    page = tmp_path / "cluster.md"
    mark = "<!-- What follows is made by python -m recipes.benchmarks.cluster -->"
    page.write_text(f"# Title\n\nFindings.\n\n{mark}\nold")
    write({CASE: result(ring=2.0, two=1.0, published=1.5, profiled=1.25)}, page)
    text = page.read_text()
    assert text.startswith(f"# Title\n\nFindings.\n\n{mark}\n")
    assert "old" not in text
    assert f"| {CASE.name} | 2d, C = 2 | 1.00 |" in text
    assert "| regret of what is profiled, % | 1 | 25.0 | 25.0 | 25.0 |" in text
    assert page.with_suffix(".png").stat().st_size > 10_000


class Silent:
    """A cluster that answers at once, its devices busy for what the planner says, times a factor."""

    def __init__(self, case: Case, factor: float = 1.0) -> None:
        self.case, self.factor, self.network = case, factor, self
        self.seconds, self.late, self.ring_is_slow = 0.5, 0.0, False  # each way; of these; whether it takes twice that
        self.asked: list[str] = []

    def received(self) -> list[int]:
        return [len(self.asked), 0]

    def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        self.asked.append(what)
        ways = contenders(self.case)
        if what == "choose":
            return {"predicted": asdict(ways[RING]), "profiled": asdict(ways["2d, C = 2"]), "seconds": 1.0}
        way = next(one for one in ways.values() if asdict(one) == fields["way"])
        cost = attention_cost(way, self.case.model, self.case.sequence, replace(LINKS, kernels=self.case.kernels))
        busy = [[self.factor * line.compute] * 8 for line in (cost.forward, cost.backward)]
        seconds = self.seconds * (2 if fields["way"] == asdict(ways[RING]) and self.ring_is_slow else 1)
        return {
            n: {"seconds": seconds, "busy": b, "held": [one + self.late * seconds for one in b]}
            for n, b in zip(("forward", "backward"), busy, strict=True)
        }


def test_ways_take_turns_and_devices_are_the_planners() -> None:
    cluster = Silent(CASE)
    found = run.measure(cluster, LINKS, CASE, 2, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]
    ways = contenders(CASE)
    assert set(found.ways) == {*ways, PREDICTED, PROFILED}
    assert found.ways[PREDICTED] == found.ways[RING]
    # Each plan once a round, whatever it is called.
    assert cluster.asked == ["choose", *["turn"] * (2 * len(set(ways.values())))]
    assert found.ways[RING].rounds == ((0.5, 0.5), (0.5, 0.5))
    for which in (0, 1):
        assert 0 < found.bound[which] <= min(one.predicted[which] for one in found.ways.values())
    for factor in (1.02, 0.98, float("nan")):
        with pytest.raises(network.ClusterError, match="a device computed"):
            run.measure(Silent(CASE, factor), LINKS, CASE, 1, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]


def test_equal_work_has_an_equal_bound_on_every_mesh() -> None:
    """Under a window, too, where ranks have more and less to do; as in the record."""
    found = set()
    for machines in (Machines(4, 2, (50.0,) * 4), Machines(8, 1, (25.0,) * 8)):
        case = Case(machines, 4, 4, "window", 1.0)
        links = Cluster(8, machines.per_node, Link(1e9, 1e-3), Link(1e9, 1e-3), kernels=case.kernels)
        some = run.bound(case, links)  # of links so fast that only devices count
        found.add(some)
        share = case.sequence.pairs() * case.heads * case.head_dim / 8
        assert some[0] > 4 * share / case.kernels.forward
        assert some[1] > 10 * share / case.kernels.backward
    assert len(found) == 1
    bounds = {sum(one.bound) for case, one in read(PAGE.with_suffix(".jsonl.gz")).items() if case.name in WINDOWS}
    assert len(bounds) == 1


WINDOWS = (
    "16 ranks, 12.5 Mbit/s; 4/4 heads, window, ratio 1",
    "4 x 4 ranks, 50 Mbit/s a node; 4/4 heads, window, ratio 1",
)


def test_a_rank_that_oversleeps_is_recorded_and_beyond_a_limit_refused() -> None:
    for late in (0.1, 0.2):
        cluster = Silent(CASE)
        cluster.late = late
        found = None
        with pytest.raises(network.ClusterError, match="overslept by 20%") if late > run.HELD else nullcontext():
            found = run.measure(cluster, LINKS, CASE, 1, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]
        if found is not None:
            one = found.ways[RING]
            assert one.held == pytest.approx([busy + late / 2 for busy in one.busy])
            assert one.overslept == pytest.approx(late / sum(one.busy))


def test_what_takes_long_or_is_far_slower_than_the_fastest_runs_once() -> None:
    cluster = Silent(CASE)
    cluster.ring_is_slow = True
    found = run.measure(cluster, LINKS, CASE, 2, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]
    assert {name: len(one.rounds) for name, one in found.ways.items()} == {
        name: 1 if name in (RING, PREDICTED) else 2 for name in found.ways
    }
    cluster.seconds, cluster.ring_is_slow = 0.6, False
    found = run.measure(cluster, LINKS, CASE, 2, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]
    assert {len(one.rounds) for one in found.ways.values()} == {1}
    found = run.measure(Silent(half := replace(CASE, ratio=0.5)), LINKS, half, 2, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]
    assert {len(one.rounds) for one in found.ways.values()} == {1}


def test_a_call_is_timed_once_it_is_planned(clocked: list[float]) -> None:
    """For the first one nothing is sent, and nothing computed."""
    x, seen = torch.ones(2, requires_grad=True), list[bool]()

    def work() -> torch.Tensor:
        seen.append(functional._ops is ranks._NOTHING)
        device.DEVICE.compute(1.0)
        return 2 * x

    timed = patch.object(ranks, "_timed", lambda some: (some(), {"seconds": 1.0}))
    with timed:
        assert set(ranks._both(work, [x], torch.ones(2))) == {"forward", "backward"}
    assert seen == [True, False]
    assert clocked == [1.0]


def test_of_collectives_that_send_nothing_as_much_comes() -> None:
    buffer, some = torch.ones(6), ranks._NOTHING
    assert some.wait_tensor(buffer) is buffer
    assert some.all_to_all_single(buffer, [1, 3], [2, 4], "").equal(torch.zeros(4))
    assert some.all_gather_into_tensor(buffer, 3, "").equal(torch.zeros(18))
    assert some.broadcast(buffer, 1, "").equal(torch.zeros(6))


def test_a_gather_of_two_is_a_message_to_the_other() -> None:
    with patch.object(ranks._Messages, "all_to_all_single", lambda _, *given: given):
        both, *splits, group = ranks._Messages().all_gather_into_tensor(torch.arange(3), 2, "team")
    assert both.tolist() == [0, 1, 2, 0, 1, 2]
    assert (splits, group) == ([[3, 3], [3, 3]], "team")


@pytest.mark.parametrize("machines", [Machines(2, 2, (25.0,) * 2), Machines(2, 2, (25.0,) * 2, has_adapters=True)])
def test_a_link_is_shared_by_targets_where_it_enters_and_by_sources_where_it_comes_out(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a class has next to nothing of its own, which it may send whatever the link has left."""
    told: dict[str, str] = {}

    def noted(*command: str, given: str = "") -> None:
        if command[0] == "tc":
            told[" ".join(command[1:-2]) + given.split(" dev ")[1].split()[0]] = given

    monkeypatch.setattr(network, "_run", noted)
    network.Network(replace(machines, inside=100.0), PREFIX).make()
    entering = {name for name in told if name.startswith("-n") or name.startswith(f"{PREFIX}u")}
    assert entering
    assert set(told) > entering
    for name, lines in told.items():
        assert ("match ip dst" in lines, "match ip src" in lines) == (name in entering, name not in entering)
        assert lines.count("rate 8kbit") == machines.ranks


def test_wrong_number_is_refused() -> None:
    class Wrong:
        def __init__(self, error: float) -> None:
            self.error = error

        def ask(self, *_: str, **__: Any) -> dict[str, Any]:
            return {"errors": [0.0, self.error]}

    assert set(run.check_numbers(Wrong(1e-6), CASE)) == set(contenders(CASE))  # pyrefly: ignore[bad-argument-type]
    for error in (1e-3, float("nan")):
        with pytest.raises(network.ClusterError, match="ring is off"):
            run.check_numbers(Wrong(error), CASE)  # pyrefly: ignore[bad-argument-type]


def test_the_planner_takes_the_rank_with_most_to_do() -> None:
    ((inner, program),) = programs_of(contenders(CASE)[RING], CASE.sequence, together=False, backward=False).items()
    assert inner == 7
    assert len([*attended(program)]) == 8


def invoke(*args: str, tmp_path: Path) -> tuple[int, str]:
    """The command's status and what it says, where it must not come to start anything."""
    app = command.typer.Typer()
    app.command()(command.main)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "_locked", lambda *_: pytest.fail("went on to make a cluster"))
        done = CliRunner().invoke(app, [*args, "--page", str(tmp_path / "cluster.md")])
    return done.exit_code, done.output


def test_nothing_to_report(tmp_path: Path) -> None:
    status, output = invoke("--report-only", tmp_path=tmp_path)
    assert (status, output.count("\n")) == (2, 1)
    assert "the record is empty" in output
    status, output = invoke("--only", "typo", tmp_path=tmp_path)
    assert (status, output.count("\n")) == (2, 1)
    assert "no case has 'typo'" in output


def test_not_root_and_no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status, output = invoke(tmp_path=tmp_path)
    assert (status, output.count("\n")) == (2, 1)
    assert "needs root" in output
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    status, output = invoke(tmp_path=tmp_path)
    assert (status, output.count("\n")) == (2, 1)
    assert "needs tc: install iproute2" in output


def test_latency_that_the_kernel_cannot_add(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: str, given: str = "") -> None:
        if "netem" in given:
            raise network.ClusterError("Specified qdisc kind is unknown")

    monkeypatch.setattr(network, "_run", refusing)
    network.Network(MACHINES).make()
    with pytest.raises(network.ClusterError, match="latency needs the qdisc netem"):
        network.Network(replace(MACHINES, latency=1.0)).make()


@pytest.mark.parametrize(("prefix", "ranks"), [("wf1", 2), ("tenletters", 2), ("", 2), ("wf", 256)])
def test_network_without_names(prefix: str, ranks: int) -> None:
    with pytest.raises(network.ClusterError, match="a prefix has 1 to 9 letters"):
        network.Network(Machines(ranks, 1, (1.0,) * ranks), prefix)


def test_host_where_ranks_may_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_BATCH)
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda _, policy, param: set_to.append((policy, param.sched_priority))
    )
    network.check_host()
    assert set_to == [(os.SCHED_RR, 1), (os.SCHED_BATCH, 0)]  # and as it was


def test_host_where_ranks_may_not_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(shutil, "which", str)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with pytest.raises(network.ClusterError, match="SCHED_RR needs CAP_SYS_NICE"):
        network.check_host()


RUNNING = """
    from dataclasses import asdict

    from recipes.benchmarks.cluster.cases import Case, Machines, contenders, RING
    from recipes.benchmarks.cluster.launch import started
    from recipes.benchmarks.cluster.run import check_network, check_numbers

    case = Case(Machines(2, 1, (100.0, 100.0)), 2, 2, "causal", 1.0)
    with started(case.machines, {prefix!r}) as cluster:
        check_network(cluster)
        check_numbers(cluster, case)
        way = asdict(contenders(case)[RING])
        cluster.ask("turn", case=asdict(case), way=way)
        print("measuring", cluster.process.pid, flush=True)
        while True:
            cluster.ask("turn", case=asdict(case), way=way)
"""


def left_over() -> list[str]:
    """Whatever there is of the test's cluster."""
    processes = []
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            processes.append(arguments.read_text().replace("\0", " "))
    folder = network.STATE / PREFIX
    return [
        *network.left_over(PREFIX),
        *(line for line in processes if PREFIX in line),
        *([str(folder)] if folder.exists() else []),
    ]


def without_a_core() -> None:
    """Nobody is to look for what it crashed of."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def started(**options: Any) -> subprocess.Popen[str]:
    """A run that measures, and says so."""
    program = textwrap.dedent(RUNNING.format(prefix=PREFIX))
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
        **options,
    )  # fmt: skip


def ranks_of(line: str) -> list[int]:
    """The processes of the ranks, from what a run says."""
    pid = line.split()[1]
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.ranks
@needs_network
@pytest.mark.parametrize(
    "group", [pytest.param(False, id="alone", marks=pytest.mark.whole), pytest.param(True, id="with its group")]
)
def test_killed_run_leaves_nothing(group: bool) -> None:
    assert left_over() == []
    with started() as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("measuring")
            # Of two nodes of one rank: two namespaces, five switches, two uplinks of two ends, and two ports of each.
            assert len(network.left_over(PREFIX)) == 15
            ranks = ranks_of(said)
            assert sorted(ranks) == sorted(pid for node in range(2) for pid in network.pids(f"{PREFIX}{node}"))
            for rank in ranks if not group else []:
                # Such ranks end by nothing but SIGKILL.
                os.kill(rank, signal.SIGSTOP)
        finally:
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left_over() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over() == []


@pytest.mark.whole
@pytest.mark.ranks
@needs_network
def test_rank_that_crashes_says_of_which_signal_and_where() -> None:
    with started(stderr=subprocess.PIPE, preexec_fn=without_a_core) as process:
        assert process.stdout is not None
        os.kill(ranks_of(process.stdout.readline())[1], signal.SIGABRT)
        try:
            _, said = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # or else it would be waited for without a limit
            raise
    assert "rank 1 died of SIGABRT" in said
    assert "of SIGTERM" not in said  # as the other one may have been ended
    assert "Fatal Python error: Aborted" in said
    assert "in _serve" in said
    assert "ClusterError: the ranks ended during 'turn'" in said
