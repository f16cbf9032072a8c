"""Profile: measure the cluster, run the few fastest plans, keep the fastest (WallFacer, equation 8)."""

import gc
import json
import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.agreement.worlds import name_mesh
from wallfacer_dt.attention import context_parallel_attention
from wallfacer_dt.dealing import dealing_by_hand
from wallfacer_dt.kernels.registry import takes_segments
from wallfacer_dt.layout import shard_sizes
from wallfacer_dt.mesh import PLACEMENTS, context_groups, mesh_ranks, temporary_groups
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.cluster import Cluster, PlanningError, check_kind, check_number
from wallfacer_dt.planning.model import ModelShape, SequenceShape, kinds_of_layers
from wallfacer_dt.planning.predict import Prediction, attention_cost
from wallfacer_dt.planning.probe import Probe, slowest
from wallfacer_dt.planning.search import Plan, Ranked, plan
from wallfacer_dt.reading import FileError, make, read_json, shown

_VERSION = 6
_MOST_BYTES = 2**22  # of a file; some 6000 runs
_CLOSE = 1.1  # times the fastest: so close are run again
_SHORT, _MANY = 16, 20  # tokens of a rank with which a call has a GPU wait for its host, and how many calls in a row
_RANKED = len(PLACEMENTS)  # plans for each that is run: so many there may be of a mesh and schedule

