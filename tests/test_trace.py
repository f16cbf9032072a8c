"""What the executor really does, op by op and byte by byte, on fake ranks.

The programs below are what rank 0 runs for queries (1, 2, 4, 8) and keys and values (1, 1, 4, 8) in bfloat16: a
``send`` is a hop on ``cp_ring`` or the exchange of partial results on ``cp_team``, with what one rank sends to another.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases import told
from tests.strategies import examples, schedules, ulysses_meshes
from wallfacer_dt import Kernels, ModelShape, SequenceShape, context_mesh, context_parallel_attention
from wallfacer_dt.algorithms.heads import split_heads
from wallfacer_dt.algorithms.sequences import Sequences
from wallfacer_dt.command.explain.facts import Communicate, Rank
from wallfacer_dt.command.explain.make import make_facts
from wallfacer_dt.command.explain.settings import Settings
from wallfacer_dt.mesh import ContextGroups, Coordinate
from wallfacer_dt.ops import BODIES
from wallfacer_dt.options import AttentionOptions, Options, Setting, Window
from wallfacer_dt.planning.attention import attention_events
from wallfacer_dt.planning.candidates import Candidate
from wallfacer_dt.planning.programs import program_of
from wallfacer_dt.planning.timeline import Begin, Compute, Event
from wallfacer_dt.planning.traffic import Key, Wire
from wallfacer_dt.testing.fake import fake_world

ROTATIONS = [*product(("kv", "q"), repeat=2)]
SHORT = {
    "all_gather_into_tensor": "gather",
    "all_to_all_single": "send",
    "wait_tensor": "wait",
    "_scaled_dot_product_flash_attention_for_cpu": "flash",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "flash_backward",
}


class Bodies(TorchDispatchMode):
    """Run the operators' bodies, so that what they do is seen."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in BODIES:
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class Program(Bodies):
    """The collectives by axis and the kernels that run, in order; pending buffers are numbered."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes = axes
        self.lines: list[str] = []
        self.pending: dict[int, int] = {}
        self.alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = SHORT.get(func._schema.name.partition("::")[2])
        if name in ("gather", "send"):
            self.alive.append(out)
            self.pending[id(out)] = len(self.pending)
            dtype = str(args[0].dtype).removeprefix("torch.")
            axis = self.axes.get(args[-1], "both axes")
            self.lines.append(f"{name} #{len(self.pending) - 1} {axis} {dtype} {list(args[0].shape)}")
        elif name == "wait":
            self.lines.append(f"wait #{self.pending[id(args[0])]}")
        elif name:
            q, k = args[1:3] if "backward" in name else args[:2]
            self.lines.append(f"  {name} {list(q.shape)} x {list(k.shape)}")
        return out


def program(
    ring: int, team: int, ulysses: int = 1, heads: tuple[int, int] = (2, 1), rank: int = 0, **options: Any
) -> str:
    with fake_world(ring * team * ulysses, rank=rank):
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        axes = {str(mesh.get_group(axis).group_name): axis for axis in mesh.mesh_dim_names or ()}
        with FakeTensorMode(), Program(axes) as trace:
            q, k, v = (
                torch.empty(1, n, 4, 8, requires_grad=True, dtype=torch.bfloat16) for n in (heads[0], *heads[1:] * 2)
            )
            out = context_parallel_attention(q, k, v, mesh, **told(mesh, **options))
            trace.lines.append("backward")
            out.backward(torch.empty_like(out))
        return "\n".join(trace.lines)


def test_ring() -> None:
    assert_expected_inline(
        program(3, 1, rotate="kv"),
        """\
send #0 cp_ring bfloat16 [64]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #0
send #1 cp_ring bfloat16 [64]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #1
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
backward
send #2 cp_ring bfloat16 [64]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
wait #2
send #3 cp_ring bfloat16 [64]
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
send #4 cp_ring float32 [64]
wait #3
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
wait #4
send #5 cp_ring bfloat16 [64]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
wait #5""",
    )


