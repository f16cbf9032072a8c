"""Floating point operations of a model, and what share of the peak they are."""

from wallfacer_dt.planning.model import ModelShape, SequenceShape, kinds_of_layers


def model_flops(model: ModelShape, sequence: SequenceShape) -> int:
    """Of a step of training, forward and backward, nothing computed twice: of all ranks together.

    Matrix products take 6 for every token and weight that it is multiplied with; attention 6 for every query head,
    element of a head's key and of its value, and pair of query and key that the mask shows, of which under a causal
    mask there are N (N + 1) / 2. Like a prediction's time, without a feed-forward this is attention's alone, and
    without a vocabulary there is no output projection.

    Args:
        model: sizes.
        sequence: what a step takes.

    Returns:
        The operations.
    """
    tokens = sequence.batch * sequence.length
    weights = sum(layers * (model.attention_weights + model.of(kind).ffn_products) for kind, layers in model.kinds)
    pairs = sum(layers * one.pairs() for layers, one in kinds_of_layers(model, sequence))
    attention = 6 * sequence.batch * pairs * model.heads * sum(model.dims)
    return 6 * tokens * (weights * bool(model.ffn) + model.hidden * model.vocab) + attention


def flops_utilization(flops: float, seconds: float, ranks: int, peak: float) -> float:
    """MFU: ``flops / (seconds x ranks x peak)``.

    Args:
        flops: a model's, of a step.
        seconds: that the step takes.
        ranks: that share it.
        peak: of one rank, floating point operations per second.

    Returns:
        The share, 1 for all.
    """
    return flops / (seconds * ranks * peak)
