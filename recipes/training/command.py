"""Dataclasses of options as a command line, and how a recipe refuses."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Protocol, get_type_hints

import typer
from typer.models import OptionInfo

from recipes.training.metrics import check_tensorboard
from recipes.training.record import make_folders
from recipes.training.settings import (
    DEMO_WITHOUT,
    KEYWORDS,
    PATHS,
    Demo,
    Launch,
    LostError,
    Output,
    RecipeError,
    Saving,
    check_restarts,
    check_saving,
)


def as_command(
    function: Callable[..., int | None],
    *parts: type,
    without: Collection[str] = (),
    **defaults: Any,
) -> Callable[..., int | None]:
    """A function of dataclasses as a command that has an option for each of their fields.

    Args:
        function: called with one of each of `parts`.
        *parts: dataclasses whose fields are annotated with `typer.Option`.
        without: fields that are no options, and keep their default.
        **defaults: of fields that have none, or another one here.
    """
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, Parameter.empty if field.default is MISSING else field.default),
            annotation=hints[field.name],
        )
        for part in parts
        for hints in [get_type_hints(part, include_extras=True)]
        for field in fields(part)
        if field.name not in without
    ]

    def command(**options: Any) -> int | None:
        return function(*(part(**_own(part, options)) for part in parts))

    # What typer reads.
    command.__signature__ = Signature(parameters)  # pyrefly: ignore[missing-attribute]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _own(part: type, options: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: options[field.name] for field in fields(part) if field.name in options}


def spelled(settings: Any) -> Iterator[str]:
    """A dataclass of options as the command line spells it, paths absolute."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, bool):
            yield from _flag(hints[field.name], value)
        elif value is not None:
            # What exists is a path, which the run need not see from the same folder.
            is_path = field.name in PATHS and value != KEYWORDS.get(field.name) and Path(value).exists()
            yield f"--{field.name.replace('_', '-')}={Path(value).resolve() if is_path else value}"


def _flag(hint: Any, value: bool) -> Iterator[str]:
    (option,) = (each for each in hint.__metadata__ if isinstance(each, OptionInfo))
    # The first of its arguments, which typer takes for a name where it is annotated with it.
    on, _, off = str(option.default).partition("/")
    yield from filter(None, [on if value else off])


class Data(Protocol):
    """What a recipe trains on: where it came from, and numbers by which ranks see that they found the same."""

    @property
    def source(self) -> str:
        """In words."""
        ...

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """The same on every rank, and after a restart."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe's command line: `train` (also what options without a command mean) and `demo`.

    Its package has `train.train(settings, ranks, data, saving, output)`, which returns the record that every rank has,
    and `demo.demo(settings, options)`, which returns the exit status. They are imported when they are called.

    Attributes:
        name: of its package.
        settings: the dataclass of its options.
        what: it does, in a sentence.
        example: of options of `train`, on 8 ranks.
        out: folders of a run and of a demo.
        compared: what `demo` compares, in a sentence.
        load: the data of a run, after every check that needs no other rank. Quick to import.
    """

    name: str
    settings: type[Any]
    what: str
    example: str
    out: tuple[Path, Path]
    compared: str
    load: Callable[[Any, Launch], Data]

    def main(self, arguments: Sequence[str]) -> int:
        """Run the command line.

        Returns:
            The exit status: 2 for anything the caller must change, 1 after any other error.
        """
        commandless = not arguments or (arguments[0].startswith("-") and arguments[0] != "--help")
        arguments = ["train", *arguments] if commandless else list(arguments)
        try:
            status = self._app()(arguments, prog_name=self.name, standalone_mode=False)
        except RecipeError as error:
            return _refuse(self.name, str(error))
        except typer.TyperException as error:
            return _refuse(self.name, error.format_message())
        except (typer.Abort, KeyboardInterrupt):
            return 130
        except LostError as error:
            # Each rank for itself: the one that speaks for its machine may be the one that is lost.
            print(f"{self.name}: {error}", file=sys.stderr, flush=True)
            return 1
        except Exception:  # at once, or what ranks write would be mixed line by line
            sys.stderr.write(traceback.format_exc())
            sys.stderr.flush()
            return 1
        return status if isinstance(status, int) else 0

    def _app(self) -> typer.Typer:
        app = typer.Typer(add_completion=False, rich_markup_mode=None, help=self.what)
        train, demo = (
            as_command(self._train, self.settings, Saving, Output, without=["failures"], out=self.out[0]),
            as_command(self._demo, self.settings, Demo, without=DEMO_WITHOUT, out=self.out[1]),
        )
        example = f"torchrun --nproc-per-node 8 -m recipes.{self.name} train {self.example}"
        where = "Train on the ranks that torchrun started, or on this process alone."
        app.command("train", help=f"{where}\n\n\b\n{example}")(train)
        app.command("demo", help=self.compared)(demo)
        return app

    def _train(self, settings: Any, saving: Saving, output: Output) -> None:
        launch = Launch.from_environment()
        # Before the imports below, which take seconds: what is plainly wrong should be said at once.
        data = self.load(settings, launch)
        check_restarts()
        check_saving(saving)
        check_tensorboard(output)
        make_folders(output.out, saving.checkpoint, launch)
        from recipes.training.ranks import join_ranks, leave_ranks, load_alike
        from recipes.training.report import print_run
        from wallfacer_dt import WaitError

        try:
            ranks = join_ranks(settings, saving, launch)
            # Ranks may have found other data, such as the libraries of different Pythons.
            load_alike(lambda: (None, data.fingerprint), launch, data.source)
            train = importlib.import_module(f"recipes.{self.name}.train").train
            run = train(settings, ranks, data, saving, output)
        except WaitError as error:
            where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
            raise LostError(f"{where}{error}") from error
        # Not in a `finally`: after an error on one rank, waiting for the others' groups could hang.
        leave_ranks()
        if launch.rank == 0:
            print_run(run)
        if output.failures:
            raise RecipeError("; ".join(dict.fromkeys(output.failures)))

    def _demo(self, settings: Any, options: Demo) -> int:
        # Runs are compared to 1e-4, on GPUs too.
        demo = importlib.import_module(f"recipes.{self.name}.demo").demo
        return demo(replace(settings, dtype="float32"), options)


_PATIENCE = 10.0  # seconds


def _refuse(name: str, message: str) -> int:
    # One rank of a machine speaks for all. torchrun stops every rank once one has gone, so the
    # others wait for the one that speaks; if that goes on, it knows of nothing, or is lost.
    if Launch.from_environment().local_rank > 0:
        time.sleep(_PATIENCE)
    print(f"{name}: {message}", file=sys.stderr, flush=True)
    return 2
