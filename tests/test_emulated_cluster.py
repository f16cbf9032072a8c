"""The emulated cluster: its report, its record, who takes part, what it refuses, and that nothing of it stays."""

import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from recipes.benchmarks.cluster import __main__ as command
from recipes.benchmarks.cluster import network, run, watcher
from recipes.benchmarks.cluster.cases import Case, Nodes, all_cases
from recipes.benchmarks.cluster.contenders import (
    FLOOR,
    GATHER,
    PLANNED,
    PREDICTED,
    PUBLISHED,
    RING,
    ULYSSES,
    USP,
    contenders,
)
from recipes.benchmarks.cluster.findings import findings
from recipes.benchmarks.cluster.gathered import gathered_attention
from recipes.benchmarks.cluster.judged import best_of, is_slower, noise, regret, regret_by_round
from recipes.benchmarks.cluster.record import Entry, append, is_done, latest, read
from recipes.benchmarks.cluster.report import case_table, summary, write
from recipes.benchmarks.cluster.stolen import Ticks, undisturbed
from recipes.benchmarks.cluster.watcher import environment
from wallfacer_dt.layout import deal, positions
from wallfacer_dt.testing import RankPool, attention_oracle, worst_error

NODES = Nodes(4, 4)
CASE = Case(500, 16, 16, False, 4096)
SECONDS = {FLOOR: 1.0, RING: 4.0, f"{PUBLISHED}, C = 2": 3.0, ULYSSES: 1.6, USP: 2.0, GATHER: 5.0}
PREFIX = "wftest"


def entries(case: Case = CASE, seconds: dict[str, float] | None = None, **others) -> list[Entry]:
    """A run of a case: three rounds, the middle one of these seconds."""
    fits = {one.name: one for one in contenders(NODES, case.heads, is_causal=case.is_causal)}
    made = []
    for name, middle in (seconds or SECONDS).items():
        # What was planned, and what was predicted, are like no other.
        contender = fits.get(name) or replace(fits[RING], name=name, team=2 + (name == PREDICTED))
        rounds = (0.9 * middle, middle, 1.1 * middle)
        backward = tuple(0.75 * one for one in rounds)
        forward = tuple(0.25 * one for one in rounds)
        fields = {"run": "2026-11-22T00:00:00", "commit": "abc", "machine": "2 cores", "node_bytes": 3 << 20} | others
        made.append(
            Entry(
                cluster=NODES, case=case, contender=contender, forward=forward, backward=backward, error=1e-6, **fields
            )
        )
    return made


def test_contenders_that_fit() -> None:
    names = [one.name for one in contenders(NODES, 16, is_causal=False)]
    assert names[:2] == [FLOOR, RING]
    assert len(names) == len(set(names)) == 13
    assert {ULYSSES, USP, GATHER, f"{PUBLISHED}, C = 2", f"{PUBLISHED}, C = 4", "2d, ring 1 x team 16"} < set(names)
    # Six heads are not enough for all ranks, but for those of a node; a causal mask brings the head-tail ring.
    few = [one.name for one in contenders(NODES, 6, is_causal=True)]
    assert set(names) - set(few) == {ULYSSES}
    assert set(few) - set(names) == {"ring, head-tail"}
    assert [one.name for one in contenders(Nodes(2, 1), 16, is_causal=False)] == [
        FLOOR, RING, "2d, ring 1 x team 2", ULYSSES, GATHER,
    ]  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
def test_contenders_fill_the_ranks(is_causal: bool) -> None:
    for one in contenders(NODES, 16, is_causal=is_causal):
        if one.kind != "whole":
            assert one.ulysses * one.ring * one.team == NODES.ranks
            assert one.order == ("head_tail" if is_causal and one.name != RING else "contiguous")


def test_cheap_cases_come_first() -> None:
    cases = all_cases()
    assert len(cases) == len(set(cases)) == 48
    assert [case.cost for case in cases] == sorted(case.cost for case in cases)
    assert cases[0] == Case(None, 6, 2, True, 4096)
    assert cases[-1] == Case(200, 16, 4, False, 16384)


