"""A table once, for the terminal and for Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class Table:
    """Cells by row; the first column is text, the others are numbers.

    Attributes:
        title: of the table.
        head: of its columns.
        rows: as many cells each.
        note: what stands under the title.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        """As Markdown."""
        lines = [f"## {self.title}", "", *([self.note, ""] if self.note else [])]
        lines += [_line(self.head), _line(["---"] + ["---:"] * (len(self.head) - 1)), *map(_line, self.rows)]
        return "\n".join(lines)

    def rich(self) -> RichTable:
        """For the terminal."""
        table = RichTable(title=self.title, title_justify="left")
        for place, heading in enumerate(self.head):
            table.add_column(heading, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
