"""What only a GPU can show of time, on one of them; ``python -m tests.gpu`` checks numbers there.

python -m recipes.benchmarks.gpu --out runs/gpu
"""

import sys

from recipes.benchmarks.gpu.loops import loops
from recipes.benchmarks.gpu.stages import main

STAGES = {"loops": (loops, 240)}
"""With seconds, after 30 of versions."""

if __name__ == "__main__":
    sys.exit(main("recipes.benchmarks.gpu", STAGES))
