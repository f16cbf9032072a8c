"""Faults of recipes under torchrun's agent: told in a line within the timeout, and gone on from what was saved last."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from recipes.train_bytes.settings import Settings
from recipes.training.finite import blame, first_not_finite, last_not_finite
from recipes.training.loop import _is_refused
from recipes.training.ranks import check_options
from recipes.training.settings import Launch, RecipeError, Saving, check_restarts
from tests.faults.__main__ import FAULTS_BY_NAME, PAGE, judged
from tests.faults.faulty import FROM_THE_START
from tests.faults.run import PATIENCE, RECIPES, STEPS, Outcome, provoke
from tests.machines import needs_network
from tests.metp_refusals import FeedForward, metp
from wallfacer_dt import context_mesh
from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.mesh import name_of
from wallfacer_dt.testing import RankPool
from wallfacer_dt.testing.fake import fake_world

Ranks = Callable[[int], RankPool]
LAUNCH = Launch(rank=0, world=1, local_rank=0, local_world=1)
OUTSIDE = ("the disk fills up", "a link is cut", "a link slows to a hundredth")


def waiting(step: int, call: str, layer: int, rank: int = 2) -> str:
    """What a rank says that waits for one that is gone; of who had come what they sent may be lost, too."""
    inner = rf"{call}, in layers\.{layer}\.attention\.inner"
    who = rf"rank (\d, )*(\d or )?{rank}(, \d)*( or \d)?"
    return rf"rank \d of 4, step {step} of 8: call \d+.*, {inner}: {who} did not come within 0:00:10, or was lost"


SAID = [
    ("killed in the forward", waiting(5, "attention", 1)),
    ("killed in the backward", waiting(5, "the backward of attention", 1)),
    ("killed in the optimizer", waiting(6, "attention", 0)),
    # What is kept is written beside the next step.
    ("killed in a save", r"step [56] of 8: .*(did not come within 0:00:10, or was lost|waited for .* in vain: )"),
    ("leaves the loop", waiting(5, "attention", 0)),
    ("rank 0 is killed in the backward", waiting(5, "the backward of attention", 1, rank=0)),
    ("another version", r"the version of torch.* on every rank of the mesh, got .*rank 2: .*, another"),
    ("other options", r"--lr is 0.01 on rank 2, 0.004 on rank 0: start all alike"),
    ("NaN in gradients", r"step 5: .*the gradients of rank 0, 1, 2, 3 were not, back from layers\.1\."),
]
# Where a rank is killed as in the backward, or leaves; and what a rank has from the start, as another version.
LIKE_OTHERS = (
    "killed in the forward", "killed in the optimizer", "killed in a save", "leaves the loop",
    "rank 0 is killed in the backward", "other options",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[float, ...]]:
    """A recipe's losses where nothing happens."""

    @cache
    def losses(recipe: str) -> tuple[float, ...]:
        found = provoke(recipe, "none", tmp_path_factory.mktemp(recipe))
        assert (found.status, len(found.losses)) == (0, STEPS), found.said
        return found.losses

    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [pytest.param(*one, marks=pytest.mark.whole if one[0] in LIKE_OTHERS else ()) for one in SAID],
)
def test_it_is_told_of_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Callable[[str], tuple[float, ...]], fault: str, message: str
) -> None:
    found = FAULTS_BY_NAME[fault]("train_bytes", tmp_path)
    assert_goes_on(fault, found, message, undisturbed("train_bytes"))


def assert_goes_on(fault: str, found: Outcome, message: str, losses: tuple[float, ...]) -> None:
    assert re.search(message, found.message), found.said
    # Of an asynchronous save it is not known whether it was done, but where a rank leaves in good order.
    steps = [()] if fault in FROM_THE_START else [(4,)] if fault == "leaves the loop" else [(2,), (4,)]
    assert found.resumed in steps
    assert judged(found, losses) == ("", "0")  # the mesh is the same, and so is every bit
    assert found.seconds is not None
    assert found.seconds < PATIENCE


@pytest.mark.whole
@pytest.mark.slow
def test_torchrun_itself_starts_all_again(tmp_path: Path, undisturbed: Callable[[str], tuple[float, ...]]) -> None:
    found = provoke("train_bytes", "killed in the backward", tmp_path, forks=False)
    message = waiting(5, "the backward of attention", 1)
    assert_goes_on("killed in the backward", found, message, undisturbed("train_bytes"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "recipe", "message"),
    [
        ("NaN in activations", "train_dit", r"step 5: loss nan.*; first not finite, when .*: layers.1 on rank 2"),
        ("raises in the forward", "finetune_hf", r"a bug of this rank's alone \(rank 2 of 4, step 5 of 8\)"),
    ],
)
def test_what_other_recipes_say(tmp_path: Path, fault: str, recipe: str, message: str) -> None:
    needed = {"train_dit": "sklearn", "finetune_hf": "transformers"}[recipe]
    pytest.importorskip(needed, reason=f"{needed} is not installed")
    found = provoke(recipe, fault, tmp_path, restarts=0)
    assert re.search(message, found.message), found.said
    assert found.status


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "fault", [pytest.param(x, marks=needs_network if x in OUTSIDE else ()) for x in FAULTS_BY_NAME]
)
def test_every_fault(tmp_path: Path, undisturbed: Callable[[str], tuple[float, ...]], fault: str, recipe: str) -> None:
    found = FAULTS_BY_NAME[fault](recipe, tmp_path)
    assert judged(found, undisturbed(recipe))[0] == "", found.said
    if fault != "a link slows to a hundredth":
        assert found.message, found.said
        assert found.seconds is not None
        assert found.seconds < 3 * PATIENCE


