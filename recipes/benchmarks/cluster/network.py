"""Ranks as network namespaces, with links as clusters have them; and how they are removed again.

Every rank has two interfaces: ``in`` to the switch of its node, ``out`` to other nodes. Either its node's ranks share
one link, behind a switch of their own, or each has an adapter. A link is limited by ``tc htb`` at both ends: where it
is entered evenly for all ranks that something is sent to, where it is left for all that it comes from; short packets
go before long ones, or else a rank could not say that it is ready to receive while it sends. The rank's one address is
at ``out``, and a route to its own node's goes by ``in``. All names begin with a prefix, by which everything is found
again.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recipes.benchmarks.cluster.cases import Machines

PREFIX = "wfnet"
# Where `ip netns` keeps its names, too, and a network its files, by its prefix: root's alone, and gone after a reboot.
STATE = Path("/run")
OUT = "out"
_SUBNET = "10.213"
# Packets of at most so many bytes, so that a link is shared by all that want it, and a burst of a few.
_PACKET, _BURST = 8192, "12kb"
# A whole transfer may be under way at once, and is acknowledged only when it has gone through the queue of a slow link,
# where packets overtake each other: nothing of that is a loss.
_ROUTE = ("initcwnd", "1000", "initrwnd", "1000", "rto_min", "20s")
_TCP = {
    "congestion_control": "reno", "reordering": "250", "sack": "0", "early_retrans": "0",
    "slow_start_after_idle": "0", "rmem": "4096 4194304 8388608", "wmem": "4096 4194304 8388608",
}  # fmt: skip
_NEWNET = 0x40000000
# Deep enough that ranks which send to one node at once wait instead of losing packets, as switches for such work do.
_QUEUE = "16mb"


class ClusterError(Exception):
    """Something the caller must change or have: shown as one line, exit status 2, never as a traceback."""


def run_first() -> None:
    """Have this process run before other programs, so that a rank wakes up when its device's time is over."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def check_host() -> None:
    """Refuse (ClusterError) a machine or user that cannot make network namespaces, or run ranks before others."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ClusterError(f"the emulated cluster needs {' and '.join(missing)}: install iproute2 (Debian, Ubuntu)")
    if os.geteuid() != 0:
        raise ClusterError("the emulated cluster needs root, for network namespaces: run it with sudo")
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        run_first()
    except PermissionError:
        raise ClusterError("ranks may not run before other programs here: SCHED_RR needs CAP_SYS_NICE") from None
    os.sched_setscheduler(0, policy, priority)


@dataclass(frozen=True, slots=True)
class Network:
    """Ranks, their links and names; made by :meth:`make`, removed by :func:`remove`."""

    machines: Machines
    prefix: str = PREFIX  # of all names, at most 9 letters (an interface's name has 15)

    def __post_init__(self) -> None:
        """Refuse (ClusterError) what has no names or addresses."""
        if not re.fullmatch("[a-z]{1,9}", self.prefix) or not 1 <= self.machines.ranks <= 254:
            raise ClusterError(
                f"a prefix has 1 to 9 letters, and a cluster 1 to 254 ranks, got {self.prefix!r} and "
                f"{self.machines.ranks}"
            )

    def namespace(self, rank: int) -> str:
        """The name of a rank's network namespace."""
        return f"{self.prefix}{rank}"

    def address(self, rank: int) -> str:
        """The address of a rank."""
        return f"{_SUBNET}.{rank // self.machines.per_node}.{rank + 1}"

    def port(self, rank: int) -> str:
        """The switch's end of a rank's link to other nodes."""
        return f"{self.prefix}o{rank}"

    def received(self) -> tuple[int, ...]:
        """Bytes that have come into each node from others since it was made, headers included."""
        return tuple(
            sum(int(Path("/sys/class/net", port, "statistics/tx_bytes").read_text()) for port in self._into(node))
            for node in range(self.machines.nodes)
        )

    def make(self) -> None:
        """Make switches, namespaces and links, and limit these (ClusterError: this kernel cannot)."""
        machines = self.machines
        self._switch("b")
        for node in range(machines.nodes):
            self._switch(f"c{node}")
            if not machines.has_adapters:
                self._switch(f"b{node}")
                up, down = f"{self.prefix}u{node}", f"{self.prefix}d{node}"
                _run("ip", "link", "add", up, "type", "veth", "peer", "name", down)
                for end, switch, by in ((up, f"b{node}", "dst"), (down, "b", "src")):
                    self._plug(end, switch)
                    self._limit(end, machines.rates[node], machines.latency, by=by)
        for rank in range(machines.ranks):
            self._rank(rank, rank // machines.per_node)

    def _rank(self, rank: int, node: int) -> None:
        machines, name = self.machines, self.namespace(rank)
        _run("ip", "netns", "add", name)
        adapter = ("b", machines.rates[node], machines.latency)
        self._interface(rank, OUT, "o", *(adapter if machines.has_adapters else (f"b{node}", None, 0.0)))
        self._interface(rank, "in", "i", f"c{node}", machines.inside, 0.0)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address(rank)}/32", "dev", OUT)
        for subnet, inner in ((f"{_SUBNET}.0.0/16", OUT), (f"{_SUBNET}.{node}.0/24", "in")):
            _run("ip", "-n", name, "route", "add", subnet, "dev", inner, *_ROUTE)

    def _interface(self, rank: int, inner: str, port: str, switch: str, rate: float | None, latency: float) -> None:
        name, port = self.namespace(rank), f"{self.prefix}{port}{rank}"
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", inner, "netns", name)
        self._plug(port, switch)
        _run("ip", "-n", name, "link", "set", inner, "gso_max_size", str(_PACKET), "up")
        self._limit(port, rate, latency, by="src")
        self._limit(inner, rate, latency, "-n", name)

    def _switch(self, name: str) -> None:
        _run("ip", "link", "add", f"{self.prefix}{name}", "type", "bridge")
        _run("ip", "link", "set", f"{self.prefix}{name}", "up")

    def _plug(self, port: str, switch: str) -> None:
        _run("ip", "link", "set", port, "gso_max_size", str(_PACKET), "master", f"{self.prefix}{switch}", "up")

    def _limit(self, device: str, rate: float | None, latency: float, *inside: str, by: str = "dst") -> None:
        if rate is None:
            return
        leaf = f"netem delay {latency / 2}ms limit 100000" if latency else f"bfifo limit {_QUEUE}"
        way = f"htb rate {rate}mbit ceil {rate}mbit burst {_BURST} cburst {_BURST}"
        lines = [
            f"qdisc add dev {device} handle 1: root htb default 2",
            f"class add dev {device} parent 1: classid 1:1 {way}",
            f"class add dev {device} parent 1:1 classid 1:2 {way} prio 0",
            f"qdisc add dev {device} parent 1:2 {leaf}",
            # What is shorter than 256 bytes: acknowledgements, and that a rank is ready to receive.
            f"filter add dev {device} parent 1: protocol ip prio 1 u32 match u16 0x0000 0xff00 at 2 flowid 1:2",
        ]
        for rank in range(self.machines.ranks):
            # Of its own next to nothing, which a class sends whatever the link has left; the link lends it the rest.
            own, share = f"1:{rank + 16:x}", f"htb rate 8kbit ceil {rate}mbit burst 1kb cburst {_BURST}"
            address = f"{self.address(rank)}/32"
            lines += [
                f"class add dev {device} parent 1:1 classid {own} {share} prio 1 quantum {_PACKET}",
                f"qdisc add dev {device} parent {own} {leaf}",
                f"filter add dev {device} parent 1: protocol ip prio 2 u32 match ip {by} {address} flowid {own}",
            ]
        try:
            _run("tc", *inside, "-batch", "-", given="\n".join(lines))
        except ClusterError as error:
            if not latency:
                raise
            raise ClusterError(f"latency needs the qdisc netem, which this kernel may not have: {error}") from None

    def _into(self, node: int) -> list[str]:
        """The ports through which something comes into a node."""
        if not self.machines.has_adapters:
            return [f"{self.prefix}d{node}"]
        first = node * self.machines.per_node
        return [self.port(rank) for rank in range(first, first + self.machines.per_node)]


