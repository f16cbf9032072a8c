"""Which versions of torch and of packages of models were run, what becomes of others, and what differs in a plan.

pip holds to the same ranges, which pyproject.toml has; an environment may have other versions all the same.
Torch's is looked at where this is imported.
"""

import re
import warnings

import torch

_RUN = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 19), (5, 24)), "diffusers": ((0, 41), (0, 42))}


def check_version(package: str, version: str) -> None:
    """Refuse (ImportError) a version before the first that was run, and warn of one after the last."""
    first, last = _RUN[package]
    found = _release(version)
    if first <= found <= last:
        return
    run = " to ".join(".".join(map(str, some)) for some in (first, last))
    if found < first:
        raise ImportError(f"wallfacer_dt runs on {package} {run}, got {version}: install one of these")
    warnings.warn(
        f"{package} {version} is newer than those that wallfacer_dt was run on ({run}), and may have changed what it "
        "relies on: install one of these, or compare with one process (check_model) before you train",
        stacklevel=2,
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


check_version("torch", torch.__version__)

PIPELINES_KEEP_BUFFERS = _release(torch.__version__) < (2, 15)
"""Whether ``torch.distributed.pipelining`` has tensors for what comes of all microbatches of a step.

It was so on torch 2.11.0, 2.13.0 and, by its sources, 2.14.1; 2.15.0 makes each when it is due.
"""
