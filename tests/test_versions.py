"""What becomes of versions that were not run, and that pip is told of the same ones."""

import builtins
import importlib
import runpy
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

from wallfacer_dt.versions import _RUN, check_version

IMPORT = builtins.__import__
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
REQUIRED = {
    one.name: one.specifier
    for one in map(Requirement, chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()))
    if one.name in _RUN
}


@pytest.mark.parametrize("package", _RUN)
def test_pip_installs_what_was_run(package: str) -> None:
    first, last = _RUN[package]
    after = (last[0], last[1] + 1)
    assert str(REQUIRED[package]) == f"<{after[0]}.{after[1]},>={first[0]}.{first[1]}"
    for version in (first, last):
        check_version(package, "{}.{}.3".format(*version))
        check_version(package, "{}.{}.0a0+git1234567".format(*version))
    before = f"{first[0]}.{first[1] - 1}.9"
    with pytest.raises(ImportError, match=rf"runs on {package} .*, got {before}: install"):
        check_version(package, before)
    for version in ("{}.{}.0.dev0".format(*after), f"{last[0] + 1}.0rc1"):
        with pytest.warns(UserWarning, match=f"^{package} {version} is newer than .*check_model"):
            check_version(package, version)


@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_it_is_asked_where_a_package_is_imported(package: str) -> None:
    """Before modules of ours, which may import what other versions lack."""
    imported = pytest.importorskip(package)
    file = importlib.import_module(f"wallfacer_dt.integrations.{package}").__file__
    asked: list[str] = []

    def record(name: str, *args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return IMPORT(name, *args, **kwargs)

    with mock.patch.object(imported, "__version__", "99.0"), pytest.warns(UserWarning, match=r"99\.0 is newer"):
        runpy.run_path(str(file))
    with (
        mock.patch.object(imported, "__version__", "0.1"),
        mock.patch("builtins.__import__", record),
        pytest.raises(ImportError, match=r"got 0\.1"),
    ):
        runpy.run_path(str(file))
    assert "wallfacer_dt.versions" in asked
    assert not [name for name in asked if name.startswith(f"wallfacer_dt.integrations.{package}.")]


def test_torch_is_asked_for_first() -> None:
    program = "import sys, torch; torch.__version__ = '2.9.1'\ntry: import wallfacer_dt\nexcept ImportError as error: "
    program += "print(error, *sorted(name for name in sys.modules if name.startswith('wallfacer_dt.')), sep='; ')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "wallfacer_dt runs on torch 2.11 to 2.15, got 2.9.1: install one of these"
