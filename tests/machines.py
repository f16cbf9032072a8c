"""Machines that are network namespaces, and torchrun on each of them, as on a cluster."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from recipes.benchmarks.cluster import network
from recipes.benchmarks.cluster.cases import Machines
from recipes.benchmarks.cluster.watcher import environment, watched

PATIENCE = 600.0  # seconds that something may take on busy cores
PORT = 29500


def can_limit() -> bool:
    """Whether links can be limited here as the cluster does it."""
    try:
        network.check_host()
    except network.ClusterError:
        return False
    name = f"wfcan{os.getpid()}"  # others may ask at the same time
    commands = (
        f"ip netns add {name}",
        f"tc -n {name} qdisc add dev lo handle 1: root htb",
        f"tc -n {name} filter add dev lo parent 1: protocol ip u32 match u16 0x0000 0xff00 at 2 flowid 1:2",
    )
    done = [subprocess.run(command.split(), capture_output=True, check=False).returncode for command in commands]
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return not any(done)


needs_network = pytest.mark.skipif(
    not can_limit(), reason="needs root, CAP_SYS_NICE, iproute2's ip and tc, and a kernel with veth, htb and u32"
)


class Site:
    """Machines of a network, and what runs on each.

    Attributes:
        folder: of what they say, one file a machine, and of what they share.
    """

    def __init__(self, machines: network.Network, folder: Path) -> None:
        self.folder = folder
        self._network = machines
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def torchrun(self, machine: int, options: Sequence[str], command: Sequence[str], **variables: str) -> None:
        """Start torchrun on a machine.

        All machines are called alike here, as they have but one host's name: so they say their addresses, and the first
        that the store is its own.
        """
        rendezvous = [
            *("--nnodes", "4", "--rdzv-backend", "c10d", "--rdzv-id", "job"),
            *("--rdzv-endpoint", f"{self._network.address(0)}:{PORT}", "--rdzv-conf", f"is_host={int(machine == 0)}"),
            *("--local-addr", self._network.address(machine)),
        ]
        with self._said(machine).open("ab") as said:
            self._running[machine] = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._network.namespace(machine)),
                    *(sys.executable, "-m", "torch.distributed.run", *rendezvous, *options, "-m", *command),
                ],
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment() | {"GLOO_SOCKET_IFNAME": network.OUT} | variables,
                start_new_session=True,
            )

    def ended(self) -> dict[int, int]:
        """The exit status of torchrun by machine, once it has ended on all where it was started and that are left."""
        deadline = time.monotonic() + PATIENCE
        try:
            return {
                machine: process.wait(max(0.1, deadline - time.monotonic()))
                for machine, process in self._running.items()
            }
        except subprocess.TimeoutExpired:
            pytest.fail(f"torchrun has not ended:\n{self.said()}")
        finally:
            self._running.clear()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until something is so."""
        deadline = time.monotonic() + PATIENCE
        while not what():
            if time.monotonic() > deadline:
                pytest.fail(f"waited in vain:\n{self.said()}")
            time.sleep(0.1)

    def lose(self, machine: int) -> None:
        """Kill whatever runs on a machine: torchrun, and its ranks, which are in process groups of their own."""
        while running := network.pids(self._network.namespace(machine)):
            for pid in running:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(KeyError):
                self._running.pop(machine).wait()

    def cut(self, machine: int) -> None:
        """Unplug a machine: nobody hears of it."""
        self._port(machine, "down")

    def mend(self, machine: int) -> None:
        """Plug it in again."""
        self._port(machine, "up")

    def _port(self, machine: int, state: str) -> None:
        subprocess.run(["ip", "link", "set", self._network.port(machine), state], check=True)

    def slow(self, machine: int, rate: float) -> None:
        """Limit a machine's link, both ways, to so many Mbit/s from now on."""
        inside = ["-n", self._network.namespace(machine)]
        for where, device in (([], self._network.port(machine)), (inside, network.OUT)):
            limit = ["root", "tbf", "rate", f"{rate}mbit", "burst", "32kb", "latency", "10s"]
            subprocess.run(["tc", *where, "qdisc", "replace", "dev", device, *limit], check=True)

    def said(self, most: int | None = 3000) -> str:
        """What the machines have said, or so much of its end."""
        files = sorted(self.folder.glob("machine*"))
        return "\n".join(f"{path.name}:\n{path.read_text()[-(most or 0) :]}" for path in files)

    def _said(self, machine: int) -> Path:
        return self.folder / f"machine{machine}"


@contextmanager
def site(machines: Machines, prefix: str, folder: Path) -> Iterator[Site]:
    """Machines, of one rank's namespace each, which are gone afterwards with whatever runs on them."""
    with watched(prefix):
        network.remove(prefix)
        made = network.Network(machines, prefix)
        made.make()
        yield Site(made, folder)
