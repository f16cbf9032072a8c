"""DTensors in, DTensors out: equal to one process on meshes with further axes, and what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Case, Inner, draw, draw_extras, held, oracle, per_head, per_row, told
from tests.refusals import Communication
from wallfacer_dt import RingParallel, TokenOrder, WallFacerParallel, context_parallel_attention, sharding
from wallfacer_dt.mesh import ContextGroups, Coordinate
from wallfacer_dt.options import AttentionOptions, Options, Setting
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

AXES = {"U": "cp_ulysses", "R": "cp_ring", "T": "cp_team"}
PLACEMENTS = {"B": Shard(0), "N": Shard(1), "L": Shard(2), "H": Shard(3), "-": Replicate(), "+": Partial()}


class Layout(NamedTuple):
    """A mesh, by size and by letter: U, R, T are ulysses, ring, team, others are axes of their own; and placements.

    A letter per axis for q, and for k and v, and sinks, where they are placed otherwise; ``options``: of the case.
    """

    sizes: tuple[int, ...]
    axes: str
    q: str
    kv: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    heads: tuple[int, int] = (4, 2)
    sinks: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(AXES.get(letter, letter) for letter in self.axes)

    @property
    def context(self) -> tuple[str, ...]:
        """The axes that share a sequence."""
        return tuple(AXES[letter] for letter in self.axes if letter in AXES)

    @property
    def case(self) -> Case:
        """Shapes, inputs and options."""
        size = dict(zip(self.axes, self.sizes, strict=True))
        heads, kv_heads = self.heads
        options = {"batch": 4, "head_dim": 8, "is_causal": True, "order": "head_tail"} | self.options
        return Case(
            size.get("R", 1), size.get("T", 1), ulysses=size.get("U", 1), heads=heads, kv_heads=kv_heads, **options
        )  # fmt: skip

    def placements(self, letters: str) -> list[Placement]:
        return [PLACEMENTS[letter] for letter in letters]

    def placements_of(self, name: str) -> list[Placement]:
        """Of an input by its name."""
        kv = self.kv or self.q
        if name == "sinks":
            return [Shard(0) if letter == "N" else Replicate() for letter in self.sinks or self.q]
        if name == "k_shared":
            return self.placements(kv.replace("N", "-"))
        return self.placements(self.q if name == "q" else kv)


class Outcome(NamedTuple):
    error: float
    placements: list[tuple[Placement, ...]]
    collectives: int


def attend(layout: Layout, through: str = "function") -> Outcome:
    """Output and gradients against one process, their placements, and what redistribution cost."""
    mesh, case = init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.names), layout.case
    context: DeviceMesh = mesh[layout.context]

    def rows(length: int) -> list[int]:
        """The order in which shards hold tokens."""
        return [row for index in range(case.size) for row in held(index, case.axes, case.order, length)]

    q_rows, k_rows = rows(case.total), rows(case.kv_total)
    q, k, v, grad_out = draw(case)
    whole = {"q": q, "k": k, "v": v} | draw_extras(case)
    order = {"q": q_rows, "k": k_rows, "v": k_rows, "k_shared": k_rows}
    leaves = {
        name: distribute_tensor(x[:, :, order[name]] if name in order else x, mesh, layout.placements_of(name))
        for name, x in whole.items()
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    sent = CommDebugMode()
    # A DTensor knows how long its sequence is.
    options = {name: value for name, value in case.options_on(context).items() if name not in ("length", "kv_length")}
    documents = {name: options.pop(name) for name in ("document_ids", "cu_seqlens") if name in options}

    def results(attention: Callable[..., Tensor]) -> dict[str, Tensor]:
        with sent if through == "function" else nullcontext():
            out = attention(**leaves, **documents)
        grad = distribute_tensor(grad_out[:, :, q_rows], mesh, out.placements)
        grads = torch.autograd.grad(out, list(leaves.values()), grad)
        return dict(zip(("out", *(f"d{name}" for name in leaves)), (out.detach(), *grads), strict=True))

    if through == "function":
        got = results(partial(context_parallel_attention, mesh=context, **options))
    else:
        inner = parallelize_module(Inner(), context, WallFacerParallel(layout="BNLH", check=False, **options))
        got = results(inner)
    if through == "compiled":
        torch._dynamo.reset()
        counting = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda q, **others: inner(q * 1, **others) * 1, backend=counting, fullgraph=True)
        for _ in range(2):
            eager, got = got, results(compiled)
            assert all(torch.equal(x.full_tensor(), got[name].full_tensor()) for name, x in eager.items())
            assert all(x.placements == got[name].placements for name, x in eager.items())
        assert counting.frame_count == 1
    assert all(isinstance(x, DTensor) for x in got.values())
    pairs = {}
    for name, expected in oracle(case).by_name().items():
        picked = order.get("q" if name == "out" else name[1:])
        pairs[name] = got[name].full_tensor(), expected if picked is None else expected[:, :, picked]
    # The operator is opaque to this mode, so what it counts are redistributions.
    return Outcome(worst_error(pairs), [tuple(x.placements) for x in got.values()], sent.get_total_counts())


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

PACKED = (((5, 11, 16), (32,), (1, 1, 30), (9, 23)), ((7, 25),))

FEATURES = {
    "ulysses": Layout((2,), "U", "L", options={"order": "contiguous"}),
    "kv heads over tp that do not divide": Layout((2, 2), "Ut", "LN", heads=(12, 6)),
    "fewer kv heads than ulysses": Layout((2, 2), "UR", "LL", heads=(3, 1)),
    "hybrid, published": Layout((2, 2, 2), "URT", "LLL", options={"schedule": "published"}),
    "hybrid, window, sinks": Layout(
        (2, 2, 2), "URT", "LLL", options={"window_size": (5, 0), "sinks": True, "rotate": "q", "rotate_forward": "q"}
    ),
    "hybrid, data parallel, documents by row": Layout(
        (2, 2, 2), "dUR", "BLL", options={"shard": 8, "documents": PACKED[0], "sinks": True}
    ),
    "documents by row, all rows everywhere": Layout((2, 2), "RT", "LL", options={"shard": 8, "documents": PACKED[0]}),
    "documents alike": Layout(
        (2, 2, 2), "dRT", "BLL", options={"shard": 8, "documents": PACKED[1], "packed": "cu_seqlens"}
    ),
    "window both ways": Layout((2, 2), "RT", "LL", options={"is_causal": False, "window_size": (3, 2)}),
    "prefix": Layout((2, 2), "UR", "LL", options={"prefix_length": 6}),
    "mask": Layout((2, 2), "UR", "LL", options={"is_causal": False, "mask": "per_head"}),
    "mask by head beside an axis of one rank": Layout(
        (2, 1), "Rt", "LN", options={"is_causal": False, "mask": "per_head"}
    ),
    "mask, data parallel": Layout((2, 2, 2), "dRt", "BLN", options={"is_causal": False, "mask": "blind"}),
    "block mask": Layout((2, 2), "RT", "LL", options={"is_causal": False, "mask": "blockmask"}),
    "sinks over tp": Layout((2, 2, 2), "dRt", "BLN", options={"sinks": True}),
    "sinks everywhere": Layout((2, 2), "Rt", "LN", options={"sinks": True}, sinks="--"),
    "shared keys": Layout((2, 2, 2), "URT", "LLL", options={"shared_dim": 4, "value_dim": 6}),
    "shared keys over tp": Layout((2, 2, 2), "dUt", "BLN", options={"shared_dim": 4, "value_dim": 6}),
    "shared keys over tp, all q": Layout((2, 2, 2), "dRt", "BLN", "-LN", options={"shared_dim": 4}),
    "cross": Layout((2, 2), "RT", "LL", options={"is_causal": False, "kv_length": 20, "order": "contiguous"}),
    "cross, uneven": Layout(
        (2, 2), "UR", "LL", options={"is_causal": False, "length": 13, "kv_length": 5, "order": "contiguous"}
    ),
    "soft cap": Layout((2, 2), "RT", "LL", options={"softcap": 0.7, "kernel": "reference"}),
    "uneven": Layout((2, 2), "RT", "LL", options={"length": 13, "order": "contiguous"}),
    "uneven, head and tail": Layout((2, 2, 2), "URT", "LLL", options={"length": 29}),
    "shorter than ranks": Layout((2, 2, 2), "dRT", "BLL", options={"length": 3}),
    "everything": Layout(
        (2, 2, 2, 1, 2),
        "dURTt",
        "BLLLN",
        heads=(12, 6),
        options={
            "length": 31, "documents": ((31,), (4, 27), (30, 1), (15, 16)), "window_size": (9, None), "sinks": True,
            "shared_dim": 4, "value_dim": 6,
        },
    ),
}  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("layout", CONFORMING, ids=lambda layout: f"{layout.axes}{layout.sizes}{layout.q}")
def test_equals_one_process_with_the_placements_it_was_given(ranks: Callable[[int], RankPool], layout: Layout) -> None:
    placements = tuple(layout.placements(layout.q))
    for outcome in ranks(torch.Size(layout.sizes).numel()).run(attend, layout):
        assert outcome.error < 1e-10
        assert outcome.placements == [placements] * 4


@pytest.mark.ranks
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_equals_one_process(ranks: Callable[[int], RankPool], name: str) -> None:
    """On DTensors, which say themselves how long an uneven sequence is."""
    layout = FEATURES[name]
    for outcome in ranks(torch.Size(layout.sizes).numel()).run(attend, layout):
        assert outcome.error < 1e-10
        assert outcome.placements[:2] == [tuple(layout.placements(layout.q))] * 2
        assert outcome.collectives == 0


COMPILED = ("hybrid, data parallel, documents by row", "mask", "shared keys over tp", "shorter than ranks")


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_they_are_one_graph_and_as_in_eager_mode(ranks: Callable[[int], RankPool], name: str) -> None:
    layout = FEATURES[name]
    for outcome in ranks(torch.Size(layout.sizes).numel()).run(attend, layout, "compiled"):
        assert outcome.error < 1e-10
        assert outcome.placements[:2] == [tuple(layout.placements(layout.q))] * 2


def on_equal_meshes(name: str, size: int) -> list[tuple[bool, float]]:
    """Of two, one after the other, whether torch has computed q on this one, and the error."""
    found = []
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2 // size, size, 1), mesh_dim_names=("dp", name, "cp_team"))
        context: DeviceMesh = mesh[name, "cp_team"] if name == "cp_ring" else mesh[name]
        x = torch.randn(1, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        given = distribute_tensor(x, mesh, [Replicate(), Shard(2), Shard(2)]).requires_grad_()
        q = given * 1
        order = TokenOrder("contiguous", context)
        style = RingParallel(layout="BNLH", is_causal=True, order=order, check=False)
        out = parallelize_module(Inner(), context, style)(q, q, q)
        (grad,) = torch.autograd.grad(out.square().sum(), given)
        whole = x.requires_grad_()
        expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        (want,) = torch.autograd.grad(expected.square().sum(), whole)
        error = worst_error([(out.full_tensor().detach(), expected.detach()), (grad.full_tensor(), want)])
        found.append((q.device_mesh is mesh, error))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "size"), [("cp_ring", 2), ("cp", 2), ("cp", 1)])
def test_a_mesh_that_is_equal_to_an_older_one(ranks: Callable[[int], RankPool], name: str, size: int) -> None:
    """Torch gives what it computes the first of all that are equal, whose groups are others, of the same ranks."""
    for (_, before), (is_own, error) in ranks(2).run(on_equal_meshes, name, size):
        assert not is_own
        assert before <= 1e-12
        assert error <= 1e-12


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
        (Layout((2, 2, 2), "RTt", "LLL", options={"is_causal": False, "mask": "per_head"}, heads=(3, 1)), "LL-", 3),
        (Layout((2, 2, 2), "Rtu", "LNL", heads=(2, 2)), "LN-", 3),  # heads are divided by another axis
        (Layout((2, 4), "Ut", "LL", heads=(4, 4)), "L-", 3),  # or are for Ulysses
    ],
    ids=[
        "heads taken",
        "heads gathered",
        "batch taken",
        "heads for sequence",
        "sequence gathered",
        "by head",
        "divided",
        "ulysses",
    ],
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


SEQUENCE, EVENLY = "must have its sequence sharded on axis", "must divide evenly over axis"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (((2, 2), "RT", "L-"), [f"q {SEQUENCE} 'cp_team'", "got Replicate()"]),
        (((2, 2), "RT", "-L"), [f"q {SEQUENCE} 'cp_ring'", "got Replicate()"]),
        (((2, 2), "RT", "--"), [f"q {SEQUENCE} 'cp_ring'", "got Replicate()"]),
        (((2, 2), "RT", "LL", "L-"), [f"k {SEQUENCE} 'cp_team'", "got Replicate()"]),
        (((2, 2), "RT", "LN"), [f"q {SEQUENCE} 'cp_team'", "got Shard(dim=1)"]),
        (((2, 2), "RT", "L+"), [f"q {SEQUENCE} 'cp_team'", "got Partial(sum)"]),
        (
            ((2, 2, 2), "RTt", "LLH"),
            ["q must be replicated on axis 't', or sharded by batch or heads", "got Shard(dim=3)"],
        ),
        (((2, 2, 2), "RTt", "LL+"), ["q is a sum still to be made, Partial(sum) on axis 't'; redistribute it first"]),
        (((2, 2, 2), "RTt", "LLN", "LL-", (4, 1)), [f"heads of q, k and v {EVENLY} 't' of 2", "placement Shard(1)"]),
        (((2, 2, 2), "RTt", "LLN", "", (3, 3)), [f"heads of q, k and v {EVENLY} 't' of 2", "got q (4, 3, 32, 8)"]),
        (((2, 2, 2), "dRT", "BLL", "", (4, 2), 3), [f"batch {EVENLY} 'd' of 2", "placement Shard(0)"]),
    ],
)
def test_refuses_by_axis_and_placement(case: tuple[Any, ...], parts: list[str]) -> None:
    message = refusal(*case)
    for part in parts:
        assert part in message


def with_extras(what: str) -> None:
    """A call with something beside q, k and v that cannot be."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp_ring"))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "dp"))
    q = DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh, [Shard(0), Shard(2)])
    shared, summed = torch.zeros(1, 1, 8, 4), torch.zeros(2, 1, 4, 4)

    def placed(x: Tensor, *placements: Placement, on: DeviceMesh = mesh) -> DTensor:
        return DTensor.from_local(x, on, placements)

    k = placed(torch.zeros(1, 2, 4, 4), Shard(0), Shard(2))
    ids = torch.zeros(2, 8, dtype=torch.int64)
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "a plain v": lambda: {"v": q.to_local()},
        "plain sinks": lambda: {"sinks": torch.zeros(2)},
        "sinks on another mesh": lambda: {"sinks": placed(torch.zeros(2), Replicate(), Replicate(), on=other)},
        "plain shared keys": lambda: {"k": k, "k_shared": torch.zeros(2, 1, 8, 4)},
        "shared keys replicated on the ring": lambda: {"k": k, "k_shared": placed(shared, Shard(0), Replicate())},
        "shared keys still to be summed": lambda: {"k": k, "k_shared": placed(summed, Partial(), Shard(2))},
        "shared keys on another mesh": lambda: {
            "k": k, "k_shared": placed(shared[:, :, :4], Shard(2), Shard(0), on=other)
        },
        "replicated tokens": lambda: {"replicated": 2},
        "documents as a DTensor": lambda: {"document_ids": placed(ids, Replicate(), Replicate())},
        "documents of one shard": lambda: {"document_ids": ids[:, :4]},
        "documents of some rows": lambda: {"document_ids": ids.repeat(2, 1)},
        "a mask by row of a sharded batch": lambda: {"mask_mod": per_row},
        "a mask by head of heads for a sequence": lambda: {
            **dict.fromkeys("qkv", placed(torch.zeros(1, 2, 2, 8), Shard(2), Shard(2))), "mask_mod": per_head
        },
    }  # fmt: skip
    context_parallel_attention(
        **({"q": q, "k": q, "v": q} | calls[what]()), **told(mesh["cp_ring"]), mesh=mesh["cp_ring"]
    )


