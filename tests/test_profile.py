"""Profiling on real ranks: all end with one plan, the fastest of those run, or with one error."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.plan_cases import measured_shortly
from wallfacer_dt import (
    Cluster,
    Kernels,
    Link,
    ModelShape,
    Plan,
    Profile,
    SequenceShape,
    calls,
    plan,
    profile,
    register_kernel,
)
from wallfacer_dt import mesh as mesh_module
from wallfacer_dt.kernels import reference, registry
from wallfacer_dt.kernels.block import BlockKernel, Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.planning import Candidate, Measured, PlanningError, Prediction, Ranked, probe, profiling
from wallfacer_dt.planning.probe import Probe, fitted
from wallfacer_dt.planning.profiling import attention_step, check_writable
from wallfacer_dt.testing.fake import fake_world

MODEL = ModelShape(hidden=32, heads=4, kv_heads=2)
SEQUENCE = SequenceShape(64, is_causal=True, dtype=torch.float32)
WHERE = Cluster(4, 2, Link(1e9), Link(1e8), device_type="cpu")


def measured_links() -> Cluster:
    with measured_shortly():
        where = Probe.on("cpu", 2)
        return where.cluster(MODEL, SEQUENCE, memory=10**9, kernel=where.selected("auto", MODEL, SEQUENCE))


@pytest.mark.ranks
def test_every_rank_measures_the_same_cluster(ranks) -> None:
    found = ranks(4).run(measured_links)
    assert all(one == found[0] for one in found)
    cluster = found[0]
    assert (cluster.ranks, cluster.ranks_per_node, cluster.nodes, cluster.memory) == (4, 2, 2, 10**9)
    assert cluster.device_type == "cpu"
    assert Cluster.from_json(cluster.as_json()) == cluster


FLASH = select_kernel("flash", Need("cpu", torch.float32, 8, 8))


@pytest.mark.parametrize(
    ("device", "batch", "rows", "kernel"),
    [
        ("cpu", 1, 2048, FLASH),
        ("cuda", 1, 8192, FLASH),
        ("cuda", 16, 4096, FLASH),
        ("cuda", 1000, 2048, FLASH),
        ("cuda", 1, 2048, reference.KERNEL),
    ],
)
@pytest.mark.parametrize(("tokens", "share"), [(1.0, 1.0), (0.25, 0.25), (16.0, 1.0)])
def test_kernels_are_measured_on_blocks_that_keep_a_device_busy(
    device: str, batch: int, rows: int, kernel: BlockKernel, tokens: float, share: float
) -> None:
    """Of a rank's tokens, and at most so many: of 4 heads and a batch of 16 those are 2^18 in all."""
    sequence = replace(SEQUENCE, length=int(2 * rows * tokens), batch=batch)
    where, blocks = Probe(torch.device(device), "", 1), []

    def measured(*given: Any) -> tuple[float, float]:
        blocks.append(given[-2:])
        return 1.0, 1.0

    with (
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.multiple(
            Probe, _attention=measured, _repeated=lambda *_: 1.0, _contention=lambda *_: 1.0,
            _random=lambda _, *shape, dtype: torch.empty(shape, dtype=dtype, device="meta"),
        ),
    ):  # fmt: skip
        where.kernels(MODEL, sequence, kernel)
    few = int(rows * share) // 4
    assert blocks == [(4 * few, 4 * few), (few, few), (few, 16 * few)]


def block(queries: int, keys: int, overhead: float, pair: float, half_rows: float) -> float:
    return overhead + queries * keys * pair * (1 + half_rows / queries)


SECONDS = st.floats(1e-9, 1.0)
PAIR = st.floats(1e-12, 1e-6)


def blocks(rows: int, *costs: float) -> tuple[float, float, float]:
    few = rows // 4
    return block(rows, rows, *costs), block(few, few, *costs), block(few, 4 * rows, *costs)


@given(st.sampled_from([16, 64, 2048]), st.floats(0, 1e-2), PAIR, PAIR, st.floats(0, 1.9))
def test_costs_of_kernels_are_found_from_three_blocks(
    rows: int, overhead: float, forward: float, backward: float, share: float
) -> None:
    half_rows = share * rows
    times = [blocks(rows, overhead, pair, half_rows) for pair in (forward, backward)]
    found = fitted(rows, *times)
    least = min(square for square, *_ in times)
    if overhead <= 0.9 * least:
        assert found.overhead == pytest.approx(overhead, abs=1e-9 * max(square for square, *_ in times))
        assert found.half_rows == pytest.approx(half_rows, abs=1e-6 * rows)
        assert (found.forward, found.backward) == pytest.approx((forward, backward))


