"""Run in a copy of the package that an example of docs/extending.md has changed: attention against the oracle."""

import ast
import sys
from typing import Any

import torch
from torch import Tensor

import wallfacer_dt
from wallfacer_dt import TokenOrder, context_mesh, context_parallel_attention, shard_sequence
from wallfacer_dt.testing import RankPool, attention_oracle, worst_error

RING, TEAM, LENGTH = 2, 2, 96


def error(options: dict[str, Any], said: dict[str, Any]) -> float:
    mesh = context_mesh("cpu", ring=RING, team=TEAM)
    order = TokenOrder("head_tail", mesh)
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, LENGTH, 8, dtype=torch.float64) for _ in range(4)]
    want = attention_oracle(*whole, **{name: MASKS.get(value, value) for name, value in said.items()})
    q, k, v, grad_out = (shard_sequence(x, order, dim=2).requires_grad_() for x in whole)
    out = context_parallel_attention(q, k, v, mesh, order=order, **options)
    got = (out, *torch.autograd.grad(out, (q, k, v), grad_out))
    return worst_error(zip(got, (shard_sequence(x, order, dim=2) for x in want), strict=True))


def of_20(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q // 20 == k // 20)


MASKS = {"of_20": of_20}

if __name__ == "__main__":
    print(wallfacer_dt.__file__)
    pool = RankPool(RING * TEAM, threads=True)
    try:
        print(max(pool.run(error, *map(ast.literal_eval, sys.argv[1:]))))
    finally:
        pool.close()
