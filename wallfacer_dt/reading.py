"""Files from disk are data that nobody vouches for: read in bounded memory, as JSON, into dataclasses, or refused.

What is wrong is one short line that begins with the file's path. Nothing that is read can name code, and nothing is
waited for: a pipe is no file. Versions of a format are their readers' matter.
"""

import json
import math
import os
import stat
import types
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

T = TypeVar("T")

_DEEPEST = 32
_INTS = 2**63 - 1
# Beyond them products of a few overflow or vanish; no rate, time or ratio is.
LEAST, MOST = 1e-30, 1e30
_SHOWN = 300
DTYPES = {str(it).removeprefix("torch."): it for it in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}


class FileError(ValueError):
    """A file is not what it should be, or cannot be read: the message goes on from its path, and is cut to a line."""

    def __init__(self, path: str | os.PathLike[str], message: object) -> None:
        said = cut(" ".join(str(message).split()))
        super().__init__(f"{cut(os.fspath(path), 4096)}{'' if said.startswith(':') else ' '}{said}")


def cut(text: str, most: int = _SHOWN) -> str:
    """As much of a text as is shown, without what a terminal takes for commands.

    >>> cut("a" * 50, 10), cut("red: \\x1b[31m")
    ('aaaaaaa...', 'red: \\\\x1b[31m')
    """
    kept = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in kept)


def shown(value: object) -> str:
    """A value in a message."""
    return cut(repr(value), 40)


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file, or of a link to one; refused (FileError) if none, unreadable, empty or too long.

    At most ``most`` and one more are read.
    """
    try:
        # Opening a pipe for reading would wait until somebody writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most + 1) if is_file else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        raise FileError(path, f": {getattr(error, 'strerror', None) or error}") from error
    if not is_file:
        raise FileError(path, "is no file")
    if not content:
        raise FileError(path, "is empty")
    if len(content) > most:
        raise FileError(path, f"has more than {most} bytes")
    return content


def read_json(path: str | os.PathLike[str], most: int) -> dict[str, Any]:
    """The JSON object that a file of at most so many bytes is, or a FileError.

    In it nothing is nested deeper than 32, no key occurs twice, and no number is infinite or NaN.
    """
    return _object(path, read_bytes(path, most))


def read_packed_lines(path: str | os.PathLike[str], most: int) -> list[dict[str, Any]]:
    """The JSON objects, as :func:`read_json` gives one, of the lines of a file compressed by gzip, or a FileError.

    At most so many bytes, compressed or not; the file is not cut short, and has nothing after its end.
    """
    packed = zlib.decompressobj(wbits=31)
    try:
        text = packed.decompress(read_bytes(path, most), most + 1)
    except zlib.error as error:
        raise FileError(path, f"is not compressed by gzip: {error}") from error
    if len(text) > most:
        raise FileError(path, f"has more than {most} bytes when decompressed")
    if not packed.eof:
        raise FileError(path, "is cut short")
    if packed.unused_data:
        raise FileError(path, "has more bytes behind its end")
    lines = text.split(b"\n")
    if lines.pop():
        raise FileError(path, "is cut short: its last line does not end")
    return [_object(path, line, f"line {number} ") for number, line in enumerate(lines, 1)]


def _object(path: str | os.PathLike[str], text: bytes, where: str = "") -> dict[str, Any]:
    try:
        made = json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite)
        _check_depth(made)
    except json.JSONDecodeError as error:
        ends = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        raise FileError(path, f"{where}is no JSON{', and may be cut short' * ends}: {error}") from error
    except UnicodeDecodeError as error:
        raise FileError(path, f"{where}is no JSON: it is no UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise FileError(path, f"{where}is no JSON: {_TOO_DEEP}") from error
    except ValueError as error:
        raise FileError(path, f"{where}is no JSON: {error}") from error
    if not isinstance(made, dict):
        raise FileError(path, f"{where}is JSON, but no object")
    return made


_TOO_DEEP = f"it is nested deeper than {_DEEPEST}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"{shown(key)} is there twice")
        made[key] = value
    return made


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"{cut(digits, 40)} is too large a number")
    return number


def _check_depth(made: object) -> None:
    # By levels, not by recursion; what is short is not short as text if it is deep.
    level = [made]
    for _ in range(_DEEPEST):
        nested = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [*chain.from_iterable(nested)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def make(kind: type[T], given: object, where: str = "") -> T:
    """A dataclass, and those within it, from what JSON gave.

    Every field must be there, and no other key. Types are those of annotations, to the letter: a bool is no number, a
    number with a fraction no int, a text one printable line, and a dtype the name of a floating one. Tuples are lists.
    A ValueError says what is wrong and where, beginning with ``where`` this stands.
    """
    return _made(kind, given, where)


def _made(kind: Any, given: object, where: str) -> Any:
    """By the kind of type; ``where`` is what a message begins with."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _instance(kind, given, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if given is None and type(None) in inner:
            return None
        (one,) = (one for one in inner if one is not type(None))
        return _made(one, given, where)
    if origin is Literal:
        if given not in inner:  # the next line names it, whatever its type
            raise ValueError(f"{where} must be one of {', '.join(map(str, inner))}, got {shown(given)}")
        return given
    if origin is tuple:
        return _tuple(inner, given, where)
    if origin is not None and issubclass(origin, Mapping):
        found = _checked(given, dict, where, "an object")
        names = [_made(str, key, f"a name in {where}") for key in found]
        return {name: _made(inner[1], found[name], f"{where}.{cut(name, 40)}") for name in names}
    return _plain(kind, given, where)


