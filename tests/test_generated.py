"""What Inductor makes of a styled module: order, fusion, memory; read from generated code, on fake ranks."""

import math
import re
from typing import Any

import pytest
import torch
import torch._inductor.config
from expecttest import assert_expected_inline
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings

from tests.generated import code_of, lines_of, packed, saved_bytes, two_and_a_sum
from wallfacer_dt.ops import BODIES


def text(ring: int, team: int, **options: Any) -> str:
    forward, backward = lines_of(ring, team, **options)
    return "\n".join([*forward, "backward", *backward])


def test_wallfacer_causal() -> None:
    assert_expected_inline(
        text(2, 2, rotate="kv", is_causal=True, order="head_tail"),
        """\
    fused
  agree
    fused
gather #0 cp_team
    fused
send #1 cp_ring
  flash
    fused
  flash
    fused
  flash
    fused
wait #0
    fused
  flash
wait #1
  flash
    fused
send #2 cp_team
  flash
    fused
wait #2
    fused
backward
  agree
    fused
gather #0 cp_team
    fused
send #1 cp_ring
    fused
  flash_backward
    fused
wait #0
    fused
  flash_backward
    fused
wait #1
  flash_backward
    fused
send #2 cp_team
    fused
  flash_backward
    fused
send #3 cp_ring
    fused
  flash_backward
    fused
  flash_backward
    fused
wait #2
    fused
wait #3
    fused""",
    )


def test_published() -> None:
    assert_expected_inline(
        text(4, 2, schedule="published"),
        """\
    fused
  agree
    fused
gather #0 cp_team
    fused
gather #1 cp_team
wait #0
    fused
send #2 both axes
wait #1
wait #2
send #3 cp_ring
  flash
  flash
wait #3
  flash
    fused
send #4 cp_team
  flash
    fused
wait #4
    fused
backward
    fused
  agree
    fused
gather #0 cp_team
    fused
gather #1 cp_team
wait #0
    fused
send #2 both axes
wait #1
wait #2
send #3 cp_ring
    fused
  flash_backward
  flash_backward
    fused
send #4 cp_ring
wait #3
    fused
  flash_backward
    fused
send #5 cp_team
  flash_backward
    fused
wait #4
    fused
send #6 both axes
wait #5
    fused
wait #6
    fused
send #7 cp_team
wait #7
    fused""",
    )


def test_ulysses() -> None:
    """Of two groups of heads: the next one is on its way while one is computed, and the last one's results are."""
    assert_expected_inline(
        text(1, 1, ulysses=2, heads=(8, 4)),
        """\
    fused
  agree
    fused
send #0 cp_ulysses
wait #0
    fused
send #1 cp_ulysses
  flash
    fused
send #2 cp_ulysses
wait #1
    fused
  flash
    fused
send #3 cp_ulysses
wait #2
wait #3
    fused
backward
  agree
    fused
send #0 cp_ulysses
wait #0
    fused
send #1 cp_ulysses
    fused
  flash_backward
    fused
send #2 cp_ulysses
wait #1
    fused
  flash_backward
    fused
send #3 cp_ulysses
wait #2
wait #3
    fused""",
    )


@pytest.mark.parametrize(
    ("ring", "options"),
    [
        pytest.param(1, {"heads": (16, 8)}, id="four groups", marks=pytest.mark.whole),
        pytest.param(
            2, {"heads": (8, 4), "is_causal": True, "window_size": (70, None), "length": 255}, id="uneven hybrid"
        ),
    ],
)
def test_groups_of_heads_are_exchanged_behind_kernels(ring: int, options: dict[str, Any]) -> None:
    """The next group's leave before a group's kernels, its results before the next group's: U Uk U Uk ... U k U."""
    for lines in lines_of(ring, 1, ulysses=2, **options):
        marks = ["U" if "cp_ulysses" in line else "k" if line.startswith("  flash") else "" for line in lines]
        assert re.fullmatch("U(Uk+U)+k+U", "".join(marks))
        sent = [line.split()[1] for line in lines if "cp_ulysses" in line]
        # Nothing can hide the first group's arrival and the last one's return.
        assert exposed(lines) == [sent[0], sent[-1]]


