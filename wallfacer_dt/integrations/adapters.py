"""Adapters of peft, which may come at any time; known by what their classes are called, as peft need not be there."""

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

# By the package that they are of.
_MIXING = {
    "adalora": "AdaLoRA adds the whole of its penalty on every rank: leave it out",
    "lily": "Lily's router takes the mean over all tokens, of which a rank would take that of its own: leave it out",
    "shadow": "SHADOW's second model would see a rank's own tokens only: leave it out",
}
STATE = (
    "the random state, of which adapters draw once for all tokens (rank_dropout, module_dropout, boft_dropout): leave "
    "these out, or give all ranks one seed"
)
"""What ranks must have alike where :func:`draw_for_all` says so; in words."""


def reasons(model: nn.Module, *, offsets_are_told: bool = False) -> Iterator[str]:
    """Why adapters of a model are refused: they look at several tokens by themselves, or count on every rank.

    Args:
        model: whose.
        offsets_are_told: calls bring aLoRA's offsets, so that it does not.

    Yields:
        In words.
    """
    for layer in _layers(model):
        package = type(layer).__module__.split(".")[2]
        if package in _MIXING:
            yield _MIXING[package]
        inits: dict[str, str] = getattr(layer, "lora_velora_init_type", {})
        for adapter, variant in getattr(layer, "lora_variant", {}).items():
            kind = type(variant).__name__
            if kind == "ALoraLinearVariant" and not offsets_are_told:
                yield (
                    "aLoRA looks for its invocation in a rank's own tokens: pass alora_offsets to every call, of each "
                    "row the number of this rank's tokens from its invocation on, and set alora_offsets_are_told = "
                    "True on the handle that context_parallel returned"
                )
            if kind == "VeloraLinearVariant" and inits.get(adapter) != "random":
                yield (
                    'VeLoRA takes the mean over a rank\'s own tokens: leave it out, or VeloraConfig(init_type="random")'
                )
            if kind == "MontecloraLinearVariant":
                yield (
                    "MonteCLoRA draws what all tokens share ahead, and its penalty counts on every rank: leave it out"
                )


def draw_for_all(model: nn.Module) -> bool:
    """Whether adapters drop parts of weights at random, once for all tokens: then ranks must drop the same ones."""
    return any(layer.training and _dropped(layer) for layer in _layers(model))


def draw_for_each(model: nn.Module) -> bool:
    """Whether adapters draw noise for every token, but for dropout."""
    layers = (layer for layer in _layers(model) if type(layer).__module__.startswith("peft.tuners.pvera."))
    return any(layer.training or any(getattr(layer, "sample_at_inference", {}).values()) for layer in layers)


def random_state(model: nn.Module) -> str:
    """Of this rank's generators on the CPU and on the model's device."""
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("cpu")}
    states = [torch.get_rng_state(), *(torch.get_device_module(one).get_rng_state(one) for one in devices)]
    return hashlib.blake2b(b"".join(state.cpu().numpy().tobytes() for state in states), digest_size=8).hexdigest()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if type(module).__module__.startswith("peft.tuners."))


def _dropped(layer: nn.Module) -> bool:
    if type(layer).__name__ == "MultiplicativeDropoutLayer":
        return bool(layer.p)
    by_adapter = (getattr(layer, name, None) for name in ("rank_dropout", "module_dropout"))
    return any(any(some.values()) for some in by_adapter if isinstance(some, dict))