def test_record_round_trip_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "record.jsonl"
    assert read(path) == []
    append(path, entries())
    assert read(path) == entries()
    assert is_done(read(path), "abc", NODES, CASE, list(SECONDS), 3)
    assert not is_done(read(path), "abc", NODES, CASE, list(SECONDS), 4)
    assert not is_done(read(path), "abc", NODES, CASE, [*SECONDS, "2d, ring 8 x team 2"], 3)
    assert not is_done(read(path), "def", NODES, CASE, list(SECONDS), 3)
    assert not is_done(read(path), "abc", Nodes(2, 4), CASE, list(SECONDS), 3)
    assert not is_done(read(path), "abc", NODES, replace(CASE, rate=None), list(SECONDS), 3)
    # A run that was killed while it wrote.
    path.write_text(path.read_text()[:-20])
    assert read(path) == entries()[:-1]
    assert not is_done(read(path), "abc", NODES, CASE, list(SECONDS), 3)
    append(path, entries(run="later"))
    assert read(path) == entries()[:-1] + entries(run="later")


def test_latest_is_the_fullest_run_of_a_cases_last_commit() -> None:
    slower = {name: 2 * seconds for name, seconds in SECONDS.items()}
    old = entries(commit="old")
    part = entries(run="part", seconds={FLOOR: 9.0, RING: 9.0})
    again = entries(run="again", seconds=slower)
    assert latest([]) == {}
    assert latest([*old, *entries(), *part]) == {CASE: {entry.contender.name: entry for entry in entries()}}
    assert latest([*old, *entries(), *again, *part])[CASE][RING].seconds == 8.0
    once = [replace(entry, forward=(1.0,), backward=(7.0,), run="once") for entry in entries()]
    assert latest([*entries(), *once])[CASE][RING].seconds == 4.0
    # What the last commit has not measured is there as it was.
    other = replace(CASE, rate=200)
    both = latest([*entries(other, commit="old"), *old, *entries()])
    assert {case: measured[RING].commit for case, measured in both.items()} == {other: "old", CASE: "abc"}


def test_disturbed_measurement_is_made_again() -> None:
    said: list[str] = []
    waited: list[float] = []

    def measured(*shares: float, attempts: int = 3) -> tuple[int, float]:
        """The attempt that counts, of those in which these shares were missing."""
        clock = iter([ticks for share in shares for ticks in (Ticks(500, 70), Ticks(600, 70 + round(100 * share)))])
        calls = iter(range(len(shares)))
        return undisturbed(
            lambda: next(calls), "it", said.append, attempts=attempts, ticks=lambda: next(clock), sleep=waited.append
        )

    assert measured(0.05) == (0, 0.05)
    assert (said, waited) == ([], [])
    assert measured(0.3, 0.0) == (1, 0.0)
    assert len(said) == len(waited) == 1
    assert "it: the host took 30% of the cores" in said[0]
    assert measured(0.3, 0.1, 0.2) == (1, 0.1)
    assert measured(0.3, attempts=1) == (0, 0.3)


def test_ticks_are_those_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Guests' time, the last two, is in the first two already.
    monkeypatch.setattr(Path, "read_text", lambda _: "cpu  1 2 3 4 5 6 7 80 1 2\ncpu0 9 9 9 9 9 9 9 9 9 9\n")
    assert Ticks.now() == Ticks(every=108, stolen=80)


class Silent:
    """A cluster that computes nothing: it writes down what it is asked, and at which rate of its links."""

    nodes = NODES

    def __init__(self, error: float = 0.0) -> None:
        self.asked: list[tuple[str, str, int | None]] = []
        self.error = error
        self.rate: int | None = None
        self.network = self

    def limit(self, rate: int | None) -> None:
        self.rate = rate

    def received(self) -> list[int]:
        return [len(self.asked), 0]

    def ask(self, what: str, contender: dict[str, Any] | None = None, **_: object) -> dict[str, Any]:
        self.asked.append((what, contender["name"] if contender else "", self.rate))
        one = asdict(contenders(NODES, 16, is_causal=False)[1])
        chosen = {"predicted": one | {"name": PREDICTED}, "planned": one | {"name": PLANNED}, "ran": 8, "seconds": 9.0}
        return chosen if what == "choose" else {"forward": len(self.asked), "backward": 1.0, "error": self.error}


