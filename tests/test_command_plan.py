"""`wallfacer plan` and `wallfacer profile`: what is printed is the plan, and a file of one serves the other."""

import ast
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch.distributed.tensor.parallel import ParallelStyle

from tests.plan_cases import measured_shortly
from wallfacer_dt import Cluster, Kernels, Link, ModelShape, Plan, Profile, SequenceShape, sequence_positions
from wallfacer_dt import plan as make_plan
from wallfacer_dt.command.app import main
from wallfacer_dt.command.options import NodeError, OptionError
from wallfacer_dt.command.planning.document import plan_as_json
from wallfacer_dt.command.planning.figures import Figures
from wallfacer_dt.command.planning.lanes import _beside, _labels, kind_of
from wallfacer_dt.command.planning.launch import Launch, _check_device
from wallfacer_dt.command.planning.text import print_plan, print_profile
from wallfacer_dt.command.planning.usage import code_of
from wallfacer_dt.layout import deal, deal_documents, positions
from wallfacer_dt.planning import Candidate, Measured, Prediction, Ranked
from wallfacer_dt.planning.candidates import attentions
from wallfacer_dt.planning.predict import attention_cost
from wallfacer_dt.planning.stack import StackMemory
from wallfacer_dt.planning.timeline import Bar
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

ROOT = Path(__file__).parents[1]
SIZES = "--seq 4096 --hidden 256 --heads 4 --kv-heads 2"
SHAPE = f"{SIZES} --full"
SMALL_SHAPE = "--seq 64 --hidden 32 --heads 2 --dtype float32 --full"
WHERE = "--ranks 4 --ranks-per-node 2 --intra 300GB/s --inter 12.5GB/s"
MODEL = ModelShape(256, 4, 2, 64)
SEQUENCE = SequenceShape(4096)
CLUSTER = Cluster(4, 2, Link(300e9, 5e-6), Link(12.5e9, 10e-6))


def out_of(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, that is not refused."""
    status = main(arguments.split())
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


def listed(thing: object) -> object:
    """As JSON has it: tuples are lists, a dtype its name."""
    if isinstance(thing, dict):
        return {key: listed(value) for key, value in thing.items()}
    if isinstance(thing, torch.dtype):
        return str(thing).removeprefix("torch.")
    return [listed(value) for value in thing] if isinstance(thing, tuple | list) else thing


def ranked(candidate: Candidate, seconds: float, why: str, measured: float | None = None) -> Ranked:
    prediction = Prediction(seconds, 0.001, seconds - 0.001, 0.0002, 3_000_000, 1_500_000, 6, 80_000_000)
    return Ranked(candidate, prediction, why, measured)


# By hand, so that what is printed of a plan is tested apart from how plans are made.
SMALL = Plan(
    ModelShape(256, 4, 2, 64, ffn=1024, layers=2),
    SequenceShape(4098, is_causal=True, window_size=(100, 0)),
    replace(CLUSTER, memory=10**8, nics=2),
    (
        ranked(Candidate(2, 2, rotate="q", order="head_tail", feed_forward="metp", checkpoint="attention"), 0.002, "a"),
        ranked(Candidate(1, 1, 4, "ulysses_in_node"), 0.0025, "b", 0.0031),
        ranked(Candidate(4), 0.003, "not shown"),
    ),
    tuple(ranked(Candidate(1, 4), 1.0, f"needs {n} GiB, a rank has 0 GiB") for n in range(1, 6)),
    considered=19,
)


FIGURES = Figures(
    flops=10**12, peak=1e15, ranks=4, tokens=4098, time={
        "attention": 1.0, "products": 0.2, "elementwise": 0.03, "copies": 0.005, "optimizer": 0.004,
        "transfers": 0.0005, "host": 0.0,
    },
    memory=StackMemory(1, 20, 300, 4000, 50000, 600000),
    origins={
        "forward": "assumed, 50% of the peak", "backward": "given", "linear": "measured", "merge": "there",
        "launch": "by hand",
    },
    source="h100x4: by its data sheet", activation="gelu", left_out=("in the time: this", "of the model: that"),
)  # fmt: skip


def printed(plan: Plan, profile: Profile | None = None, width: int = 100) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False)
    if profile is None:
        print_plan(plan, FIGURES, 2, console)
    else:
        print_profile(plan, profile, Path("profile.json"), console)
    # expecttest writes ASCII alone.
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).replace("─", "-")


def test_golden_text() -> None:
    assert_expected_inline(
        printed(SMALL),
        """\
4 ranks on 2 nodes of 2, each with 100 MB
into a rank 300 GB/s and 5 us; into a node 12.5 GB/s and 10 us over 2 interfaces
attention at 357 TFLOPS (assumed, 50% of the peak), its backward at 322 TFLOPS (given), other matrix
products at 666 TFLOPS (measured)
memory is read and written at 2.5 TB/s (there)
the host launches an operation of attention in 70 us (by hand)
4098 tokens in contiguous or head_tail order, causal, window 100, batch 1, bfloat16
hidden 256, 4/2 heads of 64, gated feed-forward of 1024
h100x4: by its data sheet

The best 2 of 19 plans, for a step, 2 layers
  ulysses x   in            rotates         tokens               into   into
# ring x team node schedule fwd,bwd   step   per s MFU exposed a rank a node hops memory
----------------------------------------------------------------------------------------
1 1 x 2 x 2   team 2d       kv, q     2 ms 2049000 12%    1 ms   3 MB 1.5 MB    6  80 MB
2 4 x 1 x 1   -    -        -       3.1 ms 1321935  8%  1.5 ms   3 MB 1.5 MB    6  80 MB

Why
#  order       feed-forward  checkpoint  measured
----------------------------------------------------
1  head_tail   METP          attention          -  a
2  contiguous  plain         none          3.1 ms  b

Dropped, 5:
team 4, 2d, rotates kv: needs 1 GiB, a rank has 0 GiB
team 4, 2d, rotates kv: needs 2 GiB, a rank has 0 GiB
team 4, 2d, rotates kv: needs 3 GiB, a rank has 0 GiB
and 2 that need as much or more

MFU of plan 1: 12.5%
model FLOPs without recomputation, causal attention counted as half / (time x ranks x peak); 1e+12
FLOPs, 1 PFLOPS a rank

Time of plan 1, 2 ms a step as predicted:
     1 s  attention
  200 ms  other matrix products
   30 ms  norms, positions, activations, METP's sums and copies
    5 ms  FSDP's copies
    4 ms  clipping and optimizer
  500 us  waiting for transfers

Memory of plan 1, 654 kB a rank:
     1 B  weights, a rank's shards
    20 B  gradients, likewise
   300 B  optimizer: Adam's moments and master weights, in float32
   50 kB  activations, kept for the backward
    4 kB  buffers: FSDP's whole weights and gradients in use
  600 kB  buffers: the most that computing takes beside

Not included:
- in the time: this
- of the model: that

To use plan 1:
from wallfacer_dt import (METPParallel, TokenOrder, WallFacerParallel, context_mesh,
    sequence_positions, shard_sequence)
mesh = context_mesh("cuda", ring=2, team=2, ulysses=1, placement="team_in_node")
order = TokenOrder("head_tail", mesh)
attention = WallFacerParallel(
    order=order, is_causal=True, schedule="2d", rotate="q", rotate_forward="kv",
    window_size=(100, 0), length=4098
)
styles = {"layers.*.attention.inner_attention": attention}
styles["layers.*.feed_forward"] = METPParallel(up="w3", down="w2", gate="w1", activation="gelu")
parallelize_module(model, mesh, styles)  # torch.distributed.tensor.parallel
tokens = shard_sequence(tokens, order, dim=1)  # and labels, once they are shifted
# for RoPE, which else counts from 0 on every rank
positions = sequence_positions(4098, order)
# wrap layers: checkpoint(layer, x, use_reentrant=False, context_fn=save_attention())""",
    )


