"""The command line: torchtitan's own, on CPUs too, with `--module recipes.torchtitan` understood."""

import sys

from recipes.torchtitan.shim import fit_to_cpu, fit_to_torch


def main() -> None:
    """Train with the arguments of the command line, as `torchtitan.train` does."""
    # Before any other import of torchtitan: its modules copy what is put right here.
    fit_to_torch()
    fit_to_cpu()
    from torchtitan.train import main as train

    if not any(argument.partition("=")[0] == "--module" for argument in sys.argv):
        sys.argv[1:1] = ["--module", "recipes.torchtitan"]
    train()


if __name__ == "__main__":
    main()
