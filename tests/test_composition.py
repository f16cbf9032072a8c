"""Context parallelism together with torch's own parallelisms: three training steps against those of one process.

Shape suffixes: B = sequences, N = tokens of each, L = those of them that a rank holds, V = vocabulary.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from recipes.train_bytes.model import ByteGPT, ModelConfig
from tests import composition
from tests.cases import rms
from tests.composition import IGNORED, MAX_NORM, deal, order_of, pipeline, pipeline_step, train_step
from tests.pairwise import few, tiers
from wallfacer_dt import RingParallel, WallFacerParallel, sequence_positions
from wallfacer_dt.testing import RankPool, worst_error

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]
Arrays = dict[str, np.ndarray]

STEPS, SEQUENCES, LENGTH = 3, 4, 64
CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2)
DATA, TENSOR, PIPELINE = ("dp", "cp_ring", "cp_team"), ("cp_ring", "cp_team", "tp"), ("pp", "cp_ring", "cp_team")
THREE = ("pp", "cp_ring", "tp")
AXES = {"tensor_parallel": TENSOR, "loss_parallel": TENSOR, "pipeline": PIPELINE}
HYBRIDS = {"fsdp": ("dp", "cp_ulysses", "cp_ring"), "tensor_parallel": ("cp_ulysses", "cp_ring", "tp")}
COMPOSITIONS = ["fsdp", "zero2", "offloaded", "hsdp", "tensor_parallel", "loss_parallel", "pipeline"]
SCHEDULES = "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
AROUND: dict[str, Callable[[], AbstractContextManager]] = {"loss_parallel": loss_parallel, "offloaded": save_on_cpu}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    # Adam hides a wrong scale of the gradients. With an eps below most of them, rounding would decide the direction in
    # which the smallest go.
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


@dataclass
class Run:
    """What training left; of the parameters those that this rank's pipeline stage has.

    Attributes:
        losses: by step.
        norms: by step, before clipping.
        gradients: by step and name, after clipping.
        start: the parameters before the first step, by name, where one process has noted them.
        parameters: after all steps, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    start: Arrays = field(default_factory=dict)
    parameters: Arrays = field(default_factory=dict)

    def note(self, loss: float, norm: float, *modules: nn.Module) -> None:
        """Add a step."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.gradients.append({name: whole(p.grad) for name, p in named(modules)})

    def finish(self, *modules: nn.Module) -> "Run":
        """Add what the steps led to."""
        self.parameters = {name: whole(p) for name, p in named(modules)}
        return self


def named(modules: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of all, which have other names in each."""
    return chain.from_iterable(module.named_parameters() for module in modules)


