"""A folder of files that counts as a checkpoint only if it is whole: what each file was is written down last.

Files are written into a folder of another name, then the manifest with their sizes and digests, and the folder is
renamed last. Whatever ends a run before that leaves nothing that looks like a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

NAME = "manifest.json"
FORMAT = 1
# Far more than any manifest, which is a list of files and a few settings.
_MOST_BYTES = 64 * 2**20

Files = dict[str, tuple[int, str]]


class BrokenError(Exception):
    """A folder is no whole checkpoint; why, in a few words."""


def files_of(folder: Path) -> list[str]:
    """Names of the files that a manifest of this folder lists, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.name != NAME)


def fingerprints(folder: Path, names: Iterable[str]) -> Files:
    """By name, (bytes, SHA-256) of files.

    Raises:
        OSError: one cannot be read.
    """
    found: Files = {}
    for name in names:
        with (folder / name).open("rb") as file:
            found[name] = (os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())
    return found


def write(folder: Path, files: Files, fields: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, durably: plain values in `fields`, and what its files are."""
    body = {"format": FORMAT, "fields": dict(fields), "files": {name: list(file) for name, file in files.items()}}
    with (folder / NAME).open("w") as file:
        json.dump({"sha256": _digest(body), **body}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> tuple[dict[str, Any], Files]:
    """The fields and files that a manifest lists.

    Raises:
        BrokenError: there is none, or it is not as it was written.
        ValueError: it is whole, and of another format.
        OSError: it cannot be read, which says nothing of how it was written.
    """
    try:
        if (folder / NAME).stat().st_size > _MOST_BYTES:
            raise BrokenError(f"{NAME} is too large to be one")
        whole = json.loads((folder / NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BrokenError(f"{NAME} is missing") from None
    # RecursionError: of what is nested without end.
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"{NAME} is not as it was written") from error
    if not isinstance(whole, dict) or whole.pop("sha256", None) != _digest(whole):
        raise BrokenError(f"{NAME} is not as it was written")
    if whole["format"] != FORMAT:
        raise ValueError(f"{folder / NAME} is of format {whole['format']}, this is format {FORMAT}")
    return whole["fields"], {name: (size, digest) for name, (size, digest) in whole["files"].items()}


def check(folder: Path, files: Mapping[str, tuple[int, str]]) -> None:
    """Refuse files that are not as they were written, sizes first.

    Raises:
        BrokenError: names the first of them.
        OSError: one cannot be read.
    """
    for name, (size, digest) in files.items():
        try:
            found = (folder / name).stat().st_size
            if found != size:
                raise BrokenError(f"{name} has {found} bytes, of {size} that were written")
            if fingerprints(folder, [name])[name][1] != digest:
                raise BrokenError(f"{name} has other bytes than were written")
        except FileNotFoundError:
            raise BrokenError(f"{name} is missing") from None


def sync(folder: Path) -> None:
    """Have the names in a folder outlast a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
