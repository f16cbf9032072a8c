"""What a mask depends on may change at any time: the next call sees it, and what cannot be seen is refused."""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

from tests.cases import Case, draw, prepare, rows_of, told
from wallfacer_dt import context_parallel_attention
from wallfacer_dt.algorithms import blocks
from wallfacer_dt.algorithms.captured import MOST, fingerprint
from wallfacer_dt.comparison import worst_error
from wallfacer_dt.testing import RankPool, attention_oracle

Ranks = Callable[[int], RankPool]
CASE = Case(2, 1, shard=8)
REACH = [3]
Change = tuple[Any, Callable[[], Any], Callable[[], Any]]


class Settings:
    reach = 3
    losses = 0


settings = ModuleType("settings")
settings.reach, settings.losses = 3, 0


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


CHANGES: dict[str, Callable[[], Change]] = {
    f.__name__: f
    for f in (
        an_int_of_the_closure, a_global, a_global_of_an_inner_function, an_entry_of_a_list, a_default,
        an_attribute_of_the_function, a_tensor_in_place, a_tensor_by_data, a_tensor_by_numpy, a_numpy_array,
        another_tensor_at_the_same_address, of_nested_masks, an_int_of_nested_masks, another_function,
        the_function_of_a_block_mask, the_table_of_a_block_mask,
    )
} | {
    "an_attribute_of_a_class": partial(an_attribute_of, Settings),
    "an_attribute_of_a_module": partial(an_attribute_of, settings),
}  # fmt: skip


def errors(name: str) -> list[float]:
    """Errors of output and gradients before a change, after it with the backward of before, and after changing back."""
    mask, change, back = CHANGES[name]()
    index, mesh, leaves, grad_out = prepare(CASE)
    rows, found, outs, expected = rows_of(CASE, index, CASE.total), [], [], []
    for step in (lambda: None, change, back):
        step()
        outs.append(context_parallel_attention(*leaves, mesh, **told(mesh, mask_mod=mask)))
        expected.append(attention_oracle(*draw(CASE), mask_mod=mask))
    for out, want in zip(outs, expected, strict=True):
        got = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
        found.append(worst_error(zip(got, (x[:, :, rows] for x in want[:4]), strict=True)))
    moved = worst_error([(expected[0].out, expected[1].out)])
    return [*found, moved]


@pytest.mark.ranks
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_sees_what_its_mask_depends_on_now(ranks: Ranks, name: str) -> None:
    for *found, moved in ranks(2).run(errors, name):
        assert max(found) < 1e-10
        assert moved > 0.1


def counted(depends_on: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    count = 0

    def ask(*args: Any) -> Any:
        nonlocal count
        count += 1
        return asked(*args)

    asked = blocks.blocks_of
    monkeypatch.setattr(blocks, "blocks_of", ask)
    return lambda: count


def name_of(mask: Any) -> str:
    return blocks.mask_name(blocks.mask_key(mask), 1, 2, 16, 16, "cpu", by_row=True, by_head=True)


def test_a_state_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, change, back = an_int_of_the_closure()
    count = counted(mask, monkeypatch)
    names = [name_of(mask)]
    for step in (change, back, change, back):
        step()
        names += [name_of(mask), name_of(mask)]
    assert count() == 2
    assert len(set(names)) == 2
    for n in range(4, 10):  # the oldest states are forgotten
        mask.change(n)
        name_of(mask)
    back()
    assert name_of(mask) == names[0]
    assert count() == 8


def test_what_the_mask_does_not_name_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.losses, self.tags = 0.0, tags()

    trainer = Trainer()
    of_tensor, of_class, of_module = same_tag(trainer.tags), an_attribute_of(Settings)[0], an_attribute_of(settings)[0]
    count = counted(of_tensor, monkeypatch)
    for _ in range(3):
        for mask in (of_tensor, of_class, of_module):
            name_of(mask)
        for owner in (trainer, Settings, settings):
            owner.losses += 1
    assert count() == 3


def test_what_is_refused_is_not_walked_through() -> None:
    class Config:
        def __init__(self) -> None:
            self.entries = list(range(10**6))

    config = Config()
    entries = config.entries
    nested = [list(range(100)) for _ in range(10)]
    refused = {
        "`config` .Config., whose state cannot be seen": lambda b, h, q, kv: q - kv < config.entries[0],
        "`entries` .list., whose 1000000 entries are too many": lambda b, h, q, kv: q - kv < entries[0],
        rf"one thing more than the {MOST}|of which|whose 100 entries": lambda b, h, q, kv: q - kv < nested[0][0],
    }
    for text, mask in refused.items():
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            with pytest.raises(TypeError, match=text):
                fingerprint(mask)
        finally:
            sys.setprofile(None)
        assert calls < 8 * MOST


def test_equal_state_is_an_equal_fingerprint() -> None:
    for name, make in CHANGES.items():
        mask, change, back = make()
        before = fingerprint(mask)
        assert fingerprint(mask) == before, name
        change()
        assert fingerprint(mask) != before, name
        back()
        assert fingerprint(mask) == before, name


def test_values_of_another_type_are_other_values() -> None:
    found = {fingerprint(reach_of(n)) for n in (1, True, 1.0, "1", -1.0, 0.0, -0.0, torch.int32, None)}
    assert len(found) == 9


def test_a_function_that_knows_itself() -> None:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask(b, h, q - 4, kv) if False else q >= kv

    cells: list[Any] = [1]
    cells.append(cells)
    assert fingerprint(mask) == fingerprint(mask)
    assert fingerprint(same_tag(cells)) == fingerprint(same_tag(cells))


def test_a_graph_holds_the_answers_of_its_own_mask() -> None:
    """Whoever's code it is: a number of another mask, or of none, is not taken for the one that was named."""
    mine, same, other = reach_of(3), reach_of(3), reach_of(5)
    name = name_of(mine)
    for mask in (mine, same):
        blocks.check_mask(blocks.mask_key(mask), name, 1, 2, 16, 16, "cpu")
    for key in (blocks.mask_key(other), 10**9):
        with pytest.raises(ValueError, match="mask_mod's state has changed, or mask_mod has gone, since the graph"):
            blocks.check_mask(key, name, 1, 2, 16, 16, "cpu")


def test_a_block_mask_is_not_read_for_what_a_forward_does_not_use() -> None:
    mask: BlockMask = create_block_mask(reach_of(3), None, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    before = fingerprint(mask)
    mask.q_num_blocks = None
    assert fingerprint(mask) == before