def whole(x: Tensor) -> np.ndarray:
    x = x.full_tensor() if isinstance(x, DTensor) else x
    return x.detach().double().numpy().copy()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """tokens_BN and labels_BN of a step; every sequence, and so every rank, has another number of labels that count."""
    text = torch.randint(256, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    tokens_BN, labels_BN = text[:, :-1], text[:, 1:].clone()
    for row, (start, end) in enumerate(((0, LENGTH), (5, LENGTH), (11, 30), (40, 50))):
        labels_BN[row, :start] = labels_BN[row, end:] = IGNORED
    return tokens_BN, labels_BN


def make_model(dtype: torch.dtype, layers: int = CONFIG.layers) -> ByteGPT:
    """The same model wherever it is made, with weights so large that attention is far from uniform."""
    torch.manual_seed(0)
    model = ByteGPT(replace(CONFIG, layers=layers)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 8
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.eps = 1e-6  # torch's default depends on the dtype
    return model


def train_alone(
    dtype: torch.dtype, optimizer: str, compute: torch.dtype | None = None, layers: int = CONFIG.layers
) -> Run:
    """One process that knows nothing of ranks; its layers compute in ``compute``, from parameters in ``dtype``."""
    model = make_model(dtype, layers)
    run = Run(start={name: whole(p) for name, p in model.named_parameters()})
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        tokens_BN, labels_BN = batch(step)
        stepper.zero_grad()
        weights = {name: p.to(compute or dtype) for name, p in model.named_parameters()}
        logits_BNV = torch.func.functional_call(model, weights, (tokens_BN, torch.arange(LENGTH)))
        counts = labels_BN != IGNORED
        loss = F.cross_entropy(logits_BNV[counts].to(dtype), labels_BN[counts])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        stepper.step()
        run.note(loss.item(), norm.item(), model)
    return run.finish(model)


def make_mesh(name: str, ring: int, team: int, *, hybrid: bool = False) -> DeviceMesh:
    """The mesh of 8 ranks that a composition is for."""
    axes = HYBRIDS[name] if hybrid else AXES.get(name, DATA)
    return _made(tuple({"cp_ring": ring, "cp_team": team}.get(axis, 2) for axis in axes), axes)


@lru_cache
def _made(shape: tuple[int, ...], axes: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


def train(name: str, ring: int, team: int, dtype: torch.dtype, optimizer: str, hybrid: bool = False) -> Run:
    """The same steps on this rank of 8, under a composition; a hybrid has an axis ``cp_ulysses`` of 2."""
    mesh, model = make_mesh(name, ring, team, hybrid=hybrid), make_model(dtype)
    kind = WallFacerParallel if team > 1 or hybrid else RingParallel
    style = kind(is_causal=True, order=order_of(mesh), check=hybrid)
    with no_warning_of_views():
        if name == "pipeline":
            return train_pipeline(model, mesh, style, optimizer)
        with AROUND.get(name, nullcontext)():
            if name == "loss_parallel":
                composition.tensor_parallel(model, mesh, style, logits_too=True)
            else:
                getattr(composition, name)(model, mesh, style)
            stepper, run = OPTIMIZERS[optimizer](model.parameters()), Run()
            for step in range(STEPS):
                run.note(*train_step(model, stepper, *batch(step), mesh), model)
            return run.finish(model)


def train_in_stages(schedule: str, axes: tuple[str, ...]) -> Run:
    """The same of a model of four layers, in a pipeline of two ranks, each with two stages."""
    mesh = _made((2, 2, 2), axes)
    kind = WallFacerParallel if "cp_team" in axes else RingParallel
    style = kind(is_causal=True, order=order_of(mesh), check=False)
    with no_warning_of_views():
        return train_pipeline(make_model(torch.float64, 4), mesh, style, "sgd", schedule)


def train_pipeline(
    model: ByteGPT, mesh: DeviceMesh, style: RingParallel, optimizer: str, schedule: str = "1F1B"
) -> Run:
    positions_L = sequence_positions(LENGTH, order_of(mesh))
    counted = torch.zeros((), dtype=torch.int64)
    running, modules = pipeline(model, mesh, style, positions_L, counted, schedule)
    stepper, run = OPTIMIZERS[optimizer]([p for _, p in named(modules)]), Run()
    for step in range(STEPS):
        tokens_BL, labels_BL, _ = deal(*batch(step), mesh)
        run.note(*pipeline_step(running, modules, stepper, tokens_BL, labels_BL, mesh, counted), *modules)
    return run.finish(*modules)


@contextmanager
def no_warning_of_views() -> Iterator[None]:
    # The logits that ColwiseParallel returns are a view of its DTensor; nothing changes them in place.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        yield


alone = lru_cache(train_alone)


def errors(run: Run, exact: Run) -> dict[str, float]:
    """The largest relative error of a loss, a norm, a parameter's gradient, and the way that a parameter went."""
    gradients = [
        distance(gradient, expected[name])
        for found, expected in zip(run.gradients, exact.gradients, strict=True)
        for name, gradient in found.items()
    ]
    start = exact.start
    ways = [distance(p - start[name], exact.parameters[name] - start[name]) for name, p in run.parameters.items()]
    return {
        "loss": worst_error([(run.losses, exact.losses)], relative_to="each"),
        "norm": worst_error([(run.norms, exact.norms)], relative_to="each"),
        "gradient": max(gradients),
        "parameter": max(ways),
    }


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return rms(found, expected) / rms(expected)


def worst(runs: list[Run], exact: Run) -> dict[str, float]:
    """The errors of the worst rank; together the ranks have every parameter."""
    assert set().union(*(run.parameters for run in runs)) == set(exact.parameters)
    found = [errors(run, exact) for run in runs]
    return {kind: max(each[kind] for each in found) for kind in found[0]}


def limits(factor: float, error: dict[str, float], granted: float) -> dict[str, float]:
    """That much of one process' errors; a loss or a norm, which may be right by chance, is granted some rounding."""
    return {kind: max(factor * value, granted if kind in ("loss", "norm") else 0.0) for kind, value in error.items()}


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer"),
    tiers([(name, *rest) for name in COMPOSITIONS for rest in (((2, 2), "sgd"), ((4, 1), "adamw"))], strength=1),
)
def test_steps_equal_those_of_one_process(ranks: Ranks, name: str, mesh: tuple[int, int], optimizer: str) -> None:
    exact = alone(torch.float64, optimizer)
    assert min(exact.norms) > MAX_NORM, "gradients are clipped"
    found = worst(ranks(8).run(train, name, *mesh, torch.float64, optimizer), exact)
    assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize(
    ("schedule", "axes"),
    few(product(SCHEDULES, (PIPELINE, THREE)), {("ZBVZeroBubble", PIPELINE)}),
    ids=str,
)
def test_steps_in_two_stages_a_rank_equal_those_of_one_process(
    ranks: Ranks, schedule: str, axes: tuple[str, ...]
) -> None:
    """Some schedules split the backward in two; with tensor parallelism there are three at once."""
    found = worst(ranks(8).run(train_in_stages, schedule, axes), alone(torch.float64, "sgd", layers=4))
    assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize("name", few(HYBRIDS, {"tensor_parallel"}))
def test_steps_of_a_hybrid_equal_those_of_one_process(ranks: Ranks, name: str) -> None:
    """Ulysses around a ring; with tensor parallelism a rank has one key head and splits it."""
    exact = alone(torch.float64, "sgd")
    found = worst(ranks(8).run(train, name, 2, 1, torch.float64, "sgd", True), exact)
    assert all(error < 1e-10 for error in found.values()), found


@pytest.mark.parametrize("name", few(COMPOSITIONS, {"fsdp"}))
def test_float32_steps_are_as_close_as_one_process_is(ranks: Ranks, name: str) -> None:
    """Measured from float64."""
    exact = alone(torch.float64, "adamw")
    found = worst(ranks(8).run(train, name, 2, 2, torch.float32, "adamw"), exact)
    limit = limits(2, errors(alone(torch.float32, "adamw"), exact), granted=4 * torch.finfo(torch.float32).eps)
    assert all(found[kind] <= limit[kind] for kind in limit), (found, limit)


@pytest.mark.parametrize("optimizer", few(["sgd", "adamw"], {"sgd"}))
def test_bfloat16_steps_are_as_close_as_one_process_is(ranks: Ranks, optimizer: str) -> None:
    """Measured from float32; parameters are float32 and computed with in bfloat16."""
    exact = alone(torch.float32, optimizer)
    found = worst(ranks(8).run(train, "mixed_precision", 2, 2, torch.float32, optimizer), exact)
    single = errors(alone(torch.float32, optimizer, torch.bfloat16), exact)
    limit = limits(2, single, granted=torch.finfo(torch.bfloat16).eps / 2)
    assert all(found[kind] <= limit[kind] for kind in limit), (found, limit)


def precisions() -> dict[str, torch.dtype]:
    """What is computed in which dtype in one forward and backward."""
    mesh, model = make_mesh("mixed_precision", 2, 2), make_model(torch.float32)
    composition.mixed_precision(model, mesh, WallFacerParallel(is_causal=True, order=order_of(mesh), check=False))
    found = {}

    def note(_: nn.Module, args: tuple[Tensor, tuple[Tensor, Tensor]]) -> None:
        x_BLD, (cos_LH, _) = args
        found.update(activations=x_BLD.dtype, rope=cos_LH.dtype)

    model.layers[0].attention.register_forward_pre_hook(note)
    tokens_BL, _, positions_L = deal(*batch(0), mesh)
    logits_BLV = model(tokens_BL, positions_L)
    logits_BLV.square().sum().backward()
    gradient = model.head.weight.grad.to_local()
    rounded = torch.equal(gradient, gradient.bfloat16().float())
    return found | {
        "logits": logits_BLV.dtype,
        "parameters": model.head.weight.dtype,
        "sums of gradients": torch.bfloat16 if rounded else gradient.dtype,
    }


def test_what_is_computed_in_bfloat16(ranks: Ranks) -> None:
    expected = dict.fromkeys(("rope", "logits", "parameters", "sums of gradients"), torch.float32)
    assert ranks(8).run(precisions) == [expected | {"activations": torch.bfloat16}] * 8


def keeps_parameters(name: str) -> list[bool]:
    """Of each layer whether its parameters are whole after the forward."""
    mesh, model = make_mesh(name, 2, 2), make_model(torch.float32)
    getattr(composition, name)(model, mesh, WallFacerParallel(is_causal=True, order=order_of(mesh), check=False))
    tokens_BL, _, positions_L = deal(*batch(0), mesh)
    model(tokens_BL, positions_L)
    return [not isinstance(layer.feed_forward.gate.weight, DTensor) for layer in model.layers]


@pytest.mark.parametrize(("name", "kept"), [("zero2", True), ("fsdp", False)])
def test_zero2_keeps_parameters_after_the_forward(ranks: Ranks, name: str, kept: bool) -> None:
    assert ranks(8).run(keeps_parameters, name) == [[kept] * CONFIG.layers] * 8


def test_the_page_shows_what_the_tests_run() -> None:
    page = (Path(__file__).parents[1] / "docs" / "composition.md").read_text()
    source = Path(composition.__file__).read_text()
    shown = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    _, _, code = source.partition('"""\n')

    def lines(text: str) -> list[str]:
        return [line for line in text.splitlines() if line]

    assert lines(shown) == lines(code)
    for axes in (DATA, TENSOR, PIPELINE, THREE, *HYBRIDS.values()):
        assert f"(2, 2, 2), mesh_dim_names={axes})".replace("'", '"') in page
