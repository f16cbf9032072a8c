"""What becomes of versions that were not run, and that pip is told of the same ones."""

import runpy
import sys
import tomllib
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.requirements import Requirement

import wallfacer_dt
from wallfacer_dt.versions import _RUN, check_version

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


def torchs() -> tuple[object, str]:
    return torch, wallfacer_dt.__file__


def transformers() -> tuple[object, str]:
    pytest.importorskip("transformers")
    from wallfacer_dt.integrations.transformers import upstream

    return sys.modules["transformers"], upstream.__file__


def diffusers() -> tuple[object, str]:
    pytest.importorskip("diffusers")
    from wallfacer_dt.integrations.diffusers import upstream

    return sys.modules["diffusers"], upstream.__file__


@pytest.mark.parametrize("where", [torchs, transformers, diffusers])
def test_it_is_asked_where_a_package_is_imported(where: Callable[[], tuple[object, str]]) -> None:
    package, file = where()
    with mock.patch.object(package, "__version__", "99.0"), pytest.warns(UserWarning, match=r"99\.0 is newer"):
        runpy.run_path(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(file)
