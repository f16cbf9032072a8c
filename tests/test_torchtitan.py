"""torchtitan's Trainer and Llama 3 with context-parallel attention: equal to one process, or refused.

Ranks live in pools, where torchtitan finds a process group that it need not make; torchtitan is imported there only.
"""

import contextlib
import dataclasses
import io
import itertools
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from recipes.torchtitan.shim import (
    fit_attention_to_cpu,
    fit_biases_to_tensor_parallelism,
    fit_to_cpu,
    fit_to_torch,
    is_cpu,
)
from tests.models import KEYS, verdict
from tests.pairwise import few
from tests.titan_models import MODELS, narrow, positions_of, section, try_all, try_model
from wallfacer_dt import TokenOrder, context_mesh, dealing, shard_sequence
from wallfacer_dt.algorithms.heads import split_heads
from wallfacer_dt.algorithms.masks import Mask
from wallfacer_dt.algorithms.schedule import make_schedule
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.algorithms.steps import Schedule
from wallfacer_dt.algorithms.volume import resolve_rotations
from wallfacer_dt.calls import Call
from wallfacer_dt.mesh import Coordinate, context_groups
from wallfacer_dt.testing import IncomparableError, RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks,
    pytest.mark.skipif(not is_cpu(), reason="torchtitan would take the accelerator, and these pools have gloo"),
]

ROOT = Path(__file__).parents[1]
STEPS, LAYERS, SEQUENCES, LENGTH = 3, 2, 4, 64
TEXT = ROOT / "LICENSE"  # shorter than the default, which is the standard library: every run reads it anew
# Paragraphs of the text are documents, which sequences cut.
SMALL = (
    f"--training.seq_len {LENGTH} --training.steps {STEPS} --debug.seed 1 --debug.no-enable_structured_logging "
    "--dataloader.documents"
)


class Curve(NamedTuple):
    """One run by step: losses, gradient norms computed in float64 and as torchtitan reports them.

    And how many tokens were seen as torchtitan reports them, and how often, after the first step, attention sent round
    the ring or exchanged in the team, and something was compiled; and how often in it.
    """

    losses: list[float]
    norms: list[float]
    reported: list[float]
    tokens: list[int]
    sent: int
    compiled: int = 0
    compiled_first: int = 0


class Size(NamedTuple):
    """A mesh: what it is on the command line, on how many ranks, and a data-parallel rank's sequences.

    Then its sizes, and the query heads that a tensor-parallel rank of the debug model has.
    """

    options: str
    ranks: int
    sequences: int = SEQUENCES
    ulysses: int = 1
    ring: int = 2
    team: int = 2
    heads: int = 16

    def sends(self, layers: int = LAYERS) -> int:
        """How often attention sends after the first step, forward and backward, according to its schedules."""
        sends = sum(line.startswith(("start permute", "start all_to_all")) for line in self.starts())
        if self.ulysses > 1:
            # Every group of heads is sent there and back, forward and backward, and has the schedules in between.
            groups = split_heads(self.heads, self.heads, self.ulysses, hidden=True)[0]
            sends = len(groups) * (4 + sends)
        return layers * (STEPS - 1) * sends

    def starts(
        self, order: str = "head_tail", schedule: Any = "2d", rotate: Any = "auto", rotate_forward: Any = "auto"
    ) -> list[str]:
        """What the first rank's attention starts, forward and backward, according to its schedules."""
        forward, backward = resolve_rotations(
            rotate, rotate_forward, schedule, self.ring, self.team, ulysses=self.ulysses, heads=self.heads,
            kv_heads=self.heads, head_dim=16, value_dim=16, shared_dim=0, lengths=(LENGTH, LENGTH), dtype=torch.float32,
        )  # fmt: skip
        programs = (
            make_schedule(
                Coordinate(self.ring, self.team, 0, 0, self.ulysses, 0),
                Sequences(LENGTH, LENGTH, order, Mask(right=0)),
                schedule=schedule,
                resident="kv" if moves == "q" else "q",
                backward=is_backward,
            )
            for is_backward, moves in ((False, forward), (True, backward))
        )
        return [line for program in programs for line in starts_of(program)]


def starts_of(schedule: Schedule) -> list[str]:
    return [line for line in str(schedule).splitlines() if line.startswith("start ")]


def context(degree: int, team: int, rest: str = "") -> str:
    """Options of a context mesh."""
    return f"--parallelism.context_parallel_degree {degree} --parallelism.context_parallel_team {team} {rest}"


