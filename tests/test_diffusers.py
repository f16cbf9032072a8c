"""Models of diffusers on a mesh: each gives what docs/models.md says, and what a call brings is never swallowed."""

import copy
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from wallfacer_dt import EquivalenceError, TokenOrder, check_model, context_mesh
from wallfacer_dt.testing import RankPool, worst_error

pytest.importorskip("diffusers", reason="the extra `diffusers` is not installed")

import diffusers
import numpy as np
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_processor import AttnProcessor
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

from tests.diffusion_models import (
    KEYS,
    MODELS,
    Key,
    Outcomes,
    averaged,
    errors_of,
    gradients,
    loss_of,
    section,
    try_all,
    try_model,
)
from tests.models import RANKS, verdict
from tests.pairwise import few
from wallfacer_dt.integrations.diffusers import attend, context_parallel, share_inputs
from wallfacer_dt.integrations.diffusers.sequence import RotaryTables, Texts

Ranks = Callable[[int], RankPool]
PIPELINES = ("DiT", "PixArt", "SD3.5", "Flux", "Flux 2", "Wan 2.1", "LTX-Video", "Qwen-Image", "HunyuanVideo",
             "CogVideoX")  # fmt: skip
PAGE = Path(__file__).parent.parent / "docs" / "models.md"
GUIDE = Path(__file__).parent.parent / "docs" / "diffusers.md"


def written() -> str:
    """What docs/models.md says of diffusers."""
    return PAGE.read_text().partition("\n# Models of diffusers\n")[2].partition("\n# Models of ")[0]


def one(name: str) -> list[Key]:
    """A cell; by turns on other meshes, and of tokens that ranks divide or do not."""
    return [KEYS[(5 * list(MODELS).index(name) + 1) % len(KEYS)]]


