"""`wallfacer plan --sequences`: what is printed is the division, and its flags are torchtitan's."""

import io
import json
import re
from contextlib import suppress
from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import pytest
import torch
from expecttest import assert_expected_inline
from rich.console import Console

from tests.test_plan_divide import contexts
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape
from wallfacer_dt.command.app import main
from wallfacer_dt.command.planning.divided import context_lines, print_division
from wallfacer_dt.command.planning.figures import Figures
from wallfacer_dt.command.planning.flags import flags_of
from wallfacer_dt.command.planning.share import print_figures
from wallfacer_dt.planning import Candidate, Prediction
from wallfacer_dt.planning.dividing import DivisionPlan, RankedDivision, divide
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.flops import model_flops
from wallfacer_dt.planning.gpus import GPUS
from wallfacer_dt.planning.stack import StackMemory

MODEL = ModelShape(256, 4, 2, 64, ffn=1024, layers=2, vocab=1000)
CLUSTER = Cluster(16, 4, Link(300e9, 5e-6), Link(12.5e9, 10e-6), memory=10**8, kernels=GPUS["h100"].kernels(MODEL.dim))
SIZES = "--hidden 256 --heads 4 --kv-heads 2 --ffn 1024 --layers 2 --vocab 1000 --seq 4096"
WHERE = "--ranks 16 --ranks-per-node 4 --intra 300GB/s --inter 12.5GB/s --memory 100MB"
COMMAND = f"plan {SIZES} --causal {WHERE} --sequences 8"


def ranked(division: Division, seconds: float, why: str) -> RankedDivision:
    return RankedDivision(division, Prediction(seconds, 0.75 * seconds, 0.25 * seconds, 0, 1, 1, 6, 80_000_000), why)


