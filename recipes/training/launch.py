"""Starting ranks on this machine with torch's launcher, without the tracebacks torchrun ends in.

python -m recipes.training.launch RECIPE RANKS OPTIONS...
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(recipe: str, ranks: int, options: Sequence[str]) -> int:
    """Train by `recipe`, such as "train_bytes", on `ranks` processes that find each other over the loopback.

    Returns:
        Exit status: 0, 1 after a rank failed (the others are stopped), 130 after a signal.
    """
    # It would announce each process it stops, and the signal that made it.
    logging.disable(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        # Port 0: any that is free.
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", f"recipes.{recipe}", "train", *options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"{recipe}: rank {rank} ended with status {failure.exitcode}", file=sys.stderr)
        return 1
    except SignalException:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