def test_golden_text_of_a_profile() -> None:
    runs = tuple(Measured(SMALL.model, SMALL.sequence, one.candidate, 1.0) for one in SMALL.ranked[1::-1])
    kernels = Kernels(1e12, 5e11, 2e12, 1e-5, 1e9, copy=1e-9, half_rows=40, launch=0.0)
    assert_expected_inline(
        printed(replace(SMALL, cluster=replace(CLUSTER, kernels=kernels)), Profile(CLUSTER, runs)),
        """\
4 ranks on 2 nodes of 2
into a rank 300 GB/s and 5 us; into a node 12.5 GB/s and 10 us
attention at 1 TFLOPS (measured), its backward at 500 GFLOPS (measured) in long blocks, half of that
in those of 40 queries, other matrix products at 2 TFLOPS (measured)
memory is read and written at 1 GB/s (measured)
4098 tokens in contiguous or head_tail order, causal, window 100, batch 1, bfloat16
hidden 256, 4/2 heads of 64, gated feed-forward of 1024
a kernel call costs 10 us
a rank copies what it sends and receives, at 1 GB/s

Plans that were run: a step of attention, forward and backward
   ulysses x    in              rotates
#  ring x team  node  schedule  fwd,bwd       order  predicted  measured
------------------------------------------------------------------------
1  4 x 1 x 1    -     -         -        contiguous     2.5 ms    3.1 ms
2  1 x 2 x 2    team  2d        kv, q     head_tail       2 ms      2 ms

chosen: ring 2 x team 2, team in node, 2d, rotates kv, backward q, head-tail, METP, checkpoint
attention
written to profile.json; wallfacer plan --profile reads it""",
    )


@pytest.mark.parametrize(
    "profile", [None, Profile(CLUSTER, (Measured(SMALL.model, SMALL.sequence, SMALL.chosen, 1.0),))]
)
def test_nothing_is_left_out_of_a_narrow_terminal(profile: Profile | None) -> None:
    wide, narrow = (Counter(printed(SMALL, profile, width).replace("-", "")) for width in (100, 60))
    assert {c: n for c, n in wide.items() if not c.isspace()} == {c: n for c, n in narrow.items() if not c.isspace()}


def test_json_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = Kernels(1e14, 288e12 / 304e12 * 1e14, 1e15)  # as of flash for heads of 64
    cluster = replace(CLUSTER, nics=2, inter=Link(12.5e9, 1e-3), kernels=kernels)
    sequence = replace(SEQUENCE, batch=2, is_causal=True, window_size=(64, 0))
    needed = sorted(one.prediction.memory for one in make_plan(MODEL, sequence, cluster).ranked)
    memory = needed[0]
    plan = make_plan(MODEL, sequence, replace(cluster, memory=memory), keep=3)
    assert plan.dropped
    options = f"--window 64 --memory {memory}B --nics 2 --attention-speed 100TFLOPS --linear-speed 1PFLOPS"
    document = json.loads(
        out_of(f"plan {SIZES} --causal {WHERE} {options} --inter-latency 1ms --batch 2 --top 3 --json", capsys)
    )
    assert document.pop("code") == code_of(plan)
    figures = document.pop("figures")
    assert figures["tokens_per_second"] == pytest.approx(2 * 4096 / plan.prediction.seconds)
    assert (figures["mfu"], figures["peak"], figures["source"]) == (None, None, "")
    assert sum(figures["memory"].values()) == plan.prediction.memory
    assert sum(figures["time"].values()) == pytest.approx(plan.prediction.seconds)
    assert f"time          {', '.join(figures['time'])} (as predicted)" in (plan_as_json.__doc__ or "")
    assert figures["origins"] == {
        "forward": "given", "backward": "assumed, 0.95 of the forward's", "linear": "given",
        "merge": "assumed, an H100's", "launch": "assumed, an H100's",
    }  # fmt: skip
    assert document.pop("version") == 1
    assert document == listed(asdict(plan))


def test_one_rank_waits_for_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """Not for what rounding leaves, either: its device waits for its host, and for nothing else."""
    options = "--cluster h100x1 --model llama3-8b --seq 512 --causal --memory 1TB"
    times = json.loads(out_of(f"plan {options} --json", capsys))["figures"]["time"]
    assert times["transfers"] == 0 < times["host"]


