"""Hypothesis strategies for attention cases."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from tests.cases import BLOCK_MASKS, MASK_MODS, Case

PLACEMENTS = ["team_in_node", "ring_in_node", "ulysses_in_node"]


def examples(number: int, today: int | None = None) -> settings:
    """Of a property as many examples as this, where others have 100: `make test` tries 40% of them.

    Args:
        number: of `make test-all`, of the mutants, and of random runs, in percent.
        today: that of `make test`, where it is another.
    """
    every = settings.default.max_examples
    if today is not None and every < 100:
        number = today
    return settings(max_examples=-(-number * every // 100))


def meshes(size: int) -> list[tuple[int, int]]:
    """All (ring, team) of that size."""
    return [(size // team, team) for team in range(1, size + 1) if size % team == 0]


def ulysses_meshes(size: int) -> list[tuple[int, int, int]]:
    """All (ring, team, ulysses) of that size."""
    return [
        (*mesh, ulysses) for ulysses in range(1, size + 1) if size % ulysses == 0 for mesh in meshes(size // ulysses)
    ]


def schedules(ring: int, team: int) -> list[str]:
    """All that fit."""
    return ["2d", *["rings"] * (team > 1), *["published"] * (ring % team == 0)]


@st.composite
def cases(draw: st.DrawFn, sizes: range = range(1, 9), **fixed: object) -> Case:
    """Any case of attention that sees all or is causal, on a ring and a team with shards of equal length."""
    ring, team = draw(st.sampled_from([mesh for size in sizes for mesh in meshes(size)]))
    order = draw(st.sampled_from(["contiguous", "head_tail"]))
    schedule = draw(st.sampled_from(schedules(ring, team)))
    kv_heads = draw(st.sampled_from([1, 2]))
    options = {
        "ring": ring,
        "team": team,
        "placement": draw(st.sampled_from(["team_in_node", "ring_in_node"])),
        "batch": draw(st.integers(1, 3)),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 3, 8])),
        "kv_heads": kv_heads,
        "shard": draw(st.integers(1, 9)) * (2 if order == "head_tail" else 1),
        "head_dim": draw(st.sampled_from([16, 17, 23, 32, 64, 99, 128])),
        "dtype": "float64",
        "is_causal": draw(st.booleans()),
        "order": order,
        "schedule": schedule,
        **draw(_rotations(schedule)),
        "kernel": draw(st.sampled_from(["auto", "auto", "reference"])),
        "scale": draw(st.sampled_from([None, None, 0.3])),
        "inputs": draw(st.sampled_from(["normal", "normal", "normal", "equal", "huge", "zero_grad", "strided"])),
    }
    return Case(**(options | fixed))


@st.composite
def any_case(
    draw: st.DrawFn, size: int, *, shortest: int = 1, longest: int = 9, in_turn: bool = False, **fixed: object
) -> Case:
    """Any case that the package accepts on so many ranks, of ``shortest`` to ``longest`` tokens on each.

    ``in_turn``: groups of heads take turns on a ring or team.
    """
    meshes = [mesh for mesh in ulysses_meshes(size) if not in_turn or 1 < mesh[2] < size]
    ring, team, ulysses = draw(st.sampled_from(meshes))
    batch = draw(st.integers(1, 2))
    lengths = draw(_lengths(size, shortest, longest))
    total = lengths.get("length", lengths.get("shard", 0) * size)
    masks = draw(mask_options(batch, total))
    if not masks and draw(st.booleans()):
        lengths["kv_length"] = draw(st.integers(1, longest * size))
    options = (
        {"ring": ring, "team": team, "ulysses": ulysses, "batch": batch, "dtype": "float64"}
        | {"placement": draw(st.sampled_from(PLACEMENTS)), "order": draw(st.sampled_from(["contiguous", "head_tail"]))}
        | lengths
        | masks
        | draw(_schedules(ring, team))
        | draw(_heads(ulysses, least=ulysses + 1 if in_turn else 1))
        | draw(_variants(replicable=not masks))
        | ({"shared_dim": 0} if in_turn else {})
    )
    return Case(**(options | fixed))


@st.composite
def _lengths(draw: st.DrawFn, size: int, shortest: int, longest: int) -> dict[str, Any]:
    """Equal shards, of which nothing is said, or any length."""
    kind = draw(st.sampled_from(["shard", "length", "fewer than ranks"]))
    if kind == "shard":
        return {"shard": draw(st.integers(shortest, longest))}
    if kind == "fewer than ranks" and shortest == 1:
        return {"length": draw(st.integers(1, size))}
    return {"length": draw(st.integers(shortest * size, longest * size))}


@st.composite
def mask_options(draw: st.DrawFn, batch: int, total: int) -> dict[str, Any]:
    """Who sees whom, or nothing."""
    kind = draw(
        st.sampled_from(["none", "none", "causal", "window", "prefix", "documents", "documents", "mask", "mask"])
    )
    if kind == "none":
        return {}
    if kind == "causal":
        return {"is_causal": True}
    if kind == "prefix":
        return {"is_causal": True, "prefix_length": draw(st.integers(1, total + 1))}
    if kind == "mask":
        return {"mask": draw(st.sampled_from([*MASK_MODS, *BLOCK_MASKS]))}
    masks: dict[str, Any] = {"is_causal": draw(st.booleans())}
    if kind == "window" or draw(st.booleans()):
        reach = st.one_of(st.integers(0, total), st.sampled_from([None, -1]))
        masks["window_size"] = (draw(reach), 0 if masks["is_causal"] else draw(reach))
    if kind == "documents":
        packed = draw(st.sampled_from(["document_ids", "cu_seqlens"]))
        rows = 1 if packed == "cu_seqlens" else draw(st.sampled_from([1, batch]))
        masks |= {"documents": tuple(draw(_documents(total)) for _ in range(rows)), "packed": packed}
    return masks


@st.composite
def _documents(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    """Lengths of documents that fill a sequence."""
    if draw(st.integers(0, 5)) == 5:
        return (1,) * total
    cuts = sorted(draw(st.sets(st.integers(1, max(1, total - 1)), max_size=4)) - {total})
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True))


@st.composite
def _schedules(draw: st.DrawFn, ring: int, team: int) -> dict[str, Any]:
    schedule = draw(st.sampled_from(schedules(ring, team)))
    return {"schedule": schedule} | draw(_rotations(schedule))


@st.composite
def _rotations(draw: st.DrawFn, schedule: str) -> dict[str, str]:
    backward, forward = (["q", "auto"], ["kv", "auto"]) if schedule == "published" else (["kv", "q", "auto"],) * 2
    return {"rotate": draw(st.sampled_from(backward)), "rotate_forward": draw(st.sampled_from(forward))}


@st.composite
def _heads(draw: st.DrawFn, ulysses: int, least: int) -> dict[str, Any]:
    """Heads of either kind that the Ulysses axis need not divide, of queries at least as many as it is long."""
    pairs = [
        (kv, group) for kv in range(least, 7) for group in (1, 2, 3, 8) if ulysses <= kv * group <= max(8, ulysses + 2)
    ]
    kv_heads, group = draw(st.sampled_from(pairs))
    return {"heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": draw(st.sampled_from([16, 8, 17]))}


@st.composite
def _variants(draw: st.DrawFn, *, replicable: bool) -> dict[str, Any]:
    """Each drawn about one time in three."""
    softcap = draw(st.sampled_from([None, None, 2.0]))
    return {
        "sinks": draw(st.sampled_from([False, False, True])),
        "shared_dim": draw(st.sampled_from([0, 0, 4, 8])),
        "value_dim": draw(st.sampled_from([None, None, 8, 24])),
        "softcap": softcap,
        "replicated": draw(st.sampled_from([0, 1, 3])) if replicable else 0,
        "kernel": "reference" if softcap else draw(st.sampled_from(["auto", "auto", "reference"])),
        "scale": draw(st.sampled_from([None, None, 0.3])),
        "inputs": draw(st.sampled_from(["normal", "normal", "normal", "equal", "huge", "zero_grad", "strided"])),
    }
