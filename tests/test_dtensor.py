"""DTensors in, DTensors out: equal to one process on meshes with further axes, and what is refused."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Inner, fake_world, held
from wallfacer_dt import WallFacerParallel, context_parallel_attention, release_order
from wallfacer_dt.testing import RankPool, attention_oracle

AXES = {"R": "cp_ring", "T": "cp_team"}
PLACEMENTS = {"B": Shard(0), "N": Shard(1), "L": Shard(2), "H": Shard(3), "-": Replicate(), "+": Partial()}


class Layout(NamedTuple):
    """A mesh, by size and by letter: R ring, T team, others are axes of their own; and a letter per axis and tensor."""

    sizes: tuple[int, ...]
    axes: str
    q: str
    kv: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    heads: tuple[int, int] = (4, 2)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(AXES.get(letter, letter) for letter in self.axes)

    def placements(self, letters: str) -> list[Placement]:
        return [PLACEMENTS[letter] for letter in letters]


def draw(layout: Layout, mesh: DeviceMesh, order: str) -> tuple[list[Tensor], list[int]]:
    """q, k, v and grad_out of the whole sequence, and the order in which shards hold it."""
    size = mesh["cp_ring"].size() * mesh["cp_team"].size()
    length = 4 * size
    torch.manual_seed(7)
    n, g = layout.heads
    whole = [torch.randn(4, heads, length, 8, dtype=torch.float64) for heads in (n, g, g, n)]
    rows = [int(row) for index in range(size) for row in held(index, size, order, length)]
    return whole, rows


class Outcome(NamedTuple):
    error: float
    placements: list[tuple[Placement, ...]]
    collectives: int


def attend(layout: Layout, through: str = "function") -> Outcome:
    """Output and gradients against one process, their placements, and what redistribution cost."""
    mesh = init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.names)
    context: DeviceMesh = mesh["cp_ring", "cp_team"]
    release_order(context)
    options = {"is_causal": True, "order": "head_tail"} | layout.options
    (q, k, v, grad_out), rows = draw(layout, mesh, options["order"])
    expected = attention_oracle(q, k, v, grad_out, is_causal=options["is_causal"])
    kv = layout.kv or layout.q
    leaves = [
        distribute_tensor(x[:, :, rows], mesh, layout.placements(letters)).requires_grad_()
        for x, letters in ((q, layout.q), (k, kv), (v, kv))
    ]
    sent = CommDebugMode()
    if through == "style":
        inner = parallelize_module(Inner(), context, WallFacerParallel(layout="BNLH", **options))
        out = inner(*leaves)
    else:
        with sent:
            out = context_parallel_attention(*leaves, context, **options)
    grads = torch.autograd.grad(out, leaves, distribute_tensor(grad_out[:, :, rows], mesh, out.placements))
    got = (out.detach(), *grads)
    assert all(isinstance(x, DTensor) for x in got)
    errors = [(a.full_tensor() - b[:, :, rows]).abs().max() for a, b in zip(got, expected, strict=True)]
    # The operator is opaque to this mode, so what it counts are redistributions.
    return Outcome(float(max(errors)), [tuple(x.placements) for x in got], sent.get_total_counts())


CONFORMING = [
    Layout((2, 2), "RT", "LL"),
    Layout((4, 1), "RT", "LL"),
    Layout((1, 4), "RT", "LL", options={"is_causal": False, "order": "contiguous"}),
    Layout((4, 2), "RT", "LL", options={"schedule": "published"}),
    Layout((2, 4), "RT", "LL", options={"rotate": "q"}),
    Layout((2, 2, 2), "dRT", "BLL"),
    Layout((2, 2, 2), "RTt", "LLN"),
    Layout((2, 2, 2), "RtT", "LNL"),
    Layout((2, 2, 2), "dRT", "-LL"),
    Layout((2, 2, 2, 1), "dRTt", "BLLN"),
    Layout((2, 2, 2, 2), "dRTt", "BLLN"),
    Layout((2, 4, 2), "dRT", "BLL"),
    Layout((2, 2, 2, 2), "dRTt", "BLLN", options={"schedule": "published", "is_causal": False}),
]


@pytest.mark.ranks
@pytest.mark.parametrize("layout", CONFORMING, ids=lambda layout: f"{layout.axes}{layout.sizes}{layout.q}")
def test_equals_one_process_with_the_placements_it_was_given(ranks: Callable[[int], RankPool], layout: Layout) -> None:
    placements = tuple(layout.placements(layout.q))
    for outcome in ranks(torch.Size(layout.sizes).numel()).run(attend, layout):
        assert outcome.error < 1e-10
        assert outcome.placements == [placements] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [CONFORMING[5], CONFORMING[10]], ids=["3d", "4d"])
def test_through_a_style(ranks: Callable[[int], RankPool], layout: Layout) -> None:
    placements = tuple(layout.placements(layout.q))
    for outcome in ranks(torch.Size(layout.sizes).numel()).run(attend, layout, "style"):
        assert outcome.error < 1e-10
        assert outcome.placements == [placements] * 4


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("layout", "out", "sent"),
    [
        (Layout((2, 2, 2), "RTt", "LLN", "LL-"), "LLN", 0),  # heads of k and v are taken from what is there
        (Layout((2, 2, 2), "RTt", "LL-", "LLN"), "LL-", 2),  # heads of k and v are gathered
        (Layout((2, 2, 2), "dRT", "BLL", "-LL"), "BLL", 0),
        (Layout((2, 2, 2), "RTt", "LLL"), "LLN", 3),  # sequence parallel over a third axis
        (Layout((2, 2, 2), "RTt", "LLL", heads=(3, 1)), "LL-", 3),
    ],
    ids=["heads taken", "heads gathered", "batch taken", "heads for sequence", "sequence gathered"],
)
def test_redistributes_what_can_be(ranks: Callable[[int], RankPool], layout: Layout, out: str, sent: int) -> None:
    """Where the output then is, how many collectives that took, and that gradients come back as their tensors are."""
    q, kv = (tuple(layout.placements(letters)) for letters in (layout.q, layout.kv or layout.q))
    for outcome in ranks(8).run(attend, layout):
        assert outcome.error < 1e-10
        assert outcome.placements == [tuple(layout.placements(out)), q, kv, kv]
        assert outcome.collectives == sent


def refusal(
    sizes: tuple[int, ...],
    axes: str,
    q: str,
    kv: str = "",
    heads: tuple[int, int] = (4, 2),
    batch: int = 4,
) -> str:
    """What one rank of a fake world says to such tensors."""
    layout = Layout(sizes, axes, q, kv or q, heads=heads)
    with fake_world(torch.Size(sizes).numel()):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=layout.names)

        def tensor(heads: int, letters: str) -> DTensor:
            shape = [batch, heads, 8 * mesh["cp_ring"].size() * mesh["cp_team"].size(), 8]
            local = list(shape)
            for axis, letter in enumerate(letters):
                if "BNLH".find(letter) >= 0:
                    local["BNLH".index(letter)] //= sizes[axis]
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(
                torch.zeros(local), mesh, layout.placements(letters), shape=torch.Size(shape), stride=stride
            )

        tensors = [tensor(heads[0], q), tensor(heads[1], kv or q), tensor(heads[1], kv or q)]
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the caller looks at the text
            context_parallel_attention(*tensors, mesh["cp_ring", "cp_team"])
        return str(caught.value)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (((2, 2), "RT", "L-"), ["q", "'cp_team'", "Replicate()"]),
        (((2, 2), "RT", "-L"), ["q", "'cp_ring'", "Replicate()"]),
        (((2, 2), "RT", "--"), ["q", "'cp_ring'", "Replicate()"]),
        (((2, 2), "RT", "LL", "L-"), ["k", "'cp_team'", "Replicate()"]),
        (((2, 2), "RT", "LN"), ["q", "'cp_team'", "Shard(dim=1)"]),
        (((2, 2), "RT", "L+"), ["q", "'cp_team'", "Partial"]),
        (((2, 2, 2), "RTt", "LLH"), ["q", "'t'", "Shard(dim=3)"]),
        (((2, 2, 2), "RTt", "LL+"), ["q", "'t'", "Partial(sum)", "redistribute"]),
        (((2, 2, 2), "RTt", "LLN", "LL-", (4, 1)), ["heads", "'t' of 2", "Shard(1)"]),
        (((2, 2, 2), "RTt", "LLN", "", (3, 3)), ["heads", "t", "2"]),
        (((2, 2, 2), "dRT", "BLL", "", (4, 2), 3), ["batch", "d", "Shard(0)"]),
    ],
)
def test_refuses_by_axis_and_placement(case: tuple[Any, ...], parts: list[str]) -> None:
    message = refusal(*case)
    assert all(part in message for part in parts), message


def mixed() -> str:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "cp_team"))
        x = torch.zeros(1, 2, 4, 8)
        q = DTensor.from_local(x, mesh, [Shard(2), Shard(2)])
        with pytest.raises(TypeError) as caught:
            context_parallel_attention(q, q, x, mesh)
        return str(caught.value)


def test_refuses_a_mixture_of_dtensors_and_plain_ones() -> None:
    assert "v" in mixed()
    assert "DTensors" in mixed()


@pytest.mark.parametrize(
    ("axes", "part"),
    [
        (("cp_team", "cp_ring"), "'cp_ring' must come before 'cp_team'"),
        (("tp", "dp"), "does not hold cp_ring of the context mesh"),
    ],
)
def test_refuses_a_mesh_of_other_axes(axes: tuple[str, str], part: str) -> None:
    with fake_world(4):
        context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "cp_team"))
        groups = {"cp_ring": context.get_group("cp_ring"), "cp_team": context.get_group("cp_team")}
        if "cp_ring" in axes:
            mesh = DeviceMesh.from_group(
                [groups[axis] for axis in axes], "cpu", mesh=torch.arange(4).view(2, 2).T, mesh_dim_names=axes
            )
        else:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
        q = DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh, [Shard(2), Shard(2)])
        with pytest.raises(ValueError, match=part):
            context_parallel_attention(q, q, q, context)


def test_the_rule_itself_refuses_too() -> None:
    """Under a compiler, and for whoever calls the operator, the rule is all there is."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "cp_team"))
        good, bad = (
            DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh, [Shard(2), second]) for second in (Shard(2), Replicate())
        )
        names = (mesh.get_group(axis).group_name for axis in mesh.mesh_dim_names)
        options = ((2, 2, 0, 0), *names, "", (), False, 1.0, "contiguous", "2d", "kv", "flash", "")
        torch.ops.wallfacer_dt.attention(good, good, good, *options)
        with pytest.raises((ValueError, RuntimeError), match=r"(?s)'cp_team'.*Replicate"):
            torch.ops.wallfacer_dt.attention(good, good, bad, *options)
