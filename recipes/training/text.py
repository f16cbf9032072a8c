"""Finding the text to train on: bytes that come with this Python, or a file of one's own.

Shape suffix: S = bytes of text.
"""

from __future__ import annotations

import platform
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.training.settings import RecipeError

STANDARD_LIBRARY_BYTES = 4_000_000

# Not the library's, or left out by some who package Python.
_FOREIGN = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"}
# Tables of characters and pages of help: hardly Python, and each a jump in the loss.
_TABLES = {"encodings", "pydoc_data"}


@dataclass(frozen=True)
class Text:
    """Text as `bytes_S` (uint8, perhaps a memory map), and words saying where it came from."""

    source: str
    bytes_S: np.ndarray

    @property
    def fingerprint(self) -> tuple[int, int]:
        """(bytes, CRC-32 of the first 4 MB): enough to see that two ranks read different text."""
        return self.bytes_S.size, zlib.crc32(self.bytes_S[:STANDARD_LIBRARY_BYTES].tobytes())


def load_text(path: str | None) -> Text:
    """The file at `path`, mapped rather than read; without a path, the standard library's source.

    Raises:
        RecipeError: the file cannot be read or is empty, or this interpreter came without source.
    """
    return _standard_library() if path is None else _file(Path(path))


def check_long_enough(text: Text, sequence: int, samples: int) -> None:
    """Refuse a text without `samples` whole windows of `sequence` + 1 bytes at stride `sequence`.

    Raises:
        RecipeError: names the length there is and the options that ask for more.
    """
    windows = max(0, (text.bytes_S.size - 1) // sequence)
    if not windows:
        raise RecipeError(
            f"--text: {text.source} has {text.bytes_S.size} bytes, but one sequence and the byte"
            f" after it need {sequence + 1}; give a longer text or a smaller --sequence"
        )
    if windows < samples:
        raise RecipeError(
            f"--text: {text.source} holds {windows} sequences of {sequence} bytes, but one step"
            f" takes --batch x --data-parallel = {samples}; give a longer text or lower one of them"
        )


def _file(path: Path) -> Text:
    try:
        if not path.is_file():
            raise RecipeError(f"--text: {path} is {'not a file' if path.exists() else 'missing'}")
        if not path.stat().st_size:
            raise RecipeError(f"--text: {path} is empty")
        return Text(str(path), np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise RecipeError(f"--text: {path} cannot be read: {error.strerror}") from error


def _standard_library() -> Text:
    pieces = b"".join(_library_files())
    source = f"the standard library of Python {platform.python_version()}"
    return Text(source, np.frombuffer(pieces[:STANDARD_LIBRARY_BYTES], dtype=np.uint8))


def load_documents(path: str | None) -> tuple[str, list[bytes]]:
    """Where documents came from, and each: a file is one; of the standard library every file is.

    Raises:
        RecipeError: as `load_text`.
    """
    if path is None:
        return f"the standard library of Python {platform.python_version()}", list(_library_files())
    text = load_text(path)
    return text.source, [text.bytes_S.tobytes()]


def _library_files() -> Iterator[bytes]:
    """Source files of the standard library, of a few million bytes together."""
    read = 0
    for path in _sources(Path(sysconfig.get_path("stdlib"))):
        piece = path.read_bytes()
        yield piece
        read += len(piece)
        if read >= STANDARD_LIBRARY_BYTES:
            return
    if not read:
        raise RecipeError("this Python has no source of its standard library; name a file: --text")


def _sources(root: Path) -> Iterator[Path]:
    """Every *.py file under `root`, in an order that does not depend on the file system."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (
        path
        for path in paths
        # The record of a build's options differs from machine to machine.
        if (_FOREIGN | _TABLES).isdisjoint(path.parts) and not path.name.startswith("_sysconfig")
    )
    return (root / path for path in sorted(kept, key=Path.as_posix))
