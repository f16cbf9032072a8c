"""What outlives a world: exported programs and pickled modules, in the same processes and in new ones."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from tests.cases import Inner, checker
from tests.metp_cases import FeedForward
from tests.pairwise import few
from wallfacer_dt import (
    BlockwiseFeedForward,
    METPParallel,
    TokenOrder,
    WallFacerParallel,
    context_mesh,
)
from wallfacer_dt.testing import RankPool, worst_error
from wallfacer_dt.testing.fake import fake_world

pytestmark = pytest.mark.ranks
Ranks = Callable[[int], RankPool]


class Attention(nn.Module):
    """A projection to q, k and v of packed documents, unless they are to be left out, and attention."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.qkv = nn.Linear(8, 48, dtype=torch.float64)
        self.inner = Inner()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).chunk(3, -1)
        return self.inner(q, k, v, document_ids=ids if self.packed else None).sin()


def styled(team: int = 1, **options: Any) -> Attention:
    torch.manual_seed(0)
    mesh = context_mesh("cpu", 2, team)
    order = TokenOrder("contiguous", mesh)
    return parallelize_module(
        Attention("mask_mod" not in options), mesh, {"inner": WallFacerParallel(order=order, check=False, **options)}
    )


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(dist.get_rank() + 1)
    return torch.randn(1, 4, 8, dtype=torch.float64), torch.arange(4 * dist.get_world_size()) // 3


def results(model: nn.Module) -> list[Tensor]:
    """The output, and the parameters' gradients."""
    out = model(*inputs())
    return [out.detach(), *torch.autograd.grad(out.sum(), list(model.parameters()))]


PROGRAMS = {"program": False, "strict program": True}


def saved_in(folder: str) -> float:
    """Export and pickle a model; how far the programs are from the model."""
    model = styled(is_causal=True)
    here = f"{folder}/{dist.get_rank()}"
    expected, found = results(model), []
    for kind, strict in PROGRAMS.items():
        program = torch.export.export(model, inputs(), strict=strict)
        torch.export.save(program, f"{here}.{kind}.pt2")
        found += zip(results(program.module()), expected, strict=True)
    torch.save(model, f"{here}.model")
    torch.save(expected, f"{here}.expected")
    return worst_error(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where two ranks have left programs and models."""
    path, pool = str(tmp_path_factory.mktemp("outliving")), RankPool(2, timeout=120)
    try:
        assert pool.run(saved_in, path) == [0, 0]
    finally:
        pool.close()
    return path


def loaded(folder: str, kind: str, before: str, backend: str) -> float | str:
    """In a new world: how far what was saved is from what it was, or what it refuses."""
    rank = dist.get_rank()
    if before == "the mesh, after another group":
        dist.new_group([0, 1])  # takes the name that a group of the mesh had
    if before == "another mesh":
        TokenOrder("contiguous", context_mesh("cpu", 1, 2))
    elif before != "no mesh":
        TokenOrder("contiguous", context_mesh("cpu", 2, 1))
    here = f"{folder}/{1 - rank if before == 'the ranks exchanged' else rank}"
    try:
        if kind in PROGRAMS:
            model = torch.export.load(f"{here}.{kind}.pt2").module()
        else:
            model = torch.load(f"{here}.model", weights_only=False)
        if backend:
            model = torch.compile(model, backend=backend, fullgraph=True)
        return worst_error(zip(results(model), torch.load(f"{here}.expected"), strict=True))
    except ValueError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "before", "backend"),
    few(
        [
            (kind, *how)
            for kind in (*PROGRAMS, "model")
            for how in (("the mesh", ""), ("the mesh", "aot_eager"), ("the mesh, after another group", ""))
        ],
        {
            *((kind, "the mesh", "aot_eager") for kind in PROGRAMS),
            *((kind, "the mesh, after another group", "") for kind in PROGRAMS),
            ("model", "the mesh", ""), ("model", "the mesh", "aot_eager"),
        },
    ),
)  # fmt: skip
def test_a_new_world_that_has_the_mesh_runs_it(folder: str, kind: str, before: str, backend: str) -> None:
    pool = RankPool(2, timeout=120)
    try:
        assert pool.run(loaded, folder, kind, before, backend) == [0, 0]
    finally:
        pool.close()


MISSING = "there is no mesh here like the cpu mesh cp_ring 2 x cp_team 1 of ranks 0, 1, for which this was exported"
REFUSED = {"no mesh": MISSING, "another mesh": MISSING, "the ranks exchanged": "every rank loads its own"}


@pytest.mark.parametrize("kind", [*PROGRAMS, "model"])
@pytest.mark.parametrize("before", REFUSED)
def test_another_world_refuses_it(folder: str, before: str, kind: str) -> None:
    pool = RankPool(2, timeout=120)
    try:
        for said in pool.run(loaded, folder, kind, before, ""):
            assert REFUSED[before] in said
    finally:
        pool.close()


def metp() -> nn.Module:
    module = FeedForward(8, 8, 8, "gelu", False, ()).double()
    return parallelize_module(module, context_mesh("cpu", 2, 1), METPParallel(up="up", down="down", activation="gelu"))


def blockwise() -> nn.Module:
    module = FeedForward(8, 8, 8, "gelu", False, ())
    return parallelize_module(module, context_mesh("cpu", 2, 1), BlockwiseFeedForward(chunk=2))


def exported(model: nn.Module) -> None:
    x, ids = inputs()
    torch.export.export(model, (x,) if isinstance(model, FeedForward) else (x, ids), strict=False)


def copied(model: nn.Module) -> None:
    copy.deepcopy(model)(*inputs())


ALONE: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "a mask is exported": (lambda: styled(mask_mod=checker), exported, "mask_mod does not go into an exported"),
    "what the style refuses is exported": (
        lambda: styled(is_causal=True, length=16), exported, "deal them out by shard_sequence",
    ),
    "a mask of the module's code is pickled": (lambda: styled(mask_mod=checker), pickle.dumps, "nothing"),
    "a local mask is pickled": (
        lambda: styled(mask_mod=lambda b, h, q, k: q >= k), pickle.dumps, "save the module's state_dict() and apply",
    ),
    "METP is exported": (metp, exported, "METP cannot be exported"),
    "METP is pickled": (metp, pickle.dumps, "a module under METPParallel cannot be pickled"),
    "a blockwise feed-forward is pickled": (blockwise, pickle.dumps, "under BlockwiseFeedForward cannot be pickled"),
    "a styled module is copied": (lambda: styled(is_causal=True), copied, "nothing"),
}  # fmt: skip


def said_of(what: str) -> str:
    make, use, _ = ALONE[what]
    model = make()
    try:
        use(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("what", ALONE)
def test_what_cannot_outlive_its_world_is_refused_by_name(ranks: Ranks, what: str) -> None:
    for said in ranks(2).run(said_of, what):
        assert ALONE[what][2] in said


@pytest.mark.parametrize("use", [exported, pickle.dumps])
def test_a_schedule_with_a_group_of_its_own_is_refused_by_name(use: Callable[[nn.Module], Any]) -> None:
    with fake_world(4):
        model = styled(2, is_causal=True, schedule="published")
        with pytest.raises(ValueError, match="schedule='published' has a process group of its own"):
            use(model)
