"""Where is planned: a cluster by name or from options, or from the file of a profile; and who says so."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wallfacer_dt.command.options import OptionError, check_least, naming
from wallfacer_dt.command.planning.shape import as_options
from wallfacer_dt.kernels.block import HALF
from wallfacer_dt.kernels.registry import names, takes_segments
from wallfacer_dt.planning import Cluster, Kernels, Link, Profile
from wallfacer_dt.planning.gpus import GPU, GPUS, INTER_LATENCY, INTRA_LATENCY, NODE, check_kernel_of
from wallfacer_dt.planning.units import format_speed, format_time, parse_rate, parse_size, parse_speed, parse_time

_NO_LINK = Link(1e12)
MEASURED = dict.fromkeys(("forward", "backward", "linear", "merge", "launch"), "measured")


class Where(NamedTuple):
    """A cluster, and who says what it can do.

    Attributes:
        cluster: it.
        origins: of the kernels' rates by their names: ``"measured"``, ``"published"``, ``"given"`` or ``"assumed"``,
            and how; or why there is none.
        peak: of a rank by its data sheet, floating point operations per second, or None.
        source: a line about a cluster that has a name, otherwise empty.
    """

    cluster: Cluster
    origins: Mapping[str, str]
    peak: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What was said of the machines; None where nothing was.

    Attributes:
        name: of a cluster, as h100x64.
        ranks: P.
        ranks_per_node: of a node.
        nics: interfaces of a node.
        intra: rate into a rank from its node.
        inter: rate into a node.
        intra_latency: of a message in a node.
        inter_latency: of one between nodes.
        attention_speed: of attention's forward.
        linear_speed: of matrix products.
        memory_rate: at which memory is read and written.
        launch: time of the host for an operation of attention.
        peak_speed: of a rank by its data sheet.
        memory: of a rank.
        kernel: of attention, by name.
    """

    name: str | None = None
    ranks: int | None = None
    ranks_per_node: int | None = None
    nics: int | None = None
    intra: str | None = None
    inter: str | None = None
    intra_latency: str | None = None
    inter_latency: str | None = None
    attention_speed: str | None = None
    linear_speed: str | None = None
    memory_rate: str | None = None
    launch: str | None = None
    peak_speed: str | None = None
    memory: str | None = None
    kernel: str | None = None

    def cluster(self, dtype: torch.dtype, dims: tuple[int, int]) -> Where:
        """The cluster that a name and options describe; an option replaces what the name says of the same.

        Args:
            dtype: of attention.
            dims: of heads, of keys and of values.

        Returns:
            It.

        Raises:
            OptionError: an option is missing or wrong, or no kernel takes such heads there.
        """
        self._check_counts()
        gpu, ranks = (None, self.ranks) if self.name is None else self._named()
        if ranks is None:
            raise OptionError(
                "--ranks is missing: say how many share a sequence, or give --cluster NAME or --profile FILE"
            )
        per_node = NODE if self.ranks_per_node is None else self.ranks_per_node
        if gpu is not None and ranks > per_node and ranks % per_node:
            raise OptionError(
                f"--cluster {self.name}: nodes of {per_node} do not make {ranks} ranks; say another number, or "
                "--ranks-per-node"
            )
        base = None if gpu is None else gpu.cluster(ranks, per_node)
        has_intra, has_inter = min(ranks, per_node) > 1, ranks > per_node
        intra = self._link("intra", base.intra if base else None, INTRA_LATENCY, needed=has_intra)
        inter = self._link("inter", base.inter if base else None, INTER_LATENCY, needed=has_inter)
        intra, inter = intra or inter or _NO_LINK, inter or intra or _NO_LINK
        kernels, origins = self._kernels(gpu, dtype, dims)
        with as_options():
            cluster = Cluster(
                ranks, min(ranks, per_node), intra, inter, self.nics or (base.nics if base else 1),
                base.memory if base and self.memory is None else read_memory(self.memory), kernels,
            )  # fmt: skip
        return Where(
            cluster, origins, self._peak(gpu, dtype), "" if gpu is None else self._described(gpu, kernels, dtype, dims)
        )

    def idle(self, cluster: Cluster) -> tuple[list[str], str] | None:
        """Options of links that a cluster does not have, which were given, and why not; None if there are none."""
        has_one, alone = cluster.ranks <= cluster.ranks_per_node, cluster.ranks_per_node == 1
        across, within = ("inter", "inter_latency", "nics"), ("intra", "intra_latency")
        given = [_option(name) for name in (*across * has_one, *within * alone) if getattr(self, name) is not None]
        why = f"one node, of {cluster.ranks} ranks" if has_one else "one rank a node"
        return (given, why) if given else None

    def measured(self, profile: Profile, dtype: torch.dtype, dims: tuple[int, int]) -> Where:
        """The cluster of a profile, with the memory that was said.

        Args:
            profile: what was measured.
            dtype: of attention.
            dims: of heads, of keys and of values.

        Returns:
            The cluster.

        Raises:
            OptionError: another one was described, or its kernel takes no such heads.
        """
        self._check_counts()
        cluster = profile.cluster
        for name in ("ranks", "ranks_per_node", "nics"):
            given, known = getattr(self, name), getattr(cluster, name)
            if given is not None and given != known:
                raise OptionError(f"{_option(name)} is {known} in --profile, got {given}; leave it out")
        if self.name is not None:
            raise OptionError("--cluster: links and kernels are measured in --profile; leave one of them out")
        links = "intra", "inter", "intra_latency", "inter_latency"
        for name in (*links, "attention_speed", "linear_speed", "memory_rate", "launch", "kernel"):
            if getattr(self, name) is not None:
                raise OptionError(f"{_option(name)} is measured in --profile; leave one of them out")
        kernel = cluster.kernels.attention
        if cluster.device_type == "cuda" and kernel in ("auto", *names()):  # of another's nothing is known here
            with naming("--profile"):
                check_kernel_of(kernel, None, dtype, *dims)
        cluster = cluster if self.memory is None else replace(cluster, memory=read_memory(self.memory))
        said = MEASURED | _of_others(profile, dtype, dims)
        if not cluster.kernels.launch:
            said |= {"launch": "none, as kernels and hosts are one"}
        return Where(cluster, said, self._peak(None, dtype))

    def _named(self) -> tuple[GPU, int]:
        name = self.name or ""
        match = re.fullmatch(r"([a-z]+\d+)x([1-9]\d{0,5})", name)
        if match is None or match[1] not in GPUS:
            raise OptionError(
                f"--cluster must be a GPU and how many, like h100x64, of {', '.join(GPUS)}, got {name!r}; or describe "
                "it by --ranks, --intra and --inter"
            )
        if self.ranks is not None:
            raise OptionError(f"--ranks: --cluster {name} says how many; leave one of them out")
        return GPUS[match[1]], int(match[2])

    def _check_counts(self) -> None:
        for name in ("ranks", "ranks_per_node", "nics"):
            if (given := getattr(self, name)) is not None:
                check_least(_option(name), given)

    def _link(self, name: str, known: Link | None, latency: float, *, needed: bool) -> Link | None:
        rate, late = getattr(self, name), getattr(self, f"{name}_latency")
        if late is not None:  # a link that is not needed, too
            with naming(f"{_option(name)}-latency"):
                latency = parse_time(late)
        if rate is None and known is None:
            if needed:
                raise OptionError(
                    f"{_option(name)} is missing: give a rate like 12.5GB/s or 200Mbit/s, or --cluster NAME or "
                    "--profile FILE"
                )
            return None
        link = known or Link(1.0, latency)
        if rate is not None:
            with naming(_option(name)):
                link = replace(link, bandwidth=parse_rate(rate))
        return link if late is None else replace(link, latency=latency)

    def _kernels(self, gpu: GPU | None, dtype: torch.dtype, dims: tuple[int, int]) -> tuple[Kernels, Mapping[str, str]]:
        """Rates, and by name who says so: of what neither a name nor an option says an H100's."""
        whose, given = gpu or GPUS["h100"], self._given_rates()
        kernel = "auto" if self.kernel is None else self.kernel
        check_kernel_name(kernel)
        if gpu is not None:
            self._check_kernel(gpu.capability, dtype, dims)
        if dtype not in HALF and not {"forward", "linear"} <= given.keys():
            said = "by default are an H100's in 16 bits" if gpu is None else f"on --cluster {self.name} are in 16 bits"
            raise OptionError(
                f"--dtype {str(dtype).removeprefix('torch.')}: rates {said}; give --attention-speed and "
                "--linear-speed, or --profile FILE"
            )
        if gpu is None and (self.kernel or "forward" not in given):
            self._check_kernel(None if "forward" in given else whose.capability, dtype, dims)
        segments = takes_segments(kernel, "cuda")
        known = Kernels(linear=whose.linear, merge=whose.merge, attention=kernel, takes_segments=segments)
        origins = {"linear": whose.linear_source, "merge": "assumed", "launch": "assumed"}
        if kernel == "auto" or kernel in whose.attention:
            known = whose.kernels(dims[0], kernel, dims[1])
            origins["forward"], origins["backward"] = whose.origins(dims[0], kernel, dims[1])
        elif "forward" not in given:
            raise OptionError(
                f"--kernel: of {kernel!r} no rates are known there, but of {', '.join(whose.attention)}; give "
                "--attention-speed"
            )
        if gpu is None:
            origins = {name: f"{said}, an H100's" for name, said in origins.items()}
        origins |= dict.fromkeys(given, "given")
        if "forward" in given:
            share = known.backward / known.forward
            given["backward"] = share * given["forward"]
            origins["backward"] = f"assumed, {share:.2g} of the forward's"
        return replace(known, **given), {name: origins[name] for name in MEASURED}

    def _check_kernel(self, capability: tuple[int, int] | None, dtype: torch.dtype, dims: tuple[int, int]) -> None:
        """Refuse (OptionError) heads that the kernel of the printed code does not take on such a GPU."""
        try:
            check_kernel_of(self.kernel or "auto", capability, dtype, *dims)
        except ValueError as error:
            if self.kernel is not None:
                raise OptionError(f"--{error}") from error
            option, where, remedy = "--head-dim", "an H100, whose rates are taken", "give --attention-speed"
            if self.name is not None:
                where, remedy = f"--cluster {self.name}", "describe other machines by --ranks, --intra and --inter"
            if dtype not in HALF:
                option, remedy = "--dtype", "use --dtype bfloat16 or float16"
            reason = str(error).partition(": ")[0]  # without the remedy of who has tensors
            raise OptionError(f"{option}: no attention kernel for it on {where}, {remedy} ({reason})") from error

    def _given_rates(self) -> dict[str, Any]:
        """By names."""
        options: dict[str, tuple[str, Callable[[str], Any]]] = {
            "forward": ("attention_speed", parse_speed), "linear": ("linear_speed", parse_speed),
            "merge": ("memory_rate", parse_rate), "launch": ("launch", parse_time),
        }  # fmt: skip
        given = {}
        for rate, (name, parse) in options.items():
            if (text := getattr(self, name)) is not None:
                with naming(_option(name)):
                    given[rate] = parse(text)
        return given

    def _described(self, gpu: GPU, kernels: Kernels, dtype: torch.dtype, dims: tuple[int, int]) -> str:
        """Where the parts of a named cluster come from, and which kernel is faster than one that nobody chose."""
        latencies = " and ".join(map(format_time, (INTRA_LATENCY, INTER_LATENCY)))
        parts = ("ranks_per_node", "intra", "inter", "intra_latency", "inter_latency", "nics", "memory", "peak_speed")
        replaced = ", ".join(_option(name) for name in parts if getattr(self, name) is not None)
        said = (
            f"{self.name}: dense peak in 16 bits and memory as in {gpu.source}; NVLink and an adapter for each GPU as "
            f"others have measured; latencies of {latencies} are assumed"
        ) + f"; replaced by {replaced}" * bool(replaced)
        if self.kernel is None and self.attention_speed is None:
            name, fastest = gpu.fastest(dtype, *dims)
            if fastest.forward > 1.1 * kernels.forward:
                whose = gpu.origins(dims[0], name, dims[1])[0]
                said += f". With --kernel {name} attention's forward is at {format_speed(fastest.forward)} ({whose})"
        return said

    def _peak(self, gpu: GPU | None, dtype: torch.dtype) -> float | None:
        """As said, or a GPU's, which is known for 16 bits alone."""
        if self.peak_speed is None:
            return gpu.peak if gpu is not None and dtype in HALF else None
        with naming("--peak-speed"):
            return parse_speed(self.peak_speed)


