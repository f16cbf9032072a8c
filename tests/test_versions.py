"""What becomes of versions that were not run, and that pip is told of the same ones."""

import importlib
import runpy
import tomllib
import warnings
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
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


@pytest.mark.parametrize("package", _RUN)
def test_it_is_asked_where_a_package_is_imported(package: str) -> None:
    imported = pytest.importorskip(package)
    ours = wallfacer_dt if package == "torch" else importlib.import_module(f"wallfacer_dt.integrations.{package}")
    assert ours.__file__
    with mock.patch.object(imported, "__version__", "99.0"), pytest.warns(UserWarning, match=r"99\.0 is newer"):
        runpy.run_path(ours.__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(ours.__file__)
