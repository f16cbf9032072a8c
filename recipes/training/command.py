"""Dataclasses of options as a command line, and how a recipe refuses."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, get_type_hints

import typer
from typer.models import OptionInfo

from recipes.training.settings import Launch, RecipeError


def new_app(help_text: str) -> typer.Typer:
    """A command line without completion, whose help is plain text."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, help=help_text)


def as_command(
    function: Callable[..., int | None],
    *parts: type,
    without: Collection[str] = (),
    **defaults: Any,
) -> Callable[..., int | None]:
    """A function of dataclasses as a command that has an option for each of their fields.

    Args:
        function: called with one of each of `parts`; its docstring is the command's help.
        *parts: dataclasses whose fields are annotated with `typer.Option`.
        without: fields that are no options, and keep their default.
        **defaults: of fields that have none, or another one here.
    """
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, Parameter.empty if field.default is MISSING else field.default),
            annotation=get_type_hints(part, include_extras=True)[field.name],
        )
        for part in parts
        for field in fields(part)
        if field.name not in without
    ]

    def command(**options: Any) -> int | None:
        return function(*(part(**_own(part, options)) for part in parts))

    command.__doc__ = function.__doc__
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
            is_path = field.name in ("text", "model", "tokenizer") and Path(value).exists()
            yield f"--{field.name.replace('_', '-')}={Path(value).resolve() if is_path else value}"


def _flag(hint: Any, value: bool) -> Iterator[str]:
    (option,) = (each for each in hint.__metadata__ if isinstance(each, OptionInfo))
    # The first of its arguments, which typer takes for a name where it is annotated with it.
    on, _, off = str(option.default).partition("/")
    yield from filter(None, [on if value else off])


def run(app: typer.Typer, name: str, arguments: Sequence[str]) -> int:
    """Run a recipe's command line, of which options without a command mean `train`.

    Returns:
        The exit status, 2 for anything the caller must change.
    """
    commandless = not arguments or (arguments[0].startswith("-") and arguments[0] != "--help")
    arguments = ["train", *arguments] if commandless else list(arguments)
    try:
        status = app(arguments, prog_name=name, standalone_mode=False)
    except RecipeError as error:
        return _refuse(name, str(error))
    except typer.TyperException as error:
        return _refuse(name, error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def _refuse(name: str, message: str) -> int:
    # One rank of a machine speaks for all. torchrun stops every rank once one has gone, so the
    # others wait for the one that speaks.
    if Launch.from_environment().local_rank == 0:
        print(f"{name}: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(10)
    return 2
