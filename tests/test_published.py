"""What others have measured, as docs/benchmarks/published.md has it beside what the planner says."""

from pathlib import Path

import pytest

from tests.published import FILE, models, runs, table
from wallfacer_dt.planning.gpus import GPUS

PAGE = (FILE.parent / "published.md").read_text()


def test_the_table_is_what_the_planner_says() -> None:
    lines = table()
    assert "\n".join(lines) in PAGE
    assert len(lines) == 62


def test_what_is_said_in_short_is_the_tables() -> None:
    shares = sorted(float(line.split("|")[-2]) for line in table()[2:])  # no comparison: texts
    assert [sum(abs(share - 1) <= part for share in shares) for part in (0.15, 0.25)] == [36, 50]  # no comparison: told
    assert shares[29:31] == pytest.approx([0.9, 0.9], abs=0.011)
    assert "36 of 60 predictions are within 15%, 50 within 25%. The median of predicted / measured is 0.90" in PAGE


def test_rates_said_to_be_published_are_on_the_page() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line[:2] == "| "]
    found = {tuple(row[:4]) for row in rows}
    for name, gpu in GPUS.items():
        told = {("products", gpu.linear, None)} if gpu.linear_source == "published" else set()
        told |= {
            (f"{kernel} {dim}", rates.forward, rates.backward)
            for kernel, dims in gpu.attention.items()
            for dim, rates in dims.items()
            if rates.source == "published"
        }
        for what, forward, backward in told:
            numbers = f"{forward / 1e12:g}", f"{backward / 1e12:g}" if backward else ""
            known = {row for row in found if row[0] == what and row[2:] == numbers}
            assert any(name.upper() in row[1].split(", ") for row in known), (name, what)


def test_every_row_has_a_source_and_a_model() -> None:
    text = Path(FILE).read_text()
    for run in runs():
        assert run.model in models()
        assert f'"{run.source}": [' in text
        assert f"| {run.source} |" in PAGE