ULYSSES = "--parallelism.context_parallel_ulysses 2"
SIZES = {
    "ring 4": Size(context(4, 1), 4, ring=4, team=1),
    "2x2": Size(context(4, 2), 4),
    "ulysses 2 x ring 2": Size(context(4, 1, ULYSSES), 4, ulysses=2, team=1),
    "ulysses 2, TP 2": Size(
        context(2, 1, f"{ULYSSES} --parallelism.tensor_parallel_degree 2"), 4, ulysses=2, ring=1, team=1, heads=8
    ),
    "ring 2, TP 2": Size(context(2, 1, "--parallelism.tensor_parallel_degree 2"), 4, team=1),
    "ring 2, FSDP 2": Size(context(2, 1, "--parallelism.data_parallel_shard_degree 2"), 4, SEQUENCES // 2, team=1),
    "team 2, HSDP 2": Size(context(2, 2, "--parallelism.data_parallel_replicate_degree 2"), 4, SEQUENCES // 2, ring=1),
    "2x2, TP 2": Size(context(4, 2, "--parallelism.tensor_parallel_degree 2"), 8),
    "2x2, FSDP 2": Size(context(4, 2, "--parallelism.data_parallel_shard_degree 2"), 8, SEQUENCES // 2),
    "2x2, HSDP 2": Size(context(4, 2, "--parallelism.data_parallel_replicate_degree 2"), 8, SEQUENCES // 2),
}
BY_DOCUMENT = "--parallelism.context_parallel_load_balancer document_headtail"
SIZES |= {
    f"{name}, by document": SIZES[name]._replace(options=f"{SIZES[name].options} {BY_DOCUMENT}")
    for name in ("ring 4", "2x2", "ulysses 2 x ring 2", "ring 2, TP 2", "ring 2, FSDP 2")
}
AOT = "--compile.enable --compile.backend aot_eager"
INDUCTOR = "--compile.enable"


# What ranks run.


def do_nothing(*_: Any) -> None:
    """Takes the place of a check."""


def configure(options: str, layers: int = LAYERS) -> Any:
    """The recipe's configuration as the command line makes it, with fewer layers; by default that of Llama 3."""
    fit_to_torch()
    fit_to_cpu()
    from torchtitan.config import ConfigManager

    named = "" if "--config" in options else "--config llama3_debugmodel"
    config = ConfigManager().parse_args(shlex.split(f"--module recipes.torchtitan {named} {SMALL} {options}"))
    del config.model_spec.model.layers[layers:]
    return config


def build(options: str, change: Callable[[Any], None] = do_nothing, layers: int = LAYERS) -> Any:
    """A Trainer on this pool's process group."""
    rank = dist.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size())}
    torch._dynamo.reset()
    config = configure(options, layers)
    change(config)
    return config.build()


def train(
    options: str,
    patches: dict[str, Callable[..., Any]] | None = None,
    change: Callable[[Any], None] = do_nothing,
    layers: int = LAYERS,
) -> Curve:
    """Train on all ranks of the pool, perhaps with functions replaced and a configuration changed."""
    fit_to_torch()
    fit_to_cpu()
    from torchtitan.distributed.utils import clip_grad_norm_

    curve = Curve([], [], [], [], sent=0)
    graphs = [torch._dynamo.utils.counters["stats"]["unique_graphs"]]
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def log(step: int, loss: float, _: float, norm: float, *, extra_metrics: dict[str, Any]) -> None:
        curve.losses.append(loss)
        curve.reported.append(norm)
        curve.tokens.append(int(extra_metrics["n_tokens_seen"]))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        # What compilers trace in the first step is not sent.
        if step == 1:
            profile.start()
        elif step == STEPS and len(curve.losses) == STEPS:
            profile.stop()

    def clip(parameters: list[torch.Tensor], *rest: Any, **options: Any) -> torch.Tensor:
        # torch's float32 norm of a large tensor is off by 1e-4 on a CPU, and by less of a shard.
        squares = [float(whole(p.grad).double().square().sum()) for p in parameters]
        curve.norms.append(math.sqrt(sum(squares)))
        return clip_grad_norm_(parameters, *rest, **options)

    patches = {
        "torchtitan.distributed.utils.clip_grad_norm_": clip,
        "torchtitan.trainer.time.sleep": lambda _: None,
    } | (patches or {})
    with contextlib.ExitStack() as stack:
        for name, replacement in patches.items():
            stack.enter_context(mock.patch(name, replacement))
        trainer = build(f"--dataloader.dataset_path {TEXT} {options}", change, layers)
        trainer.metrics_processor.log = log
        trainer.train()
    trainer.close()
    curve = curve._replace(compiled=graphs[-1] - graphs[1], compiled_first=graphs[1] - graphs[0])
    return curve._replace(sent=exchanges(profile)) if len(curve.losses) == STEPS else curve


def refusal_of_training(options: str, patches: dict[str, Callable[..., Any]]) -> str:
    """What this rank says in training."""
    try:
        train(options, patches)
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


def two_documents_on_a_rank(sequences: Any, _: int) -> torch.Tensor:
    """Takes the place of what says positions, of one document elsewhere."""
    whole = torch.arange(sequences.length)
    return whole % (sequences.length // 2) if dist.get_rank() == 1 else whole


def fractions_on_a_rank(sequences: Any, _: int) -> torch.Tensor:
    """The same."""
    whole = torch.arange(sequences.length)
    return whole / 2 if dist.get_rank() == 1 else whole


def exchanges(profile: torch.profiler.profile) -> int:
    """How many have begun. Nothing but attention has such exchanges here."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:  # in a tenth of the time of `profile.events()`
        profile.export_chrome_trace(file.name)
        return Path(file.name).read_text().count('"name": "_c10d_functional::all_to_all_single"')


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def refusal(options: str) -> str:
    """What the command line says of a configuration."""
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        configure(options)
    # It stands in a box of lines.
    return " ".join(re.sub("[╭╮╰╯│─]", " ", said.getvalue()).split())


def large_configuration(options: str) -> tuple[Any, ...]:
    """What the 8B model's command line makes of these options."""
    fit_to_torch()
    fit_to_cpu()
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(["--module", "recipes.torchtitan", *shlex.split(options)])
    spec, parallelism = config.model_spec, config.parallelism
    sizes = parallelism.context_parallel_degree, parallelism.context_parallel_team
    return spec.flavor, len(spec.model.layers), sizes, config.training.seq_len, config.compile.enable


def refusals_of_parts() -> dict[str, str]:
    """What is said of parts of torchtitan that the command line does not offer."""
    config = configure("")
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

    changes = {kind.__name__: {"activation_checkpoint": kind.Config()} for kind in (SelectiveAC, FullAC)}
    changes["MemoryBudgetAC"] = {
        "activation_checkpoint": MemoryBudgetAC.Config(),
        "compile": dataclasses.replace(config.compile, enable=True),
    }
    changes["parallelism"] = {"parallelism": ParallelismConfig(spmd_backend="partial_dtensor")}
    said = {}
    for name, change in changes.items():
        try:
            dataclasses.replace(config, **change)
        except ValueError as error:
            said[name] = str(error)
    return said


def refusal_on_ranks(options: str, kind: str) -> str:
    """What this rank says when it builds its Trainer."""
    with contextlib.ExitStack() as stack:
        # A part of the standard library does as well as millions of bytes, which every rank would cut into tokens.
        stack.enter_context(mock.patch("recipes.training.text.STANDARD_LIBRARY_BYTES", 1000))
        if kind == "other order" and dist.get_rank() == 1:
            fit_to_cpu()
            from torchtitan.distributed.context_parallel import cp_shard

            other = mock.patch(
                "recipes.torchtitan.parallelize.cp_shard",
                lambda mesh, buffers, masks, _: cp_shard(mesh, buffers, masks, None),
            )
            stack.enter_context(other)
        try:
            build(options, {"another": take_another_attention, "sdpa": train_sdpa, "mixed": mix}.get(kind, do_nothing))
        except ValueError as error:
            return str(error)
    return "nothing"


def take_full_checkpointing_of_torchtitan(config: Any) -> None:
    """What `check_config` refuses."""
    from torchtitan.distributed.activation_checkpoint import FullAC

    config.activation_checkpoint = FullAC.Config()


def take_less(config: Any) -> None:
    """Fewer experts, and narrower feed-forwards."""
    narrow(config.model_spec.model, vocab=256)


def draw_by_name(config: Any) -> None:
    """Parameters that depend on their names alone: torchtitan draws others for every stage of a pipeline."""
    from torchtitan.protocols.module import Module

    def drawn(name: str, fill: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
        def draw(parameter: torch.Tensor) -> None:
            with torch.random.fork_rng([]):
                torch.manual_seed(zlib.crc32(name.encode()))
                fill(parameter)

        return draw

    for path, part, _, _ in list(config.model_spec.model.traverse(Module.Config, recurse=True)):
        if part.param_init is not None:
            part.param_init = {name: drawn(f"{path}.{name}", fill) for name, fill in part.param_init.items()}


def take_another_attention(config: Any) -> None:
    """What `parallelize` refuses."""
    from torchtitan.models.common.attention import FlexAttention

    class OwnAttention(FlexAttention):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(FlexAttention.Config):
            pass

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = OwnAttention.Config()


def take_sdpa(config: Any) -> None:
    """Attention that is told no documents, which torchtitan offers by no name."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()


def train_sdpa(config: Any) -> None:
    """The same, of a Trainer's configuration."""
    take_sdpa(config.model_spec.model)


def mix(config: Any) -> None:
    """One layer of it."""
    masked = config.model_spec.model.layers[0].attention.inner_attention
    train_sdpa(config)
    config.model_spec.model.layers[0].attention.inner_attention = masked


def deal_contiguously(*arguments: Any) -> Any:
    """What torchtitan's Trainer calls, whatever load balancer the configuration names."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    *first, _, key = arguments
    return prepare_context_parallel_input(*first, None, key)


def deal_head_tail(*arguments: Any) -> Any:
    """The same, the other way round."""
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    *first, _, key = arguments
    return prepare_context_parallel_input(*first, "headtail", key)


def deal_as_one_document(x: torch.Tensor, order: TokenOrder, *, dim: int, document_ids: torch.Tensor) -> torch.Tensor:
    """What the recipe's Trainer calls, whatever the documents."""
    return shard_sequence(x, order, dim=dim, document_ids=torch.zeros_like(document_ids))


# The tests.


@pytest.fixture(scope="module")
def titans() -> Iterator[Callable[[int], RankPool]]:
    """Pools of their own, since torchtitan changes settings of torch.

    That of one rank stays; of the larger ones there is one at a time, since a rank takes over 1 GB.
    """
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools or pools[size].closed:
            for other in {*pools} - {1}:
                pools.pop(other).close()
            pools[size] = RankPool(size, timeout=240)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="module")
def alone_with(titans) -> Callable[[int], Curve]:
    """One process with that many layers, without compilation and checkpointing."""

    @cache
    def curve_of(layers: int) -> Curve:
        options = f"--training.local_batch_size {SEQUENCES} activation-checkpoint:none"
        (curve,) = titans(1).run(train, options, {}, do_nothing, layers)
        assert len(curve.losses) == STEPS
        assert curve.losses[-1] < curve.losses[0]
        return curve

    return curve_of


@pytest.fixture(scope="module")
def alone(alone_with: Callable[[int], Curve]) -> Curve:
    return alone_with(LAYERS)


def differences(curves: list[Curve], expected: Curve) -> tuple[float, float, float]:
    """The largest difference of losses, and of gradient norms and reported norms relative to them."""
    for curve in curves:
        assert (len(curve.losses), len(curve.norms), len(curve.reported)) == (STEPS, STEPS, STEPS)
    losses = worst_error((curve.losses, expected.losses) for curve in curves)
    norms = worst_error(((curve.norms, expected.norms) for curve in curves), relative_to="each")
    reported = worst_error(((curve.reported, expected.norms) for curve in curves), relative_to="each")
    return losses, norms, reported


@pytest.mark.parametrize("what", ["losses", "norms", "reported"])
def test_a_curve_that_ends_in_nan_equals_none(what: str) -> None:
    fine = Curve([3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1, 2, 3], 0)
    assert differences([fine, fine], fine) == (0, 0, 0)
    for bad in (math.nan, math.inf):
        ended = fine._replace(**{what: [getattr(fine, what)[0], bad, bad]})
        for curves in ([fine, ended], [ended, fine], [ended]):
            with pytest.raises(IncomparableError, match="not finite"):
                differences(curves, fine)
    with pytest.raises(IncomparableError, match="nothing to compare"):
        differences([], fine)


def assert_equal(curves: list[Curve], expected: Curve) -> None:
    losses, norms, reported = differences(curves, expected)
    assert losses < 1e-5
    assert norms < 1e-6
    assert reported < 1e-3


CASES = [
    *((size, "", checkpointing) for size in ("ring 4", "2x2") for checkpointing in ("none", "selective", "full")),
    ("ulysses 2 x ring 2", "", "full"),
    ("ulysses 2, TP 2", "", "selective"),
    ("ring 2, TP 2", "", "none"),
    ("ring 2, FSDP 2", "", "full"),
    ("team 2, HSDP 2", "", "selective"),
    ("ring 2, FSDP 2", AOT, "full"),
    ("ring 4", AOT, "selective"),
    ("2x2", AOT, "none"),
    ("2x2", AOT, "full"),
    ("ring 2, TP 2", AOT, "selective"),
    ("2x2", INDUCTOR, "selective"),
    ("ring 4, by document", "", "none"),
    ("2x2, by document", "", "full"),
    ("ulysses 2 x ring 2, by document", "", "selective"),
    ("ring 2, TP 2, by document", "", "selective"),
    ("ring 2, FSDP 2, by document", "", "none"),
    ("ring 4, by document", AOT, "full"),
    ("2x2, by document", AOT, "selective"),
    ("2x2, by document", INDUCTOR, "none"),
]


def name_part(part: str) -> str:
    return part.replace("--compile.", "") or "eager"


@pytest.mark.parametrize(
    ("size", "compilation", "checkpointing"),
    few(
        CASES,
        {
            ("ring 4", "", "none"),
            ("ulysses 2, TP 2", "", "selective"),
            ("ring 2, FSDP 2", AOT, "full"),
            ("2x2, by document", AOT, "selective"),
        },
    ),
    ids=name_part,
)
def test_training_equals_one_process(
    titans, alone_with: Callable[[int], Curve], size: str, compilation: str, checkpointing: str
) -> None:
    # Of DTensors a second layer is compiled anew, and takes as long; on eight ranks it is.
    layers = 1 if compilation and "tensor_parallel" in SIZES[size].options else LAYERS
    assert_trains_alike(titans, alone_with(layers), size, compilation, checkpointing, layers)


def assert_trains_alike(
    titans, alone: Curve, size: str, compilation: str, checkpointing: str, layers: int = LAYERS
) -> None:
    options, ranks, sequences = SIZES[size][:3]
    curves = titans(ranks).run(
        train,
        f"{options} --training.local_batch_size {sequences} {compilation} activation-checkpoint:{checkpointing}",
        {},
        do_nothing,
        layers,
    )
    assert_equal(curves, alone)
    assert {curve.sent for curve in curves} == {SIZES[size].sends(layers)}
    assert {curve.compiled for curve in curves} == {0}  # though documents are others in every step
    first = {curve.compiled_first for curve in curves}
    assert min(first) > 1 if compilation else first == {0}  # of the loss there is one


@pytest.mark.parametrize(
    "then",
    few(["ring 2, FSDP 2", "2x2", "ulysses 2 x ring 2", "ring 2, TP 2", "2x2, by document"], {"ring 2, TP 2"}),
)
def test_a_checkpoint_is_resumed(titans, alone: Curve, tmp_path: Path, then: str) -> None:
    assert_resumes(titans, alone, tmp_path, SIZES["ring 2, FSDP 2"], SIZES[then])


def test_a_checkpoint_within_what_ranks_take_together_is_refused() -> None:
    from recipes.torchtitan.text import TextLoader

    loader = object.__new__(TextLoader)
    loader._batch, loader.dp_world_size, loader._made_of = 2, 2, {}
    with pytest.raises(ValueError, match="made after 6 sequences, of which 2 data-parallel ranks take 4 at a time"):
        loader.load_state_dict({"sequences": 6})


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    from recipes.torchtitan.text import ByteTokenizer, TextLoader

    (tmp_path / "text").write_text("".join(f"{number:8d}" for number in range(100)))
    config = TextLoader.Config(dataset_path=str(tmp_path / "text"), num_workers=workers)

    def made() -> TextLoader:
        return TextLoader(config, dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), seq_len=8, local_batch_size=2)

    def taken(loader: TextLoader) -> list[int]:
        rows = [row for inputs, _ in itertools.islice(loader, 2) for row in inputs["input"].tolist()]
        return [int(bytes(row)) for row in rows]

    loader, resumed = made(), made()
    assert taken(loader) == [0, 1, 2, 3]
    assert taken(loader) == [4, 5, 6, 7]
    resumed.load_state_dict(loader.state_dict())
    assert taken(resumed) == [8, 9, 10, 11]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_a_loader_of_other_sequences_does_not_go_on(tmp_path: Path) -> None:
    def made(text: str = "one two\n\nthree four" * 9, length: int = 8, **options: Any) -> Any:
        from recipes.torchtitan.text import ByteTokenizer, TextLoader

        (tmp_path / "text").write_text(text)
        config = TextLoader.Config(dataset_path=str(tmp_path / "text"), **options)
        return TextLoader(
            config, dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), seq_len=length, local_batch_size=2
        )

    saved = made().state_dict()
    for other, option in (
        (made("four three two one" * 9), "--dataloader.dataset_path of 171 tokens with CRC-32"),
        (made(length=16), "--training.seq_len of 8, this run has 16"),
        (made(documents=True), "--dataloader.documents of False, this run has True"),
    ):
        with pytest.raises(ValueError, match=f"the checkpoint was made with {option}"):
            other.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"--dataloader\.dataset_path of None"):
        made().load_state_dict({"sequences": 4})  # of a version before
    made().load_state_dict(saved)
    packed = made(documents=True)
    packed.load_state_dict(packed.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.torchtitan.text._PARAGRAPH", re.compile(r".+?(?:\n|\Z)", re.DOTALL))
        with pytest.raises(ValueError, match=r"the checkpoint was made with --dataloader\.documents of True, "):
            made(documents=True).load_state_dict(packed.state_dict())


@pytest.mark.parametrize(
    "documents",
    [
        ["a\n\n\n", "b\nc\n\n"],
        ["\n\n\na\n\n", "b\n"],
        ["a\r\n\r\n\r\n", "b\r\nc\r\n\r\n"],
    ],
)
def test_documents_end_after_empty_lines(tmp_path: Path, documents: list[str]) -> None:
    from recipes.torchtitan.text import ByteTokenizer, TextLoader, _encoded

    (tmp_path / "text").write_bytes("".join(documents).encode())
    config = TextLoader.Config(dataset_path=str(tmp_path / "text"), documents=True)
    (tokens_T, starts_T), _ = _encoded(config, ByteTokenizer())
    parts = tokens_T.tensor_split(starts_T.nonzero().flatten()[1:])
    assert [bytes(part.tolist()).decode() for part in parts] == documents


@pytest.mark.parametrize("text", ["one\ntwo\r\nthree\r" * 9, "one " * 9 + "\n\n"])
def test_a_text_of_one_document_is_refused(tmp_path: Path, text: str) -> None:
    from recipes.torchtitan.text import ByteTokenizer, TextLoader

    (tmp_path / "text").write_bytes(text.encode())
    config = TextLoader.Config(dataset_path=str(tmp_path / "text"), documents=True)
    with pytest.raises(ValueError, match="is one document: paragraphs must end in an empty line"):
        TextLoader(config, dp_world_size=1, dp_rank=0, tokenizer=ByteTokenizer(), seq_len=8, local_batch_size=1)


def said_of_loaders(folder: Path) -> list[str]:
    """What this rank says of texts and tokenizers of which rank 1 has its own."""
    fit_to_torch()
    fit_to_cpu()
    from recipes.torchtitan.text import ByteTokenizer, TextLoader

    class Other(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [255 - byte for byte in super().encode(text)]

    is_odd, said = dist.get_rank() == 1, []
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    for path, tokenizer in ((TEXT, Other()), (folder / "missing", ByteTokenizer()), (folder / "a", ByteTokenizer())):
        config = TextLoader.Config(dataset_path=str(path if is_odd else TEXT))
        try:
            TextLoader(
                config, dp_world_size=1, dp_rank=0, tokenizer=tokenizer if is_odd else ByteTokenizer(), seq_len=8,
                local_batch_size=1,
            )  # fmt: skip
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_with_other_tokens_are_refused(titans, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(TEXT.read_text()[::-1])
    for rank, (tokens, missing, text) in enumerate(titans(4).run(said_of_loaders, tmp_path)):
        assert "rank 1 found other data than rank 0" in tokens
        whose = "" if rank == 1 else "rank 1: "
        assert missing == f"{whose}--dataloader.dataset_path: {tmp_path / 'missing'} is missing"
        assert "rank 1 found other data than rank 0" in text


@pytest.mark.parametrize("options", ["--dataloader.num_workers 2", "--dataloader.persistent_workers"])
def test_workers_that_count_for_themselves_are_refused(titans, options: str) -> None:
    (said,) = titans(1).run(refusal_on_ranks, options, "")
    assert "--dataloader.num_workers must be 0 or 1" in said


def assert_resumes(titans, alone: Curve, tmp_path: Path, size: Size, then: Size) -> None:
    def options(size: Size) -> str:
        return (
            f"{size.options} --training.local_batch_size {size.sequences} --dump_folder {tmp_path} "
            "--checkpoint.enable --checkpoint.interval 2"
        )

    titans(size.ranks).run(train, options(size))
    for curve in titans(then.ranks).run(train, f"{options(then)} --checkpoint.load_step 2"):
        assert len(curve.losses) == 1
        assert worst_error([(curve.losses, alone.losses[2:])]) < 1e-5
        assert worst_error([(curve.norms, alone.norms[2:])], relative_to="each") < 1e-6
        assert curve.tokens == alone.tokens[2:]


def test_what_is_sent_tells_when_checkpointing_runs_the_ring_again(titans, alone: Curve) -> None:
    size = SIZES["2x2"]
    options = f"{size.options} --training.local_batch_size {SEQUENCES}"
    patches = {"recipes.torchtitan.trainer.check_config": do_nothing}
    curves = titans(size.ranks).run(train, options, patches, take_full_checkpointing_of_torchtitan)
    assert_equal(curves, alone)
    assert all(curve.sent > size.sends() for curve in curves)


def train_noting(options: str) -> tuple[Curve, set[tuple[str, ...]], set[str]]:
    """Beside the curve what attention's forward and what its backward starts, and the kernels that it chooses."""
    started: dict[bool, set[tuple[str, ...]]] = {False: set(), True: set()}
    kernels: set[str] = set()
    schedule_of = Call._schedule

    def noting(call: Call, *, backward: bool) -> Schedule:
        schedule = schedule_of(call, backward=backward)
        started[backward].add(tuple(starts_of(schedule)))
        kernels.add(call.kernel.name)
        return schedule

    curve = train(options, {"wallfacer_dt.calls.Call._schedule": noting})
    return curve, {there + back for there, back in itertools.product(*started.values())}, kernels


@pytest.mark.parametrize(
    ("told", "kernel"),
    [
        ({"schedule": "published", "rotate": "q"}, "reference"),
        ({"rotate": "q", "rotate_forward": "q"}, "auto"),
        pytest.param({"order": "contiguous"}, "auto", marks=pytest.mark.whole),
    ],
)
def test_other_ways_to_the_same_training(titans, alone: Curve, told: dict[str, str], kernel: str) -> None:
    size = SIZES["2x2"]
    options = {**told, "kernel": kernel}
    if options.pop("order", ""):
        options["load_balancer"] = "None"
    line = " ".join(f"--parallelism.context_parallel_{name} {value}" for name, value in options.items())
    run = train_noting, f"{size.options} --training.local_batch_size {SEQUENCES} {line}"
    curves, started, kernels = zip(*titans(size.ranks).run(*run), strict=True)
    assert_equal(curves, alone)
    assert started[0] == {tuple(size.starts(**told))}
    assert all(chosen == {"flash" if kernel == "auto" else kernel} for chosen in kernels)


def test_attention_that_is_told_no_documents_trains_as_one_process(titans) -> None:
    options = f"--training.local_batch_size {SEQUENCES} --dataloader.no-documents activation-checkpoint:none"
    (alone,) = titans(1).run(train, options, {}, train_sdpa)
    assert_equal(titans(4).run(train, f"{SIZES['2x2'].options} {options}", {}, train_sdpa), alone)


def fitting_meshes() -> dict[str, str]:
    """By shape and balancer, what is said of the mesh that is made for it, and of the one for the other balancer."""
    fit_to_torch()
    fit_to_cpu()
    from recipes.torchtitan.parallelize import check_token_order, context_mesh_of
    from recipes.torchtitan.settings import ORDERS

    cp = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "cp"))["cp"]
    said = {}
    for sizes in ((2, 2, 1), (2, 1, 2), (4, 1, 1), (1, 2, 2)):
        for balancer, other in ((None, "headtail"), ("headtail", None)):
            for made_for in (balancer, other):
                mesh = context_mesh_of(cp, sizes, made_for)
                try:
                    check_token_order(cp, TokenOrder(ORDERS[balancer], mesh), 32, balancer)
                    said[f"{sizes} {balancer} {made_for}"] = ""
                except ValueError as error:
                    said[f"{sizes} {balancer} {made_for}"] = str(error)
    return said


def test_meshes_fit_the_balancer(titans) -> None:
    """With Ulysses round a ring or a team each balancer has its own."""
    for said in titans(4).run(fitting_meshes):
        refused = [name for name, error in said.items() if error]
        assert len(said) == 16
        assert refused == [
            "(2, 2, 1) None headtail", "(2, 2, 1) headtail None", "(2, 1, 2) None headtail", "(2, 1, 2) headtail None",
        ]  # fmt: skip
        assert "attention would be wrong" in said[refused[0]]


@pytest.mark.parametrize(
    ("balancer", "patch"),
    [
        ("headtail", {"torchtitan.trainer.prepare_context_parallel_input": deal_contiguously}),
        pytest.param(
            "None", {"torchtitan.trainer.prepare_context_parallel_input": deal_head_tail}, marks=pytest.mark.whole
        ),
        pytest.param(
            "document_headtail",
            {"recipes.torchtitan.trainer.shard_sequence": deal_as_one_document},
            marks=pytest.mark.whole,
        ),
    ],
)
def test_a_wrong_token_order_is_seen(titans, alone: Curve, balancer: str, patch: dict) -> None:
    size = SIZES["2x2"]
    options = (
        f"{size.options} --training.local_batch_size {SEQUENCES} "
        f"--parallelism.context_parallel_load_balancer {balancer} activation-checkpoint:none"
    )
    for said in titans(size.ranks).run(refusal_of_training, options, patch):
        assert "positions are not this rank's part" in said
    unchecked = {"wallfacer_dt.integrations.torchtitan.model.check_positions": do_nothing}
    curves = titans(size.ranks).run(train, options, patch | unchecked)
    losses, norms, _ = differences(curves, alone)
    assert losses > 1e-4
    assert norms > 1e-3
    with pytest.raises(AssertionError):
        assert_equal(curves, alone)


@pytest.mark.parametrize(
    ("balancer", "positions", "message"),
    [
        ("document_headtail", two_documents_on_a_rank, "the positions of Documents must be the same on every rank"),
        ("document_headtail", fractions_on_a_rank, "positions must be a tensor of int64 or int32, got torch.float32"),
        pytest.param(
            "headtail", fractions_on_a_rank, "positions must be a tensor of int64 or int32", marks=pytest.mark.whole
        ),
    ],
)
def test_what_a_rank_cannot_deal_out_all_refuse(
    titans, balancer: str, positions: Callable[..., Any], message: str
) -> None:
    options = f"{SIZES['2x2'].options} --parallelism.context_parallel_load_balancer {balancer}"
    for said in titans(4).run(
        refusal_of_training, options, {"recipes.torchtitan.text._Sequences._positions": positions}
    ):
        assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            context(4, 3),
            "context_parallel_degree must be context_parallel_ulysses x context_parallel_ring x context_parallel_team, "
            "got 4 and 1 x any x 3",
        ),
        (context(4, 2, "--parallelism.context_parallel_ring 4"), "got 4 and 1 x 4 x 2"),
        (context(4, 1, f"{ULYSSES} --parallelism.context_parallel_ring 4"), "got 4 and 2 x 4 x 1"),
        (context(1, 2), "got 1 and 1 x any x 2"),
        (context(4, 0), "must be at least 1, got 1, None and 0"),
        (context(4, 1, "--parallelism.context_parallel_ulysses 0"), "must be at least 1, got 0, None and 1"),
        (
            context(4, 2, "--parallelism.context_parallel_load_balancer ptrr"),
            "must be one of headtail, document_headtail, None, got ptrr",
        ),
        (
            context(4, 2, "--parallelism.spmd_backend spmd_types"),
            "spmd_backend must be partial_dtensor, got spmd_types",
        ),
        (
            context(4, 2, "--training.seq_len 1020"),
            "--training.seq_len must be a multiple of 8 (4 ranks of context parallelism, of each of which torchtitan "
            "wants two parts), got 1020",
        ),
        (
            context(
                2,
                1,
                "--training.seq_len 66 --parallelism.tensor_parallel_degree 2 "
                "--parallelism.context_parallel_load_balancer None",
            ),
            "must be a multiple of 8 (2 ranks of context parallelism, of each of which torchtitan wants two parts, 2 "
            "of tensor parallelism), got 66",
        ),
        (
            context(4, 2, "--training.seq_len 72"),
            "--training.seq_len must be a multiple of 32 (4 ranks of context parallelism, whose tokens the loss takes "
            "in 8 chunks), got 72",
        ),
        (context(0, 1), "--parallelism.context_parallel_degree must be at least 1, got 0"),
        (
            context(2, 1, "--parallelism.tensor_parallel_degree 0"),
            "--parallelism.tensor_parallel_degree must be at least 1, got 0",
        ),
        (context(1, 1, "--parallelism.context_parallel_kernel fast"), "kernel must be one of"),
        (context(2, 1, "--training.seq_len -64"), "--training.seq_len must be at least 1, got -64"),
        (context(1, 1, "--training.local_batch_size 0"), "--training.local_batch_size must be at least 1, got 0"),
        (context(1, 1, "--training.global_batch_size 0"), "--training.global_batch_size must be at least 1, got 0"),
        (context(2, 1, "--loss.num_chunks 0"), "--loss.num_chunks must be at least 1, got 0"),
        (
            context(
                2,
                1,
                "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule ZBVZeroBubble",
            ),
            "pipeline_parallel_schedule ZBVZeroBubble splits the backward",
        ),
        (
            context(2, 1, "--parallelism.pipeline_parallel_schedule_csv one.csv"),
            "--parallelism.pipeline_parallel_schedule_csv may split the backward",
        ),
        (context(4, 2, "--training.enable_cpu_offload"), "--training.enable_cpu_offload has no device to offload"),
        (context(4, 2, "--validator.enable"), "--validator.enable has no loader of whole sequences"),
        (context(4, 2, "--training.no-disable_cuda_graphs"), "set --training.disable_cuda_graphs"),
    ],
)
def test_options_that_are_refused(titans, options: str, message: str) -> None:
    (said,) = titans(1).run(refusal, options)
    assert message in said


