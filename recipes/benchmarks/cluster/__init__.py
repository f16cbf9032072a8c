"""An emulated cluster on one Linux machine, and every way to share a sequence measured on it.

A node is a network namespace; its link is rate-limited in both directions. The ranks of all nodes start once and serve
every case.
"""
