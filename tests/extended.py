"""Run in a copy of the package that an example of docs/extending.md has changed: attention against the oracle.

Of a schedule, what is received too, which ``attention_volume`` knows without being told.
"""

import ast
import sys
from typing import Any

import torch
from torch import Tensor

import wallfacer_dt
from wallfacer_dt import TokenOrder, attention_volume, context_mesh, context_parallel_attention, shard_sequence
from wallfacer_dt.testing import RankPool, attention_oracle, count_collectives, worst_error

RING, TEAM, LENGTH = 2, 2, 96


def error(options: dict[str, Any], said: dict[str, Any]) -> float:
    mesh = context_mesh("cpu", ring=RING, team=TEAM)
    order = TokenOrder("head_tail", mesh)
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, LENGTH, 8, dtype=torch.float64) for _ in range(4)]
    want = attention_oracle(*whole, **{name: MASKS.get(value, value) for name, value in said.items()})
    q, k, v, grad_out = (shard_sequence(x, order, dim=2).requires_grad_() for x in whole)
    with count_collectives(mesh) as traffic:
        out = context_parallel_attention(q, k, v, mesh, order=order, **options)
        got = (out, *torch.autograd.grad(out, (q, k, v), grad_out))
    if "schedule" in options:
        told = {name: value for name, value in options.items() if name in ("schedule", "rotate")}
        volume = attention_volume(
            RING, TEAM, batch=2, length=LENGTH, heads=4, kv_heads=4, head_dim=8, dtype=torch.float64, **told
        )
        assert traffic.forward.received_bytes == volume.forward.bytes
        assert traffic.backward.received_bytes == volume.backward.bytes
    return worst_error(zip(got, (shard_sequence(x, order, dim=2) for x in want), strict=True))


def of_20(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q // 20 == k // 20)


MASKS = {"of_20": of_20}

if __name__ == "__main__":
    print(wallfacer_dt.__file__)
    pool = RankPool(RING * TEAM, threads=True)
    try:
        for options, said in ast.literal_eval(sys.argv[1]):
            print(max(pool.run(error, options, said)))
    finally:
        pool.close()
