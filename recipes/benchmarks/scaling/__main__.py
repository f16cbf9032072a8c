"""Predict attention on 8 to 1024 ranks, and write the report (minutes).

python -m recipes.benchmarks.scaling
"""

from collections.abc import Iterator
from pathlib import Path

import typer

from recipes.benchmarks.report import Table, write
from recipes.benchmarks.scaling.cases import HEADS
from recipes.benchmarks.scaling.tables import forward_table, picture, ways_table


def main(page: Path = Path("docs/benchmarks/scaling.md")) -> None:
    """Write what is found into the page, and pictures beside it."""
    write(page, "recipes.benchmarks.scaling", _parts(page.parent))


def _parts(folder: Path) -> Iterator[Table | str]:
    for weak, name in ((False, "strong"), (True, "weak")):
        yield from (ways_table(heads, weak=weak) for heads in HEADS)
        yield picture(folder / f"scaling_{name}.png", weak=weak)
    yield forward_table()


if __name__ == "__main__":
    typer.run(main)