def test_wallfacer_causal() -> None:
    assert_expected_inline(
        program(2, 2, rotate="kv", is_causal=True, order="head_tail"),
        """\
gather #0 cp_team bfloat16 [64]
send #1 cp_ring bfloat16 [64]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #0
  flash [1, 2, 4, 8] x [1, 1, 2, 8]
wait #1
  flash [1, 2, 2, 8] x [1, 1, 4, 8]
send #2 cp_team bfloat16 [80]
  flash [1, 2, 2, 8] x [1, 1, 4, 8]
wait #2
backward
gather #3 cp_team bfloat16 [160]
send #4 cp_ring bfloat16 [64]
  flash_backward [1, 2, 3, 8] x [1, 1, 3, 8]
wait #3
  flash_backward [1, 2, 4, 8] x [1, 1, 2, 8]
wait #4
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
send #5 cp_team bfloat16 [64]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
send #6 cp_ring bfloat16 [64]
  flash_backward [1, 2, 1, 8] x [1, 1, 4, 8]
wait #5
wait #6""",
    )


def sent(traced: str) -> tuple[list[str], list[str]]:
    """The axes along which forward and backward send, or the gathers, in order."""
    lines = [part.splitlines() for part in traced.split("backward\n", 1)]
    return tuple(
        [" ".join(line.split()[::2][:2]) for line in part if "#" in line and "wait" not in line] for part in lines
    )


def test_a_team_alone_gathers_keys_and_values() -> None:
    """Where they are fewer than queries; nothing is exchanged in the forward."""
    assert sent(program(1, 3, is_causal=True)) == (["gather cp_team"], ["gather cp_team", "send cp_team"])


def test_wallfacer_rotating_queries_in_the_forward() -> None:
    """What there is of their output goes with them, in float32."""
    assert_expected_inline(
        program(3, 2, rotate_forward="q"),
        """\
gather #0 cp_team bfloat16 [64]
send #1 cp_ring bfloat16 [64]
  flash [1, 2, 2, 8] x [1, 1, 4, 8]
wait #0
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #1
send #2 cp_ring bfloat16 [64]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
send #3 cp_ring float32 [72]
wait #2
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #3
send #4 cp_ring bfloat16 [80]
  flash [1, 2, 2, 8] x [1, 1, 4, 8]
wait #4
backward
gather #5 cp_team bfloat16 [160]
send #6 cp_ring bfloat16 [64]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
wait #5
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
wait #6
send #7 cp_ring bfloat16 [64]
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
send #8 cp_ring float32 [64]
wait #7
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
send #9 cp_team bfloat16 [64]
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
wait #8
send #10 cp_ring bfloat16 [64]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
wait #9
wait #10""",
    )


def test_wallfacer_rotating_queries() -> None:
    assert_expected_inline(
        program(2, 2, rotate="q"),
        """\
gather #0 cp_team bfloat16 [64]
send #1 cp_ring bfloat16 [64]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #0
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #1
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
send #2 cp_team bfloat16 [80]
  flash [1, 2, 4, 8] x [1, 1, 4, 8]
wait #2
backward
gather #3 cp_team bfloat16 [64]
send #4 cp_ring bfloat16 [160]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
wait #3
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
wait #4
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
send #5 cp_team bfloat16 [64]
  flash_backward [1, 2, 4, 8] x [1, 1, 4, 8]
send #6 cp_ring bfloat16 [64]
  flash_backward [1, 2, 2, 8] x [1, 1, 4, 8]
wait #5
wait #6""",
    )


def test_published() -> None:
    assert_expected_inline(
        program(4, 2, schedule="published"),
        """\
gather #0 cp_team bfloat16 [64]
gather #1 cp_team bfloat16 [64]
wait #0
send #2 both axes bfloat16 [128]
wait #1
wait #2
send #3 cp_ring bfloat16 [128]
  flash [1, 2, 4, 8] x [1, 1, 8, 8]
  flash [1, 2, 4, 8] x [1, 1, 8, 8]
wait #3
  flash [1, 2, 4, 8] x [1, 1, 8, 8]
send #4 cp_team bfloat16 [80]
  flash [1, 2, 4, 8] x [1, 1, 8, 8]
wait #4
backward
gather #5 cp_team bfloat16 [160]
gather #6 cp_team bfloat16 [64]
wait #5
send #7 both axes bfloat16 [320]
wait #6
wait #7
send #8 cp_ring bfloat16 [320]
  flash_backward [1, 2, 8, 8] x [1, 1, 4, 8]
  flash_backward [1, 2, 8, 8] x [1, 1, 4, 8]
send #9 cp_ring float32 [128]
wait #8
  flash_backward [1, 2, 8, 8] x [1, 1, 4, 8]
send #10 cp_team bfloat16 [64]
  flash_backward [1, 2, 8, 8] x [1, 1, 4, 8]
wait #9
send #11 both axes bfloat16 [128]
wait #10
wait #11
send #12 cp_team bfloat16 [64]
wait #12""",
    )