def test_parts_that_are_refused(titans) -> None:
    (said,) = titans(1).run(refusals_of_parts)
    for kind in ("SelectiveAC", "FullAC", "MemoryBudgetAC"):
        assert f"got {kind}.Config: others run attention, and its ring, once more" in said[kind]
    assert "parallelism must be a ContextParallelism, got ParallelismConfig" in said["parallelism"]


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (context(4, 2), "another", "OwnAttention is not one of torchtitan's inner attentions as they are made"),
        (
            context(4, 2),
            "sdpa",
            "--dataloader.documents does not go with ScaledDotProductAttention, in which tokens see those of other",
        ),
        (
            context(4, 2, f"--dataloader.no-documents {BY_DOCUMENT}"),
            "sdpa",
            "--parallelism.context_parallel_load_balancer document_headtail does not go with ScaledDotProductAttention",
        ),
        (
            context(4, 2, "--dataloader.no-documents"),
            "mixed",
            "layers have FlexAttention and ScaledDotProductAttention, not all of which are told documents",
        ),
        (context(4, 2), "other order", "headtail deals tokens out in another order than 'head_tail'"),
        (context(4, 4, "--parallelism.context_parallel_schedule published"), "", "team * team"),
        (
            context(4, 2, "--dataloader.dataset_path nowhere.txt"),
            "",
            "--dataloader.dataset_path: nowhere.txt is missing",
        ),
        (context(4, 2, "--training.local_batch_size 100000"), "", "--dataloader.dataset_path: the standard library"),
        (
            context(2, 1, "--training.local_batch_size 1 --training.global_batch_size 100000"),
            "",
            "one step of 100000 sequences needs 6400001",
        ),
        pytest.param(
            context(2, 1, "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 100000"),
            "",
            "one step of 100000 sequences needs 6400001",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_every_rank_refuses_before_training(titans, options: str, kind: str, message: str) -> None:
    for said in titans(4).run(refusal_on_ranks, options, kind):
        assert message in said


EXPERTS = "--config deepseek_v3_debugmodel activation-checkpoint:selective"


def bias_shared_by(tensor_ranks: int) -> tuple[bool, list[float]]:
    """Of an output projection of GPT-OSS on one of them: whether it adds its part, and the gradient of its bias."""
    fit_to_torch()
    fit_to_cpu()
    from torchtitan.models.common.linear import ScaledBiasRowwiseLinear

    fit_biases_to_tensor_parallelism()
    module = ScaledBiasRowwiseLinear(ScaledBiasRowwiseLinear.Config(in_features=4, out_features=2, bias=True))
    torch.nn.init.ones_(module.bias)
    module.tp_degree = tensor_ranks
    y = module(torch.zeros(3, 4))
    y.sum().backward()
    return bool((y == 1 / tensor_ranks).all()), module.bias.grad.tolist()


def test_a_bias_that_tensor_ranks_share_gets_its_whole_gradient(titans) -> None:
    assert titans(1).run(bias_shared_by, 4) == [(True, [3.0, 3.0])]


@pytest.mark.whole
@pytest.mark.parametrize(("size", "experts"), [("ring 2, FSDP 2", 2), ("2x2", 4)])
def test_expert_parallelism_beside_context_parallelism(titans, size: str, experts: int) -> None:
    """DeepSeek-V3; its experts round to bfloat16, of other sums on other ranks."""
    (alone,) = titans(1).run(train, f"--training.local_batch_size {SEQUENCES} {EXPERTS}", {}, take_less)
    options = (
        f"{SIZES[size].options} --training.local_batch_size {SIZES[size].sequences} "
        f"--parallelism.expert_parallel_degree {experts} {EXPERTS}"
    )
    curves = titans(4).run(train, options, {}, take_less)
    losses, norms, _ = differences(curves, alone)
    assert losses < 1e-5
    assert norms < 1e-5


@pytest.mark.whole
@pytest.mark.parametrize("balancer", ["headtail", "document_headtail"])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_pipelines_beside_context_parallelism(titans, schedule: str, balancer: str) -> None:
    """Two stages of two ranks, with torchtitan's own schedules; the last stage knows the loss."""
    options = f"--training.local_batch_size {SEQUENCES} activation-checkpoint:none"
    (alone,) = titans(1).run(train, options, {}, draw_by_name, 4)
    pipeline = f"--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule {schedule}"
    dealt = f"--parallelism.context_parallel_load_balancer {balancer}"
    curves = titans(4).run(train, f"{context(2, 1)} {pipeline} {dealt} {options}", {}, draw_by_name, 4)
    last = [curve for curve in curves if min(curve.losses) > 0]
    assert len(last) == 2
    assert worst_error((curve.losses, alone.losses) for curve in last) < 1e-5
    # torchtitan sums the norm over stages, in float32.
    assert worst_error(((curve.reported, alone.norms) for curve in curves), relative_to="each") < 1e-3


PACKED = [("ring 4", "packed")]
COVERING: list[tuple[str, list[tuple[str, str]]]] = [
    ("Llama 3, varlen", [("Ulysses 2 x ring 2", "packed")]),
    ("DeepSeek-V3", [("ring 2 x team 2", "packed")]),
    ("GPT-OSS", [("ring 2 x team 2", "packed"), ("ring 4", "")]),
    ("Muse Glimmer", [("Ulysses 2 x ring 2", "packed")]),
    ("DeepSeek-V3, multi-token prediction", PACKED),
    ("Kimi K2", PACKED),
]


@pytest.mark.parametrize(("name", "keys"), COVERING)
def test_models_are_equal_or_refused_as_the_page_says(titans, name: str, keys: list[tuple[str, str]]) -> None:
    page = (ROOT / "docs" / "models.md").read_text().partition("\n# Models of torchtitan\n")[2]
    page = page.partition("\n# Models of ")[0]
    (row,) = re.findall(rf"\n\| {re.escape(name)} \| (.*) \|\n", page)
    cells = dict(zip(KEYS, row.split(" | ")[1:], strict=True))
    notes = dict(re.findall(r"\n(\d+)\. `(.*)`", page))
    assert "WRONG" not in page
    for outcomes in titans(4).run(try_model, name, keys):
        for key in keys:
            said = re.sub(r"refused \((\d+)\)", lambda found: notes[found[1]], cells[key])
            assert verdict(outcomes[key]) == said, outcomes[key]


@pytest.mark.whole
def test_the_page_of_models_is_what_comes_out(titans) -> None:
    page = (ROOT / "docs" / "models.md").read_text()
    assert section(dict(try_all(titans(4), MODELS))) in page


@pytest.mark.parametrize(
    "dropped",
    ["document_ids", *(pytest.param(what, marks=pytest.mark.whole) for what in ("sinks", "scale", "window_size"))],
)
def test_a_model_without_what_its_attention_has_is_another(titans, dropped: str) -> None:
    for outcomes in titans(4).run(try_model, "GPT-OSS", PACKED, dropped):
        assert verdict(outcomes[PACKED[0]]) == "WRONG", outcomes


def test_feed_forwards_share_their_weights(titans) -> None:
    for outcomes in titans(4).run(try_model, "Llama 3", [("ring 2 x team 2", "packed")], "", True):
        assert verdict(*outcomes.values()) == "equal", outcomes


def refusals_of_calls() -> dict[str, str]:
    """What is said of models and calls that would be silently wrong."""
    fit_to_torch()
    fit_to_cpu()
    fit_attention_to_cpu()
    from torchtitan.distributed.utils import set_spmd_backend

    from wallfacer_dt.integrations.torchtitan import Documents, context_parallel, context_plan, feed_forward_plan

    set_spmd_backend("partial_dtensor")
    mesh = context_mesh("cpu", 4)
    order = TokenOrder("head_tail", mesh)
    model = MODELS["Llama 3"].made()
    whole = positions_of(True)
    masks = model.get_attention_masks(positions=whole)
    context_parallel(model, mesh, order=order)
    tokens, here = (shard_sequence(x, order, dim=1) for x in (whole, whole))
    q = torch.zeros(2, 16, 4, 16)
    inner = model.layers["0"].attention.inner_attention
    documents = Documents.of(whole)
    with_mtp = MODELS["DeepSeek-V3"].made()
    with_mtp.layers["1"].moe.router._debug_force_load_balance = True
    own = MODELS["Llama 3"].made()
    own.layers["1"].attention = torch.nn.Linear(2, 2)
    short = whole[:, :62]
    unmasked = dataclasses.replace(MODELS["Llama 3"], change=take_sdpa).made()
    context_parallel(unmasked, mesh, order=order, check=False)
    by_document = dataclasses.replace(MODELS["Llama 3"], change=take_sdpa).made()
    context_parallel(by_document, mesh, order=TokenOrder("document_head_tail", mesh), check=False)
    fused = dataclasses.replace(MODELS["Llama 3"], options={"tp_gemm_backend": "dist_gemm"}).made()
    is_second = dist.get_rank() == 1

    def uneven() -> None:
        cut = shard_sequence(short, order, dim=1)
        model(cut, positions=cut, attention_masks=Documents.of(short))

    calls: dict[str, Callable[[], Any]] = {
        "one row of documents": lambda: model(tokens, positions=here, attention_masks=Documents.of(whole[:1])),
        "a shard's own positions": lambda: model(
            tokens, positions=torch.arange(16).expand(2, -1), attention_masks=documents
        ),
        "other documents": lambda: model(tokens, positions=here, attention_masks=Documents.of(positions_of(False))),
        "documents of a shard": lambda: model(tokens, positions=here, attention_masks=Documents.of(here)),
        "other positions on a rank": lambda: model(tokens, positions=here + is_second, attention_masks=documents),
        "no positions on a rank": lambda: model(
            tokens, positions=None if is_second else here, attention_masks=documents
        ),
        "a length that does not divide": uneven,
        "positions of fewer tokens": lambda: model(tokens, positions=here[:, 1:], attention_masks=documents),
        "positions that are no numbers": lambda: model(tokens, positions=here.float(), attention_masks=documents),
        "steps, without documents": lambda: unmasked(tokens, positions=2 * here),
        "by document, without documents": lambda: by_document(tokens, positions=here),
        "no positions": lambda: model(tokens, attention_masks=documents),
        "None by place": lambda: model(tokens, None, documents),
        "no documents": lambda: model(tokens, positions=here),
        "a mask": lambda: model(tokens, positions=here, attention_masks=masks),
        "a score_mod": lambda: inner(q, q, q, attention_masks=documents, score_mod=torch.add),
        "an out_transform": lambda: inner(q, q, q, attention_masks=documents, out_transform=torch.add),
        "twice": lambda: context_parallel(model, mesh, order=order),
        "forced balance": lambda: context_plan(with_mtp, order=order),
        "another layer": lambda: context_plan(own, order=order),
        "another model": lambda: context_plan(torch.nn.Linear(2, 2), order=order),
        "a scale": lambda: context_plan(own, order=order, scale=0.05),
        "a mask of its own": lambda: context_plan(own, order=order, is_causal=False),
        "no decoder": lambda: feed_forward_plan(torch.nn.Linear(2, 2)),
        "another feed-forward": lambda: feed_forward_plan(fused),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            said[name] = str(error)
    return said


def test_calls_that_are_refused(titans) -> None:
    expected = {
        "one row of documents": "Documents of 1 rows were given for a batch of 2",
        "a shard's own positions": "not this rank's part of those that the Documents were made of",
        "other documents": "not this rank's part of those that the Documents were made of",
        "documents of a shard": "not a rank's part of Documents of 16 tokens, which is 4: pass",
        "other positions on a rank": "not this rank's part of those that the Documents were made of",
        "no positions on a rank": "called without positions",
        "a length that does not divide": "the 4 ranks of the mesh do not divide sequences of 62 tokens",
        "positions of fewer tokens": "are not those of tokens (2, 16)",
        "positions that are no numbers": "positions must be a tensor of int64 or int32, got torch.float32",
        "steps, without documents": "positions neither count on nor restart",
        "by document, without documents": "document_head_tail",
        "no positions": "called without positions",
        "None by place": "called without positions",
        "no documents": "called with no attention_masks",
        "a mask": "attention_masks of type BlockMask, which has no meaning for shards: pass attention_masks=Documents",
        "a score_mod": "score_mod=",
        "an out_transform": "of which only GPT-OSS's sinks are known",
        "twice": "FlexAttention is not one of torchtitan's inner attentions as they are made",
        "a scale": "context_plan got an unexpected keyword argument 'scale', which it does not take",
        "a mask of its own": "got an unexpected keyword argument 'is_causal', which it does not take",
        "forced balance": "routes tokens by their place",
        "another layer": "layers.1 has no attention.inner_attention, but ",
        "another model": "Linear is neither a Decoder nor a FluxModel",
        "no decoder": "Linear is not a Decoder",
        "another feed-forward": "layers.0.feed_forward is AllGatherFusedFeedForward",
    }
    for said in titans(4).run(refusals_of_calls):
        assert said.keys() == expected.keys()
        for name, message in expected.items():
            assert message in said[name], (name, said[name])


def unmasked_decoder(order: TokenOrder, mesh: Any) -> Any:
    """A decoder on a mesh that is told no documents."""
    fit_to_torch()
    fit_to_cpu()
    from torchtitan.distributed.utils import set_spmd_backend

    from wallfacer_dt.integrations.torchtitan import context_parallel

    set_spmd_backend("partial_dtensor")
    model = dataclasses.replace(MODELS["Llama 3"], change=take_sdpa).made()
    return context_parallel(model, mesh, order=order, check=False)


def counted(*documents: int, begin: int = 0) -> torch.Tensor:
    """(64,), from 0 in every document but the first."""
    first, *others = documents
    return torch.cat([torch.arange(begin, begin + first), *map(torch.arange, others)])


def said_without_documents(name: str) -> dict[str, str]:
    """What is said of positions of which nothing else is known, dealt out by hand in an order."""
    from wallfacer_dt.integrations.torchtitan import Documents

    mesh = context_mesh("cpu", 4)
    model = unmasked_decoder(TokenOrder(name, mesh), mesh)
    rank, chunks = dist.get_rank(), torch.arange(64).view(8, 8)
    dealt = {
        "contiguous": chunks[2 * rank : 2 * rank + 2].flatten(),
        "head_tail": chunks[[rank, 7 - rank]].flatten(),
        "of the rank before": chunks.roll(2, 0)[2 * rank : 2 * rank + 2].flatten(),
    }
    mine = dealt[name]
    packed = torch.stack([counted(24, 29, 11, begin=5), counted(7, 57)])
    own_ends = torch.cat([torch.arange(5), torch.arange(11)])
    sixteens, halves = counted(16, 16, 16, 16), counted(32, 32)
    calls: dict[str, tuple[torch.Tensor, Any]] = {
        "right": (mine.expand(2, -1), None),
        "one row": (mine[None], None),
        "packed": (packed[:, mine], None),
        "packed, int32": (packed[:, mine].int(), None),
        "cut where ranks are, among others": (torch.stack([sixteens, packed[1]])[:, mine], None),
        "contiguous": (dealt["contiguous"].expand(2, -1), None),
        "head_tail": (dealt["head_tail"].expand(2, -1), None),
        "of the rank before": (dealt["of the rank before"].expand(2, -1), None),
        "from 0 on every rank": (torch.arange(16).expand(2, -1), None),
        "of documents on every rank": (own_ends.expand(2, -1), None),
        "cut where ranks are": (sixteens[mine].expand(2, -1), None),
        "cut where two are": (halves[mine].expand(2, -1), None),
        "one rank's": (mine.expand(2, -1) + (rank == 2), None),
        "a row on a rank": (mine.expand(1 + (rank > 0), -1), None),
        "documents on a rank": (packed[:, mine], None if rank else Documents.of(packed)),
    }
    said = {}
    for what, given in calls.items():
        said[what] = []
        for positions, documents in (calls["right"], given, given):
            with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                warnings.simplefilter("always")
                try:
                    model(torch.zeros(2, 16, dtype=torch.int64), positions, documents)
                    said[what].append("".join(str(one.message) for one in caught if "restart" in str(one.message)))
                except ValueError as error:
                    said[what].append(str(error))
    return said


@pytest.mark.parametrize("name", ["contiguous", "head_tail"])
def test_positions_without_documents_are_compared_over_ranks(titans, name: str) -> None:
    broken, at_ranks = "neither count on nor restart at 0", "restart at 0 wherever a rank's part of a sequence begins"
    right = ["right", "one row", "packed", "packed, int32", "cut where ranks are, among others", "cut where two are"]
    expected = {
        **dict.fromkeys([*right, name], ""),
        "head_tail" if name == "contiguous" else "contiguous": broken,
        "of the rank before": "are another rank's part" if name == "contiguous" else broken,
        "from 0 on every rank": at_ranks if name == "contiguous" else broken,
        "of documents on every rank": at_ranks if name == "contiguous" else broken,
        "cut where ranks are": at_ranks if name == "contiguous" else "",
        "one rank's": broken,
        "a row on a rank": "must be the same on every rank of the mesh",
        "documents on a rank": "must be the same on every rank of the mesh",
    }
    for said in titans(4).run(said_without_documents, name):
        assert said.keys() == expected.keys()
        for what, message in expected.items():
            before, once, again = said[what]
            assert not before
            assert all(message in one if message else not one for one in (once, again)), (what, said[what])
            # It may be chance, once.
            assert ("if the next forward's do, too" in once) == (message is at_ranks)
            assert "if the next forward's do, too" not in again


def warnings_of_undealt() -> int:
    """How often a decoder warns whose ranks have other tokens at positions that are this rank's, counted by hand."""
    with mock.patch.object(dealing, "_by_world", weakref.WeakKeyDictionary()):
        mesh = context_mesh("cpu", 4)
        model = unmasked_decoder(TokenOrder("contiguous", mesh), mesh)
        tokens = torch.full((2, 16), dist.get_rank())
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            for _ in range(2):
                model(tokens, torch.arange(64).view(4, 16)[dist.get_rank()].expand(2, -1))
    return sum("to which no sequence was dealt out" in str(one.message) for one in caught)


def test_a_comparison_of_positions_does_not_count_as_dealing_out(titans) -> None:
    assert titans(4).run(warnings_of_undealt) == [1] * 4


def refusals_under_fsdp(compiles: bool) -> list[str]:
    """What is said of forwards that one rank alone refuses, and of others in between."""
    fit_to_torch()
    fit_to_cpu()
    fit_attention_to_cpu()
    from torch.distributed.fsdp import fully_shard
    from torchtitan.distributed.utils import set_spmd_backend

    from wallfacer_dt.integrations.torchtitan import Documents, context_parallel

    set_spmd_backend("partial_dtensor")
    torch._dynamo.reset()
    mesh = context_mesh("cpu", 4)
    order = TokenOrder("head_tail", mesh)
    model = context_parallel(MODELS["Llama 3"].made(), mesh, order=order)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh._flatten("tokens"))
    call = torch.compile(model, backend="eager") if compiles else model
    is_third = dist.get_rank() == 2
    # Documents of which ids do not show it.
    whole, other = (torch.stack([counted(24, 29, 11, begin=begin), counted(7, 57)]) for begin in (5, 6))
    mine, theirs = (shard_sequence(x, order, dim=1) for x in (whole, other))
    documents, others = Documents.of(whole), Documents.of(other)
    said = []
    for positions, told in (
        (mine, documents), (mine + is_third, documents), (mine, documents), (mine, None if is_third else documents),
        (None if is_third else mine, documents),
        (theirs, others) if is_third else (mine, documents),
    ):  # fmt: skip
        try:
            call(mine, positions, told)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_all_ranks_hear_a_refusal_under_fsdp(titans, compiles: bool) -> None:
    expected = [
        "", "not this rank's part", "", "it must be the same on every rank of the mesh", "without positions",
        "the positions of Documents must be the same",
    ]  # fmt: skip
    for rank, said in enumerate(titans(4).run(refusals_under_fsdp, compiles)):
        for message, text in zip(expected, said, strict=True):
            assert (message in text) if message else not text, (rank, said)


class StandIn:
    """torchtitan's base class of context-parallel inner attention, in its main branch."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        pass

    @staticmethod
    def prepare_cp_metadata(attention_metadata: Any, *, permutation: torch.Tensor | None) -> Any: ...


class VarlenInnerAttention(torch.nn.Module):
    """The class of that name there, as far as it matters."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Config) -> None:
        super().__init__()


def attend_by_main_branch(order: str, window: int, sizes: dict[str, int]) -> tuple[float, dict[str, str]]:
    """How far attention on stand-ins is from one process, and what is refused."""
    fit_to_torch()
    fit_to_cpu()
    from wallfacer_dt.integrations.torchtitan import backend, main_branch

    cp = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LENGTH, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2))
    positions = torch.cat([torch.arange(23), torch.arange(30), torch.arange(11)])
    with mock.patch.multiple(main_branch, base_class=lambda: StandIn, current_mesh=lambda: cp):
        kind = backend.context_attention(VarlenInnerAttention, order=order, **sizes)
        config = kind.Config(window_size=(window - 1, 0))
        module = kind(config)
        dealt = torch.arange(LENGTH).view(8, -1)
        rows = [
            dealt[[rank, 7 - rank]].flatten() if order == "head_tail" else dealt[2 * rank : 2 * rank + 2].flatten()
            for rank in range(4)
        ]
        permutation = torch.cat(rows)[None] if order == "head_tail" else None
        metadata = kind.prepare_cp_metadata(config.build_attention_metadata(positions), permutation=permutation)
        mine = rows[dist.get_rank()]
        out = module(*(x[mine] for x in (q, k, v)), attention_metadata=metadata, scale=0.7, enable_gqa=True)
        calls: dict[str, Callable[[], Any]] = {
            "order": lambda: kind.prepare_cp_metadata(metadata, permutation=torch.arange(LENGTH).flip(0)[None]),
            "metadata": lambda: kind.prepare_cp_metadata(positions, permutation=permutation),
            "length": lambda: kind.prepare_cp_metadata(
                config.build_attention_metadata(torch.arange(10)), permutation=None
            ),
            "score_mod": lambda: module(q, k, v, attention_metadata=metadata, score_mod=torch.add),
            "out_transform": lambda: module(q, k, v, attention_metadata=metadata, out_transform=torch.add),
            "inner": lambda: backend.context_attention(torch.nn.Linear),
            "ulysses": lambda: backend.context_attention(VarlenInnerAttention, ulysses=0),
            "rotate": lambda: backend.context_attention(VarlenInnerAttention, rotate="both"),
            "window": lambda: kind(kind.Config(window_size=(3, 3))),
        }
        said = {}
        for name, call in calls.items():
            try:
                call()
            except ValueError as error:
                said[name] = str(error)
    ids = (positions == 0).cumsum(0)
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    visible = (ids[:, None] == ids) & (behind >= 0) & (behind < window)
    keys, values = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ keys.mT * 0.7).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(0, 1)[mine]
    return worst_error([(out, expected)]), said