THREE = st.tuples(SECONDS, SECONDS, SECONDS)


@given(THREE, THREE)
def test_costs_of_kernels_are_costs_whatever_was_measured(forward: tuple, backward: tuple) -> None:
    """And the square blocks take as long as they did, though one overhead and one n1/2 stand for both ways."""
    found = fitted(64, forward, backward)
    assert min(found.forward, found.backward) > 0
    assert found.overhead >= 0
    assert 0 <= found.half_rows <= 2 * 64
    for pair, (square, *_) in ((found.forward, forward), (found.backward, backward)):
        assert block(64, 64, found.overhead, pair, found.half_rows) == pytest.approx(square)


def test_a_file_is_kept_when_only_the_extrapolation_differs(tmp_path: Path) -> None:
    """Both say 1e12 in blocks of 1024 queries, and 1e12 or 2.5e12 in those without end."""
    path, earlier = tmp_path / "profile.json", Candidate(4)
    one, other = (
        replace(WHERE, kernels=Kernels(rate, rate, 1e12, half_rows=half_rows))
        for rate, half_rows in ((1e12, 0.0), (2.5e12, 1.5 * 1024))
    )
    Profile(one, (Measured(MODEL, SEQUENCE, earlier, 1.0),)).save(path)
    assert [it.candidate for it in profiling._with_earlier(Profile(other), path).measured] == [earlier]
    slow = replace(WHERE, kernels=Kernels(1e12, 1e12, 1e12, half_rows=1.5 * 1024))
    with pytest.warns(
        UserWarning, match=r"profile\.json was measured .* twice as fast or slow .*: its 1 runs are repla"
    ):
        assert not profiling._with_earlier(Profile(slow), path).measured


def test_a_file_is_written_whole_and_stays_as_readable_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.touch(mode=0o600)
    readable = path.stat().st_mode
    Profile(WHERE).save(path)
    assert path.stat().st_mode == readable
    path.unlink()
    Profile(WHERE).save(path)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    before = path.read_text()
    with mock.patch.object(Path, "replace", side_effect=OSError), pytest.raises(OSError):  # noqa: PT011
        Profile(replace(WHERE, nics=2)).save(path)
    assert path.read_text() == before
    assert {one.name for one in tmp_path.iterdir()} == {"profile.json", "other"}


@pytest.mark.parametrize(
    ("device_type", "kernel", "takes_segments"),
    [("cpu", "auto", False), ("cuda", "auto", True), ("cuda", "flash_attn_3", True), ("cuda", "cudnn", False),
     ("cuda", "somebody's", False)],
)  # fmt: skip
def test_a_file_of_an_earlier_version_is_read(
    device_type: str, kernel: str, takes_segments: bool, tmp_path: Path
) -> None:
    """It says nothing of windows of some layers, of documents, or of what kernels take in a call."""
    path = tmp_path / "profile.json"
    where = replace(
        WHERE, device_type=device_type, kernels=replace(WHERE.kernels, attention=kernel, takes_segments=takes_segments)
    )
    profile = Profile(where, (Measured(ModelShape(64, 4), SequenceShape(256), Candidate(WHERE.ranks), 1.0),))
    profile.save(path)
    found = json.loads(path.read_text())
    for name in (
        "windowed_layers", "shared_ffn", "value_dim", "kv_rank", "q_rank", "rotary_dim", "dense_layers", "dense_ffn",
    ):  # fmt: skip
        del found["measured"][0]["model"][name]
    del found["measured"][0]["sequence"]["documents"], found["cluster"]["kernels"]["takes_segments"]
    path.write_text(json.dumps(found))
    assert Profile.load(path) == profile


def test_what_was_run_on_documents_is_of_these(tmp_path: Path) -> None:
    path, packed = tmp_path / "profile.json", SequenceShape(256, documents=(100, 9))
    Profile(WHERE, (Measured(ModelShape(64, 4), packed, Candidate(WHERE.ranks), 1.0),)).save(path)
    found = Profile.load(path)
    for sequence, seconds in ((packed, 1.0), (SequenceShape(256), None), (replace(packed, documents=(100,)), None)):
        assert found.seconds(Candidate(WHERE.ranks), ModelShape(64, 4), sequence) == seconds


