"""Why one plan computes longer than another, in words, by what it computes longer."""

from collections.abc import Iterator, Mapping

from wallfacer_dt.planning.division import Division

_SHARE = 0.3  # of what is computed longer that a kind must have to be named
_AGAIN = {"attention": "layers but for attention twice", "full": "layers twice"}


def longer(mine: Division, other: Division, computed: Mapping[str, float], others: Mapping[str, float]) -> str:
    """What makes a step compute longer than another.

    Args:
        mine: its division.
        other: the other's.
        computed: what it computes by kind, in seconds.
        others: what the other does.

    Returns:
        The causes, the largest first.
    """
    more = {kind: seconds - others[kind] for kind, seconds in computed.items()}
    if mine.context.projections != other.context.projections:
        # METP's attention has its projections among its own.
        more["attention"] += more.pop("products")
    named = [kind for kind in sorted(more, key=more.__getitem__, reverse=True) if more[kind] > 0]
    causes = [_cause(kind, mine, other) for kind in named if more[kind] >= _SHARE * more[named[0]]]
    return " and ".join(dict.fromkeys(causes))


def _cause(kind: str, mine: Division, other: Division) -> str:
    checkpoint, others = mine.context.checkpoint, other.context.checkpoint
    repeats = others == "none" if kind in ("products", "elementwise") else checkpoint == "full" and kind == "attention"
    if repeats and checkpoint not in ("none", others):
        return _AGAIN[checkpoint]
    return next(_causes(kind, mine, other))


def _causes(kind: str, mine: Division, other: Division) -> Iterator[str]:
    by_metp = sum(_metp(mine)) > sum(_metp(other))
    if kind == "products":
        if mine.context.feed_forward == "metp" != other.context.feed_forward:
            yield "METP's units once more"
        yield "unlike stages" if mine.pipeline > other.pipeline else "matrix products"
    if kind == "elementwise":
        if by_metp or (any(_metp(mine)) and mine.microbatches > other.microbatches):
            yield "METP's sums"  # those of weights' gradients once for each microbatch
        yield "unlike stages" if mine.pipeline > other.pipeline else "norms and activations"
    if kind == "copies":
        are_whole = mine.weight_ranks == 1 or (mine.adds_gradients and mine.microbatches > other.microbatches)
        yield "sums of microbatches' gradients" if are_whole else "FSDP's copies"
    if kind == "optimizer":
        yield "more weights to update"
    if mine.context.projections == "metp" != other.context.projections:
        yield "METP's projections once more"
    yield "smaller tiles, more merging, or idle heads"


def _metp(division: Division) -> tuple[bool, bool]:
    return division.context.feed_forward == "metp", division.context.projections == "metp"