@lru_cache
def _types(kind: Any) -> dict[str, Any]:
    """Of fields, by their names."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _instance(kind: type, given: object, where: str) -> Any:
    found, known = _checked(given, dict, where, "an object"), _types(kind)
    within = f"{where}." if where else ""
    for name in known:
        if name not in found:
            raise ValueError(f"{within}{name} is missing")
    for key in found:
        if key not in known:
            raise ValueError(f"{within}{cut(key, 40)} is not known")
    parts = {name: _made(hint, found[name], f"{within}{name}") for name, hint in known.items()}
    try:
        return kind(**parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _tuple(inner: tuple[Any, ...], given: object, where: str) -> tuple[Any, ...]:
    some = _checked(given, list, where, "a list")
    if inner[1:] == (...,):
        inner = inner[:1] * len(some)
    if len(inner) != len(some):
        raise ValueError(f"{where} must be a list of {len(inner)}, got one of {len(some)}")
    return tuple(_made(kind, one, f"{where}[{i}]") for i, (kind, one) in enumerate(zip(inner, some, strict=True)))


def _plain(kind: Any, given: object, where: str) -> Any:
    if kind is torch.dtype:
        if not isinstance(given, str) or given not in DTYPES:
            raise ValueError(f"{where} must be one of {', '.join(DTYPES)}, got {shown(given)}")
        return DTYPES[given]
    if kind is bool:
        return _checked(given, bool, where, "true or false")
    if kind is str:
        if not isinstance(given, str) or not given.isprintable():
            raise ValueError(f"{where} must be a printable text, got {shown(given)}")
        return given
    if isinstance(given, bool) or not isinstance(given, int if kind is int else int | float):
        raise ValueError(f"{where} must be {'a whole' if kind is int else 'a'} number, got {shown(given)}")
    if kind is int:
        if abs(given) > _INTS:
            raise ValueError(f"{where} must be a number of 64 bits, got {shown(given)}")
        return given
    assert kind is float, kind
    if given and not LEAST <= abs(given) <= MOST:
        raise ValueError(f"{where} must be 0, or from {LEAST} to {MOST} in size, got {shown(given)}")
    return float(given)


def _checked(given: object, kind: type[T], where: str, named: str) -> T:
    if not isinstance(given, kind):
        raise ValueError(f"{where or 'it'} must be {named}, got {shown(given)}")
    return given