@pytest.mark.parametrize(
    ("option", "documents", "said"),
    [
        ("1k", (1024,), "5 documents of 1024 tokens"),
        ("3k,100", (3072, 100), "3 documents of 100 to 3072 tokens"),
        ("1M", (), ""),
    ],
)
def test_documents_are_planned(
    capsys: pytest.CaptureFixture[str], option: str, documents: tuple[int, ...], said: str
) -> None:
    options = f"plan {SIZES.replace('4096', '5000')} --causal {WHERE} --documents {option} --top 1"
    document = json.loads(out_of(f"{options} --json", capsys))
    assert document["sequence"]["documents"] == [*documents]
    packed = SequenceShape(5000, is_causal=True, documents=documents)
    best = make_plan(MODEL, packed, replace(CLUSTER, kernels=Kernels()))
    assert document["ranked"][0]["candidate"] == listed(asdict(best.chosen))
    text = " ".join(out_of(options, capsys).split())
    assert (f" order, causal, {said}, batch 1" if said else " order, causal, batch 1") in text
    assert ("cu_seqlens = torch.tensor(...)" in text) == bool(said)


def test_layers_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--ffn 512 --no-gated --layers 3 --vocab 100 --ranks 2 --intra 1GB/s --top 1 --dtype float32"
    options += " --attention-speed 20TFLOPS --linear-speed 30TFLOPS"
    document = json.loads(out_of(f"plan {SHAPE} {options} --json", capsys))
    assert document["model"] == asdict(ModelShape(256, 4, 2, 64, 512, False, 3, 100))
    assert document["sequence"]["dtype"] == "float32"
    assert document["cluster"]["ranks_per_node"] == 2
    text = out_of(f"plan {SHAPE} {options}", capsys)
    assert "for a step, 3 layers" in text
    assert "feed-forward of 512, vocabulary of 100" in text


def test_experts_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    options = f"{SHAPE} --ffn 512 --experts 8 --experts-per-token 2 --ranks 2 --intra 1GB/s --top 1"
    document = json.loads(out_of(f"plan {options} --json", capsys))
    assert document["model"] == asdict(ModelShape(256, 4, 2, 64, 512, experts=8, experts_per_token=2))
    text = out_of(f"plan {options}", capsys)
    assert "gated feed-forward of 512, 2 of 8 experts" in text
    assert "- in the time and in memory: experts that are dealt more tokens than others" in text
    assert "experts" not in out_of(f"plan {SHAPE} --ffn 512 --ranks 2 --intra 1GB/s --top 1", capsys)


@pytest.mark.slow
def test_the_issues_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(
        "plan --ranks 64 --ranks-per-node 8 --seq 65536 --hidden 6656 --heads 52 --kv-heads 52 --intra 300GB/s "
        "--inter 12.5GB/s --full",
        capsys,
    )
    assert "64 ranks on 8 nodes of 8" in text
    rows = re.findall(r"^ *\d+ +\d+ x \d+ x \d+ .* [kMG]?B *$", text, re.MULTILINE)
    assert len(rows) == 5, text
    assert max(map(len, text.splitlines())) <= 100
    assert "context_mesh(" in text


PROJECTED = ranked(
    Candidate(2, 2, rotate="q", order="head_tail", feed_forward="metp", projections="metp", checkpoint="full"),
    0.002,
    "a",
)


ALONE = replace(PROJECTED, candidate=replace(PROJECTED.candidate, feed_forward="plain"))


@pytest.mark.parametrize("one", [*SMALL.ranked, PROJECTED, ALONE], ids=lambda one: str(one.candidate))
@pytest.mark.parametrize("gated", [True, False])
def test_the_code_makes_the_plans_mesh_and_styles(one: Ranked, gated: bool) -> None:
    where = replace(SMALL.cluster, device_type="cpu")  # as a profile says, of what it was measured on
    code = code_of(plan := replace(SMALL, ranked=(one,), model=replace(SMALL.model, gated=gated), cluster=where))
    applied = [line for line in code.splitlines() if "model" in line or line.startswith("tokens")]
    assert len(applied) == 2
    found: dict = {}
    with fake_world(4):
        exec("\n".join(line for line in code.splitlines() if line not in applied), found)
        mesh = plan.mesh("cpu")
        assert found["mesh"].mesh_dim_names == mesh.mesh_dim_names
        assert torch.equal(found["mesh"].mesh, mesh.mesh)
        order = plan.order(mesh)
    assert found["order"] == order
    styles = plan.styles(order) if gated else plan.styles(order, gate=None, up="w1")
    assert told(found["styles"]) == told(styles)
    assert ("layers.*.attention" in styles) == (one.candidate.projections == "metp")
    assert applied[1].startswith("tokens = shard_sequence(tokens, order, dim=1)")
    assert found["positions"].equal(sequence_positions(plan.sequence.length, order))
    assert order.name == one.candidate.order
    assert ("save_attention" in code) == (one.candidate.checkpoint == "attention")


@pytest.mark.parametrize("one", [SMALL.ranked[0], ALONE], ids=lambda one: str(one.candidate))
def test_the_code_asks_which_layers_have_a_window(one: Ranked) -> None:
    """As it is printed it raises, rather than give all layers one mask."""
    plan = replace(
        SMALL, ranked=(one,), model=replace(SMALL.model, layers=4, windowed_layers=2),
        sequence=replace(SMALL.sequence, is_causal=True, window_size=(100, 0)),
        cluster=replace(SMALL.cluster, device_type="cpu"),
    )  # fmt: skip
    code = code_of(plan)
    asked = "windows = ...  # the 2 of 4 layers that have one, by number"
    assert asked in code.splitlines()
    made, _ = code.split("parallelize_module")
    found: dict = {}
    with fake_world(4):
        with pytest.raises(TypeError, match="ellipsis"):
            exec(made, {})
        exec(made.replace(asked, "windows = {1, 2}"), found)
        order = plan.order(plan.mesh("cpu"))
    kind = "projections" if one.candidate.projections == "metp" else "attention"
    path = "layers.{}.attention" + ".inner_attention" * (kind == "attention")
    styles: dict = {}
    for i in range(4):
        styles |= plan.styles(order, windowed=i in (1, 2), **{kind: path.format(i)})
    assert told(found["styles"]) == told(styles)
    assert code_of(replace(plan, model=replace(plan.model, windowed_layers=0))).count("window") == 0