FIRST = Division(Candidate(2, 2, order="head_tail", checkpoint="attention"), 2, 1, 2, microbatch=2, microbatches=2)
SECOND = Division(Candidate(1, 1, 2, order="head_tail"), 1, 4, 1, 2, 1, 2)
# By hand, so that what is printed is tested apart from how divisions are chosen.
SMALL = DivisionPlan(
    MODEL, SequenceShape(4096, is_causal=True, window_size=(100, 0)), CLUSTER, 8,
    (ranked(FIRST, 0.002, "a"), ranked(SECOND, 0.0025, "b")),
    (ranked(SECOND, 0.0025, ""), ranked(FIRST, 0.002, "")), (1, 2, 4), 19,
)  # fmt: skip
FIGURES = Figures(
    flops=10**12, peak=1e15, ranks=16, tokens=8 * 4096, time={
        "attention": 1.0, "products": 0.2, "elementwise": 0.03, "copies": 0.005, "optimizer": 0.004,
        "transfers": 0.0005, "host": 6e-5,
    },
    memory=StackMemory(1, 20, 300, 4000, 50000, 600000),
    origins={"forward": "assumed", "backward": "given", "linear": "measured", "merge": "there", "launch": "by hand"},
    source="", activation="silu", left_out=("in the time: this",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("division", "copies"),
    [
        (FIRST, "FSDP's copies"),
        (replace(FIRST, pipeline=2), "FSDP's copies, sums of microbatches' gradients"),
        (replace(FIRST, pipeline=2, microbatches=1), "FSDP's copies"),
        (Division(Candidate(1), tensor=4, microbatches=2), "sums of microbatches' gradients"),
        (Division(Candidate(4), microbatches=2), "FSDP's copies"),
        # Of METP's weights that no others have.
        (
            Division(Candidate(4, feed_forward="metp"), microbatches=2),
            "FSDP's copies, sums of microbatches' gradients",
        ),
        (Division(Candidate(4, projections="metp"), shards=2, microbatches=2), "FSDP's copies"),
    ],
)
def test_what_is_copied_is_named(division: Division, copies: str) -> None:
    out = io.StringIO()
    print_figures(replace(SMALL, ranked=(ranked(division, 0.002, ""),)), FIGURES, Console(file=out, width=100))
    assert f"    5 ms  {copies}\n" in out.getvalue()


def test_golden_text() -> None:
    out = io.StringIO()
    print_division(SMALL, FIGURES, Console(file=out, width=100, highlight=False, markup=False))
    text = "\n".join(line.rstrip() for line in out.getvalue().splitlines()).replace("─", "-")
    assert_expected_inline(
        text,
        """\
16 ranks on 4 nodes of 4, each with 100 MB
into a rank 300 GB/s and 5 us; into a node 12.5 GB/s and 10 us
attention at 304 TFLOPS (assumed), its backward at 288 TFLOPS (given), other matrix products at 666
TFLOPS (measured)
memory is read and written at 2.5 TB/s (there)
the host launches an operation of attention in 70 us (by hand)
8 sequences in a step, of 4096 tokens, causal, window 100, bfloat16
hidden 256, 4/2 heads of 64, gated feed-forward of 1024, vocabulary of 1000

The best 2 of 19 divisions, for a step of 2 layers
   repli-          con-  ten-  pipe-   micro-            tokens
#     cas  shards  text   sor   line  batches    step     per s   MFU  waiting  bubble  memory
----------------------------------------------------------------------------------------------
1       2       1     4     2      1   2 of 2    2 ms  16384000  3.1%      25%       -   80 MB
2       1       4     2     1      2   2 of 1  2.5 ms  13107200  2.5%      25%     50%   80 MB

Why, and how a division's context ranks share a sequence
1  a; ring 2 x team 2, team in node, 2d, rotates kv, head-tail, checkpoint attention
2  b; ulysses 2, head-tail

Context ranks:
4 ranks, the most of which a division fits, are no waste
with fewer the step is as much longer (2: +25.0%)
of 1 nothing fits into memory

MFU of plan 1: 3.1%
model FLOPs without recomputation, causal attention counted as half / (time x ranks x peak); 1e+12
FLOPs, 1 PFLOPS a rank

Time of plan 1, 2 ms a step as predicted:
     1 s  attention
  200 ms  other matrix products
   30 ms  norms, positions, activations, embedding, loss
    5 ms  FSDP's copies
    4 ms  clipping and optimizer
  500 us  waiting for transfers
   60 us  waiting for the host

Memory of plan 1, 654 kB a rank:
     1 B  weights, a rank's shards
    20 B  gradients, likewise
   300 B  optimizer: Adam's moments and master weights, in float32
   50 kB  activations, kept for the backward
    4 kB  buffers: FSDP's whole weights and gradients in use
  600 kB  buffers: the most that computing takes beside

Not included:
- in the time: this

Plan 1 for torchtitan, by recipes.torchtitan:
--parallelism.data_parallel_replicate_degree 2 \\
--parallelism.data_parallel_shard_degree 1 \\
--parallelism.tensor_parallel_degree 2 \\
--parallelism.pipeline_parallel_degree 1 \\
--parallelism.context_parallel_degree 4 \\
--parallelism.context_parallel_ulysses 1 \\
--parallelism.context_parallel_ring 2 \\
--parallelism.context_parallel_team 2 \\
--parallelism.context_parallel_schedule 2d \\
--parallelism.context_parallel_rotate kv \\
--parallelism.context_parallel_rotate_forward kv \\
--parallelism.context_parallel_load_balancer headtail \\
--training.local_batch_size 2 \\
--training.global_batch_size 8 \\
--training.seq_len 4096 \\
activation-checkpoint:full
# the recipe has the windows of its models, and no option for another""",
    )


def test_experts_that_are_dealt_to_ranks_are_shown() -> None:
    division = Division(Candidate(1, 1, 2, order="head_tail"), 1, 4, 2, microbatches=2, expert=4)
    shown = replace(SMALL, ranked=(ranked(division, 0.002, "a"), ranked(SECOND, 0.0025, "b")))
    out = io.StringIO()
    print_division(shown, FIGURES, Console(file=out, width=100, highlight=False, markup=False))
    table = re.search(r"\n( +repli-.*?)\n\n", out.getvalue(), re.DOTALL)
    assert table
    assert_expected_inline(
        "\n".join(line.rstrip() for line in table[1].replace("─", "-").splitlines()),
        """\
   repli-          con-  ten-  pipe-   ex-   micro-            tokens
#     cas  shards  text   sor   line  pert  batches    step     per s   MFU  waiting  bubble  memory
----------------------------------------------------------------------------------------------------
1       2       4     2     1      1     4   2 of 1    2 ms  16384000  3.1%      25%       -   80 MB
2       1       4     2     1      2     1   2 of 1  2.5 ms  13107200  2.5%      25%     50%   80 MB""",
    )
    assert "--parallelism.expert_parallel_degree 4 \\\n" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0,), ["1 rank, the most of which a division fits, are no waste"]),
        ((4, 2, 1), ["4 ranks, the most of which a division fits, are no waste",
                     "with fewer the step is as much longer (1: +300.0%, 2: +100.0%)"]),
        ((1, 1.5), ["context parallelism beyond 1 rank makes the step slower (2: +50.0%)"]),
        ((2, 1, 0.995, 1.2), ["context parallelism beyond 2 ranks gains less than 1% (4: -0.5%, 8: +20.0%)",
                              "with fewer the step is as much longer (1: +100.0%)"]),
    ],
)  # fmt: skip
def test_what_is_said_of_context_ranks(seconds: tuple[float, ...], said: list[str]) -> None:
    plan = contexts(*seconds)
    assert context_lines(plan) == said
    missing = context_lines(replace(plan, contexts=(*plan.contexts, 64)))
    assert missing == [*said, "of 64 nothing fits into memory"]


