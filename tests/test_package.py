"""What is installed: a wheel made of an sdist, in an environment that has nothing else of this project."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import wallfacer_dt

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_LEFT = shutil.ignore_patterns(
    ".git*", ".venv*", ".hypothesis", "*.egg-info", "build", "dist", "runs", "__pycache__", ".*_cache", "core", "core.*"
)


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.mark.whole
@pytest.mark.slow
def test_a_wheel_of_an_sdist_is_all_that_a_user_needs(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT)
    sources = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-W", "error", "-c", code, cwd=tree)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    # All that tests read is there, as is what runs them.
    assert not [str(name) for name in sources if not (unpacked / name).is_file()]
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path,
        unpacked, cwd=tmp_path)  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    _check_wheel(wheel)
    _check_installed(wheel, tmp_path)


def _check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = message_from_bytes(packed.read(metadata))
    assert {name.split("/")[0] for name in names} == {"wallfacer_dt", metadata.split("/")[0]}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "wallfacer_dt").rglob("*.py")}
    assert {name for name in names if name.startswith("wallfacer_dt/")} == sources | {"wallfacer_dt/py.typed"}
    assert told["Version"] == wallfacer_dt.__version__
    assert told["License-Expression"] == "Apache-2.0"
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["project"]["optional-dependencies"])


def _check_installed(wheel: Path, folder: Path) -> None:
    """Beside this environment's packages, but none of what a checkout put there."""
    place = folder / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=folder)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import wallfacer_dt, importlib.metadata as m, importlib.resources as r; print(wallfacer_dt.__file__);"
        "assert wallfacer_dt.__version__ == m.version('wallfacer-dt');"
        "assert r.files('wallfacer_dt').joinpath('py.typed').is_file()"
    )
    assert run(python, "-P", "-E", "-c", code, cwd=folder) == str(site / "wallfacer_dt" / "__init__.py")
    planned = "--cluster h100x2 --hidden 64 --heads 4 --seq 64 --causal --json"
    assert '"ranked"' in run(place / "bin" / "wallfacer", "plan", *planned.split(), cwd=folder)


def test_the_version_is_stated_once() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "wallfacer_dt.__version__"}
    assert f'__version__ = "{wallfacer_dt.__version__}"' in (ROOT / "wallfacer_dt" / "__init__.py").read_text()


def test_extras_are_made_of_extras_that_there_are() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for name, needs in extras.items():
        for need in needs:
            if need.startswith("wallfacer-dt["):
                of = need.removeprefix("wallfacer-dt[").removesuffix("]").split(",")
                assert set(of) <= set(extras) - {name}, need