@pytest.mark.parametrize("order", ["contiguous", "document_head_tail"])
def test_the_code_asks_where_documents_begin(order: str) -> None:
    """It raises as it is printed, and hands them to what deals tokens out by them."""
    one = ranked(Candidate(2, 2, rotate="q", order=order), 0.002, "a")
    plan = replace(
        SMALL, ranked=(one,), sequence=SequenceShape(4096, is_causal=True, documents=(3000, 70)),
        cluster=replace(SMALL.cluster, device_type="cpu"),
    )  # fmt: skip
    *code, last, why, at = (line for line in code_of(plan).splitlines() if "parallelize_module(" not in line)
    asked = code.pop()
    assert asked.startswith("cu_seqlens = torch.tensor(...)  # where documents begin")
    bounds = plan.sequence.mask.documents[0]
    assert bounds == (0, 3000, 3070, 4096)
    found: dict = {"tokens": torch.arange(4096)[None], "torch": torch}
    with fake_world(4, 1):
        exec("\n".join(code), found)
        with pytest.raises(RuntimeError, match="ellipsis"):
            exec(asked, dict(found))
        exec(f"cu_seqlens = torch.tensor({bounds})\n{last}\n{why}\n{at}", found)
        style = plan.styles(plan.order(plan.mesh("cpu")))
    assert told(found["styles"]) == told(style)
    shards = deal(4096, (1, 2, 2), order) if order == "contiguous" else deal_documents(bounds, (1, 2, 2))
    assert found["tokens"][0].tolist() == found["positions"].tolist() == positions(shards[1]).tolist()


def told(styles: dict) -> dict:
    """What styles were told, and the styles within them."""
    return {name: (type(x), told(vars(x))) if isinstance(x, ParallelStyle) else x for name, x in styles.items()}


def saved(path: Path, **changes: object) -> Profile:
    """A profile of a run of the last plan."""
    last = make_plan(MODEL, SEQUENCE, CLUSTER).ranked[-1].candidate
    profile = Profile(replace(CLUSTER, **changes), (Measured(MODEL, SEQUENCE, last, 1e-9),))
    profile.save(path)
    return profile


def test_a_plan_by_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    profile = saved(path, memory=10**9, nics=2)
    document = json.loads(out_of(f"plan {SHAPE} --profile {path} --json", capsys))
    assert set(document.pop("figures")["origins"].values()) == {"measured"}
    told = out_of(f"plan {SHAPE} --profile {path}", capsys)
    assert "MFU is not given: the peak is not known, give --peak-speed\n" in told
    saved(path, device_type="cpu", kernels=Kernels(launch=0.0))
    origins = json.loads(out_of(f"plan {SHAPE} --profile {path} --json", capsys))["figures"]["origins"]
    assert origins == dict.fromkeys(origins, "measured") | {"launch": "none, as kernels and hosts are one"}
    saved(path, memory=10**9, nics=2)
    document.pop("code")
    document.pop("version")
    assert document == listed(asdict(make_plan(MODEL, SEQUENCE, profile.cluster, profile=profile, keep=5)))
    assert document["ranked"][0]["measured"] == 1e-9
    assert "measured fastest" in out_of(f"plan {SHAPE} --profile {path} --ranks 4 --ranks-per-node 2 --nics 2", capsys)
    document = json.loads(out_of(f"plan {SHAPE} --profile {path} --memory 2GB --json", capsys))
    assert document["cluster"] == replace(profile.cluster, memory=2 * 10**9).as_json()
    assert main(["plan", *SHAPE.split(), "--profile", str(path), "--batch", "2"]) == 0
    assert capsys.readouterr().err == (
        f"wallfacer plan: {path} has no run of this model and sequence: plans are ranked by its links and kernels\n"
    )


def test_what_does_not_count_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    model, run = replace(MODEL, ffn=512, vocab=100), make_plan(MODEL, SEQUENCE, CLUSTER).ranked[-1].candidate
    Profile(CLUSTER, (Measured(model, SEQUENCE, run, 1e-9),)).save(path)
    divided = f"--profile {path} --ffn 512 --vocab 100 --sequences 2"
    for options, said in (
        (divided, f"runs of {path} do not count with --sequences: divisions are ranked by its links"),
        (f"{divided} --ffn 1024", ""),
        (
            "--ranks 2 --intra 1GB/s --inter 1GB/s --nics 4",
            "one node, of 2 ranks, so that --inter, --nics did not",
        ),
        ("--ranks 2 --intra 1GB/s --inter 1GB/s --ranks-per-node 1", "one rank a node, so that --intra did not count"),
        (WHERE, ""),
    ):
        assert main(["plan", *SHAPE.split(), *options.split()]) == 0
        told = capsys.readouterr().err
        assert said in told if said else not told


@pytest.mark.parametrize(
    ("options", "of_heads", "linear"),
    [
        ("--seq 8k", "measured", "measured"),
        ("--seq 8k --head-dim 128", "measured of other heads or dtype", "measured"),
        ("--dtype float16", "measured of other heads or dtype", "measured in another dtype"),
        ("--dtype float16 --ffn 512 --sequences 4", "measured of other heads or dtype", "measured in another dtype"),
    ],
)
def test_rates_of_other_heads_are_not_called_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, of_heads: str, linear: str
) -> None:
    saved(tmp_path / "profile.json")
    main(f"plan {SHAPE} --profile {tmp_path / 'profile.json'} {options} --top 1 --json".split())
    origins = json.loads(capsys.readouterr().out)["figures"]["origins"]
    told = {"forward": of_heads, "backward": of_heads, "linear": linear}
    assert origins == told | dict.fromkeys(("merge", "launch"), "measured")


def test_a_kernel_of_anyone_is_planned_by_its_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "profile.json", kernels=Kernels(attention="mine"))
    text = out_of(f"plan {SHAPE} --profile {tmp_path / 'profile.json'} --top 1", capsys)
    assert 'kernel="mine"' in text