def test_ulysses() -> None:
    """A group of heads is computed while the next is on its way, and the last one's results are on theirs."""
    assert_expected_inline(
        program(1, 1, 2, heads=(4, 4)),
        """\
send #0 cp_ulysses bfloat16 [96]
wait #0
send #1 cp_ulysses bfloat16 [96]
  flash [1, 1, 8, 8] x [1, 1, 8, 8]
send #2 cp_ulysses bfloat16 [40]
wait #1
  flash [1, 1, 8, 8] x [1, 1, 8, 8]
send #3 cp_ulysses bfloat16 [40]
wait #2
wait #3
backward
send #4 cp_ulysses bfloat16 [144]
wait #4
send #5 cp_ulysses bfloat16 [144]
  flash_backward [1, 1, 8, 8] x [1, 1, 8, 8]
send #6 cp_ulysses bfloat16 [96]
wait #5
  flash_backward [1, 1, 8, 8] x [1, 1, 8, 8]
send #7 cp_ulysses bfloat16 [96]
wait #6
wait #7""",
    )


@pytest.mark.parametrize(
    ("ring", "options"),
    [
        pytest.param(1, {"heads": (16, 8)}, id="four groups"),
        pytest.param(
            2, {"heads": (8, 4), "is_causal": True, "window_size": (5, None), "length": 15}, id="uneven hybrid"
        ),
    ],
)
def test_groups_of_heads_are_exchanged_behind_kernels(ring: int, options: dict[str, Any]) -> None:
    """The next group's leave before a group's kernels, its results before the next group's: U Uk U Uk ... U k U."""
    for part in program(ring, 1, 2, **options).split("backward\n", 1):
        lines = part.splitlines()
        marks = ["U" if "cp_ulysses" in line else "k" if line.startswith("  flash") else "" for line in lines]
        assert re.fullmatch("U(Uk+U)+k+U", "".join(marks))


def test_ulysses_round_a_ring() -> None:
    there, round_, back = "send cp_ulysses", "send cp_ring", "send cp_ulysses"
    assert sent(program(2, 1, 2, rotate="kv")) == ([there, round_, back], [there, round_, round_, back])


def test_groups_of_heads_take_turns() -> None:
    """The second group's block is on its way before the last kernel of the first, whose gradients come meanwhile.

    Of queries the first group has two heads, the second one.
    """
    assert_expected_inline(
        program(2, 1, 2, heads=(6, 3), rotate="kv"),
        """\
send #0 cp_ulysses bfloat16 [96]
wait #0
send #1 cp_ulysses bfloat16 [128]
send #2 cp_ring bfloat16 [128]
  flash [1, 2, 8, 8] x [1, 1, 8, 8]
wait #2
wait #1
send #3 cp_ring bfloat16 [128]
  flash [1, 2, 8, 8] x [1, 1, 8, 8]
send #4 cp_ulysses bfloat16 [80]
  flash [1, 1, 8, 8] x [1, 1, 8, 8]
wait #3
  flash [1, 1, 8, 8] x [1, 1, 8, 8]
send #5 cp_ulysses bfloat16 [40]
wait #4
wait #5
backward
send #6 cp_ulysses bfloat16 [144]
wait #6
send #7 cp_ulysses bfloat16 [224]
send #8 cp_ring bfloat16 [128]
  flash_backward [1, 2, 4, 8] x [1, 1, 8, 8]
wait #8
wait #7
send #9 cp_ring bfloat16 [128]
  flash_backward [1, 2, 8, 8] x [1, 1, 8, 8]
send #10 cp_ring bfloat16 [128]
  flash_backward [1, 2, 4, 8] x [1, 1, 8, 8]
  flash_backward [1, 1, 4, 8] x [1, 1, 8, 8]
wait #9
wait #10
send #11 cp_ulysses bfloat16 [128]
  flash_backward [1, 1, 8, 8] x [1, 1, 8, 8]
send #12 cp_ring bfloat16 [128]
  flash_backward [1, 1, 4, 8] x [1, 1, 8, 8]
wait #12
send #13 cp_ulysses bfloat16 [96]
wait #11
wait #13""",
    )


