"""Clusters and models by name, configs of models, MFU, and the longest sequence that fits."""

import ast
import gzip
import json
import math
import os
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import examples
from wallfacer_dt import Cluster, Link, ModelShape, SequenceShape, plan
from wallfacer_dt.command.app import main
from wallfacer_dt.command.options import OptionError
from wallfacer_dt.command.planning.config import _DENSE, _LATENT, TYPES
from wallfacer_dt.command.planning.flags import flags_of
from wallfacer_dt.command.planning.machines import Machines
from wallfacer_dt.command.planning.models import make_model
from wallfacer_dt.command.planning.usage import code_of
from wallfacer_dt.kernels.block import Need
from wallfacer_dt.kernels.registry import select_kernel
from wallfacer_dt.metp.feed_forward import ACTIVATIONS
from wallfacer_dt.planning import Kernels, PlanningError
from wallfacer_dt.planning.candidates import attentions, with_layers
from wallfacer_dt.planning.dividing import divide
from wallfacer_dt.planning.flops import flops_utilization, model_flops
from wallfacer_dt.planning.gpus import AUTO, GPUS
from wallfacer_dt.planning.known_models import LEARNED, MODELS, MORE_TOKENS, YARN
from wallfacer_dt.planning.longest import length_unit, longest_length
from wallfacer_dt.planning.only import Only
from wallfacer_dt.planning.stack import stack_memory
from wallfacer_dt.planning.units import parse_tokens

BILLIONS = {
    "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3.1-405b": 405.9, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "mixtral-8x7b": 46.7, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "gpt3-175b": 175.2,
    "dit-xl/2": 0.446, "deepseek-v3": 671.0, "kimi-k2": 1026,
}  # fmt: skip
"""Parameters as published, but GPT-3's with an output projection of its own and DiT's without conditioning."""


def matrices_of(it: ModelShape) -> int:
    """Elements of all matrices."""
    layers = sum(number * (it.attention_weights + it.of(kind).ffn_weights) for kind, number in it.kinds)
    return layers + 2 * it.vocab * it.hidden


@pytest.mark.parametrize("name", MODELS)
def test_models_have_as_many_weights_as_their_names_say(name: str) -> None:
    weights = matrices_of(MODELS[name].shape)
    assert weights / 1e9 == pytest.approx(BILLIONS[name], rel=0.005)
    assert MODELS[name].activation in ACTIVATIONS


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.3),
        ("mixtral-8x7b", 12.9),
        ("gpt-oss-20b", 3.6),
        ("llama3-8b", 8.03),
        ("deepseek-v3", 37),
    ],
)
def test_a_token_meets_as_many_weights_as_are_published(name: str, billions: float) -> None:
    """Embedding and output projection among them; of GPT-OSS, as it is counted there, one of the two."""
    it = MODELS[name].shape
    products = model_flops(it, SequenceShape(1)) - 6 * it.layers * it.heads * sum(it.dims)
    met = products / 6 + it.vocab * it.hidden * (name != "gpt-oss-20b")
    assert met / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_attention_alone_is_that_of_the_model(name: str) -> None:
    it = MODELS[name].shape
    windowed = None if it.windowed_layers is None else 1
    alone = make_model(name, ffn=0, vocab=0, layers=1, windowed_layers=windowed).shape
    assert alone == it.attention_alone
    assert (alone.heads, alone.keys, alone.dim, alone.experts) == (it.heads, it.keys, it.dim, 0)


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-175b", "gpt-oss-20b"])
def test_values_have_the_head_dim_that_is_said(name: str) -> None:
    found = make_model(name, head_dim=32).shape
    assert found.dims == (32, 32)
    assert found == ModelShape(**asdict(MODELS[name].shape) | {"head_dim": 32})


def test_with_other_layers_it_must_be_said_how_many_have_a_window() -> None:
    with pytest.raises(OptionError, match="--windowed-layers is missing: 12 of the model's 24 layers have a window"):
        make_model("gpt-oss-20b", layers=12)
    with pytest.raises(OptionError, match="--windowed-layers must be at most --layers, got 5 and 4"):
        make_model("llama3-8b", layers=4, windowed_layers=5)
    assert make_model("gpt-oss-20b", layers=4, windowed_layers=2).shape.windowed_layers == 2


def test_the_window_is_the_models_unless_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def planned(options: str, model: str = "gpt-oss-20b") -> tuple[object, object, float]:
        sizes = f"--model {model} --layers 4 --experts 0 --vocab 0 --cluster h100x2 --seq 16k --causal --top 1 --json"
        assert main(["plan", *sizes.split(), *options.split()]) == 0
        found = json.loads(capsys.readouterr().out)
        seconds = found["ranked"][0]["prediction"]["seconds"]
        return found["sequence"]["window_size"], found["model"]["windowed_layers"], seconds

    assert planned("--windowed-layers 2")[:2] == ([127, 0], 2)
    assert planned("--windowed-layers 2 --window 31")[:2] == ([31, 0], 2)
    assert planned("--windowed-layers 4")[:2] == ([127, 0], None)
    *none, without = planned("--windowed-layers 0")
    assert none == [None, None]
    assert planned("--windowed-layers 2")[2] < 0.9 * without
    assert planned("--window 31", model="llama3-8b")[:2] == ([31, 0], None)
    options = "--model gpt-oss-20b --cluster h100x2 --seq 4k --causal --top 1 --experts 0"
    assert main(["plan", *options.split()]) == 0
    assert "causal, window 127 in 12 of 24 layers, batch 1" in capsys.readouterr().out
    without_window = "--model llama3-8b --cluster h100x2 --seq 4k --causal --windowed-layers 2"
    assert main(["plan", *without_window.split()]) == 2
    assert capsys.readouterr().err == "wallfacer plan: --windowed-layers: there is no window; give --window\n"


def test_without_experts_a_model_has_one_feed_forward() -> None:
    it = MODELS["mixtral-8x7b"].shape
    assert make_model("mixtral-8x7b", experts=0).shape == replace(it, experts=0, experts_per_token=0)
    assert make_model("mixtral-8x7b", experts_per_token=1).shape == replace(it, experts_per_token=1)


