"""What a mask depends on may change at any time: the next call sees it, and what cannot be written down is refused."""

import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, or_masks

from tests.cases import MASK_MODS, Case, draw, prepare, rows_of, told
from wallfacer_dt import context_parallel_attention
from wallfacer_dt.algorithms.recorded import Recording, record
from wallfacer_dt.comparison import worst_error
from wallfacer_dt.testing import RankPool, attention_oracle

Ranks = Callable[[int], RankPool]
CASE, CPU = Case(2, 1, shard=8), torch.device("cpu")
REACH = [3]
Change = tuple[Any, Callable[[], Any], Callable[[], Any]]


class Settings:
    reach = 3
    losses = 0


settings = ModuleType("settings")
settings.reach, settings.losses = 3, 0


def written_by_collectives() -> list[int]:
    x = torch.zeros(2)
    versions = [x._version]
    dist.broadcast(x, 0)
    dist.all_reduce(x)
    versions.append(x._version)
    torch.autograd.graph.increment_version(x)
    return [*versions, x._version]


def test_torch_counts_no_writing_by_collectives(ranks: Ranks) -> None:
    """What the page says to do of captured tensors on a device, by which it is known whether they were written into."""
    assert ranks(2).run(written_by_collectives) == [[0, 0, 1]] * 2


def reach_of(n: int) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv <= n

    def change(to: int) -> None:
        nonlocal n
        n = to

    mask.change = change
    return mask


def same_tag(tags: Any) -> Callable[..., Tensor]:
    return lambda b, h, q, kv: tags[q] == tags[kv]


def tags() -> Tensor:
    return torch.arange(16) % 3


def an_int_of_the_closure() -> Change:
    mask = reach_of(3)
    return mask, lambda: mask.change(5), lambda: mask.change(3)


def a_global() -> Change:
    return lambda b, h, q, kv: q - kv <= REACH[0], partial(set_global, 5), partial(set_global, 3)


def a_global_of_an_inner_function() -> Change:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (lambda distance: distance <= REACH[0])(q - kv)

    return mask, partial(set_global, 5), partial(set_global, 3)


def set_global(n: int) -> None:
    global REACH
    REACH = [n]


def an_entry_of_a_list() -> Change:
    spans = [3, 4]
    return (
        lambda b, h, q, kv: q - kv <= spans[0],
        lambda: spans.__setitem__(0, 5),
        lambda: spans.__setitem__(0, 3),
    )


def a_default() -> Change:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, n: int = 3, *, least: int = 0) -> Tensor:
        return (q - kv <= n) & (kv - q <= 9 - least)

    def change(n: int) -> None:
        mask.__defaults__, mask.__kwdefaults__ = (n,), {"least": n - 3}

    return mask, partial(change, 5), partial(change, 3)


def an_attribute_of(owner: Any) -> Change:
    return lambda b, h, q, kv: q - kv <= owner.reach, lambda: change_of(owner, 5), lambda: change_of(owner, 3)


def change_of(owner: Any, n: int) -> None:
    owner.reach = n
    owner.losses = getattr(owner, "losses", 0) + 1


def an_attribute_of_the_function() -> Change:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv <= mask.reach

    mask.reach = 3
    return mask, lambda: change_of(mask, 5), lambda: change_of(mask, 3)


def a_tensor_in_place() -> Change:
    t = tags()
    return same_tag(t), lambda: t[:4].add_(1), lambda: t[:4].sub_(1)


def a_tensor_by_data() -> Change:
    t = tags()
    return same_tag(t), lambda: t.data[:4].add_(1), lambda: t.data[:4].sub_(1)


def a_tensor_by_numpy() -> Change:
    t = tags()
    return same_tag(t), lambda: t.numpy()[:4].__iadd__(1), lambda: t.numpy()[:4].__isub__(1)


def a_numpy_array() -> Change:
    array = tags().numpy()
    mask = partial(by_array, array)
    return mask, lambda: array[:4].__iadd__(1), lambda: array[:4].__isub__(1)


