"""Benchmarks: contenders in one alternating run, medians and spread, hardware and commit."""