def check_kernel_name(kernel: str) -> None:
    """Refuse (OptionError) the name of no kernel of this package; a command cannot register others."""
    if kernel not in ("auto", *names()):
        raise OptionError(f"--kernel must be one of {', '.join(('auto', *names()))}, got {kernel!r}")


def read_memory(size: str | None) -> int | None:
    """Bytes of a rank, or None for any number; refuse (OptionError) what is no size."""
    if size is None:
        return None
    with naming("--memory"):
        nbytes = int(parse_size(size))
        if nbytes < 1:
            raise ValueError(f"must be at least 1B, got {size!r}")
    return nbytes


def _of_others(profile: Profile, dtype: torch.dtype, dims: tuple[int, int]) -> dict[str, str]:
    """Who says rates that are of other heads or of another dtype: a file's are of its last run."""
    runs = [(one.sequence.dtype, one.model.dims) for one in profile.measured[-1:]]
    said = {}
    if dtype not in [of for of, _ in runs]:
        said["linear"] = "measured in another dtype"
    if (dtype, dims) not in runs:
        said |= dict.fromkeys(("forward", "backward"), "measured of other heads or dtype")
    return said


def load_profile(path: Path) -> Profile:
    """The profile of a file; refuse (OptionError) what is none."""
    try:
        return Profile.load(path)
    except ValueError as error:
        raise OptionError(f"--profile: {error}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