@pytest.mark.parametrize(
    ("order", "sizes"), [("contiguous", {"ulysses": 2}), ("head_tail", {"team": 2}), ("head_tail", {"ulysses": 2})]
)
def test_the_interface_of_the_main_branch(titans, order: str, sizes: dict[str, int]) -> None:
    for error, said in titans(4).run(attend_by_main_branch, order, 13, sizes):
        assert error < 1e-12
        assert {name: text[:20] for name, text in said.items()} == {
            "order": "torchtitan deals tok",
            "metadata": "expected Documents, ",
            "length": "the 4 ranks of the a",
            "score_mod": "attention was called",
            "out_transform": "of functions given a",
            "inner": "inner must be one of",
            "ulysses": "ulysses must be at l",
            "rotate": "rotate must be one o",
            "window": "window_size=(3, 3) i",
        }


def test_meshes_of_a_world_that_is_gone_are_made_again() -> None:
    """A mesh like it of another world is equal to it."""
    from wallfacer_dt.integrations.torchtitan import backend, main_branch

    meshes = backend._Meshes(1, 1, "contiguous")
    for _ in range(2):
        with fake_world(2):
            cp = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
            with mock.patch.object(main_branch, "current_mesh", return_value=cp):
                found = meshes.current()
                assert meshes.current() is found
            context_groups(found[0])  # which refuses one of another world


