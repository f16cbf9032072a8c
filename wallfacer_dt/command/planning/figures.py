"""What stands beside a plan's predictions: tokens per second, MFU, time and memory by category, and what is in none."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from wallfacer_dt.command.planning.machines import Where
from wallfacer_dt.planning import ModelShape, Plan, Ranked
from wallfacer_dt.planning.dividing import DivisionPlan, RankedDivision
from wallfacer_dt.planning.division import Division
from wallfacer_dt.planning.flops import flops_utilization, model_flops
from wallfacer_dt.planning.known_models import KnownModel
from wallfacer_dt.planning.layer import Layer
from wallfacer_dt.planning.stack import StackMemory, division_memory
from wallfacer_dt.planning.step import by_kind

MFU = "model FLOPs without recomputation, causal attention counted as half / (time x ranks x peak)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of a plan.

    Attributes:
        flops: the model's, of a step.
        peak: of a rank, floating point operations per second; None: not known, and so no MFU.
        ranks: that share a step.
        tokens: of a step.
        time: of the first plan, predicted: seconds of attention, products, elementwise, copies and optimizer, all of
            them computing, and of transfers and host, which are waited for.
        memory: of the first plan.
        origins: who says the rates of kernels, see :class:`Where`.
        source: of the cluster, a line, or empty.
        activation: of the feed-forward.
        left_out: what is not counted, by name.
    """

    flops: int
    peak: float | None
    ranks: int
    tokens: int
    time: Mapping[str, float]
    memory: StackMemory
    origins: Mapping[str, str]
    source: str
    activation: str
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, plan: Plan | DivisionPlan, where: Where, known: KnownModel) -> "Figures":
        """The figures of a plan, or of divided ranks, for a model on a cluster."""
        if isinstance(plan, DivisionPlan):
            step, division, others = replace(plan.sequence, batch=plan.sequences), plan.chosen, _NOT_DIVIDED
        else:
            step, others = plan.sequence, _ALL_SHARE
            division = Division(plan.chosen, microbatch=step.batch)
        taken = replace(step, batch=division.microbatch)
        prediction = plan.prediction
        time = by_kind(Layer(division, plan.model, taken, plan.cluster), prediction.compute, prediction.pipeline_rank)
        waits = prediction.exposed - prediction.host
        time |= {"transfers": waits * (waits > 1e-9 * prediction.seconds), "host": prediction.host}  # or rounding
        return cls(
            flops=model_flops(plan.model, step),
            peak=where.peak,
            ranks=plan.cluster.ranks,
            tokens=step.batch * step.length,
            time=time,
            memory=division_memory(division, plan.model, taken),
            origins=where.origins,
            source=where.source,
            activation=known.activation,
            left_out=(*_left_out(plan.model, division.loss_chunks), others, *_of_model(known)),
        )

    def rate(self, one: Ranked | RankedDivision) -> float:
        """Tokens per second, of all ranks together."""
        return self.tokens / one.seconds

    def mfu(self, one: Ranked | RankedDivision) -> float | None:
        """Model FLOPs utilization, see :data:`MFU`; None without a peak."""
        return None if self.peak is None else flops_utilization(self.flops, one.seconds, self.ranks, self.peak)

    def as_json(self, plan: Plan | DivisionPlan) -> dict[str, Any]:
        """Of the plan's first."""
        first, mine = plan.ranked[0], asdict(self)
        del mine["ranks"], mine["tokens"]
        return {"tokens_per_second": self.rate(first), "mfu": self.mfu(first)} | mine


_ALL_SHARE = (
    "data, tensor, pipeline and expert parallelism: all ranks are taken to share each sequence; see --sequences"
)
_NOT_DIVIDED = (
    "of divisions: tensor parallelism of models with experts or latents, other pipeline schedules than 1F1B, "
    "interleaved or not, asynchronous tensor parallelism, METP beside tensor parallelism"
)


def _left_out(model: ModelShape, loss_chunks: int) -> Iterator[str]:
    """What is in no number, of the time and of memory."""
    if not model.ffn:
        yield "in the time: layers but for their attention, and the optimizer (no --ffn)"
    if model.experts:
        yield (
            "in the time and in memory: experts that are dealt more tokens than others; what their products, of fewer "
            "tokens each, take longer than other products; that a host waits for counts of tokens"
        )
    if not model.vocab:
        yield "in the time and in memory: embedding, output projection and loss (no --vocab)"
    elif loss_chunks == 1:
        yield (
            "in memory: that a loss which takes tokens in chunks, or is fused with the output projection, holds less "
            "than all logits in float32"
        )
    else:
        yield (
            f"in memory: what a loss holds that does not take tokens in {loss_chunks} chunks, as torchtitan's does: up "
            "to 12 bytes of all logits"
        )
    if model.ffn or model.vocab:
        yield (
            "in the time: what norms, positions, activations and the loss take longer where torch.compile does not "
            "fuse them, some three times as long; what the host takes to launch them and FSDP; loading data"
        )
    yield (
        "in memory: what norms keep that are not torch's fused RMSNorm (transformers' own, float32 weights under "
        "autocast, any on the CPU), up to 3 times a rank's tokens each"
    )
    yield (
        "in memory: workspace of kernels (that of torch's flash is counted, for all), CUDA's context, NCCL's buffers, "
        "what the allocator loses"
    )


def _of_model(known: KnownModel) -> Iterator[str]:
    return (f"of the model: {one}" for one in known.left_out)
