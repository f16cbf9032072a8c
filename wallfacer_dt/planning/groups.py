"""What collectives of one axis of a mesh put on links: ranks that are a stride apart, on nodes of neighbouring ranks.

Attention's transfers are read off its schedules (``traffic``). Gathers here, what is made of them, and broadcasts go
round a ring in which every rank hands on what its neighbour gave it, as NCCL's do.
"""

from dataclasses import dataclass

from wallfacer_dt.planning.traffic import Wire


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of an axis; every rank of the cluster is in one such group, and all of them communicate at once.

    Attributes:
        size: ranks of a group.
        stride: from one rank to the next of its group.
        per_node: neighbouring ranks of a node.
    """

    size: int
    stride: int
    per_node: int

    @property
    def is_aligned(self) -> bool:
        """Whether all nodes see equally much of the groups."""
        if self.size == 1 or self.stride >= self.per_node:
            return True
        fitting, rest = divmod(self.per_node, self.stride)
        return rest == 0 and (fitting % self.size == 0 or self.size % fitting == 0)

    @property
    def members(self) -> int:
        """Of one group in one node."""
        return min(self.size, max(1, self.per_node // self.stride))

    @property
    def siblings(self) -> int:
        """Groups of which a node's link carries the transfers at once; of groups within a node none are."""
        return self.per_node // self.members

    def gather(self, part: int, *, is_striped: bool = True) -> Wire:
        """An all-gather to which every rank gives ``part`` bytes; or a reduce-scatter in which it keeps as many.

        Both go round a ring in ``size - 1`` steps, and bring a rank ``(size - 1) part`` bytes (Thakur, Rabenseifner,
        Gropp 2005, section 4.1).

        Args:
            part: bytes.
            is_striped: over the interfaces of all members in a node, see :class:`Cluster`.

        Returns:
            The transfer.
        """
        return self._round(self.size - 1, part, is_striped)

    def all_reduce(self, nbytes: int, *, is_striped: bool = True) -> Wire:
        """An all-reduce of ``nbytes`` on every rank: a reduce-scatter, then an all-gather (the same, section 4.5)."""
        return self._round(2 * (self.size - 1), -(-nbytes // self.size), is_striped)

    def broadcast(self, nbytes: int, *, is_striped: bool = True) -> Wire:
        """``nbytes`` from one rank to all others, which hand them on as they come, so that each is received once.

        Args:
            nbytes: of what is sent.
            is_striped: over the interfaces of all members in a node, see :class:`Cluster`.

        Returns:
            The transfer; its latencies are those of the whole way round, to the last rank.
        """
        if self.size == 1:
            return Wire()
        nodes = self.size // self.members
        near, crosses = self.members > 1, nodes > 1
        entering = -(-nbytes // self.members) if is_striped else nbytes
        return Wire(
            nbytes, nodes * (self.members - 1), near * nbytes,
            nodes - 1, crosses * entering, crosses * nbytes * self.siblings,
        )  # fmt: skip

    def exchange(self, part: int) -> Wire:
        """An all-to-all in which every rank sends ``part`` bytes to every other."""
        return self._at_once(part, self.members)

    def collect(self, part: int) -> Wire:
        """Every rank sends ``part`` bytes to one of them."""
        return self._at_once(part, 1)

    def _at_once(self, part: int, receivers: int) -> Wire:
        """``part`` bytes from every rank, to so many of a node."""
        within, others = (self.members - 1) * part, (self.size - self.members) * part
        return Wire(
            within + others, int(within > 0), within, int(others > 0), others, receivers * others * self.siblings
        )

    def send(self, nbytes: int) -> Wire:
        """A message of ``nbytes`` from every rank to the next of its group, but for the last, as in a pipeline."""
        if self.size == 1:
            return Wire()
        crosses = self.size > self.members
        # Of several in a node only the first is sent something by another node.
        entering = min(self.stride, self.per_node) * nbytes
        near = self.members > 1
        return Wire(nbytes, int(near), near * nbytes, int(crosses), crosses * nbytes, crosses * entering)

    def _round(self, steps: int, part: int, is_striped: bool) -> Wire:
        sent = steps * part
        near, crosses = self.members > 1, self.size > self.members
        entering = steps * -(-part // self.members) if is_striped else sent
        return Wire(
            sent, near * steps, near * sent, crosses * steps, crosses * entering, crosses * sent * self.siblings
        )
