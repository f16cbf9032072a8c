"""Starting the nodes and their ranks, and asking them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.benchmarks.cluster.cases import Nodes
from recipes.benchmarks.cluster.network import PREFIX, ClusterError, Network, folder_of, remove
from recipes.benchmarks.cluster.watcher import environment, watched


@dataclass(frozen=True)
class Cluster:
    """Ranks that run and wait; see :func:`started`.

    Attributes:
        nodes: how many nodes and ranks.
        network: its links.
        first: the process of node 0, which reads commands and writes answers.
    """

    nodes: Nodes
    network: Network
    first: subprocess.Popen[str]

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Have all ranks do something together.

        Args:
            do: the command, one of ``Rank.do``'s.
            **fields: what it needs; plain data.

        Returns:
            What rank 0 answers, or nothing.

        Raises:
            ClusterError: ranks have ended.
        """
        assert self.first.stdin is not None
        try:
            print(json.dumps({"do": do, **fields}), file=self.first.stdin, flush=True)
        except BrokenPipeError:
            raise ClusterError(f"the ranks ended before {do!r}; what they said is above") from None
        return self.answer(do)

    def answer(self, do: str) -> dict[str, Any]:
        """Read one answer."""
        assert self.first.stdout is not None
        line = self.first.stdout.readline()
        if not line:
            raise ClusterError(f"the ranks ended during {do!r}; what they said is above")
        return json.loads(line) or {}

    def end(self) -> None:
        """Have all ranks end."""
        assert self.first.stdin is not None
        self.first.stdin.close()


@contextmanager
def started(nodes: Nodes, prefix: str = PREFIX) -> Iterator[Cluster]:
    """Make the network and start the ranks; at the end, or however this process ends, all is removed.

    Args:
        nodes: how many nodes and ranks.
        prefix: of all names.

    Raises:
        ClusterError: this machine cannot have a cluster, or has one, or the ranks did not start.
    """
    with watched(prefix):
        remove(prefix)
        folder = folder_of(prefix)
        folder.mkdir(mode=0o700)
        network = Network(nodes.nodes, prefix)
        network.make()
        processes = [_node(network, nodes, node, folder / "store") for node in range(nodes.nodes)]
        cluster = Cluster(nodes, network, processes[0])
        cluster.answer("start")
        yield cluster
        # Told to end, ranks do not complain of each other. On any other way out of here they are killed.
        cluster.end()
        for process in processes:
            process.wait()


def _node(network: Network, nodes: Nodes, node: int, store: Path) -> subprocess.Popen[str]:
    settings = {"node": node, "nodes": nodes.nodes, "per_node": nodes.per_node, "store": str(store)}
    pipe = subprocess.PIPE if node == 0 else subprocess.DEVNULL
    inside = ["ip", "netns", "exec", network.namespace(node)]
    return subprocess.Popen(
        [*inside, sys.executable, "-m", "recipes.benchmarks.cluster.ranks", json.dumps(settings)],
        stdin=pipe, stdout=pipe, text=True, env=environment() | {"GLOO_SOCKET_IFNAME": network.interface(node)},
    )  # fmt: skip