@examples(60, today=30)
@given(st.sampled_from(ulysses_meshes(8) + ulysses_meshes(6)), st.integers(1, 9), st.integers(1, 2), st.data())
def test_planner_and_explain_have_the_order_of_calls(
    mesh: tuple[int, int, int], kv_heads: int, share: int, data: st.DataObject
) -> None:
    """What is started along which axis, and what is waited for, step by step, on ranks with few heads and many."""
    ring, team, ulysses = mesh
    heads, causal = kv_heads * share, data.draw(st.booleans())
    assume(heads >= ulysses)
    schedule = data.draw(st.sampled_from(schedules(ring, team)))
    rotate, rotate_forward = ("q", "kv") if schedule == "published" else data.draw(st.sampled_from(ROTATIONS))
    way = {"schedule": schedule, "rotate": rotate, "rotate_forward": rotate_forward, "order": "head_tail"}
    candidate, model = Candidate(ring, team, ulysses, **way), ModelShape(8 * heads, heads, kv_heads, 8)
    rank = data.draw(st.integers(0, candidate.size - 1))
    called = program(ring, team, ulysses, (heads, kv_heads), rank, is_causal=causal, **way).split("backward\n", 1)
    sequence = SequenceShape(4 * candidate.size, is_causal=causal)
    sequences = Sequences(sequence.length, sequence.length, "head_tail", sequence.mask)
    place = candidate.place(rank)
    groups = tuple(some.counts for some in split_heads(heads, kv_heads, ulysses, hidden=True)[place.ulysses_rank])
    sizes = {"ring": ring, "team": team, "ulysses": ulysses, "heads": heads, "kv_heads": kv_heads}
    settings = Settings(**sizes, **way, causal=causal, length=sequence.length)
    for backward, lines in enumerate(map(str.splitlines, called)):
        resident = "kv" if (rotate if backward else rotate_forward) == "q" else "q"
        steps = program_of(place, sequences, schedule, resident, bool(backward))
        wires = defaultdict[Key, Wire](Wire)
        events = attention_events(steps, candidate, model, sequence, Kernels(), wires, groups, backward=bool(backward))
        wanted = numbered(issued(lines))
        assert numbered(planned(events)) == wanted
        assert numbered(explained(make_facts(replace(settings, backward=bool(backward))).ranks[rank])) == wanted


def numbered(steps: Iterable[tuple[str, str, str]]) -> list[tuple[str, ...]]:
    """Starts, of which each has its own name, and waits, as a program has them."""
    numbers: dict[str, int] = {}
    found = []
    for do, name, axis in steps:
        number = f"#{numbers.setdefault(name, len(numbers))}"
        found.append((do, number, axis) if do == "start" else (do, number))
    return found


