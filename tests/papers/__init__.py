"""What the papers print, and what this package's calls receive and hold: tables of docs/benchmarks that need no run."""

from recipes.benchmarks.report import Table


def assert_shown(table: Table, page: str) -> None:
    """That a page has this very table under its title; the message is what should stand there."""
    shown = page.partition(f"## {table.title}\n")[2].partition("\n## ")[0]
    _, head, rows = table.markdown().partition("|")
    assert head + rows in shown, f"this should be in the page:\n\n{table.markdown()}"
