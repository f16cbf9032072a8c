"""What only a GPU can show of time, on one of them; ``python -m tests.gpu`` checks numbers there.

python -m recipes.benchmarks.gpu --out runs/gpu
"""

import sys

from recipes.benchmarks.gpu.loops import loops
from recipes.benchmarks.gpu.stages import main, merging, training, versions

STAGES = {"versions": (versions, 60), "merging": (merging, 60), "loops": (loops, 180), "training": (training, 150)}
"""In this order, with seconds."""

if __name__ == "__main__":
    sys.exit(main("recipes.benchmarks.gpu", STAGES))
