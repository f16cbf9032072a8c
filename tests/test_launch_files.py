"""What docs/launch.md hands out: files and command lines that parsers take, and variables that somebody reads."""

import os
import re
import shlex
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig

from recipes.training.command import Recipe
from recipes.training.settings import RecipeError, Saving, check_saving

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "launch.md").read_text()
SCRIPT = ROOT / "docs" / "launch" / "slurm.sh"
JOB = yaml.safe_load((ROOT / "docs" / "launch" / "pytorchjob.yaml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = ("recipes.train_bytes", "recipes.train_dit", "recipes.finetune_hf")


def torchruns(text: str) -> list[str]:
    """Every torchrun of a recipe that begins a line, with what continues it."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line for line in lines if line.startswith("torchrun ") and any(f"-m {name} " in line for name in RECIPES)]


SHOWN = sorted({command for page in PAGES for command in torchruns(page.read_text())})


def launched(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> tuple[LaunchConfig, Any, Saving]:
    """What torchrun's parser and the recipe's make of a command line, after the recipe's checks of both together."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or torchrun would, for good
    parsed = run.parse_args(arguments)
    config, _, _ = run.config_from_args(parsed)
    assert parsed.module
    assert parsed.training_script in RECIPES
    seen: list[tuple[Any, Saving]] = []
    monkeypatch.setattr(Recipe, "_train", lambda self, settings, saving, output: seen.append((settings, saving)))
    recipe = import_module(f"{parsed.training_script}.__main__")
    assert recipe.main(parsed.training_script_args) == 0
    ((settings, saving),) = seen
    check_saving(saving)
    world = config.max_nodes * config.nproc_per_node
    import_module(f"{parsed.training_script}.settings").check_settings(settings, world)
    return config, settings, saving


def test_command_lines_are_found() -> None:
    assert torchruns(
        "torchrun -m x\n torchrun -m recipes.train_dit x\ntorchrun --nnodes 2 \\\n  -m recipes.train_dit --a\n"
    ) == ["torchrun --nnodes 2 -m recipes.train_dit --a"]
    assert len(torchruns(PAGE)) == 2
    assert len(SHOWN) > 5


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_line_that_is_shown_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    launched(monkeypatch, shlex.split(command, comments=True)[1:])


def test_a_mesh_that_does_not_fit_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="= 3 ranks, but there are 8"):
        launched(monkeypatch, ["--nproc-per-node", "8", "-m", "recipes.train_bytes", "--ring", "3"])


def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs with stand-ins for SLURM's commands, of which srun says what it was to start."""
    for name, body in {
        "scontrol": 'test "$*" = "show hostnames node[7-10]" && printf "node%s\\n" 7 8 9 10',
        "srun": 'printf "%s\\0" "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    cores = {"SLURM_CPUS_PER_TASK": "64"}
    told = {"SLURM_NNODES": "4", "SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "node[7-10]"}
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(SCRIPT)], env=told | cores | paths, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    *options, program = done.stdout.split("\0")[:4]
    assert (options, program) == (["--kill-on-bad-exit=1", "--cpus-per-task", "64"], "torchrun")
    arguments = done.stdout.split("\0")[4:-1]
    config, settings, saving = launched(monkeypatch, arguments)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "node7:29500", "17.1")
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (4, 4, 8)
    assert (settings.ring, settings.team) == (4, 8)
    assert (saving.checkpoint, saving.resume) == (tmp_path / "checkpoints", True)


def test_what_slurm_is_asked_for_is_what_torchrun_is_told() -> None:
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", SCRIPT.read_text(), re.MULTILINE))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("4", "1", "8")
    assert "--nproc-per-node 8 " in SCRIPT.read_text()
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0


def test_pytorchjob(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun is told the rest by what the operator sets, as in its sources: pkg/controller.v1/pytorch, v1.9.0."""
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", JOB["metadata"]["name"])
    assert set(JOB["spec"]) == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert isinstance(JOB["spec"]["nprocPerNode"], str)
    assert set(JOB["spec"]["runPolicy"]) == {"cleanPodPolicy", "backoffLimit"}
    replicas = JOB["spec"]["pytorchReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {"Master": 1, "Worker": 3}
    for each in replicas.values():
        assert each["restartPolicy"] == "OnFailure"
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert container["image"]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == JOB["spec"]["nprocPerNode"]
        (port,) = container["ports"]
        assert port["name"] == "pytorchjob-port"
        set_by_operator = {
            "PET_NNODES": str(sum(one["replicas"] for one in replicas.values())),
            "PET_NPROC_PER_NODE": JOB["spec"]["nprocPerNode"],
            "MASTER_ADDR": f"{JOB['metadata']['name']}-master-0",
            "MASTER_PORT": str(port["containerPort"]),
        }
        for name, value in set_by_operator.items():
            monkeypatch.setenv(name, value)
        assert not [one for one in container["env"] if one["name"] in set_by_operator]
        program, *arguments = [
            re.sub(r"\$\((\w+)\)", lambda found: os.environ[found[1]], x) for x in container["command"]
        ]
        assert program == "torchrun"
        config, settings, saving = launched(monkeypatch, arguments)
        assert (config.rdzv_backend, config.rdzv_endpoint) == ("c10d", "wallfacer-master-0:23456")
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (4, 4, 8)
        assert (settings.ring, settings.team) == (4, 8)
        assert saving.resume
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert "persistentVolumeClaim" in mounted["/shared"]
        assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
        assert Path("/shared") in saving.checkpoint.parents


# NCCL's own, of which a build for the CPU has nothing: see its user guide, "Environment Variables".
NCCLS = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_DEBUG"}
# Set by the operator (its sources, v1.9.0), for torchrun's options or for programs without it.
OPERATORS = {"MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "PET_NPROC_PER_NODE", "RANK", "WORLD_SIZE"}


@cache
def torchs() -> bytes:
    """Whatever of torch's installed files may read a variable."""
    folder = Path(torch.__file__).parent
    files = [
        *folder.glob("distributed/**/*.py"),
        *folder.glob("include/torch/csrc/distributed/c10d/*.hpp"),
        *folder.glob("lib/libtorch_cpu.*"),
    ]
    return b"\n".join(file.read_bytes() for file in files)


def is_torchs(name: str) -> bool:
    # A beginning that is literal is found much faster in half a gigabyte than one that looks behind.
    found = (
        torchs()[max(0, at.start() - 1) : at.start()] for at in re.finditer(rf"{name}(?![A-Z_])".encode(), torchs())
    )
    return any(not re.match(b"[A-Z_]", before) for before in found)


def test_every_variable_is_read_by_somebody() -> None:
    texts = [PAGE, SCRIPT.read_text(), str(JOB)]
    named = {name for text in texts for name in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", text)}
    rows = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, re.MULTILINE))
    assert {"NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE"} <= rows <= named
    others = {name for name in named - NCCLS - OPERATORS if not name.startswith("SLURM_")}
    assert {name for name in others if not is_torchs(name)} == set()
    assert not is_torchs("TORCH_NCCL_TRACE_BUFFER")  # nor is the beginning of a name a name


def test_the_former_name_of_the_recorder_s_buffer_is_read_after_the_present_one() -> None:
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/FlightRecorder.hpp"
    names = r'\{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"\}, 2000'
    assert re.search(names, " ".join(header.read_text().split()))
