"""Hypothesis strategies for attention cases."""

from hypothesis import strategies as st

from tests.cases import Case


def meshes(size: int) -> list[tuple[int, int]]:
    """All (ring, team) of that size."""
    return [(size // team, team) for team in range(1, size + 1) if size % team == 0]


@st.composite
def cases(draw: st.DrawFn, sizes: range = range(1, 9), **fixed: object) -> Case:
    """Any case that the package accepts."""
    ring, team = draw(st.sampled_from([mesh for size in sizes for mesh in meshes(size)]))
    order = draw(st.sampled_from(["contiguous", "head_tail"]))
    schedules = ["2d"] if ring % team else ["2d", "published"]
    schedule = draw(st.sampled_from(schedules))
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
        "rotate": draw(st.sampled_from(["q", "auto"] if schedule == "published" else ["kv", "q", "auto"])),
        "kernel": draw(st.sampled_from(["auto", "auto", "reference"])),
        "scale": draw(st.sampled_from([None, None, 0.3])),
        "inputs": draw(st.sampled_from(["normal", "normal", "normal", "equal", "huge", "zero_grad", "strided"])),
    }
    return Case(**(options | fixed))