def test_first_layers_without_experts_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden 256 --heads 4 --layers 4 --ffn 64 --experts 8 --experts-per-token 2 --cluster h100x2 --seq 8k"
    options = ["plan", *sizes.split(), "--causal", "--top", "1", "--dense-layers", "1"]
    assert main([*options, "--dense-ffn", "512"]) == 0
    summary = "feed-forward of 64, 2 of 8 experts, but one of 512 in the first 1 of 4 layers"
    assert summary in " ".join(capsys.readouterr().out.split())
    assert main([*options, "--dense-ffn", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"]["dense_layers"], found["model"]["dense_ffn"]) == (1, 512)
    assert main(options) == 2
    said = "--dense-ffn must be above 0 where --dense-layers are, or both 0, got 0 and 1"
    assert capsys.readouterr().err == f"wallfacer plan: {said}\n"
    assert main([*options, "--dense-ffn", "1" + 15 * "0"]) == 2
    assert "a tensor of more than 2^56 elements is not planned" in capsys.readouterr().err


def test_the_h100_is_that_of_the_defaults() -> None:
    assert GPUS["h100"].kernels(128) == Kernels()


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_assumed_to_stay_below_their_peak(name: str) -> None:
    gpu = GPUS[name]
    for dim in (32, 64, 72, 128, 200, 256, 512):
        for kernel, rows in gpu.attention.items():
            it = gpu.kernels(dim, kernel)
            least = 0.13 if name == "b200" else 0.25  # whose flash is not made for it
            assert least * gpu.peak <= it.backward < 1.01 * it.forward < 0.83 * gpu.peak
            assert kernel != AUTO or it.forward < it.linear
            row = max((one for one in rows if one <= dim), default=64)
            assert (it.forward, it.backward) == rows[row][:2]
            assert (it.linear, it.merge, it.attention) == (gpu.linear, gpu.merge, kernel)
        assert gpu.kernels(dim) == replace(gpu.kernels(dim, "flash"), attention="auto")
    for dim in (32, 64, 128, 136, 200, 256):
        taking = {kernel: gpu.kernels(dim, kernel) for kernel in gpu.attention if takes(name, kernel, dim)}
        fastest, rates = gpu.fastest(torch.bfloat16, dim)
        assert taking[fastest] == rates
        assert all(seconds(rates) <= seconds(one) for one in taking.values())
    for dtype in (torch.bfloat16, torch.float16):
        assert select_kernel("auto", Need("cuda", dtype, 128, 128, capability=gpu.capability)).name == AUTO
        for kernel, rows in gpu.attention.items():  # without its package
            for dim in rows:
                need = Need("cuda", dtype, dim, dim, capability=gpu.capability, is_elsewhere=True)
                assert select_kernel(kernel, need).name == kernel
    one, node, many = (gpu.cluster(ranks) for ranks in (1, 8, 64))
    assert [it.nodes for it in (one, node, many)] == [1, 1, 8]
    assert (many.nics, many.inter.bandwidth, many.memory) == (8, 8 * gpu.adapter, gpu.memory)


def test_the_page_has_these_rates() -> None:
    lines = Path("docs/planner.md").read_text().splitlines()
    start = lines.index("| kernel | H200 | H100 | A100 | B200 |")
    for line in lines[start + 2 : start + 7]:
        kernel, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name, cell in zip(("h200", "h100", "a100", "b200"), cells, strict=True):
            rates = GPUS[name].attention.get(kernel.split("`")[1], {}).get(128)
            said = rates and f"{rates.forward / 1e12:g}, {rates.backward / 1e12:g}" + f" {rates.source}" * (
                rates.source != "assumed"
            )
            assert cell == (said or ""), (kernel, name)


def seconds(kernels: Kernels) -> float:
    return 4 / kernels.forward + 10 / kernels.backward


def takes(name: str, kernel: str, dim: int) -> bool:
    """By what the kernels' tables say of head dims on such GPUs."""
    if (name, kernel) == ("b200", "flash_attn_4"):
        return dim <= 128 or dim == 256
    return dim <= (128 if kernel == "cudnn" else 256)


def test_rates_said_to_be_measured_are_those_of_the_record() -> None:
    """One call of as many pairs as a rank of a ring of 8 has: 32 heads, 8192 queries, half of 65536 keys."""
    with gzip.open("docs/benchmarks/gpu_2026-11-26.jsonl.gz", "rt") as file:
        record = [json.loads(line) for line in file]
    gpus = {4: "h100"}  # by run, as the page says; the others are of an H200
    seen: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    linear = []
    for one in record:
        gpu, pairs = gpus.get(one["run"], "h200"), 32 * 8192 * 32768
        kernel, _, case = one["case"].partition(", ")
        if one["run"] > 1 and case.startswith("ring 8") and "one call, ms" in one and "priority" not in case:
            forward, both = one["one call, forward ms"] / 1e3, one["one call, ms"] / 1e3
            seen.setdefault((gpu, kernel, 128), []).append(
                (4 * 128 * pairs / forward, 10 * 128 * pairs / (both - forward))
            )
        if one["stage"] == "rates" and "forward ms" in one:
            kernel, dim, _, block = one["case"].split()
            if block == "8192x32768" and dim in ("64", "256"):
                seen.setdefault((gpu, kernel, int(dim)), []).append(
                    (4e3 * int(dim) * pairs / one["forward ms"], 1e4 * int(dim) * pairs / one["backward ms"])
                )
        if one["stage"] == "probe" and "error" not in one:
            linear.append(one["linear"])
    said = {
        (name, kernel, dim): rates
        for name, gpu in GPUS.items()
        for kernel, rows in gpu.attention.items()
        for dim, rates in rows.items()
        if rates.source == "measured"
    }
    assert said.keys() == seen.keys()
    for key, rates in said.items():
        # The last run's, rounded; other runs differ by up to 2%, of FlashAttention-3 by 8%.
        assert rates[:2] == tuple(round(rate / 1e12) * 1e12 for rate in seen[key][-1])
    assert min(linear) <= GPUS["h200"].linear <= max(linear)
    assert [name for name, gpu in GPUS.items() if gpu.linear_source == "measured"] == ["h200"]


def where(**said: str | int) -> tuple[Cluster, dict[str, str], float | None]:
    cluster, origins, peak, _ = Machines(**said).cluster(torch.bfloat16, (128, 128))
    return cluster, dict(origins), peak


def test_options_replace_parts_of_a_named_cluster() -> None:
    base, origins, peak = where(name="h100x16")
    assert base == GPUS["h100"].cluster(16)
    assert peak == 989e12
    assert origins == {
        "forward": "measured with flash", "backward": "measured with flash", "linear": "published",
        "merge": "assumed", "launch": "assumed",
    }  # fmt: skip
    flash = base.kernels
    changes = {
        "inter": ("1GB/s", {"inter": Link(1e9, 10e-6)}),
        "intra": ("1GB/s", {"intra": Link(1e9, 5e-6)}),
        "inter_latency": ("1ms", {"inter": Link(368e9, 1e-3)}),
        "intra_latency": ("1ms", {"intra": Link(360e9, 1e-3)}),
        "nics": (2, {"nics": 2}),
        "memory": ("40GB", {"memory": 40 * 10**9}),
        "ranks_per_node": (4, {"ranks_per_node": 4, "nics": 4, "inter": Link(184e9, 10e-6)}),
        "linear_speed": ("1TFLOPS", {"kernels": replace(flash, linear=1e12)}),
        "memory_rate": ("1TB/s", {"kernels": replace(flash, merge=1e12)}),
        "launch": ("9us", {"kernels": replace(flash, launch=9e-6)}),
        "attention_speed": ("1TFLOPS", {"kernels": replace(flash, forward=1e12, backward=322 / 357 * 1e12)}),
        "kernel": ("cudnn", {"kernels": GPUS["h100"].kernels(128, "cudnn")}),
    }
    for name, (value, parts) in changes.items():
        assert where(name="h100x16", **{name: value})[0] == replace(base, **parts)
    assert where(name="h100x16", peak_speed="1PFLOPS")[2] == 1e15
    source = Machines(name="h100x16", inter="1GB/s", memory="1GB").cluster(torch.bfloat16, (128, 128)).source
    assert source.startswith("h100x16: ")
    faster = ". With --kernel flash_attn_4 attention's forward is at 682 TFLOPS (assumed, 69% of the peak)"
    assert source.endswith("latencies of 5 us and 10 us are assumed; replaced by --inter, --memory" + faster)
    for told in ({"kernel": "auto"}, {"attention_speed": "1TFLOPS"}):
        assert "--kernel" not in Machines(name="h100x16", **told).cluster(torch.bfloat16, (128, 128)).source
    assert "--kernel" not in Machines(name="a100x16").cluster(torch.bfloat16, (128, 128)).source
    speeds = {"attention_speed": "1TFLOPS", "linear_speed": "1TFLOPS", "memory_rate": "1TB/s", "launch": "0s"}
    said = where(name="h100x16", **speeds)[1]
    assert said == {
        "forward": "given", "backward": "assumed, 0.9 of the forward's", "linear": "given", "merge": "given",
        "launch": "given",
    }  # fmt: skip
    told = Machines(name="h200x16", kernel="flash_attn_3", attention_speed="699TFLOPS")
    assert told.cluster(torch.bfloat16, (128, 128)).cluster.kernels.backward == pytest.approx(587e12)


def test_what_was_published_is_said_to_be() -> None:
    said = Machines(name="a100x8").cluster(torch.float16, (128, 128)).origins
    assert said == {
        "forward": "published with flash", "backward": "published with flash", "linear": "published",
        "merge": "assumed", "launch": "assumed",
    }  # fmt: skip
    assert (
        Machines(name="h200x8", kernel="flash_attn_4").cluster(torch.float16, (256, 256)).origins["backward"]
        == "published"
    )


def test_heads_between_those_in_the_table() -> None:
    machines = Machines(name="a100x8")
    assert machines.cluster(torch.float16, (72, 72)).origins["forward"] == (
        "assumed with flash, 61% of the peak as for heads of 64"
    )
    assert machines.cluster(torch.float16, (64, 64)).origins["forward"] == "assumed with flash, 61% of the peak"
    hopper = Machines(name="h200x8", kernel="flash_attn_3")
    measured = dict.fromkeys(("forward", "backward", "linear"), "measured")
    assert hopper.cluster(torch.float16, (128, 128)).origins == measured | {"merge": "assumed", "launch": "assumed"}
    # What was measured of others is assumed of these.
    assert (
        hopper.cluster(torch.float16, (192, 192)).origins["backward"] == "assumed, 59% of the peak as for heads of 128"
    )
    with pytest.raises(OptionError, match="--dtype: no attention kernel for it on --cluster a100x8, use --dtype bfloa"):
        machines.cluster(torch.float64, (64, 64))


def test_without_a_name_rates_are_assumed_to_be_an_h100s() -> None:
    cluster, origins, peak = where(ranks=2, intra="1GB/s")
    assert (cluster.kernels, peak) == (GPUS["h100"].kernels(128), None)
    assert origins == {
        "forward": "measured with flash, an H100's", "backward": "measured with flash, an H100's",
        "linear": "published, an H100's", "merge": "assumed, an H100's", "launch": "assumed, an H100's",
    }  # fmt: skip
    cluster, origins, _ = where(
        ranks=2, intra="1GB/s", kernel="flex", attention_speed="1TFLOPS", linear_speed="2TFLOPS"
    )
    told = {"attention": "flex", "takes_segments": False}
    assert cluster.kernels == Kernels(1e12, 322 / 357 * 1e12, 2e12, merge=2.5e12, **told)
    assert origins == {
        "forward": "given", "backward": "assumed, 0.9 of the forward's", "linear": "given",
        "merge": "assumed, an H100's", "launch": "assumed, an H100's",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("told", "dtype", "dim", "message"),
    [
        ({"kernel": "flsh"}, torch.bfloat16, 128, "--kernel must be one of auto, flash, "),
        ({"kernel": "flsh", "attention_speed": "1TFLOPS"}, torch.bfloat16, 128, "--kernel must be one of auto, "),
        ({"kernel": "mine", "attention_speed": "1TFLOPS", "name": "h100x8"}, torch.bfloat16, 128, "--kernel must be"),
        ({"kernel": "flex"}, torch.bfloat16, 128, "--kernel: of 'flex' no rates are known there, but of flash, "),
        ({"kernel": "flash_attn_3", "name": "b200x8"}, torch.bfloat16, 128, "--kernel='flash_attn_3' runs on compute "),
        ({"kernel": "cudnn", "name": "b200x8"}, torch.bfloat16, 64, "--kernel='cudnn' is known to be wrong on the"),
        ({"kernel": "cudnn", "name": "h100x8"}, torch.bfloat16, 256, "--kernel='cudnn' runs on cuda, in bfloat16 or"),
        ({"kernel": "cudnn"}, torch.bfloat16, 256, "--kernel='cudnn' runs on cuda, in bfloat16 or"),
        ({}, torch.bfloat16, 320, "--head-dim: no attention kernel for it on an H100, whose rates are taken, give --"),
        ({"name": "h100x8", "kernel": "flash_attn_4"}, torch.float32, 128, "--kernel='flash_attn_4' runs on cuda, in"),
        (
            {"name": "h100x8", "kernel": "reference", "attention_speed": "1TFLOPS"}, torch.float32, 128,
            "--dtype float32: rates on --cluster h100x8 are in 16 bits; give --attention-speed and --linear-speed, or",
        ),
    ],
)  # fmt: skip
def test_kernels_that_are_not_planned_with(told: dict, dtype: torch.dtype, dim: int, message: str) -> None:
    machines = Machines(**({"ranks": 2, "intra": "1GB/s"} if "name" not in told else {}), **told)
    with pytest.raises(OptionError) as caught:
        machines.cluster(dtype, (dim, dim))
    assert str(caught.value).startswith(message)


def test_what_a_kernel_does_not_take_is_refused_whoever_says_its_speed() -> None:
    told = {"ranks": 2, "intra": "1GB/s", "attention_speed": "1TFLOPS", "linear_speed": "1TFLOPS"}
    with pytest.raises(OptionError, match="--kernel='cudnn' runs on cuda, in bfloat16"):
        Machines(kernel="cudnn", **told).cluster(torch.float32, (128, 128))
    assert (
        Machines(kernel="reference", **told).cluster(torch.float32, (512, 512)).cluster.kernels.attention == "reference"
    )
    assert Machines(**told).cluster(torch.float32, (512, 512)).cluster.kernels.attention == "auto"


def test_what_is_elsewhere_is_not_asked_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop plans for a cluster: packages, cuDNN and what torch was built for are another's there."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: None)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    for kernel in GPUS["h100"].attention:
        need = Need("cuda", torch.bfloat16, 128, 128, capability=(9, 0))
        with pytest.raises(ValueError, match=r"runs on NVIDIA|needs the package"):
            select_kernel(kernel, need)
        assert select_kernel(kernel, need._replace(is_elsewhere=True)).name == kernel
    assert (
        select_kernel("auto", Need("cuda", torch.bfloat16, 128, 128, capability=(8, 0), is_elsewhere=True)).name == AUTO
    )


def test_a_kernel_by_name_is_in_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --cluster h200x4 --model llama3-8b --layers 2 --seq 8k --causal --kernel flash_attn_3"
    assert main(command.split()) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "attention by flash_attn_3 at 699 TFLOPS (measured), its backward at 587 TFLOPS (measured), other" in text
    assert 'kernel="flash_attn_3"' in text
    assert "With --kernel" not in text
    assert main([*command.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["kernels"]["attention"] == "flash_attn_3"
    assert main([*command.split(), "--sequences", "4"]) == 0
    text = capsys.readouterr().out
    assert "--parallelism.context_parallel_kernel flash_attn_3 \\\n" in text
    assert main([*command.removesuffix(" --kernel flash_attn_3").split(), "--sequences", "4"]) == 0
    assert "context_parallel_kernel" not in capsys.readouterr().out


def test_the_name_of_a_kernel_is_quoted_in_what_is_pasted() -> None:
    """It may come from the file of a profile, which may be anyone's."""
    name = '"); $(x) `x` # \U0001f600'
    model, sequence = ModelShape(64, 4, ffn=64), SequenceShape(64, is_causal=True)
    cluster = Cluster(4, 4, Link(1e9), Link(1e9), kernels=Kernels(attention=name))
    tree = ast.parse(code_of(plan(model, sequence, cluster, keep=1)))
    (said,) = [one.value for one in ast.walk(tree) if isinstance(one, ast.keyword) and one.arg == "kernel"]
    assert isinstance(said, ast.Constant)
    assert said.value == name
    flags = flags_of(divide(model, sequence, cluster, 4, keep=1))
    words = shlex.split(flags.replace("\\\n", " "), comments=True)
    assert words[words.index("--parallelism.context_parallel_kernel") + 1] == name


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "head_dim": None,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None, "vocab_size": 50257,
    "activation_function": "gelu_new",
}  # fmt: skip
GEMMA = LLAMA | {
    "model_type": "gemma2", "head_dim": 256, "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096, "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 144, "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


MIXTRAL = LLAMA | {
    "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": None, "router_aux_loss_coef": 0.02,
}  # fmt: skip
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "vocab_size": 151936, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "intermediate_size": 2880,
    "num_hidden_layers": 24, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4,
    "experts_per_token": 4, "sliding_window": 128, "attention_bias": True,
}  # fmt: skip


DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 3,
    "head_dim": 64, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "vocab_size": 129280, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "hidden_act": "silu", "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
"""Key heads and a head dim are passed over."""


def written(tmp_path: Path, config: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def test_configs(tmp_path: Path) -> None:
    assert make_model(written(tmp_path, LLAMA)) == MODELS["llama3-8b"]
    assert make_model(written(tmp_path, LLAMA), layers=2, ffn=0).shape == replace(
        MODELS["llama3-8b"].shape, layers=2, ffn=0
    )
    qwen = LLAMA | {
        "model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "head_dim": 128,
        "intermediate_size": 25600, "num_hidden_layers": 64, "vocab_size": 151936, "use_sliding_window": False,
        "sliding_window": 4096,
    }  # fmt: skip
    assert make_model(written(tmp_path, qwen)) == MODELS["qwen3-32b"]
    assert make_model(written(tmp_path, {k: v for k, v in qwen.items() if k != "use_sliding_window"})).left_out == (
        "norms of queries and keys",
    )
    gpt = make_model(written(tmp_path, GPT2))
    assert gpt.shape == ModelShape(768, 12, ffn=3072, gated=False, layers=12, vocab=50257)
    assert (gpt.activation, gpt.left_out) == (
        "gelu_tanh",
        ("its dropout of 0.1 in attention, which styles refuse", "shared embeddings, taken as two", "biases", LEARNED),
    )
    assert make_model(written(tmp_path, GPT2 | {"n_inner": 100})).shape.ffn == 100
    others = {"intermediate_size": 100, "num_key_value_heads": 4, "head_dim": 32}
    assert make_model(written(tmp_path, GPT2 | others)) == gpt
    crossed = make_model(written(tmp_path, GPT2 | {"add_cross_attention": True}))
    assert "attention to another sequence, with its projections" in crossed.left_out
    gemma = make_model(written(tmp_path, GEMMA))
    assert (gemma.shape.dim, gemma.activation) == (256, "gelu_tanh")
    assert (gemma.window, gemma.shape.windowed_layers) == (4095, 16)
    assert gemma.left_out == (
        "its soft cap of 30.0 of the logits",
        "its soft cap of 50.0, which the style must be told",
        "its scale of attention, 144^-0.5, which the style must be told",
        "shared embeddings, taken as two",
        "two more norms of a layer, and what is kept of them",
    )
    legacy = {key: value for key, value in GEMMA.items() if key != "hidden_activation"} | {"model_type": "gemma"}
    assert make_model(written(tmp_path, legacy)).activation == "gelu_tanh"
    assert make_model(written(tmp_path, LLAMA | {"hidden_act": "gelu"})).activation == "gelu"
    biased = make_model(written(tmp_path, LLAMA | {"mlp_bias": True}))
    assert biased.left_out == ("biases of the feed-forward",)
    dropped = "its dropout of 0.1 in attention, which styles refuse"
    assert make_model(written(tmp_path, LLAMA | {"attention_dropout": 0.1})).left_out == (dropped,)
    assert make_model(written(tmp_path, LLAMA | {"attention_dropout": 0.0})).left_out == ()
    scaled = {"attn_pdrop": 0.1, "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False}
    assert dropped not in make_model(written(tmp_path, GPT2 | {"attn_pdrop": 0.0})).left_out
    assert set(make_model(written(tmp_path, GPT2 | scaled)).left_out) - set(gpt.left_out) == {
        "its scale of attention by layers, which styles must be told",
        "its scale of attention, 1, which the style must be told",
    }
    # Where nothing is said, a Llama has as many key heads as query heads, and others a number of their own.
    old = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert make_model(written(tmp_path, old)).shape.keys == 32
    with pytest.raises(OptionError, match="num_key_value_heads is missing"):
        make_model(written(tmp_path, old | {"model_type": "mistral"}))
    mistral = make_model(written(tmp_path, LLAMA | {"model_type": "mistral"}))
    assert (mistral.shape.dim, mistral.window, mistral.shape.windowed_layers) == (128, 4095, None)  # all
    with pytest.raises(OptionError, match="head_dim is missing"):
        make_model(written(tmp_path, LLAMA | {"model_type": "qwen3"}))


def test_configs_of_experts(tmp_path: Path) -> None:
    for config, name in ((MIXTRAL, "mixtral-8x7b"), (QWEN3_MOE, "qwen3-30b-a3b")):
        assert make_model(written(tmp_path, config)) == MODELS[name]
    # As transformers writes them where nothing is said.
    unsaid = {key: value for key, value in QWEN3_MOE.items() if key != "head_dim"} | {"mlp_only_layers": None}
    assert make_model(written(tmp_path, unsaid)).shape.dim == 2048 // 32
    gpt_oss = make_model(written(tmp_path, GPT_OSS))
    assert (gpt_oss.shape, gpt_oss.window) == (MODELS["gpt-oss-20b"].shape, MODELS["gpt-oss-20b"].window)
    assert gpt_oss.left_out == (
        "biases of attention",
        "sinks, which the style must be told",
        "biases",
    )
    # Those of another model mean nothing.
    assert make_model(written(tmp_path, LLAMA | {"first_k_dense_replace": "x"})) == MODELS["llama3-8b"]
    assert make_model(written(tmp_path, LLAMA | {"num_local_experts": 8})) == MODELS["llama3-8b"]


@pytest.mark.parametrize("name", GPUS)
def test_values_are_padded_but_by_one_kernel(name: str) -> None:
    """So a call takes as long as with values as wide as keys, in products that are fewer."""
    gpu = GPUS[name]
    for kernel in ("auto", *gpu.attention):
        whole, padded = gpu.kernels(192, kernel), gpu.kernels(192, kernel, 128)
        if kernel == "flash_attn_4":
            assert padded == whole
            assert (gpu.kernels(128, kernel, 64) == gpu.kernels(128, kernel)) == (name == "b200")
            continue
        for way, asked, done in (("forward", 2 * (192 + 128), 4 * 192), ("backward", 6 * 192 + 4 * 128, 10 * 192)):
            assert done / getattr(whole, way) == pytest.approx(asked / getattr(padded, way))
        assert all(said.endswith("as for heads of 128, padded") for said in gpu.origins(192, kernel, 128))
    assert gpu.kernels(128, "flash", 128) == gpu.kernels(128, "flash")
    # Where keys are padded to values, it is as fast as for such heads.
    wide, padded = gpu.kernels(256), gpu.kernels(128, "auto", 256)
    assert 4 * 256 / wide.forward == pytest.approx(2 * (128 + 256) / padded.forward)
    machines = Machines(name=f"{name}x8").cluster(torch.bfloat16, (192, 128))
    assert machines.cluster.kernels == gpu.kernels(192, "auto", 128)


def test_configs_of_latents(tmp_path: Path) -> None:
    assert make_model(written(tmp_path, DEEPSEEK)) == MODELS["deepseek-v3"]
    kimi = {"model_type": "kimi_k2", "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
    kimi |= {"vocab_size": 163840, "num_nextn_predict_layers": 0}
    assert make_model(written(tmp_path, DEEPSEEK | kimi)) == MODELS["kimi-k2"]
    lite = {"model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2, "rope_scaling": None}
    found = make_model(written(tmp_path, DEEPSEEK | lite))
    assert (found.shape.q_rank, found.shape.shared_ffn) == (0, 4096)
    assert (found.shape.dense_layers, found.shape.dense_ffn) == (3, 18432)
    assert found.left_out == (MORE_TOKENS,)
    assert make_model(written(tmp_path, DEEPSEEK | {"n_shared_experts": None})).shape.shared_ffn == 0
    alone = make_model("deepseek-v3", experts=0, ffn=18432)
    assert alone.shape == MODELS["deepseek-v3"].shape.of("dense")
    assert alone.left_out == (YARN, MORE_TOKENS)
    every = make_model("deepseek-v3", dense_layers=0).shape
    assert every == replace(MODELS["deepseek-v3"].shape, dense_layers=0, dense_ffn=0)
    assert make_model("deepseek-v3", dense_layers=1).shape == replace(MODELS["deepseek-v3"].shape, dense_layers=1)
    with pytest.raises(OptionError, match="--dense-layers must be below --layers, got 3 and 2"):
        make_model("deepseek-v3", layers=2)
    # As transformers writes it where nothing is said.
    unsaid = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
    assert make_model(written(tmp_path, unsaid)) == MODELS["deepseek-v3"]
    assert make_model(written(tmp_path, unsaid | {"model_type": "deepseek_v2"})).shape.kinds == (("layer", 61),)
    glm = {"model_type": "glm4_moe", "num_key_value_heads": 8, "head_dim": 128, "use_qk_norm": True}
    found = make_model(written(tmp_path, DEEPSEEK | glm | {"first_k_dense_replace": 1}))
    assert found.shape == ModelShape(
        7168, 128, 8, 128, 2048, layers=61, vocab=129280, experts=256, experts_per_token=8, shared_ffn=2048,
        dense_layers=1, dense_ffn=18432,
    )  # fmt: skip
    assert found.left_out == ("norms of queries and keys", MORE_TOKENS)


SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWS: list[dict[str, Any]] = [
    {"model_type": "gpt_oss"}, {"model_type": "gpt_oss", "sliding_window": 1},
    {"model_type": "gpt_oss", "num_hidden_layers": 5}, {"model_type": "gpt_oss", "num_hidden_layers": 1},
    {"model_type": "gpt_oss", "num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL]},
    {"model_type": "gemma2", "num_hidden_layers": 7}, {"model_type": "gemma2", "sliding_window": 13},
    {"model_type": "gemma3_text", "num_hidden_layers": 13}, {"model_type": "gemma3_text", "num_hidden_layers": 5},
    {"model_type": "gemma3_text", "sliding_window_pattern": 4},
    {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 512},
    {"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": [FULL, FULL]},
    {"model_type": "mistral"}, {"model_type": "mistral", "sliding_window": None}, {"model_type": "mixtral"},
    {"model_type": "mixtral", "sliding_window": 9}, {"model_type": "qwen2", "sliding_window": 9},
    {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 30},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7},
    {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 99},
    {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1},
    {"model_type": "qwen3", "use_sliding_window": False, "max_window_layers": 1},
    {"model_type": "qwen3_moe", "use_sliding_window": True}, {"model_type": "qwen3_moe", "sliding_window": 9},
    {"model_type": "gemma"}, {"model_type": "llama", "sliding_window": 9}, {"model_type": "olmo3"},
    {"model_type": "olmo3", "num_hidden_layers": 6, "sliding_window": 5}, {"model_type": "phi3"},
    {"model_type": "phi3", "sliding_window": 2047}, {"model_type": "ministral"},
    {"model_type": "ministral", "num_hidden_layers": 2, "layer_types": [FULL, SLIDING]}, {"model_type": "smollm3"},
    {"model_type": "smollm3", "sliding_window": 9},
    {
        "model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9, "num_hidden_layers": 2,
        "layer_types": [FULL, SLIDING],
    },
]  # fmt: skip


@pytest.mark.parametrize(("kind", "dense"), [*((kind, 0) for kind in TYPES), *((kind, 2) for kind in _DENSE)])
def test_weights_are_those_of_transformers(tmp_path: Path, kind: str, dense: int) -> None:
    """Of all matrices of a small model of each type, as transformers makes and saves it: no more, and no fewer.

    Of types that may have first layers without experts, with two of these, too.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 160}
    sizes |= {"head_dim": 24, "num_hidden_layers": 3, "vocab_size": 50, "pad_token_id": 0}
    sizes |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    sizes |= {"n_routed_experts": 4, "n_shared_experts": 3, "first_k_dense_replace": dense}
    if kind == "gpt2":
        sizes = {"n_embd": 96, "n_head": 6, "n_layer": 3, "vocab_size": 50}
    if kind in ("deepseek_v2", "deepseek_v3", "kimi_k2"):
        sizes |= {"q_lora_rank": 30 if kind == "deepseek_v2" else None, "kv_lora_rank": 20, "head_dim": None}
        sizes |= {"qk_nope_head_dim": 14, "qk_rope_head_dim": 10, "v_head_dim": 12, "num_key_value_heads": 6}
    config = transformers.AutoConfig.for_model(kind.replace("kimi_k2", "deepseek_v3"), **sizes)
    config.save_pretrained(tmp_path)
    if kind == "kimi_k2":
        written(tmp_path, config.to_dict() | {"model_type": kind})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = {name: weight.numel() for name, weight in model.named_parameters(remove_duplicate=False)
                if weight.ndim > 1 and not name.endswith(("_bias", "wpe.weight"))}  # fmt: skip
    shape = make_model(str(tmp_path / "config.json")).shape
    assert shape.dense_layers == dense
    assert sum(matrices.values()) == matrices_of(shape)


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("gpt2", *_LATENT)])
def test_null_is_what_transformers_takes_it_for(tmp_path: Path, kind: str, key: str) -> None:
    """Of some types it is refused, as it is there."""
    transformers, errors = pytest.importorskip("transformers"), pytest.importorskip("huggingface_hub.errors")
    config = MIXTRAL | {"model_type": kind, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    config |= {"head_dim": 24, "num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 40}
    config |= {"n_shared_experts": 1, "intermediate_size": 64, key: None}
    try:
        theirs = transformers.AutoConfig.for_model(**config)
    except errors.StrictDataclassFieldValidationError:
        with pytest.raises(OptionError, match=f"{key} is missing"):
            make_model(written(tmp_path, config))
        return
    shape = make_model(written(tmp_path, config)).shape
    assert shape.keys == theirs.num_key_value_heads
    assert shape.dim == (getattr(theirs, "head_dim", None) or 96 // 6)


@pytest.mark.parametrize("config", WINDOWS, ids=str)
def test_windows_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    experts = QWEN3_MOE if "moe" in config["model_type"] else MIXTRAL
    sizes = {key: value for key, value in experts.items() if key != "sliding_window"}
    sizes |= {"num_hidden_layers": 8, "head_dim": 128}
    known = make_model(written(tmp_path, sizes | config))
    given = {key: value for key, value in config.items() if key != "model_type"}
    theirs = transformers.AutoConfig.for_model(config["model_type"], **{"num_hidden_layers": 8} | given)
    size = None if config["model_type"] == "llama" else getattr(theirs, "sliding_window", None)
    kinds = getattr(theirs, "layer_types", None) or [SLIDING] * theirs.num_hidden_layers
    is_windowed = getattr(theirs, "use_sliding_window", True)  # SmolLM3 keeps a size that it does not use
    windowed = kinds.count(SLIDING) if size and is_windowed else 0
    mine = (known.shape.layers if known.shape.windowed_layers is None else known.shape.windowed_layers) * (
        known.window is not None
    )
    assert mine == windowed
    assert known.window == (size - 1 if windowed else None)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            (GPT_OSS | {"sliding_window": bad}, "sliding_window must be a whole number from 1 to 10000000, got ")
            for bad in (0, True, "128", [128])
        ),
        *(
            (GPT_OSS | {"layer_types": bad}, "layer_types must be 24 of full_attention, sliding_attention")
            for bad in ([SLIDING], 24 * ["chunked_attention"], 24 * [[SLIDING]], SLIDING, {})
        ),
        (
            GEMMA | {"model_type": "gemma3_text", "sliding_window_pattern": 0},
            "sliding_window_pattern must be a whole number from 1 to 10000000, got 0",
        ),
        (
            QWEN3_MOE | {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers must be a whole number from 0 to 10000000, got -1",
        ),
        (
            QWEN3_MOE | {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 9},
            "layer_types is missing, which says which layers have the window",
        ),
        *(
            (DEEPSEEK | {key: bad}, f"{key} must be a whole number from {least} to 10000000, got ")
            for bad in (-1, True, "8", False, [], 0.0)
            for key, least in (
                ("kv_lora_rank", 1),
                ("q_lora_rank", 0),
                ("v_head_dim", 1),
                ("qk_nope_head_dim", 1),
                ("qk_rope_head_dim", 1),
                ("n_shared_experts", 0),
                ("first_k_dense_replace", 0),
            )
        ),
        *(
            ({name: value for name, value in DEEPSEEK.items() if name != key}, f"{key} is missing")
            for key in ("q_lora_rank", "n_shared_experts")
        ),
        (DEEPSEEK | {"moe_layer_freq": 2}, "layers without experts among others are not planned: moe_layer_freq is 2"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank must be a whole number from 1 to 10000000, got None"),
        (DEEPSEEK | {"n_routed_experts": None}, "num_local_experts or num_experts or n_routed_experts is missing"),
        (DEEPSEEK | {"intermediate_size": None}, "intermediate_size must be a whole number from 1 to 10000000, got No"),
        (DEEPSEEK | {"first_k_dense_replace": 61}, "first_k_dense_replace must be below the 61 layers, got 61"),
        ({}, "model_type is missing, known are gemma, "),
        (LLAMA | {"model_type": "mamba"}, "model_type is 'mamba', known are gemma, "),
        (LLAMA | {"model_type": ["llama"]}, r"model_type is \['llama'\], known"),
        (LLAMA | {"model_type": "\x1b[2J" + 100 * "m"}, r"model_type is '\\x1b\[2Jm{29}\.\.\., known"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "hidden_size or n_embd is missing"),
        ({k: v for k, v in LLAMA.items() if k != "intermediate_size"}, "intermediate_size or n_inner is missing"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_act"}, "hidden_act or activation_function is missing"),
        (LLAMA | {"hidden_act": "xielu"}, "hidden_act must be one of silu, .*, got 'xielu'"),
        (LLAMA | {"hidden_act": ["silu"]}, r"hidden_act must be one of silu, .*, got \['silu'\]"),
        *(
            (LLAMA | {"num_hidden_layers": bad}, "num_hidden_layers must be a whole number from 1 to 10000000, got ")
            for bad in (0, -1, True, 1.0, "32", 10**7 + 1, [32], 10**50)
        ),
        (LLAMA | {"num_hidden_layers": math.nan}, "is no JSON: NaN is no number of JSON"),
        (LLAMA | {"rope_theta": -math.inf}, "is no JSON: -Infinity is no number of JSON"),
        (LLAMA | {"num_key_value_heads": 5}, "kv_heads must divide heads, got 5 and 32"),
        (LLAMA | {"num_attention_heads": 24}, "heads must divide hidden unless head_dim is given, got 24 and 4096"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "experts_per_token must be from 1 to experts, or both 0, got 9 and 8"),
        (MIXTRAL | {"num_local_experts": None}, "num_local_experts or num_experts or n_routed_experts is missing"),
        (QWEN3_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        *(
            (QWEN3_MOE | some, "layers without experts among others are not planned: ")
            for some in ({"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": None})
        ),
        ("[]", "is JSON, but no object"),
        ("{", "is no JSON, and may be cut short: Expecting property name"),
        ("", "is empty"),
        ("[" * 200_000, "is no JSON: "),
        ('{"hidden_size": ' + "1" * 5000 + "}", "is no JSON: Exceeds the limit"),
        (" " * (2**20 + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_config_that_is_none_gets_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: object, message: str
) -> None:
    path = written(tmp_path, config)
    with pytest.raises(OptionError, match=message):
        make_model(path)
    assert main(["plan", "--model", path, "--seq", "8k", "--causal", "--cluster", "h100x2"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"wallfacer plan: --model: {path}")
    assert (printed.err.count("\n"), printed.out) == (1, "")
    assert len(printed.err) < 400 + 2 * len(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for name, message in (("pipe", "is no file"), ("binary", "is no JSON"), ("none", "No such file or directory")):
        with pytest.raises(OptionError, match=f"--model: .*{name}.json:? {message}"):
            make_model(str(tmp_path / f"{name}.json"))
    with pytest.raises(OptionError, match="--model: /tmp: Is a directory"):
        make_model("/tmp")


@given(st.integers(1, 2**31))
def test_tokens(tokens: int) -> None:
    assert parse_tokens(str(tokens)) == tokens
    for unit, size in (("k", 1024), ("K", 1024), ("M", 1024**2)):
        if tokens * size <= 2**31:
            assert parse_tokens(f"{tokens}{unit}") == tokens * size


@pytest.mark.parametrize(
    "bad", ["", "k", "0", "-1", "1e6", "0.3k", "1kB", "1Ki", "1m", "nan", "inf", "1_000", "٣", "2049M"]
)
def test_what_is_no_number_of_tokens(bad: str) -> None:
    with pytest.raises(ValueError, match="must be a number of tokens like 131072, 128k or 1M"):
        parse_tokens(bad)


@given(st.integers(1, 20), st.integers(1, 3), st.booleans(), st.none() | st.integers(0, 25))
def test_flops_are_those_of_the_pairs_that_are_seen(length: int, batch: int, causal: bool, left: int | None) -> None:
    model = ModelShape(16, 4, 2, 8, ffn=24, layers=3, vocab=10)
    window = None if left is None else (left, 0 if causal else left)
    sequence = SequenceShape(length, batch, causal, window)
    far = length if left is None else left
    pairs = sum(-far <= k - q <= (0 if causal else far) for q in range(length) for k in range(length))
    # A product of (m, k) and (k, n) is 2 m k n; the backward has two for one. Scores and output: two of heads x dim.
    products = 16 * (4 + 2 * 2 + 4) * 8 + 3 * 16 * 24
    forward = batch * (3 * (2 * length * products + 4 * pairs * 4 * 8) + 2 * length * 16 * 10)
    assert model_flops(model, sequence) == 3 * forward
    alone = replace(model, ffn=0, vocab=0)
    assert model_flops(alone, sequence) == 3 * 3 * batch * 4 * pairs * 4 * 8


def test_a_causal_mask_counts_as_half_and_a_run_at_the_peak_as_one() -> None:
    model, full = ModelShape(16, 4, ffn=0), SequenceShape(2**20)
    assert model_flops(model, replace(full, is_causal=True)) / model_flops(model, full) == pytest.approx(0.5, rel=1e-5)
    assert flops_utilization(6e15, 2.0, 3, 1e15) == 1


@pytest.mark.parametrize("name", GPUS)
def test_what_is_predicted_stays_below_what_kernels_reach(name: str) -> None:
    model, sequence = replace(MODELS["llama3-8b"].shape, layers=2), SequenceShape(2**15, is_causal=True)
    cluster = GPUS[name].cluster(2)
    made = plan(model, sequence, cluster)
    for one in made.ranked:
        share = flops_utilization(model_flops(model, sequence), one.prediction.seconds, 2, GPUS[name].peak)
        assert 0.1 < share < cluster.kernels.linear / GPUS[name].peak


CLUSTERS = st.sampled_from([Cluster(ranks, 2, Link(1e9), Link(1e9)) for ranks in (1, 2, 4)])


@pytest.mark.slow
@examples(6)
@given(
    CLUSTERS, st.booleans(), st.sampled_from([0, 96]), st.integers(1, 20), st.none() | st.integers(20, 200),
    st.sampled_from([{}, {}, {"team": 1, "rotate_forward": "q"}, {"ulysses": 1, "checkpoint": "none"}]),
)  # fmt: skip
def test_the_longest_sequence_fits_and_a_longer_one_does_not(
    cluster: Cluster, causal: bool, ffn: int, units: int, left: int | None, only: dict[str, int | str]
) -> None:
    asked = Only.of(only if cluster.ranks > 1 else {})
    model = ModelShape(32, 4, 2, ffn=ffn, layers=2, vocab=64 if ffn else 0)
    window = None if left is None else (left, 0 if causal else left)
    sequence = SequenceShape(1, is_causal=causal, window_size=window)
    unit = length_unit(cluster.ranks)

    def least(length: int) -> int:
        """By all rotations and placements."""
        it = replace(sequence, length=length)
        every = [one for a in attentions(model, it, cluster, asked) for one in with_layers(a, model, asked)]
        return min(stack_memory(one, model, it).peak for one in every)

    memory = least(units * unit)
    found = longest_length(model, sequence, replace(cluster, memory=memory), only if cluster.ranks > 1 else None)
    assert found % unit == 0
    assert least(found) <= memory < least(found + unit)
    assert found >= units * unit


def test_where_nothing_fits_there_is_no_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(2, 2, Link(1e9), Link(1e9), memory=1000)
    with mock.patch("wallfacer_dt.planning.longest.stack_memory", side_effect=AssertionError("a formula says so")):
        assert longest_length(ModelShape(32, 4), SequenceShape(1), cluster) == 0
    sizes = "--hidden 32 --heads 4 --ranks 2 --intra 1GB/s --memory 1kB"
    assert main(f"plan {sizes} --seq longest --full".split()) == 2
    assert capsys.readouterr().err.startswith("wallfacer plan: --memory: nothing fits: memory is 1 kB a rank")
    with pytest.raises(ValueError, match="memory of a rank must be known"):
        longest_length(ModelShape(32, 4), SequenceShape(1), replace(cluster, memory=None))


def test_the_longest_sequence_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--hidden 64 --heads 4 --ranks 2 --intra 1GB/s --memory 10MB --full"
    assert main(f"plan {sizes} --seq longest".split()) == 0
    printed = capsys.readouterr().out
    cluster = Cluster(2, 2, Link(1e9), Link(1e9), memory=10**7)
    length = longest_length(ModelShape(64, 4), SequenceShape(1), cluster)
    assert plan(ModelShape(64, 4), SequenceShape(length), cluster).prediction.memory <= 10**7
    with pytest.raises(PlanningError, match="nothing fits"):
        plan(ModelShape(64, 4), SequenceShape(length + 4), cluster)
    assert printed.startswith(
        f"the longest sequence of which a plan fits, by bisection in steps of 4, is {length} tokens\n"
    )
    assert f"\n{length} tokens in contiguous order, full, batch 1, bfloat16\n" in printed
    assert main(f"plan {sizes} --seq longest --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["sequence"]["length"] == length


def test_a_named_cluster_and_model_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --cluster h100x2 --model llama3-8b --layers 2 --seq 8k --causal"
    assert main(command.split()) == 0
    text = capsys.readouterr().out
    for part in (
        "attention at 357 TFLOPS (measured with flash)", "NVIDIA H100 SXM",
        "8192 tokens in head_tail order, causal",
        "MFU of plan 1: ", "time x ranks x peak", "Adam's moments and master weights, in float32", "Not included:",
        "is_causal=True",
    ):  # fmt: skip
        assert part in " ".join(text.split()), part
    assert max(map(len, text.splitlines())) <= 100
    assert main([*command.split(), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures, first = document["figures"], document["ranked"][0]["prediction"]
    flops = model_flops(ModelShape(**document["model"]), SequenceShape(8192, is_causal=True))
    assert figures["mfu"] == flops / (first["seconds"] * 2 * 989e12)
    assert figures["tokens_per_second"] == 8192 / first["seconds"]
    assert sum(figures["memory"].values()) == first["memory"]


def test_a_peak_in_16_bits_is_no_other_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --cluster h100x2 --model llama3-8b --layers 2 --seq 8k --causal --dtype float32 --kernel reference"
    command += " --attention-speed 30TFLOPS --linear-speed 50TFLOPS --json"
    assert main(command.split()) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["mfu"] is figures["peak"] is None
    assert main(f"{command} --peak-speed 67TFLOPS".split()) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["peak"] == 67e12
