"""Faults of recipes under torchrun: `python -m tests.faults` makes the table of docs/faults.md."""