@pytest.mark.filterwarnings("ignore")
def test_a_compiler_refuses_a_mask_by_head_of_heads_for_a_sequence() -> None:
    """It does not ask what becomes of the axis."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "t"))
        order = TokenOrder("contiguous", mesh["cp_ring"])
        style = WallFacerParallel(layout="BNLH", check=False, mask_mod=per_head, order=order)
        inner = parallelize_module(Inner(), mesh["cp_ring"], style)
        x = DTensor.from_local(torch.zeros(1, 4, 2, 8), mesh, [Shard(2), Shard(2)])
        torch._dynamo.reset()
        with pytest.raises(Exception, match="mask_mod depends on the head, which DTensors shard"):
            torch.compile(inner, backend="aot_eager", fullgraph=True)(x, x, x)


EXTRAS = {
    "a plain v": ("TypeError", "all be DTensors or all plain tensors, but q and v differ"),
    "plain sinks": ("TypeError", "sinks must be a DTensor where q is"),
    "sinks on another mesh": ("ValueError", "q and sinks must be DTensors on one mesh"),
    "plain shared keys": ("TypeError", "all be DTensors or all plain tensors, but q and k_shared differ"),
    "shared keys replicated on the ring": ("ValueError", "k_shared must have its sequence sharded on axis 'cp_ring'"),
    "shared keys still to be summed": ("ValueError", "k_shared is a sum still to be made, Partial(sum) on axis 'dp'"),
    "shared keys on another mesh": ("ValueError", "q and k_shared must be DTensors on one mesh"),
    "replicated tokens": ("ValueError", "replicated tokens and a shard are no DTensor"),
    "documents as a DTensor": ("TypeError", "document_ids must be a plain tensor"),
    "documents of one shard": ("ValueError", "must be those of the whole sequence of 8 tokens"),
    "documents of some rows": ("ValueError", "must have shape (B, N) or (N,) with B = 2"),
    "a mask by row of a sharded batch": ("ValueError", "mask_mod depends on the batch, which DTensors shard"),
    "a mask by head of heads for a sequence": ("ValueError", "mask_mod depends on the head, which DTensors shard"),
}


def outcomes() -> dict[str, tuple[str, str, list[str]]]:
    """By call, what this rank raises, and what it ran that communicates."""
    found = {}
    for what in EXTRAS:
        with Communication() as communication:
            try:
                with_extras(what)
            except Exception as error:  # the type is what is tested
                found[what] = type(error).__name__, str(error), communication.ran
    return found


@pytest.mark.ranks
def test_refuses_what_goes_with_them_on_every_rank_before_anything_is_sent(ranks: Callable[[int], RankPool]) -> None:
    for found in ranks(4).run(outcomes):
        for what, (kind, text) in EXTRAS.items():
            raised, message, ran = found.get(what, ("nothing", "", []))
            assert raised == kind, f"{what}: {raised}, {message}"
            assert text in message
            assert not [op for op in ran if not op.startswith("c10d")], f"{what}: {ran}"


def test_documents_stay_where_they_are_on_a_mesh_of_another_device() -> None:
    """The schedule is made from them on the host; ``DTensor.from_local`` would move them."""
    with fake_world(4):
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("cp_ring", "cp_team"))
        q = DTensor.from_local(torch.zeros(1, 2, 4, 8, device="meta"), mesh, [Shard(2), Shard(2)])
        documents = sharding.replicate(torch.zeros(1, 16, dtype=torch.int64), q)
        assert isinstance(documents, DTensor)
        assert documents.to_local().device.type == "cpu"
        assert documents.device_mesh == mesh


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
            mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=axes)
        q = DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh, [Shard(2), Shard(2)])
        with pytest.raises(ValueError, match=part):
            context_parallel_attention(q, q, q, context)


def test_refuses_a_mesh_that_orders_the_ranks_of_an_axis_otherwise() -> None:
    """Its groups are of the same ranks."""
    with fake_world(4):
        context = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp_ring"))["cp_ring"]
        mesh = DeviceMesh("cpu", torch.tensor([[1, 0], [3, 2]]), mesh_dim_names=("dp", "cp_ring"))
        q = DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh, [Replicate(), Shard(2)])
        module = parallelize_module(Inner(), context, RingParallel(layout="BNLH", check=False))
        with pytest.raises(ValueError, match="does not hold cp_ring of the context mesh"):
            module(q, q, q)


def test_the_rule_itself_refuses_too() -> None:
    """Under a compiler, and for whoever calls the operator, the rule is all there is."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_ring", "cp_team"))
        good, bad = (
            DTensor.from_local(torch.zeros(1, 2, 4, 8), mesh, [Shard(2), second]) for second in (Shard(2), Replicate())
        )
        ring, team = (str(mesh.get_group(axis).group_name) for axis in mesh.mesh_dim_names)
        given = AttentionOptions(rotate="kv", rotate_forward="kv", kernel="flash")
        groups = ContextGroups(Coordinate(2, 2, 0, 0), ("", ring, team))
        setting = Setting(options=given, order="contiguous", groups=groups)
        options = Options(1.0, 0.0, setting, "")
        torch.ops.wallfacer_dt.attention(good, good, good, None, None, None, None, *options.told())
        with pytest.raises((ValueError, RuntimeError), match=r"(?s)v must .*'cp_team'.*Replicate"):
            torch.ops.wallfacer_dt.attention(good, good, bad, None, None, None, None, *options.told())
        shared = torch.zeros(1, 1, 8, 4)
        for k_shared in (DTensor.from_local(shared, mesh, bad.placements), shared):
            with pytest.raises(
                (ValueError, RuntimeError), match=r"(?s)k_shared.*'cp_team'.*Replicate|mixed torch.Tensor"
            ):
                torch.ops.wallfacer_dt.attention(good, good, good, k_shared, None, None, None, *options.told())
