"""Adapters of peft, which may come at any time; known by what their classes are called, as peft need not be there."""

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import nn

# By the package that they are of.
_MIXING = {
    "adalora": "AdaLoRA adds the whole of its penalty on every rank: leave it out",
    "lily": "Lily's router takes the mean over all tokens, of which a rank would take that of its own: leave it out",
    "shadow": "SHADOW's second model would see a rank's own tokens only: leave it out",
}
STATE = (
    "the random state, of which adapters draw once for all tokens (rank_dropout, module_dropout, boft_dropout, Poly's "
    "routing): leave these out, or give all ranks one seed"
)
"""What ranks must have alike where :func:`draw_for_all` says so; in words."""


def reasons(model: nn.Module, alora: str | None = "leave it out") -> Iterator[str]:
    """Why adapters of a model are refused: they look at several tokens by themselves, or count on every rank.

    Args:
        model: whose.
        alora: what to do about aLoRA; None where calls bring its offsets, so that it does not look.

    Yields:
        In words.
    """
    for layer in _layers(model):
        package = _package(type(layer))
        if package in _MIXING:
            yield _MIXING[package]
        inits: dict[str, str] = getattr(layer, "lora_velora_init_type", {})
        for adapter, variant in getattr(layer, "lora_variant", {}).items():
            kind = type(variant).__name__
            if kind == "ALoraLinearVariant" and alora is not None:
                yield f"aLoRA looks for its invocation in a rank's own tokens: {alora}"
            if kind == "VeloraLinearVariant" and inits.get(adapter) != "random":
                yield (
                    'VeLoRA takes the mean over a rank\'s own tokens: leave it out, or VeloraConfig(init_type="random")'
                )
            if kind == "MontecloraLinearVariant" and layer.training:
                yield (
                    "MonteCLoRA draws what all tokens share ahead, and its penalty counts on every rank: leave it out"
                )


def draw_for_all(model: nn.Module) -> bool:
    """Whether adapters drop or mix parts of weights at random, once for all tokens: then all ranks must draw alike."""
    return any(layer.training and _drops(layer) for layer in _layers(model))


def draw_for_each(model: nn.Module) -> bool:
    """Whether adapters draw noise for every token, but for dropout."""
    layers = (layer for layer in _layers(model) if _package(type(layer)) == "pvera")
    return any(layer.training or any(getattr(layer, "sample_at_inference", {}).values()) for layer in layers)


def random_state(kind: str) -> str:
    """Of this rank's generators on the CPU and on its device, of a mesh's kind: where weights are, some draw there."""
    states = [torch.get_rng_state()]
    if kind != "cpu":
        states.append(torch.get_device_module(kind).get_rng_state())
    return hashlib.blake2b(torch.cat(states).numpy().tobytes(), digest_size=8).hexdigest()


def without_copies(path: str) -> str:
    """Of a module in a copy that peft keeps (``modules_to_save``), or in its original, the path that they share."""
    return re.sub(r"\.(original_module|modules_to_save\.[^.]+)(?=\.|$)", "", path)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if _package(type(module)))


@lru_cache(maxsize=1024)
def _package(kind: type[nn.Module]) -> str:
    """Of peft, that a class is of, or one of which it was made, as fully_shard makes some; or nothing."""
    modules = (base.__module__ for base in kind.__mro__)
    return next((name.split(".")[2] for name in modules if name.startswith("peft.tuners.")), "")


def _drops(layer: nn.Module) -> bool:
    if any(base.__name__ == "MultiplicativeDropoutLayer" for base in type(layer).__mro__):
        return bool(layer.p)
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return False
    # The last is Poly's, whose routers draw in training whatever they are told.
    by_adapter = (getattr(layer, name, None) for name in ("rank_dropout", "module_dropout", "poly_type"))
    active = getattr(layer, "active_adapters", ())
    return any(some.get(adapter) for some in by_adapter if isinstance(some, dict) for adapter in active)
