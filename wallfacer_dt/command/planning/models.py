"""What model is planned: by name, from a file, or by sizes."""

from dataclasses import fields, replace
from typing import Any

from wallfacer_dt.command.options import OptionError, naming
from wallfacer_dt.command.planning.config import read_config
from wallfacer_dt.command.planning.shape import as_options
from wallfacer_dt.planning import ModelShape
from wallfacer_dt.planning.known_models import MODELS, KnownModel


def make_model(name: str | None, **sizes: Any) -> KnownModel:
    """The model, with nothing left to a default, so that a profile's and a plan's are equal.

    Args:
        name: of a model, or the path of a config.json; None: sizes alone.
        **sizes: by the fields of :class:`wallfacer_dt.ModelShape`; those that are not None replace the model's own.

    Returns:
        The model.

    Raises:
        OptionError: there is no such model, or sizes are missing, are none, or do not divide.
    """
    given = {field: value for field, value in sizes.items() if value is not None}
    assert given.keys() <= {field.name for field in fields(ModelShape)}
    if 0 in (given.get("ffn"), given.get("experts")):
        for implied in ("experts", "experts_per_token", "shared_ffn", "dense_layers"):
            given.setdefault(implied, 0)
    if given.get("dense_layers") == 0:
        given.setdefault("dense_ffn", 0)
    if name is None:
        for needed in ("hidden", "heads"):
            if needed not in given:
                raise OptionError(f"--{needed} is missing: give --hidden and --heads, or --model NAME or FILE")
        with as_options():
            return KnownModel(ModelShape(**given))
    known = _known(name)
    own = known.shape.keys
    if "heads" in given and "kv_heads" not in given and given["heads"] % own:
        raise OptionError(
            f"--heads must be a multiple of the model's {own} key heads unless --kv-heads is given, got "
            f"{given['heads']}"
        )
    windowed = known.shape.windowed_layers
    if "layers" in given and "windowed_layers" not in given and windowed is not None:
        raise OptionError(
            f"--windowed-layers is missing: {windowed} of the model's {known.shape.layers} layers have a window; how "
            f"many of --layers {given['layers']}?"
        )
    with as_options():
        return replace(known, shape=replace(known.shape, **given))


def _known(name: str) -> KnownModel:
    if name in MODELS:
        return MODELS[name]
    if "/" not in name and not name.endswith(".json"):
        raise OptionError(f"--model must be one of {', '.join(MODELS)}, or the path of a config.json, got {name!r}")
    with naming("--model"):
        return read_config(name)
