"""The console script ``wallfacer``: its commands, and what is said of anything the user gets wrong."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from wallfacer_dt.command.options import NodeError, OptionError

PROGRAM = "wallfacer"
_MISSING = f"{PROGRAM}: {{}} is not installed, and this command needs it: pip install 'wallfacer-dt[cli]'"
_PATIENCE = 30.0  # seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: after the program's name; None for those of this process.

    Returns:
        The exit status: 2 for anything the caller must change, which is one line on stderr.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        import typer

        app = make_app()
    except ModuleNotFoundError as error:
        return _missing(error)
    try:
        status = app(arguments or ["--help"], prog_name=PROGRAM, standalone_mode=False)
    except OptionError as error:
        return _refuse(app, arguments, str(error), by="LOCAL_RANK" if isinstance(error, NodeError) else "RANK")
    except typer.TyperException as error:
        return _refuse(app, arguments, _message(error))
    except ModuleNotFoundError as error:
        return _missing(error)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def make_app() -> Any:
    """The typer app with all commands."""
    import typer

    from wallfacer_dt.command.explain.command import explain
    from wallfacer_dt.command.planning.plan import plan
    from wallfacer_dt.command.planning.profile import profile

    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Context-parallel attention: which way to share a sequence is fastest, and who sends what to whom.",
    )
    for command in (plan, profile, explain):
        app.command()(command)
    return app


def _message(error: Any) -> str:
    """One line that names the option, if typer knows which it is."""
    options, message = getattr(getattr(error, "param", None), "opts", ()), str(getattr(error, "message", ""))
    message = message.removeprefix("Value error, ")  # pydantic's, for typer's own
    text = f"{options[0]}: {message}" if options and message else error.format_message()
    return " ".join(text.split()).rstrip(".")


def _refuse(app: Any, arguments: Sequence[str], message: str, by: str = "RANK") -> int:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    command = next((f" {argument}" for argument in arguments if argument in names), "")
    is_of_all = command not in (" plan", " explain")  # which a process may run by itself, whatever torchrun told it
    if is_of_all and "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(by) != "0":
        # All ranks have the same arguments, and the first says what is wrong with them, or the first of its node what
        # is wrong there. torchrun ends all when one ends, which must not be before that.
        time.sleep(_PATIENCE)
    else:
        print(f"{PROGRAM}{command}: {message}", file=sys.stderr)
    return 2


def _missing(error: ModuleNotFoundError) -> int:
    if (error.name or "").split(".")[0] not in ("typer", "rich", "matplotlib"):
        raise error
    print(_MISSING.format(error.name), file=sys.stderr)
    return 2