@pytest.fixture
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host takes nothing, whatever it takes."""
    monkeypatch.setattr(run, "undisturbed", lambda call, *_, **__: (call(), 0.0))


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize(("length", "warm_up"), [(4096, True), (16384, False)])
def test_first_round_is_checked_and_may_count(length: int, *, warm_up: bool) -> None:
    case, cluster = replace(CASE, length=length), Silent()
    running = [one for one in contenders(NODES, 16, is_causal=False) if one.name in (FLOOR, RING)]
    made = run.measure(cluster, case, 2, running, "abc", lambda _: None)  # pyrefly: ignore[bad-argument-type]
    names = [FLOOR, RING, PREDICTED, PLANNED]
    assert [entry.contender.name for entry in made] == names
    choose, prepare, *done = cluster.asked
    assert (choose, prepare) == (("choose", "", CASE.rate), ("prepare", "", CASE.rate))
    # The floor's is the truth, so it comes first; later on others do. Links have no limit while results are gathered.
    first = [(what, name, rate) for name in names for what, rate in (("pass", CASE.rate), ("check", None))]
    second = [("pass", name, CASE.rate) for name in [*names[1:], FLOOR]]
    assert done[:12] == first + second
    assert len(done) == 8 + 4 * (1 + warm_up)
    passes = [at for at, asked in enumerate(cluster.asked, 1) if asked[:2] == ("pass", RING)]
    assert (list(made[1].forward), made[1].warm_up, made[1].node_bytes) == (passes[warm_up:], warm_up, 1)


@pytest.mark.usefixtures("calm")
def test_wrong_result_is_no_contender() -> None:
    with pytest.raises(network.ClusterError, match=r"ring is off by 2\.0e-03"):
        run.measure(
            Silent(2e-3),  # pyrefly: ignore[bad-argument-type]
            CASE, 1, contenders(NODES, 16, is_causal=False)[1:2], "abc", lambda _: None,
        )  # fmt: skip


def test_what_was_planned_is_judged() -> None:
    by_name = {entry.contender.name: entry for entry in entries(seconds=SECONDS | {PLANNED: 2.0})}
    assert best_of(by_name) == ULYSSES
    assert regret(by_name) == pytest.approx(0.25)
    # In the same rounds, of which here all are slower, or two of three.
    assert is_slower(by_name, ULYSSES)
    assert not is_slower(by_name, RING)
    often = replace(by_name[PLANNED], forward=(0.3, 0.5, 0.6), backward=(1.1, 1.4, 1.5))
    assert [one < other for one, other in zip(by_name[ULYSSES].sums, often.sums, strict=True)] == [False, True, True]
    assert not is_slower(by_name | {PLANNED: often}, ULYSSES)
    little = replace(by_name[ULYSSES], backward=tuple(1.02 * one for one in by_name[ULYSSES].backward))
    assert not is_slower(by_name | {PLANNED: little}, ULYSSES)
    (row,) = summary({CASE: by_name}).rows
    assert row[1:] == [
        "ulysses (1.600 s)", "0.40", "1.60", by_name[PLANNED].contender.what, "", "25%", "-", "0.50", "1.00", "1.25",
        "0.67", "2.00", "abc",
    ]  # fmt: skip


def test_one_plan_measured_twice_is_noise() -> None:
    by_name = {entry.contender.name: entry for entry in entries(seconds={FLOOR: 1.0, PLANNED: 2.0, PREDICTED: 1.6})}
    assert regret(by_name) == pytest.approx(0.25)
    assert noise({CASE: by_name}) == []
    same = replace(by_name[PREDICTED], contender=replace(by_name[PLANNED].contender, name=PREDICTED))
    assert regret(by_name | {PREDICTED: same}) == 0
    assert noise({CASE: by_name | {PREDICTED: same}}) == [pytest.approx(0.25)]
    assert "one took 25% longer than the other in the median" in "\n".join(
        findings({CASE: by_name | {PREDICTED: same}})
    )
    # Ulysses by itself has nothing that rotates, or that a placement would move.
    alone = {entry.contender.name: entry for entry in entries(seconds={ULYSSES: 1.6, PLANNED: 2.0})}
    what = replace(alone[ULYSSES].contender, name=PLANNED, rotate="q", placement="ulysses_in_node")
    alone[PLANNED] = replace(alone[PLANNED], contender=what)
    assert regret(alone) == 0
    assert "slower than Ulysses beyond noise in 0 of 1 cases" in "\n".join(findings({CASE: alone}))
    # 16 key heads on 16 ranks: of 4 in each ring keys and values are fewer bytes forward, and queries backward.
    usp = {entry.contender.name: entry for entry in entries(seconds={USP: 1.6, PLANNED: 2.0})}
    for rotations, lost in ((("kv", "q"), 0.0), (("q", "q"), 0.25)):
        what = replace(usp[USP].contender, name=PLANNED, rotate_forward=rotations[0], rotate=rotations[1])
        both = usp | {PLANNED: replace(usp[PLANNED], contender=what)}
        assert regret(both) == pytest.approx(lost)
        assert f"Best by cases: {USP if lost else PLANNED}, 1." in findings({CASE: both})


def test_who_is_best_of_many_is_lucky() -> None:
    by_name = {
        entry.contender.name: entry for entry in entries(seconds={FLOOR: 1.0, RING: 2.0, USP: 2.0, PLANNED: 2.0})
    }
    of = {
        FLOOR: (1.0, 1.0, 1.0), RING: (2.0, 2.0, 2.0), USP: (1.0, 2.5, 2.5), PLANNED: (2.1, 2.2, 2.4),
    }  # fmt: skip
    some = {name: replace(by_name[name], forward=sums, backward=(0.0,) * 3) for name, sums in of.items()}
    # By the others' medians: the ring's 2.0 in round 1; USP's 1.75 in 2 and 3.
    assert regret_by_round(some) == pytest.approx(statistics.median([2.1 / 2.0, 2.2 / 2.5, 2.4 / 2.5]) - 1)
    assert "planned takes 0.96 times as long in the median, and more than 10% longer in 0 of 1 cases." in "\n".join(
        findings({CASE: some})
    )
    once = {name: replace(entry, forward=(1.0,), backward=(1.0,)) for name, entry in some.items()}
    assert regret_by_round(once) is None
    assert "luckiest" not in "\n".join(findings({CASE: once}))


def test_findings_name_the_cases_lost() -> None:
    free = replace(CASE, rate=None, is_causal=True)
    cases = latest(
        entries(seconds=SECONDS | {PLANNED: 1.65}) + entries(free, seconds=SECONDS | {PLANNED: 6.0})
    )  # fmt: skip
    text = "\n".join(findings(cases))
    assert f"more than 10% slower than the best in 1 of 2 cases: {free.name}." in text
    assert f"slower than the plain ring beyond noise in 1 of 2 cases: {free.name}." in text
    for what in ("the best contender", "planned"):
        assert f"Without a limit {what} takes more than 1.2 times one process in 1 of 1 cases: {free.name}." in text
    assert "2 of the 48 cases" in text
    assert "as long as planned in 0 of 0 cases" in text
    assert "is 20% of its time above the fastest in the median, and more than 10% in 14 of 14. In 0 of 2 cases" in text
    # What ran but once is not judged, and named all the same, with how much longer it took.
    once = [replace(entry, forward=entry.forward[:1], backward=entry.backward[:1]) for entry in entries(free)]
    planned = replace(once[1], contender=replace(once[1].contender, name=PLANNED, team=3))
    text = "\n".join(findings(latest([*entries(seconds=SECONDS | {PLANNED: 1.65}), *once, planned])))
    assert (
        "slower than USP beyond noise in 0 of 1 cases. Of 1 that ran fewer rounds it takes more than 3% longer in "
        f"1: {free.name} (+100%)."
    ) in text
    assert "In 1 of 2 cases each ran once" in text
    few = replace(CASE, heads=6, kv_heads=2)
    head_tail = "ring, head-tail"
    cases = latest(
        entries(few, seconds={FLOOR: 1.0, RING: 4.0, head_tail: 3.2, USP: 2.4, PLANNED: 2.2, PREDICTED: 2.6})
    )
    text = "\n".join(findings(cases))
    assert f"takes less than 1.5 times as long as planned in 1 of 1 cases: {few.name}." in text
    assert "not ahead of USP in 0 of 1 cases." in text
    assert f"What was predicted alone is more than 10% slower than the best in 1 of 1 cases: {few.name}." in text
    assert "hardly that much to gain" not in text
    cases = latest(entries(few, seconds={FLOOR: 3.0, RING: 4.0, PLANNED: 3.2}))
    assert "In 1 of those 1 the rings take less than 1.5 times as long as one process, too" in "\n".join(
        findings(cases)
    )
    assert "Nothing was planned" in "\n".join(findings(latest(entries())))


def test_report_of_a_record(tmp_path: Path) -> None:
    other = replace(CASE, rate=None, heads=6, kv_heads=2)
    few = {name: seconds for name, seconds in SECONDS.items() if name != ULYSSES}
    path = write(
        entries() + entries(other, seconds=few | {PLANNED: 1.0}, stolen=(0.0, 0.02, 0.08)), tmp_path, "2026-11-22"
    )
    text = path.read_text()
    assert path.name == "cluster_cpu_2026-11-22.md"
    assert (tmp_path / "cluster_cpu_2026-11-22.png").stat().st_size > 10_000
    for case in (CASE, other):
        assert f"## {case.name}\n" in text
    assert "| ring | 1.000 | 3.000 | 4.000 | 20% | 1.00 | 4.00 | 3.0 |" in text
    assert "yunchang" in text
    assert "counts, too" not in text
    assert "Of 18 turns that counted 6 had more taken, up to 8%; in 1 of 2 cases" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith(("|", "-", "!"))) <= 120
    cold = write(entries() + entries(other, seconds=few, warm_up=False), tmp_path, "2026-11-23").read_text()
    # The first of three rounds takes 0.9 times as long as the second, the third 1.1 times.
    assert "reported.\nIn 1 of the cases, of long sequences, the first round counts, too: where there are" in cold
    assert "more, it takes 0.857 times as long in\nthe median, 0.86 to 0.86 times in all.\n\n" in cold
    assert "(1.60 times as long at best)" in cold
    with pytest.raises(network.ClusterError, match="empty"):
        write([], tmp_path, "2026-11-22")


def test_case_table_is_sorted() -> None:
    table = case_table(CASE, {entry.contender.name: entry for entry in entries()})
    assert [row[0] for row in table.rows] == sorted(SECONDS, key=lambda name: SECONDS[name])


def invoke(*args: str, tmp_path: Path) -> tuple[int, str]:
    """The command's status and what it says, where it must not come to start anything."""
    app = command.typer.Typer()
    app.command()(command.main)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watcher, "_locked", lambda *_: pytest.fail("went on to make a cluster"))
        done = CliRunner().invoke(app, [*args, "--record", str(tmp_path / "record.jsonl"), "--out", str(tmp_path)])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--rates", "fast"), "--rates none,1000"),
        (("--heads", "16/3"), "--heads 16/16"),
        (("--masks", "half"), "--masks full,causal"),
        (("--lengths", "4100"), "multiples of 32"),
        (("--report-only",), "record is empty"),
    ],
)
def test_refusals_are_one_line(args: tuple[str, ...], said: str, tmp_path: Path) -> None:
    status, output = invoke(*args, tmp_path=tmp_path)
    assert status == 2
    assert said in output
    assert output.count("\n") == 1


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