def test_a_checkpoint_that_makes_a_plan_fit_is_shown() -> None:
    alone = replace(SMALL, model=replace(SMALL.model, ffn=0))
    assert "1  head_tail   attention" in printed(alone)
    none = tuple(replace(one, candidate=replace(one.candidate, checkpoint="none")) for one in alone.ranked)
    assert "checkpoint  measured" not in printed(replace(alone, ranked=none))


@pytest.mark.parametrize("measured", [False, True])
def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: bool) -> None:
    path = tmp_path / "out.png"
    saved(tmp_path / "profile.json")
    where = f"--profile {tmp_path / 'profile.json'}" if measured else WHERE
    out_of(f"plan {SHAPE} {where} --picture {path}", capsys)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("causal", [False, True])
def test_every_bar_has_a_colour(causal: bool) -> None:
    sequence, cluster = replace(SEQUENCE, is_causal=causal), replace(CLUSTER, ranks=8)
    called: dict[str, set[str]] = {}
    for candidate in attentions(MODEL, sequence, cluster):
        cost = attention_cost(candidate, MODEL, sequence, cluster)
        for bar in (bar for line in (cost.forward, cost.backward) for bar in line.bars):
            longest = next(_labels(bar, kind_of(bar)))
            called.setdefault(kind_of(bar), set()).add(longest.partition(" x ")[0])
    assert called.keys() == {"local", "peer", "heads", "gather", "hop", "carry", "exchange"}
    assert (called["local"], called["peer"]) == ({"own"}, {"team"})