def one_step(candidate: Candidate, sequence: SequenceShape) -> list[tuple[int, ...]]:
    """The shapes, and what is said of documents, of the call that a profile makes."""
    model = replace(MODEL, value_dim=8)
    made = Plan(model, sequence, WHERE, (Ranked(candidate, Prediction(0.0, 0.0, 0.0, 0.0, 0, 0, 0), ""),))
    attend = profiling.context_parallel_attention
    with mock.patch.object(profiling, "context_parallel_attention", wraps=attend) as run:
        attention_step(made, made.mesh("cpu"))()
    q, k, v = (tuple(x.shape) for x in run.call_args.args[:3])
    assert (q, k[-1], v) == ((1, model.heads, q[2], model.dim), model.dim, (1, model.keys, q[2], 8))
    return [q, tuple(run.call_args.kwargs["cu_seqlens"].tolist())]


@pytest.mark.ranks
def test_documents_are_attended_where_a_plan_is_run(ranks) -> None:
    """And refused by attention itself if they were not those of the whole sequence."""
    sequence = SequenceShape(250, is_causal=True, dtype=torch.float32, documents=(100, 9))
    for order, rows in (("head_tail", (63, 62, 63, 62)), ("document_head_tail", (63, 63, 62, 62))):
        found = ranks(4).run(one_step, Candidate(2, 2, order=order), sequence)
        assert [shape[2] for shape, _ in found] == [*rows]
        assert {bounds for _, bounds in found} == {(0, 100, 109, 209, 218, 250)}


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, file = tmp_path / "link.json", tmp_path / "folder" / "profile.json"
    link.symlink_to(file)
    for one in (WHERE, replace(WHERE, nics=2)):
        Profile(one).save(link)
        assert link.is_symlink()
        assert Profile.load(file).cluster == one
    assert [one.name for one in file.parent.iterdir()] == ["profile.json"]


def test_a_path_is_one_that_can_be_written(tmp_path: Path) -> None:
    """Found out by what is written first, whose name is short however long the file's is."""
    path = tmp_path / f"{245 * 'a'}.json"
    check_writable(path)
    assert not list(tmp_path.iterdir())
    Profile(WHERE).save(path)
    check_writable(path)
    assert Profile.load(path).cluster == WHERE
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for bad, why in (
        (tmp_path / f"{300 * 'b'}.json", "File name too long"),
        (tmp_path / "zero\0", "embedded null byte"),
        (path / "profile.json", "File exists"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        (Path("/"), ".* has an empty name"),
        (Path("/proc/nothere.json"), "No such file or directory"),
    ):
        if bad.parent.exists():
            with pytest.raises(ValueError, match=f"cannot be written: {why}"):
                check_writable(bad)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, "loop"}