def test_flags_are_torchtitans() -> None:
    """Names that its configuration and the recipe's have, and numbers that make up the ranks and the sequences."""
    pytest.importorskip("torchtitan", reason="the extra `torchtitan` is not installed")
    from torchtitan.config import TrainingConfig
    from torchtitan.distributed.parallel_dims import ParallelDims

    from recipes.torchtitan.settings import ORDERS, ContextParallelism, context_sizes

    known = {"parallelism": ContextParallelism, "training": TrainingConfig}
    dealt = Division(Candidate(1, 1, 2, order="head_tail"), 1, 4, 2, expert=4)
    by_document = replace(FIRST, context=replace(FIRST.context, order="document_head_tail"))
    for division, dtype in (
        (FIRST, torch.bfloat16), (SECOND, torch.float32), (dealt, torch.bfloat16), (by_document, torch.bfloat16),
    ):  # fmt: skip
        sequence = replace(SMALL.sequence, dtype=dtype)
        lines = flags_of(replace(SMALL, sequence=sequence, ranked=(ranked(division, 1.0, ""),))).splitlines()
        flags = dict(re.match(r"--(\S+) (\S+)", line).groups() for line in lines if line.startswith("--"))
        found = {}
        for name, value in flags.items():
            group, _, field = name.partition(".")
            assert field in {one.name for one in fields(known[group])}, name
            found[field] = int(value) if value.isdigit() else None if value == "None" else value
        options = {
            name: value
            for name, value in found.items()
            if name.split("_")[0] in ("data", "tensor", "pipeline", "context", "expert")
        }
        settings = ContextParallelism(**options)
        assert context_sizes(settings) == division.context.axes
        assert settings.expert_parallel_degree == division.expert
        ParallelDims.from_config(settings, 16)  # which refuses what does not make up the ranks
        assert ORDERS[settings.context_parallel_load_balancer] == division.context.order
        rounds = division.microbatches if division.pipeline == 1 else 1
        assert found["local_batch_size"] * division.data * rounds == found["global_batch_size"] == 8
        assert found["seq_len"] == 4096
        training = TrainingConfig(**{name: found[name] for name in found if name == "mixed_precision_param"})
        assert training.mixed_precision_param == str(dtype).removeprefix("torch.")
        assert lines[-1].startswith(("activation-checkpoint:", "# "))
        assert f"activation-checkpoint:{'full' if division in (FIRST, by_document) else 'none'}" in lines
        assert [line.endswith("\\") for line in lines if line.startswith("--")] == [True] * len(flags)