@given(st.lists(st.tuples(st.sampled_from(["compute", "intra", "inter"]), st.integers(0, 9), st.integers(1, 5))))
def test_bars_of_a_lane_hide_none_in_as_few_tracks_as_can_be(drawn: list[tuple[str, int, int]]) -> None:
    bars = [Bar(lane, str(number), start, start + long) for number, (lane, start, long) in enumerate(drawn)]
    placed = list(_beside(bars))
    assert sorted(bar for bar, _, _ in placed) == sorted(bars)
    for bar, track, tracks in placed:
        meanwhile = [[o for o in bars if o.lane == bar.lane and o.start <= when < o.stop] for when in range(15)]
        assert track < tracks == max(map(len, meanwhile))
        others = [other for other, its, _ in placed if other.lane == bar.lane and its == track and other != bar]
        assert all(other.stop <= bar.start or other.start >= bar.stop for other in others)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{WHERE} --seq 4096 --full --hidden 256", "--heads is missing: give --hidden and --heads, or --model NAME"),
        (f"{WHERE} --seq 4096 --full --heads 4", "--hidden is missing: "),
        (f"{WHERE} --hidden 256 --heads 4 --full", "Missing option '--seq'"),
        (
            f"{WHERE} {SIZES}",
            "the mask is missing: say --causal, as for a language model that predicts the next token, or",
        ),
        ("--cluster h100x2 --model llama3-8b --seq 8k", "the mask is missing: say --causal"),
        (f"{SHAPE} {WHERE} --causal", "--causal and --full: a mask is one of them"),
        (f"{SHAPE} {WHERE} --kv-heads 3", "--kv-heads must divide --heads, got 3 and 4"),
        (
            "--model gpt3-175b --heads 48 --seq 2048 --full --cluster h100x8",
            "--heads must be a multiple of the model's 96 key heads unless --kv-heads is given, got 48",
        ),
        (f"{SHAPE} {WHERE} --hidden 255", "--heads must divide --hidden unless --head-dim is given, got 4 and 255"),
        (f"{SHAPE} {WHERE} --seq 0", "--seq must be a number of tokens like 131072, 128k or 1M (k = 1024, M = 1"),
        (f"{SHAPE} {WHERE} --seq 128KB", "--seq must be a number of tokens"),
        (f"{SHAPE} {WHERE} --seq 2049M", "--seq must be a number of tokens"),
        (f"{SHAPE} {WHERE} --seq 4G", "--seq must be a number of tokens"),
        (f"{SHAPE} {WHERE} --seq nan", "--seq must be a number of tokens"),
        (f"{SHAPE} {WHERE} --seq longest", "--seq longest: the memory of a rank is not known; give --memory"),
        (
            f"{SHAPE} {WHERE} --memory 1GB --seq longest --batch 9999999999999999",
            "--seq, --batch and the model's sizes: ",
        ),
        (f"{SHAPE} {WHERE} --batch 9999999999999", "--seq, --batch and the model's sizes: a tensor of more than 2^56 "),
        (f"{SHAPE} {WHERE} --seq 2048M --sequences 1048576", "--seq, --sequences and the model's sizes: "),
        (f"{SHAPE} {WHERE} --ffn 9999999999999999", "--seq, --batch and the model's sizes: "),
        (
            f"{SHAPE} {WHERE} --ffn 512 --experts 9999999999999999 --experts-per-token 1",
            "--seq, --batch and the model's sizes: ",
        ),
        (
            f"{SHAPE} {WHERE} --ffn 512 --experts 8",
            "--experts-per-token must be from 1 to --experts, or both 0, got 0 and 8",
        ),
        (
            f"{SHAPE} {WHERE} --ffn 512 --experts 8 --experts-per-token 9",
            "--experts-per-token must be from 1 to --experts, or both 0, got 9 and 8",
        ),
        (
            f"{SHAPE} {WHERE} --experts-per-token 2",
            "--experts-per-token must be from 1 to --experts, or both 0, got 2 ",
        ),
        (f"{SHAPE} {WHERE} --experts 8 --experts-per-token 2", "--experts must be 0 where --ffn is, got 8"),
        (f"{SHAPE} {WHERE} --gated", "--gated/--no-gated: there is no feed-forward; give --ffn"),
        (f"{SHAPE} {WHERE} --no-gated --ffn 0", "--gated/--no-gated: there is no feed-forward; give --ffn"),
        (f"{SHAPE} {WHERE} --ffn 512 --experts -1", "--experts must be at least 0, got -1"),
        (f"{SHAPE} {WHERE} --dtype float32", "--dtype float32: rates by default are an H100's in 16 bits; give --att"),
        (f"{SHAPE} {WHERE} --dtype float32 --linear-speed 1TFLOPS", "--dtype float32: rates by default are an H100's"),
        (f"{SHAPE} {WHERE} --model llama3", "--model must be one of llama3-8b, llama3-70b, "),
        (
            f"{SHAPE} --cluster h100",
            "--cluster must be a GPU and how many, like h100x64, of a100, h100, h200, b200, got",
        ),
        (f"{SHAPE} --cluster v100x8", "--cluster must be a GPU and how many"),
        (f"{SHAPE} --cluster h100x0", "--cluster must be a GPU and how many"),
        (f"{SHAPE} --cluster h100x-8", "--cluster must be a GPU and how many"),
        (f"{SHAPE} --cluster h100x12", "--cluster h100x12: nodes of 8 do not make 12 ranks; say another number, or "),
        (f"{SHAPE} --cluster h100x8 --ranks 8", "--ranks: --cluster h100x8 says how many; leave one of them out"),
        (f"{SHAPE} --cluster h100x4 --profile {{folder}}/good.json", "--cluster: links and kernels are measured in "),
        (f"{SHAPE} --cluster h100x8 --dtype float32", "--dtype: no attention kernel for it on --cluster h100x8, use -"),
        (
            f"{SHAPE} --cluster h100x8 --head-dim 320",
            "--head-dim: no attention kernel for it on --cluster h100x8, desc",
        ),
        (f"{SHAPE} --cluster h100x8 --peak-speed much", "--peak-speed must be a speed like 200TFLOPS, got 'much'"),
        (f"{SHAPE} {WHERE} --batch 0", "--batch must be at least 1, got 0"),
        (f"{SHAPE} {WHERE} --head-dim 0", "--head-dim must be at least 1, got 0"),
        (f"{SHAPE} {WHERE} --ffn -1", "--ffn must be at least 0, got -1"),
        (f"{SHAPE} {WHERE} --layers 0", "--layers must be at least 1, got 0"),
        (f"{SHAPE} {WHERE} --window -1", "--window must be at least 0, got -1"),
        (f"{SHAPE} {WHERE} --documents 0", "--documents must be a number of tokens like 131072, 128k or 1M"),
        (f"{SHAPE} {WHERE} --documents 8k,", "--documents must be a number of tokens like 131072, 128k or 1M"),
        (f"{SHAPE} {WHERE} --seq 1M --documents 1", "--documents must be at most 8192 in a sequence, got 1048576"),
        (
            f"{SHAPE} {WHERE} --memory 1GB --seq longest --documents 8k",
            "--documents: how many the longest sequence has is not known; say --seq",
        ),
        (f"{SHAPE} {WHERE} --dtype int8", "--dtype: 'int8' is not one of"),
        (f"{SHAPE} {WHERE} --ranks 0", "--ranks must be at least 1, got 0"),
        (
            f"{SHAPE} --ranks 1000000 --ranks-per-node 8 --intra 1GB/s --inter 1GB/s",
            "--ranks must be at most 999999, got 1000000",
        ),
        (f"{SHAPE} {WHERE} --nics 1000000", "--nics must be at most 999999, got 1000000"),
        (f"{SHAPE} {WHERE} --ranks 5", "--ranks-per-node must divide --ranks, got 2 and 5"),
        (f"{SHAPE} {WHERE} --nics 0", "--nics must be at least 1, got 0"),
        (f"{SHAPE} {WHERE} --inter 12.5", "--inter must be a rate like 12.5GB/s or 200Mbit/s, got '12.5'"),
        (f"{SHAPE} {WHERE} --intra 0GB/s", "--intra must be a rate"),
        (f"{SHAPE} {WHERE} --intra 1e-320B/s", "--intra must be a rate"),
        (f"{SHAPE} {WHERE} --peak-speed 1e31FLOPS", "--peak-speed must be a speed"),
        (f"{SHAPE} {WHERE} --kernel=", "--kernel must be one of auto, flash, "),
        (f"{SHAPE} {WHERE} --intra-latency 5", "--intra-latency must be a time like 5us or 1.5ms, got '5'"),
        (f"{SHAPE} {WHERE} --memory much", "--memory must be a size like 80GB or 80GiB, got 'much'"),
        (f"{SHAPE} {WHERE} --memory 0.5B", "--memory must be at least 1B, got '0.5B'"),
        (
            f"{SHAPE} --ranks 2 --intra 1GB/s --inter-latency much",
            "--inter-latency must be a time like 5us or 1.5ms, g",
        ),
        (f"{SHAPE} --kernel cudnn --profile {{folder}}/good.json", "--kernel is measured in --profile; leave one of"),
        (f"{SHAPE} {WHERE} --memory 1kB", "--memory: nothing fits: "),
        (f"{SHAPE} {WHERE} --attention-speed 5", "--attention-speed must be a speed like 200TFLOPS, got '5'"),
        (f"{SHAPE} {WHERE} --linear-speed 5", "--linear-speed must be a speed like 200TFLOPS, got '5'"),
        (f"{SHAPE} {WHERE} --top 0", "--top must be at least 1, got 0"),
        (f"{SHAPE} {WHERE} --picture {{folder}}/none/out.png", "--picture: there is no folder {folder}/none"),
        (f"{SHAPE} {WHERE} --picture {{folder}}", "--picture: {folder} is a folder; name a file in it"),
        (f"{SHAPE} {WHERE} --picture {{folder}}/out.nothing", "--picture: out.nothing must end in one of "),
        (f"{SHAPE} {WHERE} --picture {{folder}}/out.png --top 21", "--picture shows at most 20 plans, got --top 21"),
        (f"{SHAPE} --intra 1GB/s", "--ranks is missing: "),
        (f"{SHAPE} --ranks 2", "--intra is missing: "),
        (f"{SHAPE} --ranks 2 --ranks-per-node 1", "--inter is missing: "),
        (f"{SHAPE} --profile {{folder}}/none.json", "--profile: {folder}/none.json: No such file or directory"),
        (f"{SHAPE} --profile {{folder}}/bad.json", "--profile: {folder}/bad.json is no profile: "),
        (
            f"{SHAPE} --profile {{folder}}/good.json --dtype float32",
            "--profile: kernel='auto' is 'flash' on cuda, which r",
        ),
        (
            f"{SHAPE} --profile {{folder}}/good.json --head-dim 512",
            "--profile: kernel='auto' is 'flash' on cuda, which r",
        ),
        (f"{SHAPE} --profile {{folder}}/good.json --ranks 8", "--ranks is 4 in --profile, got 8; leave it out"),
        (f"{SHAPE} --profile {{folder}}/good.json --intra 1GB/s", "--intra is measured in --profile; leave one"),
    ],
)
def test_bad_input_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    """And before anything is planned, which may take a minute, but for what does not fit."""
    if "nothing fits" not in message:
        monkeypatch.setattr("wallfacer_dt.planning.plan", lambda *_, **__: pytest.fail("planned"))
    Profile(CLUSTER).save(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("{}")
    assert main(["plan", *arguments.format(folder=tmp_path).split()]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"wallfacer plan: {message.format(folder=tmp_path)}")
    assert (printed.err.count("\n"), printed.out) == (1, "")


def test_one_node_needs_one_link_and_one_rank_none(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = json.loads(out_of(f"plan {SHAPE} --ranks 2 --ranks-per-node 1 --inter 2GB/s --json", capsys))["cluster"]
    assert cluster["inter"] == {"bandwidth": 2e9, "latency": 10e-6}
    assert "1 rank on 1 node of 1" in out_of(f"plan {SHAPE} --ranks 1", capsys)


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--kv-heads 3", "--kv-heads must divide --heads, got 3 and 4"),
        ("--causal", "--causal and --full: a mask is one of them"),
        ("--seq longest", "--seq must be a number of tokens like 131072, 128k or 1M "),
        ("--top 0", "--top must be at least 1, got 0"),
        ("--iterations 0", "--iterations must be at least 1, got 0"),
        ("--threads 0", "--threads must be at least 1, got 0"),
        ("--timeout 0s", "--timeout must be from 1s to 1000000s, got '0s'"),
        ("--timeout soon", "--timeout must be a time like 5us or 1.5ms, got 'soon'"),
        ("--memory much", "--memory must be a size like 80GB or 80GiB, got 'much'"),
        ("--memory 0.5B", "--memory must be at least 1B, got '0.5B'"),
        ("--kernel flsh", "--kernel must be one of auto, flash, "),
        ("--device tpu", "--device: 'tpu' is not one of"),
        ("--ranks-per-node 0", "--ranks-per-node must be at least 1, got 0"),
        ("--out {folder}/bad.json", "--out: {folder}/bad.json is no profile: "),
        (
            "--out {folder}/bad.json/profile.json",
            "--out: {folder}/bad.json/profile.json cannot be written: File exists",
        ),
        (f"--out {{folder}}/{300 * 'a'}", f"--out: {{folder}}/{300 * 'a'} cannot be written: File name too long"),
        ("--out {folder}/gpu.json", "--out: {folder}/gpu.json is of --device cuda, not cpu; name another file"),
        ("--out {folder}/good.json", "--out: {folder}/good.json is of 4 ranks, 2 a node, these are 2, 2 a node; name"),
        (
            "--out {folder}/two.json --kernel flex",
            "--out: {folder}/two.json is of --kernel auto, not flex; name another",
        ),
    ],
)
def test_a_profiles_bad_input_gets_one_line_of_one_rank(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    message: str,
) -> None:
    """And before a process group is made, which would wait for other ranks."""
    (tmp_path / "bad.json").write_text("{}")
    Profile(CLUSTER).save(tmp_path / "good.json")
    Profile(replace(CLUSTER, ranks=2)).save(tmp_path / "gpu.json")
    Profile(replace(CLUSTER, ranks=2, device_type="cpu")).save(tmp_path / "two.json")
    line = f"wallfacer profile: {message.format(folder=tmp_path)}"
    for name, value in (TORCHRUN | {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "one"}).items():
        monkeypatch.setenv(name, value)
    command = ["profile", *SHAPE.split(), "--device", "cpu", *arguments.format(folder=tmp_path).split()]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert (printed.err.count("\n"), printed.out) == (1, "")
    if "--out" not in arguments:
        waited = []
        monkeypatch.setattr("time.sleep", waited.append)
        monkeypatch.setenv("RANK", "1")
        assert main(command) == 2
        assert capsys.readouterr() == ("", "")
        assert waited == [30], "before rank 0 has said it torchrun must see no rank end"