def kernels(lines: list[str]) -> list[str]:
    return [line.strip() for line in lines if line.startswith("  flash")]


def exposed(lines: list[str]) -> list[str]:
    """Transfers with no attention kernel between their start and their wait."""
    started: dict[str, int] = {}
    seen, found = 0, []
    for line in lines:
        words = line.split()
        if words[0] in ("send", "gather"):
            started[words[1]] = seen
        elif words[0] == "wait" and started.pop(words[1]) == seen:
            found.append(words[1])
        seen += words[0].startswith("flash")
    assert not started, "a transfer is never waited for"
    return found


BALANCED = {"is_causal": True, "order": "head_tail"}
CASES = [
    (4, 1, {"rotate": "kv"}),
    pytest.param(3, 2, {"rotate": "q"}, marks=pytest.mark.whole),
    (3, 2, {"rotate": "kv"} | BALANCED),
    (3, 2, {"rotate_forward": "q"} | BALANCED),
    (1, 3, BALANCED),
    pytest.param(1, 3, {"rotate": "kv", "rotate_forward": "kv"} | BALANCED, marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("ring", "team", "options"), CASES)
def test_transfers_hide_behind_kernels_and_merges_are_one(ring: int, team: int, options: dict[str, Any]) -> None:
    """Between a kernel and whatever follows (a kernel, start or wait) lies one fused kernel at most."""
    for lines in lines_of(ring, team, **options):
        assert exposed(lines) == []
        names = ["flash" if "flash" in line else line.split()[0] for line in lines]
        merges = re.findall(r"flash((?: fused)+)", " ".join(names))
        assert merges
        assert set(merges) == {" fused"}


def test_inductors_own_reordering_exposes_nothing() -> None:
    with torch._inductor.config.patch(reorder_for_compute_comm_overlap=True):
        # A scale of its own, since code is kept by options.
        for lines in lines_of(3, 2, scale=0.7, **BALANCED):
            assert exposed(lines) == []


@pytest.mark.parametrize("ring", [4, pytest.param(8, marks=pytest.mark.whole)])
@pytest.mark.parametrize(("team", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_nothing_more_is_alive_in_a_longer_ring(team: int, dtype: torch.dtype, ring: int) -> None:
    one, two = ([most_alive(code) for code in code_of(n, team, dtype=dtype, rotate="kv")] for n in (ring, 2 * ring))
    assert one == two
    assert min(one) > 64 * 16 * 8  # what q, k and v hold


@pytest.mark.parametrize(
    ("options", "ranks", "apart"),
    [
        ({"ring": 4, "order": "contiguous", "dynamic": None}, (0, 3), "no axis"),
        ({"ring": 4, "order": "head_tail", "dynamic": True}, (0, 3), "no axis"),
        pytest.param({"ring": 4, "order": "contiguous", "dynamic": True}, (0, 3), "no axis", marks=pytest.mark.whole),
        pytest.param({"ring": 4, "order": "head_tail", "dynamic": None}, (0, 3), "no axis", marks=pytest.mark.whole),
        pytest.param(
            {"ring": 2, "ulysses": 3, "heads": (8, 4), "window_size": (20, None)}, (0, 4), "cp_ring",
            marks=pytest.mark.whole,
        ),
    ],
)  # fmt: skip
def test_ranks_start_collectives_in_one_order(options: dict[str, Any], ranks: tuple[int, int], apart: str) -> None:
    """Although causal ranks have different work, hence different code; and some have one group of heads less.

    Those that have it less are on a ring of their own (``apart``), round which they then send nothing.
    """
    programs = [
        lines_of(team=1, rank=rank, model=two_and_a_sum, requires_grad=False, is_causal=True, **options)
        for rank in ranks
    ]
    kinds = ("agree", "send", "all_reduce", "attention", "attention_backward")
    for first, last in zip(*programs, strict=True):
        started = [
            [line.split()[0] for line in lines if line.split()[0] in kinds and apart not in line]
            for lines in (first, last)
        ]
        assert started[0] == started[1]
        assert len(started[0]) > 3 or options.get("dynamic")


def most_alive(code: str) -> int:
    """The largest number of elements that the buffers of generated code hold at once."""
    body = code[code.index("def call(") :]
    made = re.findall(r"(buf\d+) = (?:empty_strided_cpu\(|reinterpret_tensor\(\w+, )\(([\d, ]*)\)", body)
    checked = re.findall(r"assert_size_stride\((buf\d+), \(([\d, ]*)\)", body)
    elements = {name: math.prod(int(n) for n in shape.split(",") if n.strip()) for name, shape in made + checked}
    alive: dict[str, int] = {}
    most = 0
    for line in body.splitlines():
        if (match := re.match(r"\s+(buf\d+) = (\w*)", line)) and not line.endswith("# alias"):
            name, reused = match.groups()
            # A tuple of buffers has no elements of its own; a buffer that is used again has those it had.
            alive[name] = elements.get(name, alive.get(reused, 0))
        for name in re.findall(r"del (buf\d+)", line):
            alive.pop(name, None)
        most = max(most, sum(alive.values()))
    return most


@pytest.mark.parametrize("team", [1, 2])
def test_what_is_saved_does_not_grow_with_the_ring(team: int) -> None:
    """The partitioned graph keeps q, k, v, out and lse, and the model's own input."""
    tokens, heads, kv_heads, head_dim = 64, 4, 2, 16
    local = 4 * tokens * head_dim * (heads + 2 * kv_heads + heads) + 4 * tokens * heads
    x = 4 * tokens * head_dim * (heads + 2 * kv_heads)
    saved = [saved_bytes(ring, team) for ring in (2, 4, 8)]
    assert saved[0] == saved[1] == saved[2]
    assert saved[0] <= local + x


@pytest.mark.parametrize("options", [{"dynamic": True}, {"model": packed}], ids=["any length", "documents"])
def test_a_graph_of_any_length_or_packing_keeps_the_operator(options: dict[str, Any]) -> None:
    """A schedule is made for one length, and for one packing."""
    forward, backward = lines_of(2, 2, **options)
    assert "  attention" in forward
    assert "  attention_backward" in backward
    assert not kernels(forward + backward)


class Seen(CustomGraphPass):
    """A pass of the user's: notes the operators it is shown."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.names += [str(node.target) for node in graph.nodes if node.op == "call_function"]

    def uuid(self) -> str:
        return "seen"


def test_passes_of_the_users_own_run_and_see_one_operator() -> None:
    before, after = Seen(), Seen()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=before, post_grad_custom_post_pass=after):
        forward, backward = lines_of(4, 1)
    for seen in (before, after):
        assert "wallfacer_dt.attention.default" in seen.names
        assert "wallfacer_dt.attention_backward.default" in seen.names
        assert not any("c10d" in name for name in seen.names)
    assert (len(kernels(forward)), len(kernels(backward))) == (4, 5)


def test_no_option_of_torch_changes() -> None:
    def options() -> tuple[dict[str, Any], dict[str, Any]]:
        return torch._inductor.config.get_config_copy(), torch._dynamo.config.get_config_copy()

    before = options()
    lines_of(2, 1)
    assert options() == before


def test_operators_are_lowered_once() -> None:
    lines_of(2, 1)
    ops = [*BODIES, torch.ops.wallfacer_dt.agree.default]
    found = [lowerings[op] for op in ops]
    lines_of(3, 1)
    assert [lowerings[op] for op in ops] == found