def issued(lines: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        if "#" in line:
            do, name, *axis = line.split()
            yield ("start", name, axis[0]) if axis else (do, name, "")


def planned(events: Iterable[Event]) -> Iterator[tuple[str, str, str]]:
    for event in events:
        if not isinstance(event, Compute):
            kind, axis = event.name.split()[:2]
            axis = "cp_ulysses" if kind in ("to_heads", "to_tokens") else "both" if axis == "cp" else axis
            yield "start" if isinstance(event, Begin) else "wait", event.name, axis


def explained(rank: Rank) -> Iterator[tuple[str, str, str]]:
    for step in rank.steps:
        if isinstance(step, Communicate):
            axis = rank.transfer_of(step).axis
            yield step.kind, str(step.transfer), "both" if axis == "cp" else axis


def test_a_window_sends_no_further_than_it_reaches() -> None:
    """One hop of a ring of four, and one of the gradients' back."""
    window = program(4, 1, rotate="kv", is_causal=True, window_size=(2, 0))
    assert sent(window) == (["send cp_ring"], ["send cp_ring"] * 2)


def peak_bytes(ring: int, team: int, rotate: str, rotate_forward: str = "kv") -> int:
    with fake_world(ring * team):
        mesh = context_mesh("cpu", ring, team)
        with FakeTensorMode():
            q, k, v = (torch.empty(1, n, 64, 32, requires_grad=True) for n in (4, 2, 2))
            tracker = MemTracker()
            tracker.track_external(q, k, v)
            with tracker, Bodies():
                out = context_parallel_attention(q, k, v, mesh, rotate=rotate, rotate_forward=rotate_forward)
                out.backward(torch.empty_like(out))
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


BY_NEED = ("contiguous", "reshape")  # what copies only where it must
COPIES = ("cat", "clone", "constant_pad_nd", "copy_", "index", "index_copy_", "index_select", "stack")
KIB = 2**10


class Copies(Bodies):
    """Copies and their bytes, those of new dtypes by themselves; what is sent and what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.copied = self.converted = self.sent = self.arrived = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.partition("::")[2]
        if name in COPIES or (name in BY_NEED and out.untyped_storage() is not args[0].untyped_storage()):
            self.count += 1
            self.copied += out.nbytes
        elif name == "to" and out.dtype != args[0].dtype:
            self.converted += out.nbytes
        elif name == "all_to_all_single":
            self.arrived += sum(args[1]) * out.itemsize
            self.sent += sum(args[2]) * out.itemsize
        elif name == "all_gather_into_tensor":
            self.arrived += out.nbytes - args[0].nbytes
            self.sent += args[0].nbytes
        return out


def copies(
    ring: int, team: int, ulysses: int, heads: int, layout: str = "BNLH", **options: Any
) -> tuple[Copies, Copies]:
    """Of the forward and of the backward; q, k and v are 1 KiB a head each."""
    with fake_world(ring * team * ulysses, rank=1):
        mesh = context_mesh("cpu", ring, team, ulysses=ulysses)
        with FakeTensorMode():
            shape = (1, heads, 16, 32) if layout == "BNLH" else (1, 16, heads, 32)
            leaves = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            q, k, v = (x if layout == "BNLH" else x.transpose(1, 2) for x in leaves)
            with Copies() as forward:
                out = context_parallel_attention(q, k, v, mesh, **told(mesh, **options))
            with Copies() as backward:
                out.backward(torch.empty_like(out))
    return forward, backward


@pytest.mark.parametrize("layout", ["BNLH", "BLNH"])
@pytest.mark.parametrize(("heads", "groups"), [(8, 1), (32, 4)])
def test_tokens_are_copied_once_on_their_way_to_heads_and_back(heads: int, groups: int, layout: str) -> None:
    """Into what is sent, and out of what arrives or, an eighth, stays here; in a few calls for all eight ranks.

    They are at most two for a tensor that is sent, since nothing is sent to oneself, one for the tokens of all ranks,
    and for a result with all heads one. A gradient is taken as it is laid out, by heads or by tokens.
    """
    given, results = (3, 6), (2, 3)
    for way, seen in enumerate(copies(1, 1, 8, heads, layout)):
        assert seen.copied == seen.sent + seen.arrived * 8 / 7
        assert seen.count == groups * (3 * given[way] + 2 * results[way]) + results[way]


STATISTIC = 8 * 16 * 4 / KIB


@pytest.mark.parametrize(
    ("mesh", "layout", "most"),
    [
        # k and v; q, dO and two statistics, dq before its first hop, in float32, and its last, gradients as they are
        # laid out
        ((8, 1, 1), "BNLH", (16 + 8 * STATISTIC, 16 + 2 * STATISTIC + 16 + 8 + 16)),
        ((8, 1, 1), "BLNH", (16 + 8 * STATISTIC, 16 + 2 * STATISTIC + 16 + 8)),
        # k and v, q, which lies otherwise in a buffer, others' q, their out and lse; k and v, others' q, dO and two
        # statistics, their dq, dk and dv before their hop, gradients as they are laid out
        ((2, 4, 1), "BNLH", (16 + 8 + 24 + 24 + 11 * STATISTIC, 16 + 17 + 51 + 24 + 16 + 16)),
        ((2, 4, 1), "BLNH", (16 + 24 + 24 + 11 * STATISTIC, 16 + 17 + 51 + 24 + 16)),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_sent_is_copied_once_however_far_it_goes(
    mesh: tuple[int, int, int], layout: str, most: tuple[float, float]
) -> None:
    """In KiB: into a send buffer, and where rows of several ranks are put together; what arrives is used as it lies."""
    for seen, bound in zip(copies(*mesh, 8, layout), most, strict=True):
        assert seen.copied <= bound * KIB


def test_a_longer_ring_copies_only_what_its_merges_do() -> None:
    """Keys and values, and what is carried home, are sent on where they arrived; lse is written by a merge."""
    (short, back), (long, far_back) = copies(3, 1, 1, 8), copies(9, 1, 1, 8)
    assert long.copied - short.copied <= 6 * STATISTIC * KIB
    assert far_back.copied == back.copied


@pytest.mark.parametrize("rotate_forward", ["kv", "q"])
@pytest.mark.parametrize("rotate", ["kv", "q"])
@pytest.mark.parametrize("team", [1, 2])
def test_peak_memory_does_not_grow_with_the_ring(team: int, rotate: str, rotate_forward: str) -> None:
    peaks = [peak_bytes(ring, team, rotate, rotate_forward) for ring in (5, 10, 20)]
    assert len(set(peaks)) == 1, peaks


@pytest.mark.parametrize(
    ("mesh", "rotate", "most"),
    [((8, 1), "kv", 11.1), ((8, 1), "q", 14.2), ((4, 2), "kv", 18.2), ((1, 8), "kv", 37.1)],
)
def test_peak_memory_in_units_of_a_shard(mesh: tuple[int, int], rotate: str, most: float) -> None:
    """Forward and backward, in shards of q, the inputs and results included; k and v are half a shard each."""
    assert peak_bytes(*mesh, rotate) / (4 * 64 * 32 * 4) < most


ORDERED = st.lists(st.integers(), max_size=3).map(tuple)
KINDS = {int: st.integers(), str: st.text(), bool: st.booleans(), int | None: st.none() | st.integers()}
KINDS |= {tuple[int, ...]: ORDERED, Window | None: st.none() | st.tuples(st.none() | st.integers(), st.integers())}
NAMES = st.tuples(st.text(), st.text(), st.text())


def any_of(kind: type, without: Collection[str] = (), **known: Any) -> st.SearchStrategy[Any]:
    """One of a dataclass, by its fields' types."""
    drawn = {f.name: KINDS[f.type] for f in fields(kind) if f.name not in {*without, *known}}
    return st.builds(kind, **drawn, **known)


@given(
    numbers=st.tuples(st.floats(1e-9, 1e9), st.floats(0, 1e9)),
    setting=any_of(
        Setting,
        options=any_of(AttentionOptions, {"mask_mod", "order", "scale", "softcap"}),
        groups=st.builds(ContextGroups, any_of(Coordinate), NAMES, st.text(), ORDERED),
    ),
    rest=st.tuples(st.text(), st.text(), st.booleans()),
)
def test_operators_take_options_as_text(numbers: tuple[float, float], setting: Setting, rest: tuple[Any, ...]) -> None:
    """What comes out is what went in: numbers to the last bit, integers, truths, any text."""
    options = Options(*numbers, setting, *rest)
    found = Options.of(*options.told())
    assert found == options
    assert repr(found) == repr(options)  # which tells a bool from an integer


def test_the_text_of_options_needs_no_escapes() -> None:
    """Inductor's C++ wrapper puts it between quotes as it is."""
    known = AttentionOptions(window_size=(3, 0), rotate="q", kernel="flash")
    text = Options(0.5, 2.0, Setting(options=known, order="head_tail"), "0123", mask="answers").told()[3]
    assert not {'"', "\\", "\n"} & {*text}


def test_ranks_compare_every_option() -> None:
    """Of the two that are objects the names."""
    told = AttentionOptions(window_size=(3, 0), length=7, kv_length=5, replicated=2, rotate="q", kernel="flash")
    compared = Options(0.5, 2.0, Setting(options=told, order="head_tail"), "", mask="answers").compared
    assert compared == asdict(told) | {"scale": 0.5, "softcap": 2.0, "order": "head_tail", "mask_mod": "answers"}