def test_the_table_has_every_fault_of_every_recipe() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    told = {(fault.removeprefix("| "), recipe) for fault, recipe, *_ in rows[2:]}
    assert told == {(fault, recipe) for fault in FAULTS_BY_NAME for recipe in RECIPES}
    assert not [row for row in rows if "hangs" in row[2] or "wrong" in row[2]]


def with_other_options(what: str) -> str:
    """What is said on a rank where rank 2 has another option."""
    rank = dist.get_rank()
    try:
        check_options(
            Settings(lr=0.5 if rank == 2 and what == "lr" else 0.25),
            Saving(save_every=3 if rank == 2 and what == "save_every" else 2),
            replace(LAUNCH, rank=rank, world=4),
        )
    except RecipeError as error:
        return str(error)
    return ""


def test_other_options_on_one_rank_are_refused_on_all(threads: Ranks) -> None:
    assert threads(4).run(with_other_options, "lr") == ["--lr is 0.5 on rank 2, 0.25 on rank 0: start all alike"] * 4
    said = threads(4).run(with_other_options, "save_every")
    assert said == ["--save-every is 3 on rank 2, 2 on rank 0: start all alike"] * 4


@pytest.mark.parametrize(
    ("restarts", "shared", "refused"), [("3", "True", True), ("3", "False", False), ("0", "True", False)]
)
def test_restarts_that_could_not_work_are_refused(restarts: str, shared: str, refused: bool) -> None:
    told = {"TORCHELASTIC_MAX_RESTARTS": restarts, "TORCHELASTIC_USE_AGENT_STORE": shared}
    with mock.patch.dict(os.environ, told):
        if refused:
            with pytest.raises(RecipeError, match=r"--max-restarts 3 needs .* TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
                check_restarts()
        else:
            check_restarts()


class Odd(nn.Module):
    """What is not finite in its second layer, forward or backward."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.by = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == 1:
                x.register_hook(lambda grad: grad * self.by[1]) if x.requires_grad else None
                x = x * self.by[0]
        return x


@pytest.mark.parametrize(
    ("forward", "backward", "again", "said"),
    [
        (
            "nan",
            1.0,
            "nan",
            "first not finite, when the forward was run again: layers.2 on rank 0; lower --lr",
        ),
        ("nan", 1.0, 1.0, "the loss was not finite on rank 0, and was when the forward was run again: a device's"),
        (1.0, "1e30", 1.0, "every gradient is finite, their norm or the sum of losses is not"),
        (1.0, "inf", 1.0, "the loss was finite, the gradients of rank 0 were not, back from layers.1.bias on; "),
    ],
)
def test_what_is_not_finite_is_found(forward: float, backward: float, again: float, said: str) -> None:
    model, x = Odd(float(forward), float(backward)), torch.ones(2, 3)
    loss = model(x).sum()
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.by = float(again), 1.0
    first = first_not_finite(model, lambda: model(x).sum())
    finite = bool(loss.isfinite())
    found = blame(first, finite, all(bool(g.isfinite().all()) for g in grads), last_not_finite(model), LAUNCH)
    assert found.startswith(said)


def test_what_is_not_finite_is_found_round_modules_that_are_not_called() -> None:
    """As those in a module under METP, which refuses their hooks."""
    with fake_world(1):
        model = nn.Sequential(nn.Linear(6, 6), FeedForward())
        parallelize_module(model, context_mesh("cpu"), {"1": metp(check=False)}, src_data_rank=None)
        x = torch.full((1, 2, 6), torch.inf)
        assert first_not_finite(model, lambda: model(x).sum()) == (0, "0")
        model[0] = nn.Identity()
        assert first_not_finite(model, lambda: model(x).sum())[1] == "0"
        assert first_not_finite(model[1], lambda: model[1](x).sum()) == (0, "the model")


def carried() -> str:
    """A number that is not finite from rank 2 on, which attention carries to all in the next layer."""
    rank = dist.get_rank()
    first = (1, "layers.1") if rank == 2 else (3, "layers.2.attention")
    return blame(first, False, None, (0, "head"), replace(LAUNCH, rank=rank, world=4))


def test_who_began_is_blamed(threads: Ranks) -> None:
    assert {said.partition(";")[0] for said in threads(4).run(carried)} == {
        "first not finite, when the forward was run again: layers.1 on rank 2"
    }


def refused_in_a_step(odd: bool) -> bool:
    """Whether an error of attention counts as a refusal; perhaps it is one rank's."""
    mesh = context_mesh("cpu", ring=2)
    try:
        with refusing_together(name_of(mesh)):
            if not odd or dist.get_rank() == 1:
                raise ValueError("dropout is not implemented")
            agree("attention", (), name_of(mesh))
    except ValueError as error:
        return _is_refused(error, SimpleNamespace(context=mesh))
    raise AssertionError


def test_a_bug_of_one_rank_is_no_refusal(ranks: Ranks) -> None:
    assert ranks(2).run(refused_in_a_step, False) == [True, True]
    assert ranks(2).run(refused_in_a_step, True) == [False, False]
