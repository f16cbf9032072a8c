"""Where recipes.benchmarks.cluster imports ``Table`` from."""

from recipes.benchmarks.report import Table

__all__ = ["Table"]