PAGE = (ROOT / "docs" / "torchtitan.md").read_text()
LONG_FORMS = re.findall(r"\ntorchrun (.* -m recipes.torchtitan --config llama3_debugmodel .*)\n", PAGE)


def run_command(options: str) -> list[float]:
    """The losses of a run that ends well."""
    command = [sys.executable, "-m", "torch.distributed.run", *shlex.split(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Training completed" in done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"step: +\d+ .*?loss: +([\d.]+)", done.stdout + done.stderr)]


@pytest.mark.whole
@pytest.mark.parametrize("options", LONG_FORMS)
def test_the_documented_commands(options: str) -> None:
    """In their long form: `make titan` would first install what has changed."""
    losses = run_command(options)
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.whole
@pytest.mark.parametrize("rest", re.findall(r"\n\| `'(--.*)'`", PAGE))
def test_the_documented_options(rest: str) -> None:
    losses = run_command(f"{LONG_FORMS[0]} {rest} --training.steps 2 --training.seq_len 256")
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_the_page_has_commands() -> None:
    assert len(LONG_FORMS) == 2
    assert len(re.findall(r"\n\| `'(--.*)'`", PAGE)) == 5


def test_the_documented_command_for_gpus_is_understood(titans) -> None:
    page = (ROOT / "docs" / "torchtitan.md").read_text().replace("\\\n", " ")
    (options,) = re.findall(r"-m recipes.torchtitan (--config llama3_8b .*)", page)
    (made,) = titans(1).run(large_configuration, options)
    assert made == ("8B", 32, (8, 2), 8192, True)


def test_the_page_has_the_long_form() -> None:
    told = subprocess.run(["make", "--dry-run", "titan"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in told.replace("\\\n", " ").splitlines() if "recipes.torchtitan" in line]
    long_form = " ".join(line.split()).removeprefix(".venv/bin/")
    assert f"\n{long_form}\n" in (ROOT / "docs" / "torchtitan.md").read_text()


# On eight ranks, whose pool is slow to start.

EIGHT_RANKS = [
    *(
        (size, "", checkpointing)
        for size in ("2x2, TP 2", "2x2, FSDP 2")
        for checkpointing in ("none", "selective", "full")
    ),
    ("2x2, HSDP 2", "", "selective"),
    ("2x2, TP 2", AOT, "selective"),
    ("2x2, FSDP 2", AOT, "full"),
]


@pytest.mark.whole
@pytest.mark.parametrize(("size", "compilation", "checkpointing"), EIGHT_RANKS, ids=name_part)
def test_training_on_eight_ranks_equals_one_process(
    titans, alone: Curve, size: str, compilation: str, checkpointing: str
) -> None:
    assert_trains_alike(titans, alone, size, compilation, checkpointing)


@pytest.mark.whole
def test_a_checkpoint_of_eight_ranks_is_resumed(titans, alone: Curve, tmp_path: Path) -> None:
    assert_resumes(titans, alone, tmp_path, SIZES["2x2, FSDP 2"], SIZES["2x2, FSDP 2"])