@pytest.mark.parametrize(
    ("layers", "ranks", "each", "less"),
    [
        (2, 2, 1, 0), (32, 2, 1, 0), (32, 4, 1, 2), (32, 8, 1, 0), (32, 32, 1, 0), (80, 8, 1, 1), (80, 16, 1, 0),
        (126, 6, 1, 0), (126, 16, 1, 0), (32, 4, 2, 0), (36, 4, 2, 1), (126, 8, 2, 1), (126, 8, 4, 0), (126, 9, 7, 0),
        (32, 2, 4, 0), (16, 2, 4, 0), (31, 2, 4, 0),
    ],
)  # fmt: skip
def test_stages_of_torchtitan_have_the_layers_that_were_planned(layers: int, ranks: int, each: int, less: int) -> None:
    """By its flags, which say how many layers the ends count for, and of more than two stages a rank their layers."""
    pytest.importorskip("torchtitan", reason="the extra `torchtitan` is not installed")
    from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part, _get_pipeline_metadata

    from recipes.torchtitan.settings import ContextParallelism

    division = Division(Candidate(1), pipeline=ranks, microbatches=ranks, interleave=each, last_less=less)
    model = replace(MODEL, layers=layers)
    flags = flags_of(replace(SMALL, model=model, ranked=(ranked(division, 1.0, ""),)))
    found = dict(re.findall(r"--parallelism\.(pipeline_\S+) (\S+)", flags))
    settings = ContextParallelism(**{name: int(value) if value.isdigit() else value for name, value in found.items()})
    titans = SimpleNamespace(layers=range(layers))
    if "# torchtitan has no flag for" in flags:
        assert "layers_per_stage" not in flags
        settings = replace(settings, pipeline_parallel_layers_per_stage=-(-(layers + 1 + less) // (ranks * each)))
        with suppress(ValueError):
            assert _get_pipeline_metadata(SimpleNamespace(pp=ranks), settings, titans)[0] != ranks * each
        return
    parts = _generate_llm_fqn_per_model_part(*_get_pipeline_metadata(SimpleNamespace(pp=ranks), settings, titans))
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [*division.stage_layers(model)]


@pytest.mark.parametrize(
    ("division", "changes", "note"),
    [
        (FIRST, {}, "the recipe has the windows of its models, and no option for another"),
        (replace(FIRST, context=replace(FIRST.context, checkpoint="full")), {}, "the recipe saves attention in every"),
        (Division(Candidate(16, feed_forward="metp")), {}, "METP's feed-forward is not the recipe's"),
        (
            replace(FIRST, loss_chunks=8), {"sequence": SequenceShape(4112, is_causal=True)},
            "torchtitan needs sequences that 32 divides",
        ),
        # torchtitan's Trainer refuses what the recipe does not: in any order, and of tensor parallelism alone.
        (
            Division(Candidate(16), loss_chunks=8), {"sequence": SequenceShape(4128)},
            "torchtitan needs sequences that 128 divides",
        ),
        (Division(Candidate(1), 16), {"sequence": SequenceShape(4100)}, "torchtitan needs sequences that 16 divides"),
        (FIRST, {"sequence": SequenceShape(4096)}, "the recipe's language models are causal, and it has no option for"),
        (
            FIRST, {"sequence": SequenceShape(4096, is_causal=True, dtype=torch.float16)},
            "torchtitan trains in bfloat16 or float32, not in float16",
        ),
        (Division(Candidate(4, 1, 4, order="head_tail")), {}, "the recipe places ranks ulysses in node, this"),
        (
            Division(Candidate(4, 1, 4, order="document_head_tail")),
            {},
            "the recipe places ranks ulysses in node, this",
        ),
        (
            FIRST, {"sequence": SequenceShape(4096, is_causal=True, documents=(100,))},
            "documents are the loader's to tell: of a text's paragraphs --dataloader.documents",
        ),
        (
            Division(Candidate(1), pipeline=9, interleave=7), {"model": replace(MODEL, layers=126)},
            "torchtitan has no flag for 7 stages a rank of so many layers",
        ),
    ],
)  # fmt: skip
def test_what_flags_cannot_say_is_said(division: Division, changes: dict, note: str) -> None:
    plan = replace(SMALL, ranked=(ranked(division, 1.0, ""),), **changes)
    assert any(line.startswith(f"# {note}") for line in flags_of(plan).splitlines()), flags_of(plan)
    alike = Division(Candidate(1, 1, 4, "ulysses_in_node", order="head_tail"), shards=4)
    quiet = replace(plan, ranked=(ranked(alike, 1.0, ""),), sequence=SequenceShape(4096, is_causal=True))
    assert "#" not in flags_of(quiet)


def run(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    status = main(arguments.split())
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


def test_json_is_the_division(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(f"{COMMAND} --top 3 --peak-speed 1PFLOPS --json", capsys))
    made = divide(MODEL, SequenceShape(4096, is_causal=True), CLUSTER, 8, keep=3)
    assert document["ranked"] == json.loads(json.dumps([asdict(one) for one in made.ranked]))
    assert len(document["ranked"]) == 3
    assert document["by_context"] == json.loads(json.dumps([asdict(one) for one in made.by_context]))
    assert (document["sequences"], document["considered"]) == (8, made.considered)
    assert (document["contexts"], document["enough_context"]) == (list(made.contexts), made.enough_context())
    assert document["flags"] == flags_of(made)
    assert (document["version"], document["sequence"]["batch"]) == (1, 1)
    figures, seconds = document["figures"], made.prediction.seconds
    assert figures["tokens_per_second"] == 8 * 4096 / seconds
    flops = model_flops(MODEL, SequenceShape(4096, 8, is_causal=True))
    assert figures["flops"] == flops
    assert figures["mfu"] == flops / (seconds * 16 * 1e15)
    assert sum(figures["memory"].values()) == made.prediction.memory


def test_text_has_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(COMMAND, capsys)
    for part in (
        "16 ranks on 4 nodes of 4", "8 sequences in a step, of 4096 tokens, causal, bfloat16", "The best 5 of",
        "Context ranks:", "context parallelism beyond", "Memory of plan 1, ", "asynchronous tensor parallelism",
        "--parallelism.data_parallel_shard_degree", "--training.global_batch_size 8",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part
    assert max(map(len, text.splitlines())) <= 100
    assert "all ranks are taken to share each sequence" not in text


def test_without_it_all_ranks_share_a_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(run(f"{COMMAND.partition(' --sequences')[0]} --top 1", capsys).split())
    assert "all ranks are taken to share each sequence; see --sequences" in text
    assert "context_mesh(" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sequences 0", "--sequences must be at least 1, got 0"),
        ("--sequences 100000000000000000000", "--sequences: must be at most 1048576, got 100000000000000000000"),
        ("--sequences 8 --batch 2", "--batch: --sequences says how many there are, and microbatches are chosen"),
        ("--sequences 8 --seq longest", "--seq longest: not with --sequences; say how many tokens"),
        ("--sequences 8 --picture x.png", "--picture: not with --sequences"),
        ("--sequences 8 --ffn 0", "--ffn: ranks are divided for whole layers, and there is no feed-forward"),
        (
            "--sequences 8 --memory 1kB",
            "--memory: nothing fits: memory is 1 kB a rank, and the least that any division",
        ),
        ("--sequences 8 --only pipeline=3", "--only: no plan has pipeline=3, but 1, 2"),
        ("--sequences 8 --only tensor=2,context=16", "--only: no plan has all of context=16, tensor=2"),
        ("--sequences 8 --only ring=4,context=2", "--only: no plan has all of context=2, ring=4"),
        ("--sequences 8 --only degree=4", "--only must name some of context, tensor, shards, "),
        ("--sequences 8 --only tensor", "--only must be like ring=8,checkpoint=full, every name once, got 'tensor'"),
        (
            "--sequences 8 --memory 1kB --only tensor=2",
            "--memory: nothing fits: memory is 1 kB a rank, and the least that any division with tensor=2 needs is",
        ),
        ("--sequences 8 --top 0", "--top must be at least 1, got 0"),
        ("--sequences many", "--sequences: Input should be a valid integer"),
    ],
)
def test_what_does_not_go_with_it_gets_one_line(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(f"plan {SIZES} --causal {WHERE} {arguments}".split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"wallfacer plan: {message}")
    assert (printed.err.count("\n"), printed.out) == (1, "")