def _gathered(is_causal: bool) -> float:
    """The largest error of the all-gather contender on this rank, relative to the largest element."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, 48, 8, generator=generator) for heads in (4, 2, 2, 4))
    truth = attention_oracle(q, k, v, grad, is_causal=is_causal, dtype=None)
    spans = deal(48, (size,), "head_tail" if is_causal else "contiguous")[rank]
    own = torch.from_numpy(positions(spans))
    leaves = [x[:, :, own].requires_grad_() for x in (q, k, v)]
    out = gathered_attention(*leaves, is_causal=is_causal)
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad[:, :, own]))
    return worst_error([(x, y[:, :, own]) for x, y in zip(found, truth, strict=True)], relative_to="largest")


@pytest.mark.ranks
@pytest.mark.parametrize("is_causal", [False, True])
def test_all_gather_equals_one_process(ranks: Callable[[int], RankPool], is_causal: bool) -> None:
    for size in (1, 3):
        assert max(ranks(size).run(_gathered, is_causal)) < 1e-5


KILLED = """
    from dataclasses import asdict

    from recipes.benchmarks.cluster.cases import Case, Nodes
    from recipes.benchmarks.cluster.launch import started
    from recipes.benchmarks.cluster.run import check_loopback, selected

    case = Case(50, 4, 4, False, 4096)
    with started(Nodes(2, 1), {prefix!r}) as cluster:
        check_loopback(cluster)
        cluster.network.limit(case.rate)
        running = [asdict(one) for one in selected(cluster, case, ["ulysses"])]
        cluster.ask("prepare", case=asdict(case), contenders=running)
        cluster.ask("pass", contender=running[1])
        print("measuring", flush=True)
        while True:
            cluster.ask("pass", contender=running[1])