def check_row(name: str, tried: Outcomes) -> None:
    row = next(line for line in written().splitlines() if line.startswith(f"| {name} |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    notes = dict(re.findall(r"^(\d+)\. `(.*)`$", written(), re.MULTILINE))
    for key, outcome in tried.items():
        found = re.fullmatch(r"refused \((\d+)\)", cells[2 + KEYS.index(key)])
        assert (notes[found[1]] if found else cells[2 + KEYS.index(key)]) == verdict(outcome), (key, outcome)


def skip_unless_there(name: str) -> None:
    if not hasattr(diffusers, MODELS[name].kind):
        pytest.skip("an older diffusers")


@pytest.mark.parametrize("name", MODELS)
def test_models(threads: Ranks, name: str) -> None:
    skip_unless_there(name)
    for _, tried in try_all(threads(RANKS), [name], one):
        check_row(name, tried)


@pytest.mark.whole
def test_models_on_all_meshes(ranks: Ranks) -> None:
    assert section(dict(try_all(ranks(RANKS), MODELS, lambda _: KEYS))) in PAGE.read_text()


def pipelines() -> dict[str, Callable[[], Any]]:
    """By model, its pipeline of tiny parts, without text encoders and, where latents are all that is wanted, a VAE."""

    def drawn(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    small = {"height": 64, "width": 64, "output_type": "latent", "guidance_scale": 4.0}
    said = {"prompt_embeds": drawn(2, 1, 7, 24), "negative_prompt_embeds": drawn(3, 1, 7, 24)}
    pooled = {"pooled_prompt_embeds": drawn(4, 1, 16), "negative_pooled_prompt_embeds": drawn(5, 1, 16)}
    masks = dict.fromkeys(("prompt_attention_mask", "negative_prompt_attention_mask"), (drawn(6, 1, 7) < 1).double())
    vae = {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 4}
    parts: dict[str, Callable[[Any], Any]] = {
        "DiT": lambda model: diffusers.DiTPipeline(
            model, diffusers.AutoencoderKL(**vae).double().eval(), diffusers.DDIMScheduler()
        ),
        "PixArt": lambda model: diffusers.PixArtAlphaPipeline(None, None, None, model, diffusers.DDIMScheduler()),
        "SD3.5": lambda model: diffusers.StableDiffusion3Pipeline(model, flow, *[None] * 7),
        "Flux": lambda model: diffusers.FluxPipeline(flow, *[None] * 5, model),
        "Flux 2": lambda model: diffusers.Flux2Pipeline(flow, None, None, None, model),
        "Wan 2.1": lambda model: diffusers.WanPipeline(None, None, None, flow, model),
        "LTX-Video": lambda model: diffusers.LTXPipeline(flow, None, None, None, model),
        "Qwen-Image": lambda model: diffusers.QwenImagePipeline(flow, None, None, None, model),
        "HunyuanVideo": lambda model: diffusers.HunyuanVideoPipeline(None, None, model, None, flow, None, None),
        "CogVideoX": lambda model: diffusers.CogVideoXPipeline(
            None, None, None, model, diffusers.CogVideoXDDIMScheduler()
        ),
    }
    calls: dict[str, dict[str, Any]] = {
        "DiT": {"class_labels": [1, 3], "output_type": "np"},
        "PixArt": small | said | masks | {"negative_prompt": None, "use_resolution_binning": False},
        "SD3.5": small | said | pooled,
        "Flux": small | said | pooled | {"true_cfg_scale": 3.0},
        "Flux 2": small | {"prompt_embeds": said["prompt_embeds"]},
        "Wan 2.1": small | said | {"num_frames": 9},
        "LTX-Video": small | said | masks | {"num_frames": 17},
        "Qwen-Image": small | said | {"true_cfg_scale": 3.0},
        "HunyuanVideo": small | said | pooled | masks | {"num_frames": 9, "true_cfg_scale": 3.0},
        "CogVideoX": small | said | {"num_frames": 9},
    }
    as_its_pipeline_says = {"num_embeds_ada_norm": 1000, "out_channels": 8}
    dit = replace(MODELS["DiT"], config=MODELS["DiT"].config | as_its_pipeline_says)
    models = MODELS | {"DiT": dit}
    return {name: partial(sampled, make, models[name], calls[name]) for name, make in parts.items()}


def sampled(make: Callable[[Any], Any], model: Any, call: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What a pipeline samples on the mesh, and what it does without."""
    mesh, pipe = set_up(), make(model.made().eval())
    pipe.set_progress_bar_config(disable=True)

    def sample() -> torch.Tensor:
        with torch.no_grad():
            found = pipe(**call, num_inference_steps=3, generator=torch.Generator().manual_seed(1), return_dict=False)
        return torch.as_tensor(found[0]).double()

    alone = sample()
    context_parallel(pipe.transformer, mesh)
    return {type(pipe).__name__: (sample(), alone)}


def run_pipeline(name: str) -> float:
    return worst_error(pipelines()[name](), relative_to="largest")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "Wan 2.1" else pytest.mark.whole) for name in PIPELINES]
)
def test_pipelines_sample_what_one_process_does(threads: Ranks, name: str) -> None:
    """In float64, but for what schedulers and Wan's pipeline do in float32."""
    assert max(threads(RANKS).run(run_pipeline, name)) <= 1e-6


ATTENTION = attend.context_parallel_attention
SPOILT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "": lambda told: told,
    "scale": lambda told: told | {"scale": 0.5},
    # The text, which all ranks hold, is taken for tokens of each.
    "replicated": lambda told: told | {"replicated": 0, "length": told["length"] + RANKS * told["replicated"]},
}
_RANK = threading.local()


@contextmanager
def spoilt(option: str) -> Iterator[None]:
    """Attention is told something else, on this rank; ranks may be threads, and leave at other times."""
    attend.context_parallel_attention = lambda *args, **told: ATTENTION(*args, **SPOILT[_RANK.spoilt](told))
    _RANK.spoilt = option
    try:
        yield
    finally:
        _RANK.spoilt = ""


def try_spoilt(name: str, option: str) -> Outcomes:
    with spoilt(option):
        return try_model(name, [KEYS[0]])


DROPPED = [
    ("DiT", "scale"),
    ("Wan 2.1", "scale"),
    ("SD3", "replicated"),
    ("SD3.5", "scale"),
    ("Flux", "replicated"),
    ("Flux 2", "replicated"),
    ("LTX-Video", "scale"),
    ("Qwen-Image", "replicated"),
    ("Qwen-Image, texts of two lengths", "replicated"),
    ("HunyuanVideo", "replicated"),
    ("HunyuanVideo 1.5", "scale"),
    ("CogVideoX", "replicated"),
    ("Wan 2.1, VACE", "scale"),
    ("HunyuanImage 2.1", "replicated"),
    ("Krea 2", "replicated"),
    ("HunyuanDiT", "scale"),
    ("AuraFlow", "replicated"),
    ("PRX", "replicated"),
    ("Ernie-Image", "replicated"),
    ("JoyImage-Edit", "replicated"),
    ("Flux 3", "replicated"),
    ("Z-Image", "scale"),
    ("Lumina 2", "scale"),
    ("CogView4", "replicated"),
    ("GLM-Image", "replicated"),
    ("SkyReels V2", "scale"),
    ("Cosmos", "scale"),
    ("ConsisID", "replicated"),
]


@pytest.mark.parametrize(
    ("name", "option"),
    few(
        DROPPED,
        {
            ("DiT", "scale"), ("Wan 2.1, VACE", "scale"), ("SD3.5", "scale"), ("Z-Image", "scale"),
            ("SD3", "replicated"), ("Flux", "replicated"), ("Qwen-Image, texts of two lengths", "replicated"),
            ("CogVideoX", "replicated"), ("PRX", "replicated"), ("GLM-Image", "replicated"),
        },
    ),
)  # fmt: skip
def test_an_option_that_is_dropped_shows(threads: Ranks, name: str, option: str) -> None:
    skip_unless_there(name)
    for told in threads(RANKS).run(try_spoilt, name, option):
        assert verdict(told[KEYS[0]]) == "WRONG"
        assert max(told[KEYS[0]].loss, told[KEYS[0]].gradient) > 1e-3


def set_up() -> Any:
    return context_mesh("cpu", ring=2, team=2)


def single_precision() -> list[float]:
    """Outputs and gradients in float32, beside float64."""
    errors = []
    for name in ("SD3.5", "Flux", "Wan 2.1"):
        model, inputs = MODELS[name].made(), MODELS[name].called_with(even=False)
        loss_of(model, inputs).backward()
        expected = gradients(model)
        model.float()
        context_parallel(model, set_up())
        inputs = {key: x.float() if x.is_floating_point() else x for key, x in inputs.items()}
        loss_of(model, inputs).backward()
        found = averaged(model)
        errors += [max(errors_of({key: x.double() for key, x in found.items()}, expected).values())]
    return errors


def test_single_precision(threads: Ranks) -> None:
    for errors in threads(RANKS).run(single_precision):
        assert max(errors) < 1e-3


# Texts, tables and timesteps come to blocks of each of these in another way; to those of others as to one of them.
CHECKPOINTED = (
    "SD3", "Flux 2", "Wan 2.1, VACE", "Qwen-Image, zero_cond_t", "HunyuanVideo, from an image",
    "Krea 2, texts of two lengths", "Flux 3",
)  # fmt: skip
ALIKE = (
    "Flux", "Wan 2.1", "LTX-Video", "HunyuanVideo 1.5", "CogVideoX, rotary", "AuraFlow", "Z-Image", "JoyImage-Edit",
    "PRX, texts of two lengths", "ChronoEdit", "SkyReels V2", "Cosmos 2.5, with an image", "ConsisID, faces",
)  # fmt: skip


def in_turn(names: tuple[str, ...]) -> list[float]:
    """Forwards of models, checkpointed, of other numbers of tokens; then their backwards, which compute again."""
    expected, losses, models = [], [], []
    for name in names:
        if not hasattr(diffusers, MODELS[name].kind):  # an older one
            continue
        model, inputs = MODELS[name].made(), MODELS[name].called_with(even=False)
        loss_of(model, inputs).backward()
        expected.append(gradients(model))
        model.enable_gradient_checkpointing()
        context_parallel(model, set_up())
        losses.append(loss_of(model, inputs))
        with torch.no_grad():  # of another length, in between
            loss_of(model, MODELS[name].called_with(even=True))
        models.append(model)
    for loss in reversed(losses):
        loss.backward()
    found = [averaged(model) for model in models]
    return [max(errors_of(*pair).values()) for pair in zip(found, expected, strict=True)]


@pytest.mark.parametrize("names", [CHECKPOINTED, pytest.param(ALIKE, marks=pytest.mark.whole)], ids=["few", "others"])
def test_checkpointed_models_take_turns(threads: Ranks, names: tuple[str, ...]) -> None:
    for errors in threads(RANKS).run(in_turn, names):
        assert max(errors) < 1e-5


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def interrupted() -> list[bool]:
    """Whether what a model has for checkpoints is as it was, after a forward that was interrupted and after another."""
    model, inputs = MODELS["AuraFlow"].made(), MODELS["AuraFlow"].called_with(even=True)
    model.enable_gradient_checkpointing()
    before, handle = model._gradient_checkpointing_func, context_parallel(model, set_up())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.joint_transformer_blocks[0].register_forward_pre_hook(interrupt)
    with suppress(KeyboardInterrupt):
        model(**inputs)
    hook.remove()
    handle.remove()
    after_interrupt = model._gradient_checkpointing_func is before
    context_parallel(model, set_up())
    model(**inputs)
    return [after_interrupt, model._gradient_checkpointing_func is before]


def test_checkpoints_are_left_as_they_were(threads: Ranks) -> None:
    assert threads(RANKS).run(interrupted) == [[True, True]] * RANKS


def said_of_other_calls() -> dict[str, str]:
    """On every rank: what models say to another path of theirs, or to a shape that does not fit."""
    names = "SkyReels V2", "Cosmos", "ConsisID", "Chroma", "Krea 2", "Z-Image", "HunyuanDiT"
    models = {name: MODELS[name].made().eval() for name in names}
    for model in models.values():
        context_parallel(model, set_up())
    by_frame = torch.tensor([[3, 4, 5], [6, 7, 8]])
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "timesteps of frames": ("SkyReels V2", {"timestep": by_frame}),
        "diffusion forcing": ("SkyReels V2", {"timestep": by_frame, "enable_diffusion_forcing": True}),
        "residuals": ("Cosmos", {"block_controlnet_hidden_states": [torch.zeros(1).double()]}),
        "no tables": ("ConsisID", {"image_rotary_emb": None}),
        "no tables for an image": ("HunyuanDiT", {"image_rotary_emb": None}),
        "a mask in the model's dtype": ("Chroma", {"attention_mask": torch.ones(2, 31).double()}),
        "a text without its layers": ("Krea 2", {"encoder_hidden_states": torch.zeros(2, 7).double()}),
        "ControlNet": ("Z-Image", {"controlnet_block_samples": {0: torch.zeros(1).double()}}),
    }
    with torch.no_grad():
        said = {
            what: refusal(partial(models[name], **MODELS[name].called_with(even=True) | changes))
            for what, (name, changes) in calls.items()
        }
        skyreels = models["SkyReels V2"]
        skyreels._set_ar_attention(3)
        given = MODELS["SkyReels V2"].called_with(even=True)
        return said | {"blocks of frames": refusal(partial(skyreels, **given))}


def test_other_calls_that_are_refused(threads: Ranks) -> None:
    expected = {
        "timesteps of frames": "timestep must be (B,), got (2, 3)",
        "diffusion forcing": "called with enable_diffusion_forcing",
        "residuals": "called with block_controlnet_hidden_states",
        "no tables": "called without image_rotary_emb",
        "no tables for an image": "called without image_rotary_emb",
        "a mask in the model's dtype": "called with attention_mask",
        "a text without its layers": "must be the text (B, T, D), or of K layers",
        "ControlNet": "called with controlnet_block_samples",
        "blocks of frames": "num_frame_per_block=3 is not implemented",
    }
    for said in threads(RANKS).run(said_of_other_calls):
        assert said.keys() == expected.keys()
        assert [what for what, part in expected.items() if part not in said[what]] == [], said


def hidden(mask: torch.Tensor, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Another mask for attention, of the shape that it has."""
    del module
    shape = torch.broadcast_shapes(kwargs["attention_mask"].shape, mask.shape)
    return args, kwargs | {"attention_mask": mask.expand(shape).contiguous()}


def of_one_sample(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mask of the first sample for all, as scaled_dot_product_attention would take it."""
    del module
    return args, kwargs | {"attention_mask": kwargs["attention_mask"][:1]}


def refused_calls() -> dict[str, str]:
    """On every rank: what models say to calls that would be silently wrong, or that are not known to be right."""
    mesh, rank = set_up(), dist.get_rank()
    names = "Flux", "PixArt", "DiT", "HunyuanVideo", "CogVideoX, rotary"
    flux, pixart, dit, hunyuan, cog = models = [MODELS[name].made().eval() for name in names]
    given = {model: MODELS[name].called_with(even=True) for model, name in zip(models, names, strict=True)}
    handles = {model: context_parallel(model, mesh) for model in given}
    said = {}

    def say(name: str, model: Any, **changes: Any) -> None:
        said[name] = refusal(lambda: model(**given[model] | changes))

    def say_of(name: str, call: Callable[[], Any]) -> None:
        said[name] = refusal(call)

    with torch.no_grad():
        say("other latents on a rank", flux, hidden_states=given[flux]["hidden_states"] + (rank == 2))
        say("another timestep on a rank", dit, timestep=given[dit]["timestep"] + (rank == 1))
        say("another shape on a rank", dit, hidden_states=torch.zeros(2, 4, 8 + 2 * (rank == 3), 8).double())
        say("an adapter's keywords", flux, joint_attention_kwargs={"scale": 0.5})
        say("no keywords", flux, joint_attention_kwargs={})
        say("a mask of the image", pixart, attention_mask=torch.ones(2, 24))
        say("no text", flux, encoder_hidden_states=None)
        say("too few tokens", dit, hidden_states=torch.zeros(2, 4, 2, 2).double())
        say(
            "another text on a rank",
            hunyuan,
            encoder_attention_mask=given[hunyuan]["encoder_attention_mask"] * (rank != 1),
        )
        say(
            "another table on a rank",
            cog,
            image_rotary_emb=tuple(x + (rank == 1) for x in given[cog]["image_rotary_emb"]),
        )
        masks = {"no image": torch.zeros(1, 1, 1, 1).bool(), "biases": torch.zeros(1, 1, 1, 1),
                 "a row each": torch.ones(1, 1, 2, 1).bool()}  # fmt: skip
        for what, mask in masks.items():
            hide = partial(hidden, mask)
            with hunyuan.transformer_blocks[0].attn.register_forward_pre_hook(hide, with_kwargs=True):
                say(f"a mask of {what}", hunyuan)
        with hunyuan.transformer_blocks[0].attn.register_forward_pre_hook(of_one_sample, with_kwargs=True):
            say("a mask of one sample", hunyuan)
        flipped = [
            x * (1 - 2 * (rank == 1) * (torch.arange(len(x)) == 10))[:, None] for x in given[cog]["image_rotary_emb"]
        ]
        say("a list of tables, another on a rank", cog, image_rotary_emb=flipped)
        say("a list of tables", cog, image_rotary_emb=list(given[cog]["image_rotary_emb"]))
        say("an array", dit, timestep=given[dit]["timestep"].numpy())
        say("places of another image", flux, img_ids=given[flux]["img_ids"][1:])
        block, tokens, ones = dit.transformer_blocks[0], torch.zeros(2, 9, 32).double(), torch.ones(2).long()
        say_of("a block", lambda: block(tokens, timestep=ones, class_labels=ones))
        say_of("a module", lambda: dit.pos_embed(given[dit]["hidden_states"]))
        say_of("a copy", lambda: copy.deepcopy(dit)(**given[dit]))
        say_of("a copy that is set up", lambda: context_parallel(copy.deepcopy(dit), mesh))
        say("whose original is none the worse", dit)
        chunked = dit.transformer_blocks[0]
        chunked.set_chunk_feed_forward(3, 1)
        say("chunks", dit)
        chunked.set_chunk_feed_forward(None, 0)
        dit.train()
        dit.transformer_blocks[1].ff.net[1].p = 0.1
        say("dropout", dit)
        dit.transformer_blocks[1].ff.net[1].p = 0.0
        flux.enable_cache(FirstBlockCacheConfig())
        say("a cache", flux)
        flux.disable_cache()
        say("afterwards", flux)
        processor = pixart.transformer_blocks[0].attn1.processor
        pixart.transformer_blocks[0].attn1.set_processor(AttnProcessor())
        say("another processor", pixart)
        pixart.transformer_blocks[0].attn1.set_processor(processor)
        say_of("another backend", lambda: flux.set_attention_backend("_native_math"))
        say_of("diffusers' default", flux.reset_attention_backend)
        projection, flux.proj_out = flux.proj_out, torch.nn.Sequential(flux.proj_out)
        say("an adapter that comes later", flux)
        flux.proj_out = projection
        for handle in handles.values():
            handle.remove()
        for name, model in (("Flux", flux), ("PixArt", pixart), ("DiT", dit)):
            say(f"{name}, removed", model)
    return said


SAYS = {
    "other latents on a rank": "what hidden_states holds must be the same on every rank",
    "another timestep on a rank": "what timestep holds must be the same on every rank",
    "another shape on a rank": "the kind of hidden_states must be the same on every rank",
    "an adapter's keywords": "called with joint_attention_kwargs",
    "no keywords": "went through",
    "a mask of the image": "called with attention_mask",
    "no text": "encoder_hidden_states must be the text",
    "too few tokens": "1 tokens are too few for 4 ranks: dealt out as (1, 0, 0, 0)",
    "another text on a rank": "what encoder_attention_mask holds must be the same on every rank",
    "another table on a rank": "what image_rotary_emb[0] holds must be the same on every rank",
    "a mask of no image": "let all of the image be seen",
    "a mask of biases": "which must be bool",
    "a mask of a row each": "(B, T) or (B, 1, 1, T + L)",
    "a mask of one sample": "was given a mask (1, 1, 1, ",
    "a list of tables, another on a rank": "what image_rotary_emb[0] holds must be the same on every rank",
    "a list of tables": "went through",
    "an array": "timestep is an array",
    "places of another image": "the tables of pos_embed are of 23 tokens, where the model has 24",
    "a block": "transformer_blocks.0.attn1 was called outside a forward",
    "a module": "was called by itself",
    "a copy": "a copy of one",
    "a copy that is set up": "a copy of one",
    "whose original is none the worse": "went through",
    "chunks": "call disable_forward_chunking()",
    "dropout": "dropout=0.1 of transformer_blocks.1.ff.net.1",
    "a cache": "call disable_cache()",
    "afterwards": "went through",
    "another processor": "the attention processor of transformer_blocks.0.attn1 is another",
    "another backend": "attends on a mesh, by the kernel that context_parallel was given",
    "diffusers' default": "went through",
    "an adapter that comes later": "proj_out is another module than context_parallel has seen",
    "Flux, removed": "went through",
    "PixArt, removed": "went through",
    "DiT, removed": "went through",
}


def test_calls_that_are_refused(threads: Ranks) -> None:
    for told in threads(RANKS).run(refused_calls):
        assert told.keys() == SAYS.keys()
        for name, what in SAYS.items():
            assert what in told[name], (name, told[name])
            assert (what == "went through") == (told[name] == "went through"), (name, told[name])


def refused_models() -> dict[str, str]:
    mesh = set_up()
    sd3, flux, gligen = MODELS["SD3"].made(), MODELS["Flux"].made(), MODELS["PixArt"].made()
    sd3.set_attn_processor(AttnProcessor())
    flux.transformer_blocks[1].ff.net.append(torch.nn.GroupNorm(2, 32))
    gligen.register_to_config(attention_type="gated")

    class Other(type(MODELS["DiT"].made())):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    other, without = MODELS["DiT"].made(), MODELS["DiT"].made()
    other.__class__ = Other
    without.transformer_blocks[1].attn1 = torch.nn.Identity()
    processor = without.transformer_blocks[0].attn1.processor
    return {
        "attention without a processor": refusal(lambda: context_parallel(without, mesh)),
        "which is as it was": str(without.transformer_blocks[0].attn1.processor is processor),
        "another processor": refusal(lambda: context_parallel(sd3, mesh)),
        "a norm over tokens": refusal(lambda: context_parallel(flux, mesh)),
        "gligen": refusal(lambda: context_parallel(gligen, mesh)),
        "another forward": refusal(lambda: context_parallel(other, mesh)),
        "no model": refusal(lambda: context_parallel(torch.nn.Linear(2, 2), mesh)),
        "another schedule on a rank": refusal(
            lambda: context_parallel(MODELS["DiT"].made(), mesh, schedule=("2d", "rings")[dist.get_rank() == 1])
        ),
        "a kernel": refusal(lambda: context_parallel(MODELS["DiT"].made(), mesh, kernel="fast")),
    }


def test_models_that_are_refused(threads: Ranks) -> None:
    says = {
        "attention without a processor": "transformer_blocks.1.attn1 (Identity) has no attention processor",
        "which is as it was": "True",
        "another processor": "the processor AttnProcessor of transformer_blocks.0.attn is not known",
        "a norm over tokens": "transformer_blocks.1.ff.net.3 (GroupNorm) looks at several tokens",
        "gligen": "attention_type='gated'",
        "another forward": "its forward is not that of DiTTransformer2DModel",
        "no model": "must be a ModelMixin",
        "another schedule on a rank": "schedule must be the same on every rank",
        "a kernel": "kernel must be one of",
    }
    for told in threads(RANKS).run(refused_models):
        assert told.keys() == says.keys()
        for name, what in says.items():
            assert what in told[name], (name, told[name])


def elsewhere() -> str:
    """Attention that is computed by another of diffusers' backends."""
    model = MODELS["Flux"].made().requires_grad_(False)
    model.set_attention_backend("flex")
    handle = context_parallel(model, set_up())
    said = refusal(lambda: model(**MODELS["Flux"].called_with(even=True)))
    handle.remove()
    model.set_attention_backend("native")  # which other models of this process have been given, too
    return said


def test_attention_that_is_computed_elsewhere_is_refused(threads: Ranks) -> None:
    for told in threads(RANKS).run(elsewhere):
        assert "transformer_blocks.0.attn called scaled_dot_product_attention 0 times" in told


class Centred(FluxAttnProcessor):
    """One of somebody's own, which looks at several tokens."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(attn, hidden_states - hidden_states.mean(1, keepdim=True), *args, **kwargs)


def unknown_meanwhile() -> str:
    """What is said of a processor that is set while the model is as it was."""
    model = MODELS["Flux"].made().eval().requires_grad_(False)
    handle = context_parallel(model, set_up())
    with handle.whole():
        model.transformer_blocks[0].attn.set_processor(Centred())
    return refusal(lambda: model(**MODELS["Flux"].called_with(even=True)))


def test_a_processor_that_is_set_meanwhile_is_refused(threads: Ranks) -> None:
    for said in threads(RANKS).run(unknown_meanwhile):
        assert "the processor Centred of transformer_blocks.0.attn is not known" in said


class Passing(torch.nn.Module):
    """In the place of attention."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        return hidden_states


def replaced_meanwhile() -> tuple[str, str]:
    """What is said where attention is replaced while the model is as it was, and once it is back."""
    model, inputs = MODELS["DiT"].made().eval().requires_grad_(False), MODELS["DiT"].called_with(even=True)
    handle, block = context_parallel(model, set_up()), model.transformer_blocks[1]
    attention = block.attn1
    with handle.whole():
        block.attn1 = Passing()
    without = refusal(lambda: model(**inputs))
    with handle.whole():
        block.attn1 = attention
    return without, refusal(lambda: model(**inputs))


def test_attention_that_is_replaced_meanwhile_is_refused(threads: Ranks) -> None:
    for without, right in threads(RANKS).run(replaced_meanwhile):
        assert "transformer_blocks.1.attn1 of DiTTransformer2DModel computed attention on the mesh 0 times" in without
        assert right == "went through"


def with_another_block() -> tuple[str, str, str]:
    """Of SD3.5, whose first block has two attentions: what is said where one block is another, or one came twice."""
    model, inputs = MODELS["SD3.5"].made().requires_grad_(False), MODELS["SD3.5"].called_with(even=True)
    context_parallel(model, set_up())
    first, second = model.transformer_blocks

    def alone(hidden_states: Any, encoder_hidden_states: Any, **_: Any) -> Any:
        """Attention of a rank's tokens to themselves, by no processor."""
        q = hidden_states[:, None]
        return encoder_hidden_states, hidden_states + F.scaled_dot_product_attention(q, q, q)[:, 0]

    second.forward = alone
    other = refusal(lambda: model(**inputs))
    del second.forward
    second_attention = first.attn2
    first.attn2 = first.attn
    twice = refusal(lambda: model(**inputs))
    first.attn2 = second_attention
    return other, twice, refusal(lambda: model(**inputs))


def test_every_attention_is_computed_on_the_mesh_once(threads: Ranks) -> None:
    for other, twice, right in threads(RANKS).run(with_another_block):
        assert "transformer_blocks.1.attn of SD3Transformer2DModel computed attention on the mesh 0 times" in other
        assert "transformer_blocks.0.attn of SD3Transformer2DModel computed attention on the mesh 2 times" in twice
        assert right == "went through"


def shared() -> tuple[bool, bool, bool, list[str]]:
    mesh, rank = context_mesh("cpu", ulysses=2, ring=2), dist.get_rank()
    given = {"noise": torch.randn(2, 3, generator=torch.Generator().manual_seed(rank)).bfloat16(),
             "timestep": torch.tensor(rank + 5), "drop": torch.tensor([rank == 0])}  # fmt: skip
    got = share_inputs(mesh, **given, guidance=None)
    firsts = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    return (
        got["noise"].equal(firsts) and got["timestep"].item() == 5 and got["drop"].tolist() == [True],
        got["guidance"] is None and got.keys() == {*given, "guidance"},
        given["timestep"].item() == rank + 5,
        [
            refusal(lambda: share_inputs(mesh, noise=torch.zeros(2, requires_grad=True))),
            refusal(lambda: share_inputs(mesh, noise=torch.zeros(2 + rank))),
            refusal(lambda: share_inputs(mesh, noise=torch.zeros(2, device="meta"))),
            refusal(lambda: share_inputs(mesh, noise=np.zeros(5000))),
        ],
    )  # fmt: skip


def test_inputs_are_shared(threads: Ranks) -> None:
    for *right, (gradient, shape, device, array) in threads(RANKS).run(shared):
        assert "noise holds tensors, or is an array" in array
        assert right == [True] * 3
        assert "noise needs a gradient" in gradient
        assert "noise must be the same on every rank" in shape
        assert "noise must be on the mesh's device type 'cpu'" in device


def checked(option: str) -> str:
    """What check_model says of a model; the loss is the same on all ranks, of which each gives a part."""
    mesh, model, inputs = set_up(), MODELS["SD3"].made(), MODELS["SD3"].called_with(even=True)
    handle = context_parallel(model, mesh)

    def whole(model: Any) -> Any:
        with handle.whole():
            return loss_of(model, inputs)

    with spoilt(option):
        try:
            check_model(
                model, mesh, whole=whole, sharded=lambda model: loss_of(model, inputs) / RANKS,
                order=TokenOrder("contiguous", mesh),
            )  # fmt: skip
        except EquivalenceError as error:
            return str(error)
    return "equal"


def test_check_model(threads: Ranks) -> None:
    assert threads(RANKS).run(checked, "") == ["equal"] * RANKS
    for told in threads(RANKS).run(checked, "scale"):
        assert "that of transformer_blocks.0" in told


def fully_sharded() -> list[float]:
    """FSDP2, whose average is that of this; after context_parallel, and before it."""
    from torch.distributed.fsdp import fully_shard

    mesh, errors = set_up(), []
    for is_first in (True, False):
        model, inputs = MODELS["Flux"].made(), MODELS["Flux"].called_with(even=False)
        loss_of(model, inputs).backward()
        expected = gradients(model)
        if is_first:
            context_parallel(model, mesh)
        for module in (*model.transformer_blocks, *model.single_transformer_blocks, model):
            fully_shard(module, mesh=mesh._flatten("tokens"))
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if not is_first:
            context_parallel(model, mesh)
        loss_of(model, inputs).backward()
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        errors.append(max(errors_of(found, expected).values()))
    return errors


@pytest.mark.whole
def test_fsdp(ranks: Ranks) -> None:
    for errors in ranks(RANKS).run(fully_sharded):
        assert max(errors) < 1e-5


def mixed(name: str) -> list[float]:
    """How far gradients are from float64's where FSDP2 casts what blocks are given to bfloat16: alone, on a mesh."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, policy, errors = set_up(), MixedPrecisionPolicy(torch.bfloat16, torch.float32), []
    whole, inputs = MODELS[name].made(), MODELS[name].called_with(even=False)
    loss_of(whole, inputs).backward()
    expected = gradients(whole)
    inputs = {n: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
    for is_on_mesh in (False, True):
        model = MODELS[name].made().float()
        if is_on_mesh:
            context_parallel(model, mesh)
        for module in [*[m for m in model.modules() if type(m).__name__.endswith("Block")], model]:
            fully_shard(module, mesh=mesh._flatten("tokens"), mp_policy=policy)
            module.set_force_sum_reduction_for_comms(True)
        loss_of(model, inputs).backward()
        found = {n: p.grad.full_tensor().double() for n, p in model.named_parameters() if p.grad is not None}
        errors.append(
            worst_error(
                {"all": [torch.cat([x[n].flatten() for n in found]) for x in (found, expected)]}, relative_to="largest"
            )
        )
    return errors


@pytest.mark.parametrize(
    "name",
    few(
        ["Flux", "Flux 2", "SD3", "LTX-Video", "Qwen-Image, texts of two lengths", "HunyuanVideo, from an image",
         "HunyuanVideo 1.5", "CogVideoX, rotary", "Wan 2.1, VACE", "Flux 3", "AuraFlow", "Krea 2", "SkyReels V2"],
        {"SD3", "HunyuanVideo, from an image"},
    ),
)  # fmt: skip
def test_fsdp_may_cast(ranks: Ranks, name: str) -> None:
    skip_unless_there(name)
    for alone, on_mesh in ranks(RANKS).run(mixed, name):
        assert on_mesh < 2 * alone


def compiled(name: str, is_whole: bool) -> tuple[int, list[float]]:
    """Blocks, or all, compiled round attention, with a number of tokens that changes.

    Returns how many graphs there are, and how far gradients of each number are.
    """
    count, model, other = CompileCounter(), MODELS[name].made(), MODELS[name].made()
    context_parallel(other, context_mesh("cpu", ring=2))
    for module in [other] if is_whole else [m for m in other.modules() if type(m).__name__.endswith("Block")]:
        module.compile(backend=count)
    errors = []
    for even in (True, False):
        inputs = MODELS[name].called_with(even)
        loss_of(model, inputs).backward()
        loss_of(other, inputs).backward()
        errors.append(max(errors_of(averaged(other), gradients(model)).values()))
    return count.frame_count, errors


@pytest.mark.whole
@pytest.mark.parametrize(("name", "is_whole"), [
    ("SD3", False), ("Flux", True), ("Wan 2.1", False), ("HunyuanVideo, from an image", False),
    ("Qwen-Image, zero_cond_t", True), ("CogVideoX, rotary", False), ("AuraFlow", False), ("Flux 3", True),
    ("JoyImage-Edit", False), ("Cosmos 2, by frame", False),
])  # fmt: skip
def test_compiled_round_attention(ranks: Ranks, name: str, is_whole: bool) -> None:
    skip_unless_there(name)
    for graphs, errors in ranks(2).run(compiled, name, is_whole):
        assert graphs > 1  # attention is between them
        assert max(errors) < 1e-5


def compilations(name: str) -> list[int]:
    """Of blocks that are compiled one by one, after each of three forwards."""
    count, model = CompileCounter(), MODELS[name].made().requires_grad_(False)
    context_parallel(model, context_mesh("cpu", ring=2))
    found = []
    for module in [m for m in model.modules() if type(m).__name__.endswith("Block")]:
        module.compile(backend=count)
    for _ in range(3):
        model(**MODELS[name].called_with(even=False))
        found.append(count.frame_count)
    return found


@pytest.mark.parametrize("name", few(["Wan 2.1", "HunyuanVideo, from an image"], {"Wan 2.1"}))
def test_forwards_are_compiled_once(ranks: Ranks, name: str) -> None:
    for first, *others in ranks(2).run(compilations, name):
        assert first > 1  # attention is between them
        assert others == [first] * 2


def wrapped(name: str) -> tuple[dict[str, float], list[int]]:
    """How far gradients are where blocks are wrapped after all else, and how often masks are read."""
    inputs, errors, read = MODELS[name].called_with(even=False), {}, []
    expected = MODELS[name].made()
    loss_of(expected, inputs).backward()
    grads = gradients(expected)

    def compiled_blocks(model: Any) -> None:
        for number, block in enumerate(model.transformer_blocks):
            model.transformer_blocks[number] = torch.compile(block, backend="eager")

    def checkpointed(reentrant: CheckpointImpl, model: Any) -> None:
        wrap = partial(checkpoint_wrapper, checkpoint_impl=reentrant)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=set(model.transformer_blocks).__contains__
        )

    ways: dict[str, Callable[[Any], None]] = {"compiled": compiled_blocks} | {
        impl.name: partial(checkpointed, impl) for impl in CheckpointImpl
    }
    for way, wrap in ways.items():
        model = MODELS[name].made()
        context_parallel(model, set_up())
        wrap(model)
        with mock.patch.object(Texts, "of", wraps=Texts.of) as reads:
            loss_of(model, inputs).backward()
        read.append(reads.call_count)
        found = {
            n.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): g
            for n, g in averaged(model).items()
        }
        errors[way] = max(errors_of(found, grads).values())
    return errors, read


@pytest.mark.parametrize(
    "name", few(["HunyuanVideo, from an image", "Qwen-Image, zero_cond_t"], {"HunyuanVideo, from an image"})
)
def test_blocks_may_be_wrapped_afterwards(ranks: Ranks, name: str) -> None:
    for errors, read in ranks(RANKS).run(wrapped, name):
        assert max(errors.values()) < 1e-12, errors
        assert read == [int(name.startswith("Hunyuan"))] * 3


def run_page(program: str) -> tuple[float, float]:
    found: dict[str, Any] = {}
    exec(program, found)
    handle, model, batch = (found[name] for name in ("handle", "model", "batch"))
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with handle.whole():
        F.mse_loss(model(**batch).sample, batch["hidden_states"]).backward()  # no comparison: a loss
    # A key's bias has none, but for rounding.
    largest = torch.stack([torch.linalg.vector_norm(p.grad, torch.inf) for p in model.parameters()]).max()
    pairs = {name: (grads[name] / largest, p.grad / largest) for name, p in model.named_parameters()}
    return found["loss"].item(), worst_error(pairs)


def test_the_page_s_example_runs(threads: Ranks) -> None:
    program = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    results = threads(RANKS).run(run_page, program)
    assert len({loss for loss, _ in results}) == 1
    assert max(error for _, error in results) < 1e-5


def adapted(name: str, turn: str, kind: str, **options: Any) -> tuple[Any, Any]:
    """A model of peft, the same everywhere, and the handle of the one within: context_parallel comes before or after,
    or not.
    """
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, handle = MODELS[name].made(), None
    if turn == "before":
        handle = context_parallel(model, set_up())
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, getattr(peft, kind)(**{"target_modules": ["to_q", "net.2"], **options}))
    if turn == "after":
        handle = context_parallel(model, set_up())
    model.double()
    return wrapped, handle


def in_training(kind: str, options: dict[str, Any], same_state: bool) -> list[str]:
    """What Flux says with an adapter."""
    said = []
    for turn in ("before", "after"):
        try:
            model = adapted("Flux", turn, kind, **options)[0].get_base_model()
        except ValueError as error:
            said.append(f"{error}")
            continue
        torch.manual_seed(0 if same_state else dist.get_rank())
        said.append(refusal(partial(model, **MODELS["Flux"].called_with(even=True))))
    return said


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("LilyConfig", {"r": 4}, "Lily's router takes the mean"),
        ("PveraConfig", {"r": 4, "target_modules": ["to_q"]}, "noise of PVeRA"),
        ("LoKrConfig", {"rank_dropout": 0.5}, "the random state, of which adapters draw once"),
    ],
)
def test_adapters_that_are_refused(ranks: Ranks, kind: str, options: dict[str, Any], says: str) -> None:
    for told in ranks(RANKS).run(in_training, kind, options, False):
        assert all(says in one for one in told), told
    if kind == "LoKrConfig":
        assert ranks(RANKS).run(in_training, kind, options, True) == [["went through"] * 2] * RANKS


def trained(name: str, kind: str, options: dict[str, Any], turns: tuple[str, ...] = ("before", "after")) -> float:
    """How far gradients of adapters are off, as a step in which the model is whole comes between."""
    inputs, errors = MODELS[name].called_with(even=False), []

    def found(model: Any) -> dict[str, Any]:
        loss_of(model, inputs).backward()
        trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
        grads = averaged(model) if hasattr(model, "_wallfacer_dt") else gradients(model)
        return {name: grad for name, grad in grads.items() if name in trained}

    expected = found(adapted(name, "", kind, **options)[0].get_base_model())
    for turn in turns:
        wrapped, handle = adapted(name, turn, kind, **options)
        model = wrapped.get_base_model()
        with wrapped.disable_adapter(), torch.no_grad():
            loss_of(model, inputs)
        for _ in range(2):
            grads = found(model)
            errors.append(worst_error({n: (grads[n], its) for n, its in expected.items()}, relative_to="largest"))
            with handle.whole():
                loss_of(model, inputs).backward()
                model.zero_grad()
    return max(errors)


def copied_later(part: str) -> str:
    """What a model says whose block is copied after it was set up, which is told of the first frame."""
    name = "HunyuanVideo, from an image"
    wrapped, _ = adapted(name, "before", "LoraConfig", target_modules=["net.2"], modules_to_save=[part])
    return refusal(lambda: wrapped.get_base_model()(**MODELS[name].called_with(even=False)))


def test_blocks_that_peft_copies_are_told_of_the_first_frame(threads: Ranks) -> None:
    part = "single_transformer_blocks.0"
    options = {"target_modules": ["net.2"], "modules_to_save": [part]}
    assert max(threads(RANKS).run(trained, "HunyuanVideo, from an image", "LoraConfig", options, ("after",))) < 1e-12
    for said in threads(RANKS).run(copied_later, part):
        assert (
            f"{part}.modules_to_save.default is told of tokens, and is no module that context_parallel has seen" in said
        )


@pytest.mark.parametrize(("name", "part"), [("Flux", "attn"), ("Wan 2.1", "attn1"), ("Flux", "transformer_blocks.0")])
def test_attention_that_peft_copies(threads: Ranks, name: str, part: str) -> None:
    options = {"target_modules": ["net.2"], "modules_to_save": [part]}
    assert max(threads(RANKS).run(trained, name, "LoraConfig", options)) < 1e-12


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("SD3", "LoraConfig", {"use_dora": True, "init_lora_weights": False}),
        ("Flux", "IA3Config", {"feedforward_modules": [], "init_ia3_weights": False}),
        ("Flux", "LoKrConfig", {"init_weights": False}),
        ("Wan 2.1", "OFTConfig", {"oft_block_size": 4, "init_weights": False}),
        ("HunyuanVideo", "LoraConfig", {"init_lora_weights": False}),
        ("SD3", "BOFTConfig", {"boft_block_size": 4, "init_weights": False}),
    ],
)
def test_adapters(threads: Ranks, name: str, kind: str, options: dict[str, Any]) -> None:
    assert max(threads(RANKS).run(trained, name, kind, options)) < 1e-12


def offloaded(name: str) -> float:
    """How far what a model makes is from what it made whole, offloaded onto the device that it is on."""
    from accelerate import cpu_offload
    from diffusers.hooks import apply_group_offloading

    cpu = torch.device("cpu")
    to_cpu = {"onload_device": cpu, "offload_device": cpu}
    ways: dict[str, Callable[[nn.Module], Any]] = {
        "by blocks": lambda m: apply_group_offloading(m, **to_cpu, offload_type="block_level", num_blocks_per_group=1),
        "by leaves": lambda m: apply_group_offloading(m, **to_cpu, offload_type="leaf_level"),
        "by accelerate": lambda m: cpu_offload(m, execution_device=cpu),
    }
    found, inputs = {}, MODELS[name].called_with(even=True)
    for how, offload in ways.items():
        model = MODELS[name].made().requires_grad_(False)
        (expected,) = model(**inputs, return_dict=False)
        context_parallel(model, set_up())
        offload(model)
        found[how] = model(**inputs, return_dict=False)[0], expected
    return worst_error(found)


@pytest.mark.parametrize(
    "name",
    few(
        [
            "Flux",
            "Flux 2",
            "LTX-Video",
            "PixArt",
            "Qwen-Image, zero_cond_t",
            "SD3",
            "Wan 2.1",
            "Wan 2.2",
            "HunyuanVideo, from an image",
            "HunyuanVideo 1.5",
            "CogVideoX, rotary",
            "Wan 2.1, VACE",
            "Flux 3",
            "JoyImage-Edit",
            "Cosmos 2.5, with an image",
            "ConsisID, faces",
        ],
        {"Flux", "Wan 2.1"},
    ),
)
def test_models_may_be_offloaded(threads: Ranks, name: str) -> None:
    skip_unless_there(name)
    assert max(threads(RANKS).run(offloaded, name)) < 1e-14


SAME: dict[str, list[Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "Wan 2.1": [lambda given: {"timestep": given["timestep"][:, None]}],
    "LTX-Video": [lambda given: {"timestep": given["timestep"][:, None]}],
    "LTX-Video, from an image": [lambda given: {"timestep": given["timestep"][..., None]}],
    "Qwen-Image": [
        lambda given: {"encoder_hidden_states_mask": torch.ones(given["encoder_hidden_states"].shape[:2])},
        lambda _: {"encoder_hidden_states_mask": None},
    ],
}
"""Arguments that say the same as a model's own."""


def said_otherwise(name: str) -> float:
    """How far a model is from itself where it is told the same in other words."""
    model, inputs = MODELS[name].made().requires_grad_(False), MODELS[name].called_with(even=False)
    context_parallel(model, set_up())
    (expected,) = model(**inputs, return_dict=False)
    calls = [inputs | said(inputs) for said in SAME[name]]
    return worst_error([(model(**call, return_dict=False)[0], expected) for call in calls])


@pytest.mark.parametrize("name", SAME)
def test_the_same_in_other_words(threads: Ranks, name: str) -> None:
    assert max(threads(RANKS).run(said_otherwise, name)) < 1e-6


def without_a_mask() -> tuple[float, str]:
    """LTX-Video, of which a mask is an argument that must be given; and timesteps of another shape."""
    model, inputs = (
        MODELS["LTX-Video"].made().requires_grad_(False),
        MODELS["LTX-Video, from an image"].called_with(True),
    )
    inputs["encoder_attention_mask"] = None
    (expected,) = model(**inputs, return_dict=False)
    context_parallel(model, set_up())
    error = worst_error([(model(**inputs, return_dict=False)[0], expected)])
    return error, refusal(lambda: model(**inputs | {"timestep": inputs["timestep"].flatten()}))


def test_arguments_may_be_none_and_have_known_shapes(threads: Ranks) -> None:
    for error, said in threads(RANKS).run(without_a_mask):
        assert error < 1e-12
        assert said == "ValueError: timestep must be (B,) or (B, N), got (96,)"


def made_anew() -> dict[str, str]:
    """What is said where a hook makes rotary tables anew, and where diffusers makes a processor."""
    model = MODELS["Flux"].made()
    context_parallel(model, set_up())

    def anew(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {n: tuple(x) if isinstance(x, RotaryTables) else x for n, x in kwargs.items()}

    block = model.transformer_blocks[0]
    with block.register_forward_pre_hook(anew, with_kwargs=True):
        tables = refusal(lambda: model(**MODELS["Flux"].called_with(even=True)))
    assert copy.copy(block.attn.processor) is block.attn.processor
    return {"tables": tables, "processor": refusal(type(block.attn.processor))}


def test_what_is_made_anew_is_refused(threads: Ranks) -> None:
    for said in threads(RANKS).run(made_anew):
        assert "or by a hook that makes tuples of rotary tables" in said["tables"]
        assert "call remove() before you load or unload one" in said["processor"]
