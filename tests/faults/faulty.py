"""A recipe in which one rank has a fault at one step, in the first of a launcher's attempts.

torchrun ... -m tests.faults.faulty RECIPE FAULT RANK STEP FOLDER OPTIONS...

The fault leaves the time at which it came in `FOLDER/struck`.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from recipes.training.trainer import Trainer
from wallfacer_dt.agreement import agree

Act = Callable[[], None]


def _layer(model: nn.Module) -> nn.Module:
    """The second of a model's layers."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))[1]


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def in_forward(trainer: Trainer, act: Act) -> None:
    _layer(trainer.model).register_forward_pre_hook(lambda *_: act())


def in_backward(trainer: Trainer, act: Act) -> None:
    def forward(_module: nn.Module, _args: Any, output: Any) -> None:
        if _tensor(output).requires_grad:
            _tensor(output).register_hook(lambda _: act())

    _layer(trainer.model).register_forward_hook(forward)


def in_optimizer(trainer: Trainer, act: Act) -> None:
    trainer.optimizer.register_step_pre_hook(lambda *_: act())


def in_save(_: Trainer, act: Act) -> None:
    plain = dcp.FileSystemWriter.write_data

    def write_data(self: Any, *args: Any) -> Any:
        act()
        return plain(self, *args)

    dcp.FileSystemWriter.write_data = write_data


def in_activations(trainer: Trainer, act: Act) -> None:
    def forward(_module: nn.Module, _args: Any, output: Any) -> Any:
        act()
        odd = _tensor(output) * float("nan")
        return odd if isinstance(output, Tensor) else (odd, *output[1:])

    _layer(trainer.model).register_forward_hook(forward)


def in_gradients(trainer: Trainer, act: Act) -> None:
    def backward(grad: Tensor) -> Tensor:
        act()
        return grad * float("nan")

    def forward(_module: nn.Module, _args: Any, output: Any) -> None:
        if _tensor(output).requires_grad:
            _tensor(output).register_hook(backward)

    _layer(trainer.model).register_forward_hook(forward)


def at_once(_: Trainer, act: Act) -> None:
    act()


def kill(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(_: Path) -> None:
    raise ValueError("a bug of this rank's alone")


def leave(_: Path) -> None:
    sys.exit(0)


def nothing(_: Path) -> None:
    pass


def fill(folder: Path) -> None:
    """The disk of checkpoints, as another program might."""
    with suppress(OSError), _ballast(folder).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _ballast(folder: Path) -> Path:
    return folder / "kept" / "ballast"


FAULTS: dict[str, tuple[Callable[[Trainer, Act], None], Callable[[Path], None]]] = {
    "killed in the forward": (in_forward, kill),
    "killed in the backward": (in_backward, kill),
    "killed in the optimizer": (in_optimizer, kill),
    "killed in a save": (in_save, kill),
    "stopped in a save": (in_save, stop),
    "stopped in the forward": (in_forward, stop),
    "stopped in the backward": (in_backward, stop),
    "raises in the forward": (in_forward, fail),
    "leaves the loop": (at_once, leave),
    "NaN in activations": (in_activations, nothing),
    "NaN in gradients": (in_gradients, nothing),
    "the disk fills up": (at_once, fill),
    # Others come from outside: the step is where they begin.
    "begins": (at_once, nothing),
}


# Options of a rank that is odd from the beginning.
FROM_THE_START: dict[str, tuple[str, ...]] = {"another version": (), "other options": ("--lr=0.01",)}


def _inject(fault: str, step: int, folder: Path) -> None:
    """Have this rank's step have the fault."""
    install, act = FAULTS[fault]
    plain, struck = Trainer.step, folder / "struck"

    def strike() -> None:
        if not struck.exists():
            struck.write_text(str(time.time()))
        act(folder)

    def stepping(self: Trainer, number: int, batch: Any) -> tuple[float, float]:
        if number + 1 == step:
            install(self, strike)
        return plain(self, number, batch)

    Trainer.step = stepping


def main(recipe: str, fault: str, rank: str, step: str, folder: str, *options: str) -> int:
    """The recipe's command line on this rank; returns its exit status."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        _ballast(Path(folder)).unlink(missing_ok=True)
    elif os.environ["RANK"] == rank:
        if fault in FROM_THE_START:
            Path(folder, "struck").write_text(str(time.time()))
            options = (*options, *FROM_THE_START[fault])
            if fault == "another version":
                agree._VERSIONS = "2.13.0, another"
        elif fault != "none":
            _inject(fault, int(step), Path(folder))
    return importlib.import_module(f"recipes.{recipe}.__main__").main(options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