def by_array(array: Any, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.from_numpy(array)[q] == torch.from_numpy(array)[kv]


def another_tensor_at_the_same_address() -> Change:
    pool, held = tags(), {}

    def replace(by: int) -> None:
        held.pop("tags", None)
        pool[:4] = tags()[:4] + by
        held["tags"] = pool[:]

    replace(0)
    return lambda b, h, q, kv: held["tags"][q] == held["tags"][kv], partial(replace, 1), partial(replace, 0)


def of_nested_masks() -> Change:
    t, mask = tags(), reach_of(3)
    return and_masks(same_tag(t), or_masks(mask, same_tag(t * 0))), lambda: t[:4].add_(1), lambda: t[:4].sub_(1)


def an_int_of_nested_masks() -> Change:
    mask = reach_of(3)
    return and_masks(or_masks(mask)), lambda: mask.change(5), lambda: mask.change(3)


def another_function() -> Change:
    held = {"by": torch.le}

    def use(function: Any) -> None:
        held["by"] = function

    return lambda b, h, q, kv: held["by"](kv, q), partial(use, torch.ge), partial(use, torch.le)


def the_function_of_a_block_mask() -> Change:
    t = tags()
    mask = create_block_mask(same_tag(t), None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    return mask, lambda: t[:4].add_(1), lambda: t[:4].sub_(1)


def the_table_of_a_block_mask() -> Change:
    mask = create_block_mask(same_tag(tags()), None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    return mask, lambda: mask.kv_num_blocks.sub_(1), lambda: mask.kv_num_blocks.add_(1)


class Packing:
    """What a trainer keeps its mask in."""

    def __init__(self) -> None:
        self.reach, self.others = 3, list(range(10**6))

    def mask(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv <= self.others[self.reach]

    __call__ = mask


def an_attribute_of_an_object() -> Change:
    packing = Packing()
    return packing.mask, lambda: change_of(packing, 5), lambda: change_of(packing, 3)


def an_object_that_is_called() -> Change:
    packing = Packing()
    return packing, lambda: change_of(packing, 5), lambda: change_of(packing, 3)


def a_module_imported_when_asked() -> Change:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        from tests import test_recorded

        return q - kv <= test_recorded.REACH[0]

    return mask, partial(set_global, 5), partial(set_global, 3)


def a_value_of_a_tensor() -> Change:
    t = torch.tensor([3])
    return lambda b, h, q, kv: q - kv <= t.item(), lambda: t.fill_(5), lambda: t.fill_(3)


CHANGES: dict[str, Callable[[], Change]] = {
    f.__name__: f
    for f in (
        an_int_of_the_closure, a_global, a_global_of_an_inner_function, an_entry_of_a_list, a_default,
        an_attribute_of_the_function, a_tensor_in_place, a_tensor_by_data, a_tensor_by_numpy, a_numpy_array,
        another_tensor_at_the_same_address, of_nested_masks, an_int_of_nested_masks, another_function,
        the_function_of_a_block_mask, the_table_of_a_block_mask, an_attribute_of_an_object, an_object_that_is_called,
        a_module_imported_when_asked, a_value_of_a_tensor,
    )
} | {
    "an_attribute_of_a_class": partial(an_attribute_of, Settings),
    "an_attribute_of_a_module": partial(an_attribute_of, settings),
}  # fmt: skip


# What they change is the contents of a captured tensor.
CONTENTS = {
    "a_tensor_in_place": "modified by an inplace operation",
    "a_tensor_by_data": "has been written into since the forward",
    "a_tensor_by_numpy": "has been written into since the forward",
    "a_numpy_array": "has been written into since the forward",
    "another_tensor_at_the_same_address": "modified by an inplace operation",
    "of_nested_masks": "modified by an inplace operation",
    "the_function_of_a_block_mask": "modified by an inplace operation",
    "the_table_of_a_block_mask": "modified by an inplace operation",
    "a_value_of_a_tensor": "modified by an inplace operation",
}


def errors(name: str) -> tuple[list[float], str]:
    """Errors of output and gradients before a change, after it with the backward of before, and after changing back;
    and what a backward says that comes when its mask's tensors have changed."""
    mask, change, back = CHANGES[name]()
    index, mesh, leaves, grad_out = prepare(CASE)
    rows, found, grads, outs, expected, said = rows_of(CASE, index, CASE.total), [], [], [], [], ""

    def call() -> Tensor:
        return context_parallel_attention(*leaves, mesh, **told(mesh, mask_mod=mask))

    for step in (lambda: None, change, back):
        step()
        outs.append(call())
        expected.append(attention_oracle(*draw(CASE), mask_mod=mask))
        if name in CONTENTS:
            grads.append(torch.autograd.grad(outs[-1], leaves, grad_out))
    if name in CONTENTS:
        out = call()
        change()
        try:
            torch.autograd.grad(out, leaves, grad_out)
        except (RuntimeError, ValueError) as error:
            said = str(error)
    else:
        grads = [torch.autograd.grad(out, leaves, grad_out) for out in outs]
    for out, got, want in zip(outs, grads, expected, strict=True):
        found.append(worst_error(zip((out.detach(), *got), (x[:, :, rows] for x in want[:4]), strict=True)))
    moved = worst_error([(expected[0].out, expected[1].out)])
    return [*found, moved], said


@pytest.mark.ranks
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_sees_what_its_mask_depends_on_now(ranks: Ranks, name: str) -> None:
    for (*found, moved), said in ranks(2).run(errors, name):
        assert worst_error([(torch.tensor(found), torch.zeros(3))]) < 1e-10
        assert moved > 0.1
        assert CONTENTS.get(name, "") in said


def recorded(mask: Any) -> Recording:
    return record(mask, CPU, (16, 16))[0]


def answers(mask: Any) -> Tensor:
    recording, captured = record(mask, CPU, (16, 16))
    return create_mask(recording.mask_mod(captured), 2, 2, 16, 16, device="cpu")


def with_steps_in_place(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    bounds = torch.zeros(3, dtype=torch.int64)
    bounds[1] = 7
    bounds[2:] += 12
    return torch.bucketize(q, bounds) == torch.bucketize(kv, bounds)


def with_many_results(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    least, most = torch.aminmax(torch.stack([q, kv]))
    return (most - least < 5) & (torch.sort(torch.stack([q, kv])).values[0] != 2)


def of_shapes(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    t = torch.ones(3, device=q.device)
    return q - kv < t.shape[0] + t.size(0) + len(t) + q.ndim + t.numel()


def scripted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    bounds = torch.zeros(2, dtype=torch.int64)
    bounds += 7
    return (q > bounds[1]) | (kv < q)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a DeprecationWarning, from torch 2.14 on a FutureWarning
    scripted = torch.jit.script(scripted)


MADE = [with_steps_in_place, with_many_results, of_shapes, scripted]


@pytest.mark.parametrize("mask", [*MASK_MODS.values(), *MADE])
def test_what_is_replayed_is_what_the_mask_says(mask: Any) -> None:
    want = torch.tensor([
        [[[bool(mask(*map(torch.tensor, (b, h, i, j)))) for j in range(16)] for i in range(16)] for h in range(2)]
        for b in range(2)
    ])  # fmt: skip
    assert answers(mask).equal(want)


def test_a_recording_is_named_by_what_it_does() -> None:
    for name, make in CHANGES.items():
        mask, change, back = make()
        found = []
        for step in (lambda: None, lambda: None, change, back):
            step()
            found.append(recorded(mask).name)
        assert found[0] == found[1] == found[3], name
        assert (found[0] == found[2]) == (name in CONTENTS and name != "a_value_of_a_tensor"), name
    assert recorded(reach_of(3)).name == recorded(lambda b, h, q, kv: q - kv <= 3).name
    assert recorded(lambda b, h, q, kv: kv - q <= 3).name != recorded(reach_of(3)).name


def test_values_of_another_type_are_other_values() -> None:
    values = (1, True, 1.0, 2, -1.0, 0.0, -0.0, torch.inf)
    assert len({recorded(reach_of(n)).name for n in values}) == len(values)
    masks = [lambda b, h, q, kv, d=dtype: q.to(d) <= kv for dtype in (torch.int32, torch.float32)]
    assert len({recorded(mask).name for mask in masks}) == 2


def test_a_name_says_nothing_of_the_device() -> None:
    """Which on every rank is another one; a BlockMask, too, is made of tensors on its positions' device."""

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv < torch.arange(4, device=q.device).to(kv.device).sum()

    assert record(mask, CPU, None)[0].name == record(mask, torch.device("meta"), None)[0].name


def errors_in_inference() -> list[float]:
    """Of the output, under a mask that captures what was made outside and in inference mode, and afterwards."""
    index, mesh, leaves, _ = prepare(CASE)
    rows, found, outside = rows_of(CASE, index, CASE.total), [], tags()
    with torch.inference_mode():
        within = tags() % 2

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (outside[q] == outside[kv]) | (within[q] > within[kv])

    want = attention_oracle(*draw(CASE), mask_mod=mask).out[:, :, rows]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = context_parallel_attention(*leaves, mesh, **told(mesh, mask_mod=mask))
        found.append(worst_error([(out, want)]))
    return found


def test_a_mask_in_inference_mode(ranks: Ranks) -> None:
    for found in ranks(2).run(errors_in_inference):
        assert worst_error([(torch.tensor(found), torch.zeros(2))]) < 1e-10


def test_what_a_mask_reads_of_row_and_head() -> None:
    found = {name: (recorded(mask).by_row, recorded(mask).by_head) for name, mask in MASK_MODS.items()}
    assert found.pop("per_row") == found.pop("padded_text") == (True, False)
    assert found.pop("per_head") == (False, True)
    assert set(found.values()) == {(False, False)}
    table = create_block_mask(MASK_MODS["per_head"], 1, 4, 16, 16, device="cpu", BLOCK_SIZE=4)
    assert (recorded(table).by_row, recorded(table).by_head) == (False, True)


TAGS = tags()
SPARSE = TAGS.to_sparse()
NOTHING: list[int] = [0]
REFUSED: dict[str, Callable[..., Any]] = {
    "takes a value out of a tensor of positions (`TensorBase.__bool__`)": lambda b, h, q, kv: (
        q >= kv if q > 3 else q < kv
    ),
    "takes a value out of a tensor of positions (`TensorBase.item`)": lambda b, h, q, kv: kv <= q.item(),
    "takes a value out of a tensor of positions (`TensorBase.__int__`)": lambda b, h, q, kv: kv <= int(q + 1),
    "takes a value out of a tensor of positions (`TensorBase.__index__`)": lambda b, h, q, kv: kv <= NOTHING[q],
    "takes a value out of a tensor of positions (`TensorBase.tolist`)": lambda b, h, q, kv: kv <= TAGS[q].tolist(),
    "takes a value out of a tensor of positions (`Tensor.__array__`)": lambda b, h, q, kv: np.arange(16)[q] >= kv,
    "slices by a tensor": lambda b, h, q, kv: TAGS[:q].sum() > kv,
    "draws random numbers (`aten.rand.default`)": lambda b, h, q, kv: torch.rand(()) > 0.5,
    "changes in place what it is given or captures": lambda b, h, q, kv: q.add_(1) >= kv,
    "hands torch a ndarray": lambda b, h, q, kv: torch.as_tensor(np.arange(16))[q] > kv,
    "captures a Tensor of layout torch.sparse_coo": lambda b, h, q, kv, t=SPARSE: t[q] > kv,
    "must return a boolean tensor, as comparisons do, got a tensor of torch.int64": lambda b, h, q, kv: q - kv,
    "must return a boolean tensor, as comparisons do, got a bool": lambda b, h, q, kv: True,
    "must return one answer for one pair of positions, got a tensor of shape (16,)": lambda b, h, q, kv: kv < TAGS,
}


def written_by_way_of(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """Through a view, whose base torch does not name."""
    t = torch.zeros(2, dtype=torch.int64)
    t[:1].copy_(q)
    return kv <= t[0].item()


REFUSED["takes a value out of a tensor of positions (`TensorBase.item`), which Python would see once"] = (
    written_by_way_of
)


def out_of_sight(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        reach = int(q)
    return kv <= reach


def of_other_contents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    t = torch.zeros(2, dtype=torch.int64)
    t.data = torch.ones_like(t)
    return kv <= q * t[0]


REFUSED["calls `aten._local_scalar_dense.default` in a way that torch does not show"] = out_of_sight
REFUSED["sets `data` of a tensor"] = of_other_contents


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_written_down_is_refused(text: str) -> None:
    with pytest.raises(TypeError) as error:
        recorded(REFUSED[text])
    assert f"mask_mod {text}" in str(error.value)


@pytest.mark.parametrize("way", [lambda t: t, lambda t: t.data, lambda t: t[:4], Tensor.detach])
def test_a_captured_tensor_that_is_changed_is_refused(way: Callable[[Tensor], Tensor]) -> None:
    t = tags()

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        way(t).add_(1)
        return t[q] == t[kv]

    with pytest.raises(TypeError, match="changes in place what it is given or captures"):
        recorded(mask)