def enter(namespace: str) -> None:
    """Move this process, which has one thread yet, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), _NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
    for name, value in _TCP.items():
        Path(f"/proc/sys/net/ipv4/tcp_{name}").write_text(value)


def remove(prefix: str) -> None:
    """Kill the processes in namespaces of this prefix, and delete these, links and files, as far as there are any."""
    names = [name for name in _namespaces() if _is_of(name, prefix)]
    deadline = time.monotonic() + 10
    while (running := [pid for name in names for pid in pids(name)]) and time.monotonic() < deadline:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for link in left_over(prefix):
        if link not in names:
            _try("ip", "link", "del", link)
    for name in names:
        _try("ip", "netns", "del", name)
    shutil.rmtree(STATE / prefix, ignore_errors=True)


def left_over(prefix: str) -> list[str]:
    """The namespaces and links of this prefix that there are."""
    names = [link.name for link in Path("/sys/class/net").glob(f"{prefix}*")] + _namespaces()
    return sorted(name for name in names if _is_of(name, prefix))


def _is_of(name: str, prefix: str) -> bool:
    """Whether a namespace or link is called as one of ours is."""
    return re.fullmatch(re.escape(prefix) + r"(b|[bcdiou]?\d+)", name) is not None


def pids(namespace: str) -> Sequence[int]:
    """The processes in a network namespace."""
    return [int(pid) for pid in _try("ip", "netns", "pids", namespace).split()]


def _namespaces() -> list[str]:
    # Each line is a name, and perhaps a number in parentheses.
    return [line.split()[0] for line in _try("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str, given: str = "") -> None:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def _try(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
