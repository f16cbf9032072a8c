"""The report's sections: tables, and the pictures that stand before them."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.benchmarks.memory.tables import Table
from recipes.benchmarks.papers import (
    equations,
    figure1,
    figure7,
    mapping,
    peak,
    ring_table1,
    ring_table2,
    ring_table3,
    scaling_figures,
    table4,
)
from recipes.benchmarks.papers.picture import draw_figure_1, draw_lengths
from recipes.benchmarks.papers.picture_mapping import draw_figure_5, draw_figure_6
from recipes.benchmarks.papers.picture_predicted import draw_figure_7, draw_scaling


@dataclass(frozen=True, slots=True)
class Section:
    """A table and its picture.

    Attributes:
        table: with its note.
        picture: name of a file beside the report, or nothing.
        caption: of the picture.
    """

    table: Table
    picture: str = ""
    caption: str = ""

    def markdown(self) -> str:
        """The table's Markdown, its picture after it."""
        text = replace(self.table, note=textwrap.fill(self.table.note, 120)).markdown()
        return f"{text}\n\n![{self.caption}]({self.picture})" if self.picture else text


def sections(folder: Path) -> Iterator[Section]:
    """Make every table, and write the pictures.

    Args:
        folder: of the pictures.

    Yields:
        Sections in the order of the papers.
    """
    yield Section(equations.example_table())
    yield Section(equations.ring_table())
    yield Section(equations.team_table())
    yield Section(peak.table())
    draw_figure_1(folder / "papers_figure1.png", figure1.points())
    yield Section(figure1.table(), "papers_figure1.png", "Volume and what is saved, by sequence length")
    draw_figure_5(folder / "papers_figure5.png", mapping.holdings())
    yield Section(mapping.figure_5(), "papers_figure5.png", "Who holds what before and after initialisation")
    loaders = [
        (name, mapping.chunks(order), mapping.causal_work(order))
        for name, order in (("naive", "contiguous"), ("zigzag", "head_tail"))
    ]
    draw_figure_6(folder / "papers_figure6.png", loaders)
    yield Section(mapping.figure_6(), "papers_figure6.png", "Chunks and causal work by rank")
    yield Section(mapping.figure_6_by_ranks())
    yield Section(table4.table())
    draw_figure_7(folder / "papers_figure7.png")
    yield Section(figure7.table(), "papers_figure7.png", "Improvements over the ring, predicted, and the paper's")
    scaling = [(f"figure {9 + weak}", scaling_figures.curves(weak=weak)) for weak in (False, True)]
    draw_scaling(folder / "papers_figures_9_10.png", scaling)
    caption = "Strong and weak scaling, predicted, and the paper's improvements"
    yield Section(scaling_figures.table(weak=False), "papers_figures_9_10.png", caption)
    yield Section(scaling_figures.table(weak=True))
    yield Section(ring_table1.table())
    yield Section(ring_table2.table())
    draw_lengths(folder / "papers_lengths.png", _lengths())
    yield Section(ring_table3.table(), "papers_lengths.png", "Longest sequences, the papers' and ours")


def _lengths() -> list[tuple[str, list[tuple[str, float, float]]]]:
    def number(cell: str) -> float:
        return float(cell.replace(",", ""))

    wall = [(row[0], number(row[1]), number(row[9])) for row in table4.table().rows]
    ring = [(row[0], number(row[13]), number(row[14])) for row in ring_table3.table().rows]
    return [("WallFacer, table 4, with logits", wall), ("Ring Attention, table 3, Ring Attention", ring)]