@pytest.mark.parametrize(("local", "says"), [("0", True), ("1", False)])
def test_what_one_node_lacks_its_first_rank_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, local: str, says: bool
) -> None:
    ranks = {"WORLD_SIZE": "4", "RANK": str(2 + int(local)), "LOCAL_RANK": local, "TORCHELASTIC_RUN_ID": "one"}
    for name, value in (TORCHRUN | ranks | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["profile", *SHAPE.split(), "--device", "cuda"]) == 2
    line = "wallfacer profile: --device cuda: 2 ranks on a node of 1 GPUs; try --device cpu\n"
    assert (capsys.readouterr().err, waited) == ((line, []) if says else ("", [30]))


def test_ranks_of_a_node_share_its_cores_also_where_a_process_cannot_ask_for_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on macOS, of which all cores are counted."""
    environment = {**TORCHRUN, "MASTER_PORT": "1"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert Launch.read(environment, "cpu", None, None, "30s").threads == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    for cores, threads in ((16, 8), (1, 1), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert Launch.read(environment, "cpu", None, None, "30s").threads == threads


def test_nodes_on_different_devices_are_refused_before_they_wait_for_each_other() -> None:
    store = torch.distributed.HashStore()
    for rank in (0, 1):
        _check_device(store, rank, "cuda")
    with pytest.raises(NodeError, match="--device: rank 2 would run on cpu, rank 0 on cuda; say which"):
        _check_device(store, 2, "cpu")


@pytest.mark.parametrize(("met", "kind"), [((0, 1), OptionError), ((0,), ValueError), ((), ValueError)])
def test_what_all_profiling_ranks_refuse_is_one_line(
    monkeypatch: pytest.MonkeyPatch, met: tuple[int, ...], kind: type[Exception]
) -> None:
    """They leave together; after what others may not have, the process just ends."""
    ended: list[bool] = []
    store = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(True))
    error = ValueError("top must be the same on every rank")
    error.met = {*met}
    launch = Launch(2, 2, 0, 0, "cpu", torch.get_num_threads(), timedelta(seconds=60))
    with pytest.raises(Exception, match="top must be the same on every rank") as raised, launch.group():
        raise error
    assert type(raised.value) is kind
    assert ended == [True] * (kind is OptionError)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_WORLD_SIZE"])
def test_a_profile_needs_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    for name, value in (TORCHRUN | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    assert main(["profile", *SHAPE.split()]) == 2
    assert capsys.readouterr().err == (
        "wallfacer profile: ranks are needed; start it with torchrun --nproc-per-node 4 -m wallfacer_dt.command "
        "profile ...\n"
    )


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "wallfacer_dt.command"]
    command = [sys.executable, *launcher, "profile", *SMALL_SHAPE.split(), "--device", "cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=ROOT, check=False)


def check_profiled(document: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What one rank prints is what the file says, by which the same is planned."""
    assert document["file"] == str(path)
    assert document["cluster"] == Profile.load(path).cluster.as_json()
    assert document["cluster"]["ranks"] == 2
    times = [run["measured"] for run in document["measured"]]
    assert len(times) == 2
    assert document["ranked"][0]["measured"] == min(times) > 0
    read = json.loads(out_of(f"plan {SMALL_SHAPE} --profile {path} --json", capsys))
    assert {name: read[name] for name in ("ranked", "cluster", "code")} == {
        name: document[name] for name in ("ranked", "cluster", "code")
    }


