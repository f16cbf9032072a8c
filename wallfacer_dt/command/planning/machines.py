"""Where is planned: a cluster from options, or from the file of a profile."""

from dataclasses import dataclass, replace
from pathlib import Path

from wallfacer_dt.command.options import OptionError, check_least, naming
from wallfacer_dt.command.planning.shape import as_options
from wallfacer_dt.command.units import parse_rate, parse_size, parse_speed, parse_time
from wallfacer_dt.planning import Cluster, Kernels, Link, Profile

RANKS_PER_NODE = 8
INTRA_LATENCY, INTER_LATENCY = "5us", "10us"
_BACKWARD = 0.8  # of attention's forward speed, as in the defaults of Kernels
_NO_LINK = Link(1e12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What was said of the machines; None where nothing was.

    Attributes:
        ranks: P.
        ranks_per_node: of a node.
        nics: interfaces of a node.
        intra: rate into a rank from its node.
        inter: rate into a node.
        intra_latency: of a message in a node.
        inter_latency: of one between nodes.
        attention_speed: of attention's forward.
        linear_speed: of matrix products.
        memory: of a rank.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    nics: int | None = None
    intra: str | None = None
    inter: str | None = None
    intra_latency: str | None = None
    inter_latency: str | None = None
    attention_speed: str | None = None
    linear_speed: str | None = None
    memory: str | None = None

    def cluster(self) -> Cluster:
        """The cluster that options alone describe.

        Returns:
            It.

        Raises:
            OptionError: an option is missing or wrong.
        """
        self._check_counts()
        if self.ranks is None:
            raise OptionError("--ranks is missing: say how many share a sequence, or give --profile FILE")
        per_node = RANKS_PER_NODE if self.ranks_per_node is None else self.ranks_per_node
        has_intra, has_inter = min(self.ranks, per_node) > 1, self.ranks > per_node
        intra = self._link("--intra", self.intra, self.intra_latency or INTRA_LATENCY, needed=has_intra)
        inter = self._link("--inter", self.inter, self.inter_latency or INTER_LATENCY, needed=has_inter)
        intra, inter = intra or inter or _NO_LINK, inter or intra or _NO_LINK
        with as_options():
            return Cluster(
                self.ranks, min(self.ranks, per_node), intra, inter, self.nics or 1, read_memory(self.memory),
                self._kernels(),
            )  # fmt: skip

    def measured(self, profile: Profile) -> Cluster:
        """The cluster of a profile, with the memory that was said.

        Args:
            profile: what was measured.

        Returns:
            The cluster.

        Raises:
            OptionError: another one was described.
        """
        self._check_counts()
        cluster = profile.cluster
        for name in ("ranks", "ranks_per_node", "nics"):
            given, known = getattr(self, name), getattr(cluster, name)
            if given is not None and given != known:
                raise OptionError(f"{_option(name)} is {known} in --profile, got {given}; leave it out")
        for name in ("intra", "inter", "intra_latency", "inter_latency", "attention_speed", "linear_speed"):
            if getattr(self, name) is not None:
                raise OptionError(f"{_option(name)} is measured in --profile; leave one of them out")
        return cluster if self.memory is None else replace(cluster, memory=read_memory(self.memory))

    def _check_counts(self) -> None:
        for name in ("ranks", "ranks_per_node", "nics"):
            if (given := getattr(self, name)) is not None:
                check_least(_option(name), given)

    def _link(self, option: str, rate: str | None, latency: str, *, needed: bool) -> Link | None:
        if rate is None:
            if needed:
                raise OptionError(f"{option} is missing: give a rate like 12.5GB/s or 200Mbit/s, or --profile FILE")
            return None
        with naming(option):
            bandwidth = parse_rate(rate)
        with naming(f"{option}-latency"):
            return Link(bandwidth, parse_time(latency))

    def _kernels(self) -> Kernels:
        rates: dict[str, float] = {}
        if self.attention_speed is not None:
            with naming("--attention-speed"):
                rates["forward"] = parse_speed(self.attention_speed)
                rates["backward"] = _BACKWARD * rates["forward"]
        if self.linear_speed is not None:
            with naming("--linear-speed"):
                rates["linear"] = parse_speed(self.linear_speed)
        return replace(Kernels(), **rates)


def read_memory(size: str | None) -> int | None:
    """Bytes of a rank, or None for any number; refuse (OptionError) what is no size."""
    if size is None:
        return None
    with naming("--memory"):
        return int(parse_size(size))


def load_profile(path: Path) -> Profile:
    """The profile of a file; refuse (OptionError) what is none."""
    try:
        return Profile.load(path)
    except OSError as error:
        raise OptionError(f"--profile: {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise OptionError(f"--profile: {error}") from error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