"""


def left_over() -> list[str]:
    """Whatever there is of the test's cluster."""
    processes = []
    for arguments in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(FileNotFoundError, ProcessLookupError):
            processes.append(arguments.read_text().replace("\0", " "))
    folder = network.folder_of(PREFIX)
    return [
        *network.left_over(PREFIX),
        *(line for line in processes if PREFIX in line),
        *([str(folder)] if folder.exists() else []),
    ]


@pytest.mark.ranks
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="needs root and iproute2's ip and tc"
)
@pytest.mark.parametrize("group", [False, True], ids=["alone", "with its group"])
def test_killed_run_leaves_nothing(group: bool) -> None:
    assert left_over() == []
    program = textwrap.dedent(KILLED.format(prefix=PREFIX))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment(), start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "measuring\n"
            # Two namespaces, a bridge, and of each node's link the end that is not in the namespace.
            assert len(network.left_over(PREFIX)) == 5
            ranks = [pid for node in range(2) for pid in network.pids(f"{PREFIX}{node}")]
            # A node's first process, and its rank.
            assert len(ranks) == 4
            for rank in ranks if not group else []:
                # Such ranks end by nothing but SIGKILL.
                os.kill(rank, signal.SIGSTOP)
        finally:
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left_over() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over() == []


def without_a_core() -> None:
    """Nobody is to look for what it crashed of."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.ranks
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_rank_that_crashes_says_of_which_signal_and_where(tmp_path: Path) -> None:
    settings = json.dumps({"node": 0, "nodes": 1, "per_node": 2, "store": str(tmp_path / "store")})
    with subprocess.Popen(
        [sys.executable, "-m", "recipes.benchmarks.cluster.ranks", settings],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        start_new_session=True, preexec_fn=without_a_core,
    ) as node:  # fmt: skip
        assert node.stdout is not None
        assert node.stdout.readline() == "null\n"
        ranks = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        assert len(ranks) == 2
        os.kill(int(ranks[1]), signal.SIGABRT)
        try:
            _, said = node.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(node.pid, signal.SIGKILL)  # or else it would be waited for without a limit
            raise
    assert node.returncode == 1
    assert "rank 1 died of SIGABRT" in said
    assert "of SIGTERM" not in said  # as the other one may have been ended
    assert "Fatal Python error: Aborted" in said
    assert "in _serve" in said
