"""`wallfacer explain`: the facts are those of the schedules that run, and what is printed are the facts."""

import io
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.console import Console

from tests.closed_volumes import Closed
from tests.strategies import PLACEMENTS, examples, schedules, ulysses_meshes
from wallfacer_dt import TokenOrder, context_mesh, sequence_positions
from wallfacer_dt.algorithms.sequences import hops
from wallfacer_dt.command.app import main
from wallfacer_dt.command.explain import Facts, Settings, make_facts
from wallfacer_dt.command.explain.facts import Communicate, as_json
from wallfacer_dt.command.explain.picture import draw_facts
from wallfacer_dt.command.explain.text import print_facts
from wallfacer_dt.command.explain.timeline import EXPOSED, timeline
from wallfacer_dt.mesh import Placement
from wallfacer_dt.testing.fake import fake_world


@st.composite
def asked(draw: st.DrawFn) -> Settings:
    ring, team, ulysses = draw(st.sampled_from(ulysses_meshes(draw(st.integers(1, 16)))))
    kv_heads = draw(st.integers(1, 5))
    group = draw(st.integers(-(-ulysses // kv_heads), -(-ulysses // kv_heads) + 2))
    schedule = draw(st.sampled_from(schedules(ring, team)))
    published = schedule == "published"
    return Settings(
        ring=ring, team=team, ulysses=ulysses, schedule=schedule,
        rotate=draw(st.sampled_from(["q", "auto"] if published else ["kv", "q", "auto"])),
        rotate_forward=draw(st.sampled_from(["kv", "auto"] if published else ["kv", "q", "auto"])),
        order=draw(st.sampled_from(["contiguous", "head_tail"])), causal=draw(st.booleans()),
        window=draw(st.sampled_from([None, None, 0, 3, 20])), placement=draw(st.sampled_from(PLACEMENTS)),
        ranks_per_node=draw(st.integers(1, 5)), length=draw(st.integers(1, 70)), heads=kv_heads * group,
        kv_heads=kv_heads, head_dim=draw(st.sampled_from([8, 24])), batch=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from(["float32", "bfloat16"])), backward=draw(st.booleans()),
    )  # fmt: skip


@examples(50)
@given(asked())
def test_every_send_has_its_receive(chosen: Settings) -> None:
    sent, received = Counter(), Counter()
    for rank in make_facts(chosen).ranks:
        for t in rank.transfers:
            kind = (t.number, t.kind, t.what, t.group)
            sent.update((*kind, rank.rank, m.rank, m.elements, m.bytes) for m in t.sends)
            received.update((*kind, m.rank, rank.rank, m.elements, m.bytes) for m in t.receives)
            assert all(m.rank != rank.rank for m in t.sends + t.receives)
    assert sent == received


@example(Settings(ring=4))
@example(Settings(ring=6, team=2, schedule="published"))
@example(Settings(ring=2, team=3, schedule="rings", backward=True))
@examples(50)
@given(asked())
def test_a_block_comes_from_where_it_was(chosen: Settings) -> None:
    """The sender of a hop has the same rows as its block before, or as its own where another way round begins."""
    facts = make_facts(chosen)
    for rank in facts.ranks:
        held = {(step.group, step.block): step.moves for step in rank.attends}
        for t in rank.transfers:
            if t.kind == "move" and t.axis == "cp_ring" and t.receives:
                (message,) = t.receives
                theirs = {(s.group, s.block): s.moves for s in facts.ranks[message.rank].attends}
                assert held[t.group, t.block] in (theirs[t.group, t.block - 1], theirs[t.group, 0])


@examples(50)
@given(asked())
def test_what_comes_in_is_the_volume(chosen: Settings) -> None:
    """Against closed formulas that are independent of the schedules."""
    for rank, place in zip(make_facts(chosen).ranks, chosen.places().values(), strict=True):
        is_ring = chosen.schedule != "published" or chosen.team == 1
        volume = Closed(
            ring=chosen.ring, team=chosen.team, ulysses=chosen.ulysses, batch=chosen.batch, length=chosen.length,
            heads=chosen.heads, kv_heads=chosen.kv_heads, head_dim=chosen.head_dim, dtype=getattr(torch, chosen.dtype),
            schedule=chosen.schedule, rotate=chosen.rotate, rotate_forward=chosen.rotate_forward,
            order=chosen.order, index=place.index,
            hops=hops(place.axes, chosen.sequences, "q") if is_ring else None,
        ).volume()  # fmt: skip
        assert rank.received == (volume.backward if chosen.backward else volume.forward).bytes
        assert rank.received_from_other_nodes <= rank.received


@example(Settings(ring=4, team=2, schedule="published"))
@example(Settings(ring=4, team=2, ulysses=2, schedule="published", backward=True))
@examples(50)
@given(asked())
def test_every_pair_that_is_seen_is_computed_once(chosen: Settings) -> None:
    """By whose rows a step pairs: with all keys where nothing is masked; counted, under a mask."""
    facts = make_facts(chosen)
    pairs: Counter[int] = Counter()
    met: dict[int, Counter] = {}
    for rank in facts.ranks:
        for step in rank.attends:
            start, stop = rank.heads[step.group].q
            pairs[rank.rank] += step.pairs * (stop - start)
        # Own rows of one's own block may be computed in two parts.
        for part, stays, moves, group in {(s.part, s.stays, s.moves, s.group) for s in rank.attends}:
            heads = rank.heads[group].q[1] - rank.heads[group].q[0]
            for mine in stays:
                met.setdefault(mine, Counter()).update(dict.fromkeys(moves, heads))
            assert (part == "local") == (rank.rank in stays)
    ahead = 0 if chosen.causal else chosen.window
    low, high = (chosen.length if reach is None else reach for reach in (chosen.window, ahead))
    n = range(chosen.length)
    assert sum(pairs.values()) == chosen.heads * sum(i - low <= j <= i + high for i in n for j in n)
    if chosen.window is None:
        everyone = {rank.rank: chosen.heads for rank in facts.ranks}
        assert met == {rank.rank: everyone for rank in facts.ranks}


@given(asked())
@examples(25)
def test_transfers_are_started_and_then_waited_for(chosen: Settings) -> None:
    for rank in make_facts(chosen).ranks:
        done = [step for step in rank.steps if isinstance(step, Communicate)]
        started = [step.transfer for step in done if step.kind == "start"]
        waited = [step.transfer for step in done if step.kind == "wait"]
        assert len(set(started)) == len(started)
        assert set(waited) == set(started) == {t.number for t in rank.transfers}
        assert all(done.index(Communicate("start", n)) < done.index(Communicate("wait", n)) for n in started)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("ring", "team", "ulysses"), [(4, 2, 1), (2, 3, 1), (2, 2, 3), (1, 1, 4)])
def test_ranks_and_positions_are_those_of_a_mesh(placement: Placement, ring: int, team: int, ulysses: int) -> None:
    chosen = Settings(
        ring=ring, team=team, ulysses=ulysses, placement=placement, order="head_tail", length=50, ranks_per_node=3
    )
    for rank in make_facts(chosen).ranks:
        with fake_world(chosen.ranks, rank.rank):
            mesh = context_mesh("cpu", ring, team, ulysses=ulysses, placement=placement)
            coordinate = mesh.get_coordinate()
            positions = sequence_positions(50, TokenOrder("head_tail", mesh)).tolist()
        assert list(coordinate) == ([rank.ulysses_rank] if ulysses > 1 else []) + [rank.ring_rank, rank.team_rank]
        assert [p for span in rank.positions for p in range(*span)] == positions
        assert rank.node == rank.rank // 3


def test_bytes_from_other_nodes() -> None:
    """Two nodes of a ring of 4: rank 0 gets all from the other node, rank 1 nothing."""
    facts = make_facts(Settings(ring=4, ranks_per_node=2, length=8, heads=1, kv_heads=1, head_dim=4, dtype="float32"))
    hop = 2 * 2 * 4 * 4  # k and v of 2 tokens, 4 elements each
    assert [rank.received for rank in facts.ranks] == [3 * hop] * 4
    assert [rank.received_from_other_nodes for rank in facts.ranks] == [3 * hop, 0, 3 * hop, 0]


def test_an_all_gather_enters_a_node_once() -> None:
    """A team of 4 on two nodes: queries go round it, each rank is sent its results by all others."""
    facts = make_facts(
        Settings(ring=1, team=4, ranks_per_node=2, length=8, heads=1, kv_heads=1, head_dim=4, dtype="float32")
    )
    q, out = 2 * 4 * 4, 2 * (4 + 1) * 4  # of 2 tokens; the results bring an lse
    assert [rank.received for rank in facts.ranks] == [3 * (q + out)] * 4
    across = [3 * q + 2 * out, 2 * out]
    assert [rank.received_from_other_nodes for rank in facts.ranks] == across * 2


SMALL = Settings(ring=2, team=2, order="head_tail", causal=True, length=8, heads=2, kv_heads=2, ranks_per_node=2)


def printed(facts: Facts, rank: int = 0) -> str:
    out = io.StringIO()
    print_facts(facts, rank, Console(file=out, width=100, highlight=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_golden_text() -> None:
    # expecttest writes ASCII alone.
    assert_expected_inline(
        printed(make_facts(SMALL), 2).replace("─", "-"),
        """\
forward of 8 tokens, head_tail, causal; 2/2 heads of 64, batch 1, bfloat16
2d schedule: queries are gathered in teams of 2 and stay; keys and values go round rings of 2

The mesh: global rank (node)
 ring   team 0   team 1
------------------------
    0    0 (0)    1 (0)
    1    2 (1)    3 (1)

Nodes
 node   ranks   receives from other nodes
------------------------------------------
    0   0,1                       2.05 kB
    1   2,3                       2.05 kB

Who holds what: positions start:stop of the sequence, and what comes in
 rank   tokens   positions   receives   from other nodes
---------------------------------------------------------
    0        2   0:1, 7:8     2.06 kB            1.02 kB
    1        2   1:2, 6:7     2.06 kB            1.02 kB
    2        2   2:3, 5:6     2.06 kB            1.02 kB
    3        2   3:4, 4:5     2.06 kB            1.02 kB

Whose keys and values each rank works on, by rank that holds them, and the share of pairs seen
 block   rank 0   rank 1   rank 2   rank 3
-------------------------------------------
     0   0  62%   1  62%   2  62%   3  62%
     1   2  50%   3  50%   0  50%   1  50%

Who sends what to whom, in the order of the first rank's steps
 transfer                what       from -> to, or {all with all}   a message
------------------------------------------------------------------------------
        0   all-gather   q          {0,1}  {2,3}                        512 B
        1   hop          k, v       0->2  1->3  2->0  3->1            1.02 kB
        2   all-to-all   out, lse   {0,1}  {2,3}                        528 B

Steps of rank 2
                                             to and from ranks, or
                                             rows of queries x rows of   messages x elements, bytes
 step             what                       keys                                              each
----------------------------------------------------------------------------------------------------
    0   start     0: all-gather q            to 3                                    1 x 256, 512 B
    1   start     1: hop k, v                to 0                                  1 x 512, 1.02 kB
    2   compute   own x block 0 of 2         0:2 x 0:2 causal                          3 pairs, 75%
    3   wait      0: all-gather q            from 3                                  1 x 256, 512 B
    4   compute   rows of 3 x block 0 of 2   0:2 x 0:1                                 2 pairs, 50%
    5   wait      1: hop k, v                from 0                                1 x 512, 1.02 kB
    6   compute   rows of 3 x block 1 of 0   0:2 x 0:1                                 2 pairs, 50%
    7   start     2: all-to-all out, lse     to 3                                    1 x 260, 528 B
    8   compute   own x block 1 of 0         0:2 x 0:1                                 2 pairs, 50%
    9   wait      2: all-to-all out, lse     from 3                                  1 x 260, 528 B""",
    )


@examples(20)
@given(asked(), st.data())
def test_text_fits_100_columns_without_colours(chosen: Settings, data: st.DataObject) -> None:
    text = printed(make_facts(chosen), data.draw(st.integers(0, chosen.ranks - 1)))
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert "…" not in text


def test_json_is_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ring", "2", "--team", "2", "--order", "head_tail", "--causal", "--seq", "8", "--heads", "2"]
    assert main(["explain", *options, "--ranks-per-node", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    facts = make_facts(SMALL)
    assert document == json.loads(as_json(facts))
    assert document.pop("version") == 1
    assert document == listed(asdict(facts))


def listed(thing: object) -> object:
    """As JSON has it: tuples are lists."""
    if isinstance(thing, dict):
        return {key: listed(value) for key, value in thing.items()}
    return [listed(value) for value in thing] if isinstance(thing, tuple | list) else thing


@examples(25)
@given(asked())
def test_timeline(chosen: Settings) -> None:
    """Work does not overlap and takes as long as it has pairs; a transfer lasts as long as the work it hides behind."""
    assume(chosen.length > chosen.ranks)
    for rank in make_facts(chosen).ranks:
        bars = [*timeline(rank)]
        work = [bar for bar in bars if bar.work]
        assert all(a.stop <= b.start + 1e-9 for a, b in pairwise(work))
        heads = [group.q[1] - group.q[0] for group in rank.heads]
        rates = {(bar.stop - bar.start) / (bar.work.pairs * heads[bar.work.group]) for bar in work}
        assert not rates or max(rates) <= min(rates) * (1 + 1e-6)
        assert len([bar for bar in bars if bar.transfer]) == len(rank.transfers)
        for bar in bars:
            if bar.transfer:
                meanwhile = sum(w.stop - w.start for w in work if bar.start <= w.start and w.stop <= bar.stop + 1e-9)
                assert bar.is_exposed == (meanwhile == 0)
                assert bar.stop - bar.start >= (EXPOSED if bar.is_exposed else meanwhile) - 1e-9


@pytest.mark.parametrize(
    "options",
    [{"ring": 1}, {"ring": 2}, {"ring": 4, "team": 2, "schedule": "published", "backward": True},
     {"ring": 2, "team": 4, "ulysses": 2, "backward": True}],
)  # fmt: skip
def test_picture(tmp_path: Path, options: dict) -> None:
    path = tmp_path / "out.png"
    draw_facts(make_facts(Settings(**options)), 0, path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Missing option '--ring'"),
        ("--ring 0", "--ring must be at least 1, got 0"),
        ("--ring x", "--ring: "),
        ("--ring 3 --team 2 --schedule published", "--schedule: schedule='published' needs team * team to divide"),
        ("--ring 2 --schedule published --rotate kv", "--rotate: schedule='published' rotates queries"),
        ("--ring 2 --schedule published --rotate-forward q", "--rotate-forward: schedule='published' rotates keys"),
        ("--ring 2 --order zigzag", "--order: 'zigzag' is not one of 'contiguous', 'head_tail'"),
        ("--ring 2 --ulysses 9", "--ulysses 9 splits query heads, of which there are only 8"),
        ("--ring 2 --heads 99999999999999", "--heads must be at most 65536, got 99999999999999"),
        ("--ring 2 --kv-heads 3", "--heads must be a multiple of --kv-heads 3, got 8"),
        ("--ring 2 --seq 0", "--seq must be a number of tokens like 131072, 128k or 1M "),
        ("--ring 2 --seq 8kB", "--seq must be a number of tokens like 131072, 128k or 1M "),
        ("--ring 2 --window -1", "--window must be at least 0, got -1"),
        ("--ring 2 --rank 2", "--rank must be from 0 to 1, got 2"),
        ("--ring 2 --ranks-per-node 0", "--ranks-per-node must be at least 1, got 0"),
        ("--ring 1000", "--ulysses 1 x --ring 1000 x --team 1 are 1000 ranks, of which at most 128 can be shown"),
        ("--ring 33 --picture out.png", "--picture shows at most 32 ranks, got 33"),
        ("--ring 2 --picture {missing}/out.png", "--picture: there is no folder {missing}"),
        ("--ring 2 --picture {missing}.nothing", "--picture: missing.nothing must end in one of "),
        ("--ring 2 --picture {folder}", "--picture: {folder} is a folder; name a file in it"),
        ("--ring 2 --nonsense", "No such option: --nonsense"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    """And before there are facts."""
    monkeypatch.setattr("wallfacer_dt.command.explain.command.make_facts", lambda _: pytest.fail("made"))
    arguments, message = (text.format(folder=tmp_path, missing=tmp_path / "missing") for text in (arguments, message))
    assert main(["explain", *arguments.split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"wallfacer explain: {message}")
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_an_unknown_command_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 2
    assert capsys.readouterr().err == "wallfacer: No such command 'nonsense'\n"


@pytest.mark.parametrize("package", ["typer", "rich", "matplotlib"])
def test_a_missing_package_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in [n for n in sys.modules if n.startswith("wallfacer_dt.command.explain")]:
        monkeypatch.delitem(sys.modules, name)
    if package == "rich":
        monkeypatch.setitem(sys.modules, "rich.console", None)
    if package == "matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    assert main(["explain", "--ring", "2", "--picture", str(tmp_path / "out.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"wallfacer: {package}")
    assert error.endswith("is not installed, and this command needs it: pip install 'wallfacer-dt[cli]'\n")
    assert error.count("\n") == 1


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "wallfacer_dt.command", "explain", "--ring", "2", "--team", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "Steps of rank 0" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
