"""Starting the ranks, and asking them."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from recipes.benchmarks.cluster.cases import Machines
from recipes.benchmarks.cluster.network import PREFIX, STATE, ClusterError, Network, remove
from recipes.benchmarks.cluster.watcher import environment, watched

_PATIENCE = 900.0  # seconds, longer than ranks wait for each other


@dataclass(frozen=True)
class Cluster:
    """Ranks that run and wait; see :func:`started`."""

    network: Network
    process: subprocess.Popen[str]  # from which ranks are forked; the first of them reads commands and writes answers

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Have all ranks do something together, one of ``Rank``'s methods; rank 0's answer, or a ClusterError."""
        assert self.process.stdin is not None
        try:
            print(json.dumps({"do": do, **fields}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise ClusterError(f"the ranks ended before {do!r}; what they said is above") from None
        return self.answer(do)

    def answer(self, do: str) -> dict[str, Any]:
        """Read one answer."""
        assert self.process.stdout is not None
        # A line is written at once, so that nothing of it is read yet.
        ready, _, _ = select.select([self.process.stdout], [], [], _PATIENCE)
        if not ready:
            raise ClusterError(f"the ranks have not answered {do!r} for {_PATIENCE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise ClusterError(f"the ranks ended during {do!r}; what they said is above")
        return json.loads(line)


@contextmanager
def started(machines: Machines, prefix: str = PREFIX) -> Iterator[Cluster]:
    """Make the network and start the ranks; at the end, or however this process ends, all is removed."""
    with watched(prefix):
        remove(prefix)
        folder = STATE / prefix
        folder.mkdir(mode=0o700)
        network = Network(machines, prefix)
        network.make()
        settings = {"machines": asdict(machines), "prefix": prefix, "store": str(folder / "store")}
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes.benchmarks.cluster.ranks", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        cluster = Cluster(network, process)
        try:
            cluster.answer("start")
            yield cluster
            process.communicate(timeout=_PATIENCE)  # told to end, ranks do not complain of each other
        finally:
            process.kill()
            process.wait()
