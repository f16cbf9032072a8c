"""Nodes as network namespaces on one bridge, with rate-limited links and counters; how they are removed again.

A node's link is a veth pair: one end in its namespace, where what the node sends is limited, the other on the bridge,
where what it receives is. Ranks of a node reach each other at the node's own address, which the kernel serves over the
namespace's loopback; a limit does not touch them. All names begin with a prefix, by which everything is found again.
"""

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

PREFIX = "wfnet"
# Where `ip netns` keeps its names, too: root's alone, and gone after a reboot.
STATE = Path("/run")
_SUBNET = "10.213.0"
# A packet of the kernel's largest size must fit, or it is cut in pieces by the CPU.
_BURST = "128kb"
# Deep enough that ranks which send to one node at once wait instead of losing packets, as switches for such work do.
_QUEUE = "8mb"


class ClusterError(Exception):
    """Something the caller must change or have: shown as one line, exit status 2, never as a traceback."""


def check_host() -> None:
    """Refuse (ClusterError) a machine or user that cannot make network namespaces."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ClusterError(f"the emulated cluster needs {' and '.join(missing)}: install iproute2 (Debian, Ubuntu)")
    if os.geteuid() != 0:
        raise ClusterError("the emulated cluster needs root, for network namespaces: run it with sudo")


@dataclass(frozen=True, slots=True)
class Network:
    """Nodes and their names; made by :meth:`make`, removed by :func:`remove`.

    Attributes:
        nodes: how many.
        prefix: of all names, at most 9 characters (an interface's name has 15).
    """

    nodes: int
    prefix: str = PREFIX

    def namespace(self, node: int) -> str:
        """The name of a node's network namespace."""
        return f"{self.prefix}{node}"

    def interface(self, node: int) -> str:
        """The name of a node's end of its link, in its namespace."""
        return f"{self.prefix}e{node}"

    def port(self, node: int) -> str:
        """The name of the link's other end, on the bridge."""
        return f"{self.prefix}p{node}"

    @property
    def bridge(self) -> str:
        """The name of the bridge."""
        return f"{self.prefix}br"

    def limit(self, rate: int | None) -> None:
        """Limit what every node sends, and what it receives, at once and while ranks run.

        Args:
            rate: Mbit/s; None for no limit.
        """
        ways = ["tbf", "rate", f"{rate}mbit", "burst", _BURST, "limit", _QUEUE] if rate else ["pfifo"]
        for node in range(self.nodes):
            _run("tc", "-n", self.namespace(node), "qdisc", "replace", "dev", self.interface(node), "root", *ways)
            _run("tc", "qdisc", "replace", "dev", self.port(node), "root", *ways)

    def received(self) -> tuple[int, ...]:
        """Bytes that have come over each node's link, headers included, since it was made."""
        counters = (Path("/sys/class/net", self.port(node), "statistics/tx_bytes") for node in range(self.nodes))
        return tuple(int(counter.read_text()) for counter in counters)

    def make(self) -> None:
        """Make the bridge, the namespaces and the links, without limits."""
        _run("ip", "link", "add", self.bridge, "type", "bridge")
        _run("ip", "link", "set", self.bridge, "up")
        for node in range(self.nodes):
            name, inside, outside = self.namespace(node), self.interface(node), self.port(node)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            _run("ip", "link", "set", outside, "master", self.bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{_SUBNET}.{node + 1}/24", "dev", inside)
            for device in ("lo", inside):
                _run("ip", "-n", name, "link", "set", device, "up")


def folder_of(prefix: str) -> Path:
    """Where a network of this prefix has its files."""
    return STATE / prefix


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
    shutil.rmtree(folder_of(prefix), ignore_errors=True)


def left_over(prefix: str) -> list[str]:
    """The namespaces and links of this prefix that there are."""
    names = [link.name for link in Path("/sys/class/net").glob(f"{prefix}*")] + _namespaces()
    return sorted(name for name in names if _is_of(name, prefix))


def _is_of(name: str, prefix: str) -> bool:
    """Whether a namespace or link is called as one of ours is."""
    return re.fullmatch(re.escape(prefix) + r"(br|[ep]?\d+)", name) is not None


def pids(namespace: str) -> Sequence[int]:
    """The processes in a network namespace."""
    return [int(pid) for pid in _try("ip", "netns", "pids", namespace).split()]


def _namespaces() -> list[str]:
    # Each line is a name, and perhaps a number in parentheses.
    return [line.split()[0] for line in _try("ip", "netns", "list").splitlines() if line.strip()]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()}")


def _try(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
