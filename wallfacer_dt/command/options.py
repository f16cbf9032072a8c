"""What the user got wrong: one line that names the option."""

from collections.abc import Iterator
from contextlib import contextmanager


class OptionError(ValueError):
    """Something the caller must change: shown as one line, exit status 2, never as a traceback."""


class NodeError(OptionError):
    """The same, where not all nodes may have it: the first rank of each that has says so."""


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Say of a ValueError which option it is about.

    >>> with naming("--inter"):
    ...     raise ValueError("must be a rate like 12.5GB/s or 200Mbit/s, got '12'")
    Traceback (most recent call last):
    wallfacer_dt.command.options.OptionError: --inter must be a rate like 12.5GB/s or 200Mbit/s, got '12'
    """
    try:
        yield
    except OptionError:
        raise
    except ValueError as error:
        message = str(error)
        raise OptionError(f"{option}{' ' if message.startswith('must ') else ': '}{message}") from error


def check_least(option: str, value: int, least: int = 1) -> None:
    """Refuse (OptionError) a number below the least."""
    if value < least:
        raise OptionError(f"{option} must be at least {least}, got {value}")
