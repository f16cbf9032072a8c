"""Check numbers on one GPU; ``python -m recipes.benchmarks.gpu`` measures time there.

python -m tests.gpu --out runs/gpu
"""

import sys

from recipes.benchmarks.gpu.stages import main
from tests.gpu.calls import nccl, ranks, training, waiting
from tests.gpu.host import host
from tests.gpu.kernels import kernels, merging, segments
from tests.gpu.stack import memory

STAGES = {
    "kernels": (kernels, 240), "segments": (segments, 90), "merging": (merging, 60), "ranks": (ranks, 240),
    "waiting": (waiting, 60), "nccl": (nccl, 40), "memory": (memory, 40), "host": (host, 40),
    "training": (training, 90),
}  # fmt: skip
"""In this order, with seconds, after 30 of versions."""

if __name__ == "__main__":
    sys.exit(main("tests.gpu", STAGES))