MEASURING = "--top 2 --iterations 1 --threads 1 --json"


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_of_torchrun_are_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    done = torchrun(*MEASURING.split(), "--out", str(path))
    assert done.returncode == 0, done.stderr
    check_profiled(json.loads(done.stdout), path, capsys)  # one rank's


def test_two_ranks_are_profiled_and_the_file_is_planned_by(
    ranks: Callable[[int], RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (status, told, said, _), other = ranks(2).run(commanded_on_a_rank, tmp_path, MEASURING, MEASURING)
    assert (status, said, other) == (0, "", (0, "", "", []))
    check_profiled(json.loads(told), tmp_path / "profile.json", capsys)


def commanded_on_a_rank(folder: Path, *options: str) -> tuple[int, str, str, list[float]]:
    """Of a profile in a pool's process group: the exit status, what is printed, what is said and what is waited.

    Each rank has options of its own.
    """
    rank, waited, told, said = str(dist.get_rank()), [], io.StringIO(), io.StringIO()
    place = TORCHRUN | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "one"}
    store = dist.FileStore(str(folder / "store"), 2)
    command = *options[int(rank)].split(), "--device", "cpu", "--out", str(folder / "profile.json")
    with (
        mock.patch.dict(os.environ, place),
        mock.patch.object(dist, "rendezvous", return_value=iter([(store, int(rank), 2)])),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(torch, "set_num_threads"),
        mock.patch("time.sleep", waited.append),
        measured_shortly(),
        redirect_stdout(told),
        redirect_stderr(said),
    ):
        return main(["profile", *SMALL_SHAPE.split(), *command]), told.getvalue(), said.getvalue(), waited


def test_the_first_rank_says_what_all_refuse(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (status, _, said, waited), other = ranks(2).run(commanded_on_a_rank, tmp_path, "--memory 1kB", "--memory 1kB")
    assert (status, waited) == (2, [])
    assert said.startswith("wallfacer profile: --memory: nothing fits: ")
    assert said.count("\n") == 1
    assert other == (2, "", "", [30])
    assert not list(tmp_path.glob("*.json"))


def commanded_for_a_small_file(folder: Path, *options: str) -> tuple[int, str, str, list[float]]:
    with (
        mock.patch("wallfacer_dt.planning.profiling._MOST_BYTES", 1000),
        mock.patch("wallfacer_dt.planning.profiling._run", side_effect=AssertionError("nothing is run in vain")),
    ):
        return commanded_on_a_rank(folder, *options)


def test_a_file_that_would_be_too_large_is_refused_before_plans_are_run(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    (status, _, said, _), other = ranks(2).run(commanded_for_a_small_file, tmp_path, "", "")
    assert status == 2
    assert re.fullmatch(r"wallfacer profile: --out: .* would have more than 1000 bytes; name another file\n", said)
    assert other == (2, "", "", [30])


def test_ranks_with_unlike_options_are_refused_in_one_line(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (status, _, said, waited), other = ranks(2).run(commanded_on_a_rank, tmp_path, "--top 1", "--top 2")
    assert (status, waited) == (2, [])
    assert said.startswith("wallfacer profile: call ")
    assert said.endswith(": top must be the same on every rank of the mesh, got rank 0: 1, rank 1: 2\n")
    assert other == (2, "", "", [30])


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.ranks
def test_what_all_ranks_refuse_is_said_once(tmp_path: Path) -> None:
    """By torchrun, with processes of its own."""
    done = torchrun("--memory", "1kB", "--out", str(tmp_path / "profile.json"))
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("wallfacer ")]
    assert len(said) == 1
    assert said[0].startswith("wallfacer profile: --memory: nothing fits: ")
    assert not list(tmp_path.iterdir())


def test_a_plan_is_no_call_of_all_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of torchrun's asks for one hears what is wrong."""
    for name, value in {"TORCHELASTIC_RUN_ID": "one", "RANK": "3", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    for command in ("plan", "explain"):
        assert main([command, "--ranks", "0"]) == 2
        assert capsys.readouterr().err.startswith(f"wallfacer {command}: ")


def test_what_a_profile_says_of_devices_is_no_code() -> None:
    where = replace(SMALL.cluster, device_type='cpu"); print("')
    (made,) = (line for line in code_of(replace(SMALL, cluster=where)).splitlines() if line.startswith("mesh"))
    call = ast.parse(made).body[0].value
    assert ast.literal_eval(call.args[0]) == where.device_type


@pytest.mark.parametrize("causal", [False, True])
def test_the_code_always_says_the_mask(causal: bool) -> None:
    sequence = replace(SMALL.sequence, is_causal=causal, window_size=None)
    assert re.findall(r"is_causal=\w+", code_of(replace(SMALL, sequence=sequence))) == [f"is_causal={causal}"]
