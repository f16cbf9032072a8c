"""How large what is sent is: elements and bytes by what it is, as the executor packs it."""

from collections.abc import Sequence
from dataclasses import dataclass

from wallfacer_dt.algorithms import Heads, Side
from wallfacer_dt.command.explain.facts import Message
from wallfacer_dt.command.explain.settings import DTYPES, Settings
from wallfacer_dt.kernels import accumulation_dtype


@dataclass(frozen=True, slots=True)
class Content:
    """Tensors of one side.

    Attributes:
        side: whose heads and rows they have.
        names: for the reader.
        narrow: elements of a row of a head in the inputs' dtype.
        wide: likewise in the accumulation dtype.
    """

    side: Side
    names: str
    narrow: int
    wide: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one call sends.

    Attributes:
        settings: of the call.
    """

    settings: Settings

    def data(self, side: Side) -> Content:
        """What is gathered, and moves."""
        H = self.settings.head_dim
        if side == "kv":
            return Content("kv", "k, v", 2 * H)
        return Content("q", "q, dO, lse, delta", 2 * H, 2) if self.settings.backward else Content("q", "q", H)

    def result(self, side: Side) -> Content:
        """What was computed for rows, as it goes to their owner once."""
        H = self.settings.head_dim
        if not self.settings.backward:
            return Content("q", "out, lse", H, 1)
        return Content("q", "dq", H) if side == "q" else Content("kv", "dk, dv", 2 * H)

    def carried(self, side: Side) -> Content:
        """The same as it is carried along and added to."""
        once = self.result(side)
        return Content(side, once.names, 0, once.narrow + once.wide)

    def results(self) -> tuple[Content, ...]:
        """What Ulysses brings back."""
        return (self.result("q"), self.result("kv")) if self.settings.backward else (self.result("q"),)

    def message(self, rank: int, parts: Sequence[tuple[Content, int]], heads: Heads) -> Message:
        """Some contents, of so many rows each, of some heads."""
        dtype = DTYPES[self.settings.dtype]
        elements = bytes_ = 0
        for content, rows in parts:
            start, stop = heads.q if content.side == "q" else heads.kv
            count = self.settings.batch * (stop - start) * rows
            elements += count * (content.narrow + content.wide)
            bytes_ += count * (content.narrow * dtype.itemsize + content.wide * accumulation_dtype(dtype).itemsize)
        return Message(rank, elements, bytes_)