Build = Callable[[Plan], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One plan that was run.

    Attributes:
        model: of what.
        sequence: likewise.
        candidate: how.
        seconds: of a step on the slowest rank, the median; if more turns were taken by some, comparable with theirs.
    """

    model: ModelShape
    sequence: SequenceShape
    candidate: Candidate
    seconds: float

    def __post_init__(self) -> None:
        """Refuse (TypeError, ValueError) what is no time."""
        check_number(self.seconds, "seconds")


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured on a cluster.

    Attributes:
        cluster: with links and kernels as measured.
        measured: plans that were run.
    """

    cluster: Cluster
    measured: tuple[Measured, ...] = ()

    def seconds(self, candidate: Candidate, model: ModelShape, sequence: SequenceShape) -> float | None:
        """How long a step took, if it was run."""
        found = [
            one.seconds
            for one in self.measured
            if (one.candidate, one.model, one.sequence) == (candidate, model, sequence)
        ]
        return found[-1] if found else None

    def check_is_of(self, cluster: Cluster) -> None:
        """Refuse (ValueError) a cluster of other ranks, nodes, devices or kernels: what was measured is not of it."""
        mine, theirs = ((one.ranks, one.ranks_per_node) for one in (self.cluster, cluster))
        if mine != theirs:
            raise ValueError(
                f"the profile is of {mine[0]} ranks, {mine[1]} a node, the cluster has {theirs[0]}, {theirs[1]} a node"
            )
        mine, theirs = (
            {"device_type": one.device_type, "kernel": one.kernels.attention} for one in (self.cluster, cluster)
        )
        for name, said in mine.items():
            if said != theirs[name]:
                raise ValueError(f"the profile is of {name}={said!r}, this is of {name}={theirs[name]!r}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :meth:`load` reads, whole or not at all.

        Args:
            path: of the file, or of a link to it, which stays.

        Raises:
            ValueError: there would be more than :meth:`load` reads.
        """
        text = self.as_text(path)
        file, whole = _places(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            whole.write_text(text)
            if file.exists():
                shutil.copymode(file, whole)
            whole.replace(file)
        finally:
            whole.unlink(missing_ok=True)

    def as_text(self, path: str | os.PathLike[str]) -> str:
        """What such a file has, or a refusal (FileError) of more than :meth:`load` reads."""
        entries = [asdict(one) for one in self.measured]
        for entry, one in zip(entries, self.measured, strict=True):
            entry["sequence"]["dtype"] = one.sequence.dtype_name
        text = json.dumps({"version": _VERSION, "cluster": self.cluster.as_json(), "measured": entries}, indent=1)
        if len(text) >= _MOST_BYTES:
            raise FileError(path, f"would have more than {_MOST_BYTES} bytes; name another file")
        return text + "\n"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Profile":
        """Read a file.

        Args:
            path: of the file.

        Returns:
            The profile.

        Raises:
            ValueError: it cannot be read, or is none, is cut short, of another version, or of what no machine does.
        """
        given = read_json(path, _MOST_BYTES)
        _complete(given)
        try:
            version = given.pop("version", None)
            if type(version) is not int or version != _VERSION:
                said = "is missing" if version is None else f"is {shown(version)}"
                raise ValueError(f"its version {said}, this is {_VERSION}; profile again")
            found = make(cls, given)
            _check_possible(found)
        except ValueError as error:
            raise FileError(path, f"is no profile: {error}") from error
        return found


def _complete(given: dict[str, Any]) -> None:
    """Put into an earlier file what it does not say: its layers are alike, sequences one document, and so on."""

    def part(of: object, name: str) -> dict[str, Any]:
        found = of.get(name) if isinstance(of, dict) else None
        return found if isinstance(found, dict) else {}

    cluster = part(given, "cluster")
    kernels = part(cluster, "kernels")
    kernels.setdefault("takes_segments", takes_segments(kernels.get("attention"), cluster.get("device_type")))
    of_experts, of_latents = ("shared_ffn", "dense_layers", "dense_ffn"), ("kv_rank", "q_rank", "rotary_dim")
    measured, sizes = given.get("measured"), dict.fromkeys((*of_experts, *of_latents), 0)
    for one in filter(lambda one: isinstance(one, dict), measured if isinstance(measured, list) else ()):
        model = part(one, "model")
        model |= {"windowed_layers": None, "value_dim": None} | sizes | model
        part(one, "sequence").setdefault("documents", [])


def _places(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where a file is that links may lead to, and where it is written first, under a name that is never too long.

    It is the file's own, shortened: ranks of other runs may have this one's number where nodes share a disk.
    """
    file = Path(os.path.realpath(path))
    return file, file.with_name(f".{file.name[:50]}.{os.getpid()}")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuse (FileError) a path to which no profile can be saved; its folder is made."""
    try:
        file, whole = _places(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            file.stat()  # of a name that is too long
        whole.touch()
        whole.unlink(missing_ok=True)  # nodes that share a disk may have ranks of one number
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise FileError(
            path, f"cannot be written: {getattr(error, 'strerror', None) or error}; name another file"
        ) from error


def _check_possible(found: Profile) -> None:
    """Refuse (ValueError) what could not be planned by, or was not measured on this cluster."""
    ranks = found.cluster.ranks
    for i, one in enumerate(found.measured):
        if one.candidate.size != ranks:
            raise ValueError(f"measured[{i}].candidate has {one.candidate.size} ranks, the cluster {ranks}")


def profile(
    model: ModelShape,
    sequence: SequenceShape,
    device_type: str,
    *,
    ranks_per_node: int | None = None,
    memory: int | None = None,
    top: int = 4,
    iterations: int = 3,
    turns: int | None = None,
    build: Build | None = None,
    kernel: str = "auto",
    cluster: Cluster | None = None,
    path: str | os.PathLike[str] | None = None,
) -> tuple[Plan, Profile]:
    """Measure links and kernels, plan, run a few plans and choose the fastest; all ranks call it together.

    They first compare what they ask for: all but ``path``, of which rank 0's counts, and what ``build`` does. What is
    run is the choice of :func:`wallfacer_dt.plan`, and what is predicted to be fastest.

    Args:
        model: sizes.
        sequence: what a step takes.
        device_type: ``"cpu"``, ``"cuda"``, ...
        ranks_per_node: how many neighbouring ranks share a node; by default what torchrun or host names say.
        memory: bytes of a rank; None for no limit.
        top: how many plans to run, no two of which are the same mesh and schedule but for their placement or rotations.
        iterations: of each in a turn, after one that is not counted.
        turns: that every plan takes, built anew each time, so that a slow minute is nobody's loss. After several, those
            within a tenth of the fastest take as many again. By default 1 with ``build``, and 3 without.
        build: from a plan whose choice is to be run, one step of the real model, of which there is one at a time;
            without it, one call of attention of the model's shape, forward and backward, on random numbers, and that is
            what is planned; of a model of which some layers alone have the window, without it.
        kernel: of attention, see :class:`wallfacer_dt.AttentionOptions`; its rates are measured, that call runs it, and
            the plan's styles take it, which are for ``build`` to use.
        cluster: instead of measuring it; it says itself how many ranks share a node, what memory they have, and which
            kernel of attention its rates are of. No file is made then, since it would call measured what was given.
        path: a file for rank 0 to add the result to; what it has of other models and sequences stays, unless links and
            kernels are not those that it was measured with, of which a warning tells.

    Returns:
        The plan, and what was measured.

    Raises:
        ValueError: on every rank: they do not ask for the same; ``top``, ``iterations`` or ``turns`` is below 1;
            ``cluster`` comes with what it has itself, or with ``path``, or has other ranks than there are. On rank 0:
            ``path`` cannot be written, is no profile, or one of other ranks, another device or another kernel.
        PlanningError: on every rank: nothing fits, nodes are not made of neighbouring ranks, or ``kernel`` is unknown
            to one of them or cannot run there.
        RuntimeError: on the others, where rank 0 has another error.
    """
    turns = (1 if build else 3) if turns is None else turns
    ranks = dist.get_world_size()
    everyone = name_mesh("world", range(ranks), ())
    with refusing_together(everyone):
        check_kind(device_type, str, "device_type")
        if min(top, iterations, turns) < 1:
            raise ValueError(f"top, iterations and turns must be at least 1, got {top}, {iterations} and {turns}")
        if cluster is not None and (ranks_per_node, memory, kernel) != (None, None, "auto"):
            raise ValueError("a cluster has ranks_per_node, memory and kernels.attention itself: give it, or these")
        if cluster is not None and cluster.ranks != ranks:
            raise ValueError(f"the cluster has {cluster.ranks} ranks, and there are {ranks}")
        if cluster is not None and path is not None:
            raise ValueError(f"path must be None where a cluster is given and nothing of it measured, got {path!r}")
        told = {
            "model": model, "sequence": sequence, "device_type": device_type, "ranks_per_node": ranks_per_node,
            "memory": None if memory is None else float(memory), "top": top, "iterations": iterations,
            "build": "given" if build else None, "turns": turns, "kernel": kernel, "cluster": cluster,
        }  # fmt: skip
        agree("profile", [(name, repr(value)) for name, value in told.items()], everyone)
    # It takes this rank's own GPU, unless someone has, before anything is sent by another.
    probe = Probe.on(device_type, ranks_per_node if cluster is None else cluster.ranks_per_node)
    kernel = kernel if cluster is None else cluster.kernels.attention
    run = probe.selected(kernel, model, sequence) if cluster is None or build is None else None
    if cluster is None and run and run.name not in ("flash", kernel):  # what stands for it in this process alone
        kernel = run.name
    _by_first(lambda: _check_path(path, device_type, kernel))
    if cluster is None:
        assert run is not None, "it was selected, as there is no cluster"
        cluster = probe.cluster(model, sequence, memory, run)
        cluster = replace(cluster, kernels=replace(cluster.kernels, attention=kernel))
        if probe.runs_ahead:
            launch = _launch_seconds(probe, model.attention_alone, sequence, cluster)
            cluster = replace(cluster, kernels=replace(cluster.kernels, launch=launch))
    _by_first(lambda: _check_path(path, device_type, kernel, cluster))
    if not build:
        (_, sequence), *_ = kinds_of_layers(model, sequence)
        model = model.attention_alone

    def fastest() -> tuple[Plan, list[Ranked]]:
        every = plan(model, sequence, cluster, keep=_RANKED * top, margin=0.0)
        chosen = shortlist(every, top, plan(model, sequence, cluster, keep=1).ranked)
        if path is not None:
            to_come = tuple(Measured(model, sequence, one.candidate, one.seconds) for one in chosen)
            try:
                with warnings.catch_warnings(action="ignore"):  # nothing is replaced yet
                    _with_earlier(Profile(every.cluster, to_come), path).as_text(path)
            except FileError as error:
                raise PlanningError(str(error), about="out") from error
        return every, chosen

    first, chosen = _by_first(fastest)
    seconds = _run(first, chosen, iterations, turns, partial(_built, build, device_type), torch.device(device_type))
    measured = tuple(
        Measured(model, sequence, one.candidate, taken) for one, taken in zip(chosen, seconds, strict=True)
    )
    result = Profile(first.cluster, measured)

    def finish() -> Plan:
        if path is not None:
            _with_earlier(result, path).save(path)
        return plan(model, sequence, result.cluster, profile=result, keep=_RANKED * top)

    return _by_first(finish), result


def _launch_seconds(probe: Probe, model: ModelShape, sequence: SequenceShape, cluster: Cluster) -> float:
    """Seconds of the slowest host for an operation of attention, in calls for which devices wait: short ones of a ring
    of all ranks, forward and backward.

    Args:
        probe: this rank's.
        model: whose heads.
        sequence: whose batch and dtype.
        cluster: of all ranks.

    Returns:
        The seconds, the same on all ranks.
    """
    ring = Candidate(cluster.ranks, order="head_tail", rotate="kv", rotate_forward="kv")
    short = SequenceShape(_SHORT * cluster.ranks, sequence.batch, is_causal=True, dtype=sequence.dtype)
    one = replace(cluster, kernels=replace(cluster.kernels, launch=1.0))
    launched = sum(way.line.host for way in attention_cost(ring, model, short, one).ways)
    given = Plan(model, short, cluster, (Ranked(ring, Prediction(0.0, 0.0, 0.0, 0.0, 0, 0, 0), ""),), (), 1)
    with _built(None, probe.device.type, given) as step:
        return probe.timed(step, _MANY) / launched


def _check_path(
    path: str | os.PathLike[str] | None, device_type: str, kernel: str, cluster: Cluster | None = None
) -> None:
    """Refuse a file that cannot be added to, before anything is measured; or is of other ranks, devices or kernels."""
    if path is None:
        return
    check_writable(path)
    if Path(path).exists():
        earlier = Profile.load(path)
        kernels = replace(earlier.cluster.kernels, attention=kernel)
        earlier.check_is_of(cluster or replace(earlier.cluster, device_type=device_type, kernels=kernels))


def _by_first(make: Callable[[], Any]) -> Any:
    """What rank 0 plans, on every rank: they may share its processor, and plan by the same numbers."""
    made: list[Any] = [None]
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except Exception as error:  # the others wait for it
            raised = error
            made = [error if isinstance(error, PlanningError) else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(made, src=0)
    if raised is not None:
        raise raised
    if isinstance(made[0], PlanningError):
        raise made[0]
    if isinstance(made[0], str):
        raise RuntimeError(f"rank 0 could not plan: {made[0]}")
    return made[0]


def shortlist(given: Plan, top: int, before: Sequence[Ranked] = ()) -> list[Ranked]:
    """The best few, of each mesh and schedule only the best; fewer where there are no more.

    Args:
        given: a plan.
        top: how many.
        before: what goes before its best.

    Returns:
        The best first.
    """
    chosen: dict[Any, Ranked] = {}
    for one in (*before, *given.ranked):
        it = one.candidate
        chosen.setdefault((it.axes, it.schedule, it.order), one)
        if len(chosen) == top:
            break
    return list(chosen.values())


def _with_earlier(result: Profile, path: str | os.PathLike[str]) -> Profile:
    """With what the file says of other models and sequences on the same ranks."""
    if not Path(path).exists():
        return result
    earlier = Profile.load(path)
    if not _are_alike(earlier.cluster, result.cluster):
        warnings.warn(
            f"{path} was measured with links or kernels twice as fast or slow as now: its {len(earlier.measured)} runs "
            "are replaced",
            stacklevel=2,
        )
        return result
    fresh = {(one.model, one.sequence) for one in result.measured}
    kept = [one for one in earlier.measured if (one.model, one.sequence) not in fresh]
    return replace(result, measured=(*kept, *result.measured))


def _are_alike(one: Cluster, other: Cluster) -> bool:
    """Whether two measurements may be of the same machines: within a factor of two."""
    # Rates in blocks without end are extrapolated, and differ by more.
    rates = [(c.intra.bandwidth, c.inter.bandwidth, *c.kernels.in_blocks(1024), c.kernels.linear) for c in (one, other)]
    within = all(0.5 <= a / b <= 2 for a, b in zip(*rates, strict=True))
    return within and (one.ranks, one.ranks_per_node) == (other.ranks, other.ranks_per_node)


@contextmanager
def _built(build: Build | None, device_type: str, one: Plan) -> Iterator[Callable[[], object]]:
    """A plan's step, while it is there."""
    if build:
        gc.collect()  # what the last one held
        yield build(one)
        return
    # Groups that wait cost a processor's time: gloo's threads wake up all the while.
    mesh = one.mesh(device_type)
    with temporary_groups(mesh):
        yield attention_step(one, mesh)


def _run(
    given: Plan,
    chosen: Sequence[Ranked],
    iterations: int,
    turns: int,
    built: Callable[[Plan], AbstractContextManager[Callable[[], object]]],
    device: torch.device,
) -> list[float]:
    """Median seconds of each, of the slowest rank, taking turns, which those that are close take more of."""
    seconds: list[list[float]] = [[] for _ in chosen]

    def take_turns(some: Sequence[int]) -> None:
        for i in [*some] * turns:
            with built(replace(given, ranked=(chosen[i],))) as step:
                slowest(step, device)
                seconds[i] += [slowest(step, device) for _ in range(iterations)]
                del step

    take_turns(range(len(chosen)))
    medians = [statistics.median(taken) for taken in seconds]
    close = [i for i, median in enumerate(medians) if median <= _CLOSE * min(medians)]
    if turns == 1 or len(close) == 1:
        return medians
    take_turns(close)
    # Each by how it compares with one of them in the same turns, since later ones may all be slower.
    one = seconds[close[0]]
    return [
        statistics.median(one) * statistics.median(a / b for a, b in zip(taken, one, strict=False)) for taken in seconds
    ]


def attention_step(given: Plan, mesh: DeviceMesh) -> Callable[[], object]:
    """One call of the chosen attention on random numbers, forward and backward.

    Args:
        given: the plan.
        mesh: what :meth:`Plan.mesh` makes, or made before.

    Returns:
        The call.
    """
    model, sequence, it = given.model, given.sequence, given.chosen
    place, order = context_groups(mesh).coordinate, TokenOrder(it.order, mesh)
    rows = shard_sizes(sequence.length, it.axes, it.order)[place.index]

    def tensor(heads: int, dim: int) -> Tensor:
        shape = (sequence.batch, heads, rows, dim)
        return torch.randn(shape, dtype=sequence.dtype, device=mesh.device_type, requires_grad=True)

    q, k = tensor(model.heads, model.dim), tensor(model.keys, model.dim)
    v = tensor(model.keys, model.dim_of_values)

    def step() -> None:
        with dealing_by_hand(tuple(sorted(mesh_ranks(mesh)))):
            out = context_parallel_attention(
                q, k, v, mesh, order=order, cu_seqlens=sequence.cu_seqlens, **given.attention_options
            )
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return step