@pytest.mark.parametrize("name", ["forward", "backward", "linear", "overhead", "merge", "copy", "half_rows"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_kernels_that_cannot_be(name: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"kernels: {name} must be .* and finite, got {value}"):
        Kernels(**{name: value})
    path = tmp_path / "profile.json"
    Profile(WHERE).save(path)
    path.write_text(re.sub(rf'"{name}": [^,}}\n]*', f'"{name}": "40"', path.read_text()))
    with pytest.raises(ValueError, match="is no profile"):
        Profile.load(path)


Way = tuple[tuple[int, int, int], str]


def way(candidate: Candidate) -> Way:
    """What a shortlist has once."""
    return candidate.axes, candidate.schedule


def run_with(
    costs: dict[Way, float], path: Path, turns: int | None = None, later: float = 1.0
) -> tuple[Plan, Profile, int]:
    """Profile with steps that say themselves how long they took."""
    steps = 0

    def build(given: Plan):
        def step() -> float:
            nonlocal steps
            steps += 1
            # After each has taken two turns, all may be slower.
            return (costs.get(way(given.chosen), 9.0) + dist.get_rank()) * (later if steps > 4 * 2 * 3 else 1.0)

        return step

    with (
        mock.patch.object(profiling, "slowest", lambda step, _: step()),
        mock.patch.object(Probe, "cluster", return_value=WHERE),
    ):
        chosen, result = profile(
            MODEL, SEQUENCE, "cpu", ranks_per_node=2, top=4, iterations=2, build=build, turns=turns, path=path
        )
    return chosen, result, steps


@pytest.mark.ranks
def test_the_fastest_of_those_that_ran_is_chosen(ranks, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first = profiling.shortlist(plan(MODEL, SEQUENCE, WHERE), 4)
    fastest = way(first[-1].candidate)
    answers = ranks(4).run(run_with, {fastest: 0.5}, path)
    assert {steps for *_, steps in answers} == {4 * (1 + 2)}
    assert all(chosen == answers[0][0] for chosen, *_ in answers)
    chosen = answers[0][0]
    assert way(chosen.chosen) == fastest
    assert [one.measured for one in chosen.ranked[:5]] == [0.5, 9.0, 9.0, 9.0, None]
    # Rank 0 wrote the file, and a later run of another sequence adds to it.
    saved = Profile.load(path)
    assert saved == answers[0][1]
    other = Profile(WHERE, tuple(one for one in saved.measured[:1]))
    assert profiling._with_earlier(other, path).measured == other.measured


@pytest.mark.ranks
def test_those_that_are_close_run_again(ranks, tmp_path: Path) -> None:
    some = [way(one.candidate) for one in profiling.shortlist(plan(MODEL, SEQUENCE, WHERE), 4)]
    costs = dict(zip(some, (4.0, 3.0, 4.0, 3.2), strict=True))  # and more, by rank
    for chosen, result, steps in ranks(4).run(run_with, costs, tmp_path / "profile.json", 2, 1.5):
        assert (way(chosen.chosen), steps) == (some[1], 2 * (4 + 2) * (1 + 2))
        # Those that were not run in the slow minutes are not faster for that.
        seconds = {way(one.candidate): one.seconds for one in result.measured}
        assert min(seconds, key=seconds.__getitem__) == some[1]
        assert seconds[some[0]] > 1.1 * seconds[some[1]]


def leaves() -> tuple[int, int, int]:
    """New process groups after a profile, and models there at a time, in one turn and in two."""
    groups = dist.distributed_c10d._world.pg_map  # noqa: TID251  (counted, nothing is sent)
    before, alive, most = set(groups), 0, []
    known = sum(map(len, mesh_module._whole_groups.values()))

    class Model:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            most.append(alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

        def __call__(self) -> None:
            dist.barrier()

    with measured_shortly():
        _, ran = profile(MODEL, SEQUENCE, "cpu", ranks_per_node=2, top=9, iterations=1)
    assert any(one.candidate.schedule == "published" for one in ran.measured)  # it makes a group more
    left = len(set(groups) - before)
    assert sum(map(len, mesh_module._whole_groups.values())) == known
    profile(MODEL, SEQUENCE, "cpu", cluster=WHERE, top=3, iterations=1, build=lambda _: Model())
    one_by_one, most = most, []
    profile(MODEL, SEQUENCE, "cpu", cluster=WHERE, top=3, iterations=1, build=lambda _: Model(), turns=2)
    return left, max(one_by_one), max(most)


@pytest.mark.ranks
@pytest.mark.whole
def test_nothing_is_left_and_models_are_there_one_by_one(ranks) -> None:
    assert set(ranks(4).run(leaves)) == {(0, 1, 1)}


@pytest.mark.parametrize("option", ["top", "iterations", "turns"])
def test_counts_below_one_are_refused_before_anything_is_measured(option: str) -> None:
    with (
        fake_world(1),
        pytest.raises(ValueError, match=r"top, iterations and turns must be at least 1, got .*0"),
    ):
        profile(MODEL, SEQUENCE, "cpu", **{option: 0})


OTHERS: dict[str, tuple[Any, Any]] = {
    "model": (MODEL, replace(MODEL, heads=8, kv_heads=8)),
    "sequence": (SEQUENCE, replace(SEQUENCE, is_causal=False)),
    "device_type": ("cpu", "cuda"),
    "ranks_per_node": (None, 2),
    "memory": (1e9, None),
    "top": (1, 2),
    "iterations": (3, 1),
    "turns": (1, 2),
    "kernel": ("auto", "flash"),
    "cluster": (replace(WHERE, ranks=2), None),
}


def asked_apart(name: str, values: tuple[Any, ...]) -> tuple[str, str]:
    """What a rank is told that asks for one of these."""
    asked = {"model": MODEL, "sequence": SEQUENCE, "device_type": "cpu"} | {name: values[dist.get_rank()]}
    with mock.patch.object(Probe, "on", side_effect=AssertionError("measured")):
        try:
            profile(**asked)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.ranks
@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_ask_for_different_things_all_refuse(ranks, name: str) -> None:
    values = OTHERS[name]
    found = ranks(2).run(asked_apart, name, values)
    got = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
    assert found[0][1].endswith(f"{name} must be the same on every rank of the mesh, got {got}")
    assert found[0][0] == "ValueError"
    assert found[1] == found[0]


@pytest.mark.ranks
def test_a_step_of_one_rank_alone_and_what_one_refuses_is_refused_by_all(ranks) -> None:
    found = ranks(2).run(asked_apart, "build", (attention_step, None))
    assert all(
        "build must be the same on every rank of the mesh, got rank 0: 'given', rank 1" in one for _, one in found
    )
    assert ranks(2).run(asked_apart, "memory", (10**9, 1e9)) == [("AssertionError", "measured")] * 2
    (_, other), mine = ranks(2).run(asked_apart, "top", (1, 0))
    assert mine == ("ValueError", "top, iterations and turns must be at least 1, got 0, 3 and 3")
    assert other.endswith(f"rank 1 of the mesh cannot make this call: {mine[1]}")


def errors(path: str | None = None, cluster: Cluster = WHERE, others: dict[str, Any] | None = None) -> tuple[str, str]:
    """With a cluster that is given, or measured if there is a path."""
    given = {"path": path, "cluster": None if path else cluster} | (others or {})
    with mock.patch.object(Probe, "cluster", return_value=cluster):
        try:
            profile(MODEL, SEQUENCE, "cpu", top=1, iterations=1, build=lambda _: pytest.fail("ran a plan"), **given)
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.ranks
def test_an_error_of_the_rank_that_plans_ends_all(ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "profile.json")
    found = ranks(4).run(errors, path)
    assert found[0] == ("FileError", f"{path} cannot be written: File exists; name another file")
    assert all(one == ("RuntimeError", f"rank 0 could not plan: FileError: {found[0][1]}") for one in found[1:])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cluster", "others", "message"),
    [
        (WHERE, {"memory": 10**9}, "a cluster has ranks_per_node, memory and kernels.attention itself"),
        (WHERE, {"ranks_per_node": 2}, "a cluster has ranks_per_node, memory and kernels.attention itself"),
        (WHERE, {"kernel": "reference"}, "a cluster has ranks_per_node, memory and kernels.attention itself"),
        (replace(WHERE, ranks=8), {}, "the cluster has 8 ranks, and there are 4"),
        (
            WHERE,
            {"path": "x.json"},
            "path must be None where a cluster is given and nothing of it measured, got 'x.json'",
        ),
    ],
)
def test_two_accounts_of_a_cluster_are_refused(ranks, cluster: Cluster, others: dict[str, int], message: str) -> None:
    found = ranks(4).run(errors, None, cluster, others)
    assert all(kind == "ValueError" and said.startswith(message) for kind, said in found)


@pytest.mark.ranks
def test_a_file_of_other_ranks_is_refused_before_plans_run(ranks, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    Profile(replace(WHERE, ranks_per_node=4)).save(path)
    before = path.read_text()
    found = ranks(4).run(errors, path)
    message = "the profile is of 4 ranks, 4 a node, the cluster has 4, 2 a node"
    assert found == [("ValueError", message)] + 3 * [("RuntimeError", f"rank 0 could not plan: ValueError: {message}")]
    ((kind, said), *_) = ranks(4).run(errors, path, WHERE, {"kernel": "reference"})
    assert (kind, said) == ("ValueError", "the profile is of kernel='auto', this is of kernel='reference'")
    Profile(replace(WHERE, device_type="cuda")).save(path)
    ((kind, said), *_) = ranks(4).run(errors, path)
    assert (kind, said) == ("ValueError", "the profile is of device_type='cuda', this is of device_type='cpu'")
    Profile(replace(WHERE, ranks_per_node=4)).save(path)
    assert path.read_text() == before


def does_not_fit() -> tuple[str, str]:
    small = Cluster(4, 2, Link(1e9), Link(1e8), memory=10)
    try:
        profile(MODEL, SEQUENCE, "cpu", cluster=small)
    except PlanningError as error:
        return error.about, str(error)
    return "", ""


@pytest.mark.ranks
def test_that_nothing_fits_is_said_on_every_rank(ranks) -> None:
    found = ranks(4).run(does_not_fit)
    assert all(one == found[0] for one in found)
    assert found[0][0] == "memory"
    assert found[0][1].startswith("nothing fits: memory is 10 B a rank")


def kernel_of_a_profile(path: str) -> tuple[Plan, list[str], list[str]]:
    """A plan, and which kernels computed rates and steps."""
    asked: list[str] = []

    def noted(kernel: str, need: Need) -> BlockKernel:
        if need.device_type == "cpu":  # the planner's memory is of tensors without contents
            asked.append(kernel)
        return select_kernel(kernel, need)

    with (
        measured_shortly(),
        mock.patch.object(probe, "select_kernel", noted),
        mock.patch.object(calls, "select_kernel", noted),
    ):
        made, _ = profile(
            MODEL, SEQUENCE, "cpu", ranks_per_node=2, top=1, iterations=1, turns=1, kernel="reference", path=path
        )
    return made, asked[:1], sorted(set(asked[1:]))


@pytest.mark.ranks
def test_the_kernel_that_is_asked_for_is_measured_runs_and_is_kept(ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    for made, first, then in ranks(4).run(kernel_of_a_profile, path):
        assert (made.cluster.kernels.attention, first, then) == ("reference", ["reference"], ["reference"])
        assert made.attention_options["kernel"] == "reference"
    file = Profile.load(path)
    assert file.cluster.kernels.attention == "reference"
    with pytest.raises(ValueError, match="the profile is of kernel='reference', this is of kernel='au"):
        plan(MODEL, SEQUENCE, WHERE, profile=file)
    plan(MODEL, SEQUENCE, replace(WHERE, kernels=Kernels(attention="reference")), profile=file)


@pytest.mark.parametrize("name", ["", "x" * 101, 3])
def test_a_kernel_without_a_name(name: Any) -> None:
    with pytest.raises(ValueError, match="kernels: attention must be a name of at most 100 letters, got "):
        Kernels(attention=name)


def given_a_cluster() -> str:
    """By a kernel that another package stands for in this process: of which kernel what was measured is."""
    with mock.patch.object(Probe, "selected", return_value=registry._kernels["flash_attn_3"]):
        _, found = profile(MODEL, SEQUENCE, "cpu", cluster=WHERE, top=1, iterations=1, turns=1)
    return found.cluster.kernels.attention


@pytest.mark.ranks
def test_a_given_cluster_says_of_which_kernel_it_is(ranks) -> None:
    assert ranks(4).run(given_a_cluster) == ["auto"] * 4


def kernel_of_one_rank(how: str) -> tuple[str, str]:
    mine, version = (lambda _: True), "1"
    if dist.get_rank() == 2 and how == "supports":
        mine = lambda _: None  # noqa: E731
    if dist.get_rank() == 2 and how == "version":
        version = "2"
    if dist.get_rank() != 2 or how != "lacks":
        register_kernel("mine", reference.forward, reference.backward, mine, version)
    try:
        profile(MODEL, SEQUENCE, "cpu", ranks_per_node=2, kernel="mine")
    except PlanningError as error:
        return error.about, str(error)
    finally:
        registry._kernels.pop("mine", None)
    return "", ""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lacks", "every rank must take it, rank 2: kernel must be one of ('auto', "),
        (
            "supports",
            "every rank must take it, rank 2: supports of kernel='mine' must return True or why not, got None",
        ),
        ("version", "every rank must have the same, rank 2 has 'mine', 2, rank 0 'mine', 1"),
    ],
)
def test_a_kernel_that_one_rank_lacks_is_refused_by_all(ranks, how: str, message: str) -> None:
    found = ranks(4).run(kernel_of_one_rank, how)
    assert all(one == found[0] for one in found)
    assert found[0][0] == "kernel"
    assert found[0][1].startswith(message)


def planned_by_first() -> tuple[Plan, tuple[int, ...]]:
    """The lines of docs/planner.md."""
    where = Cluster(2, 2, Link(1e9), Link(1e9))
    plans = [plan(MODEL, SEQUENCE, where) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(plans, src=0)
    mesh = plans[0].mesh("cpu")
    return plans[0], tuple(mesh.shape)


@pytest.mark.ranks
def test_one_rank_plans_for_all(ranks) -> None:
    (first, mesh), other = ranks(2).run(planned_by_first)
    assert other == (first, mesh)
    assert first == plan(MODEL, SEQUENCE, Cluster(2, 2, Link(1e9), Link(1e9)))
    assert mesh == first.chosen.axes[-len(mesh) :]
