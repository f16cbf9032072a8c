"""METP's programs, op by op, on fake ranks: what is on its way while what is computed.

The programs are what rank 0 of 3 runs on 4 tokens of 6 dims in float32. ``send`` is a hop of weights (or of what was
computed for them) or a step of a reduction, with its elements; a product is named by its shape.
"""

from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from wallfacer_dt import METPAttentionParallel, METPParallel, WallFacerParallel, context_mesh
from wallfacer_dt.metp import BODIES
from wallfacer_dt.testing.fake import fake_world

_NAMES = {"all_to_all_single": "send", "broadcast": "broadcast", "wait_tensor": "wait", "mm": "mm", "addmm_": "mm"}
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 15, bias=False), nn.Linear(15, 6, bias=False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "key", "value"):
            setattr(self, name, nn.Linear(6, 12, bias=False))
        self.output = nn.Linear(12, 6, bias=False)


class Program(TorchDispatchMode):
    """Collectives and products in order; pending buffers are numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.pending: dict[int, int] = {}
        self.alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in BODIES:
            with self:
                return BODIES[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        op = func._schema.name.partition("::")[2]
        name = _NAMES.get(op)
        if name in ("send", "broadcast"):
            # Nobody sends: of what memory held before, scores may overflow, which the kernel looks into once more.
            out.normal_()
            self.alive.append(out)
            self.pending[id(out)] = len(self.pending)
            whose = f" of {args[1]}" if name == "broadcast" else ""
            self.lines.append(f"{name}{whose} #{self.pending[id(out)]} {args[0].numel()}")
        elif name == "wait":
            self.lines.append(f"wait #{self.pending[id(args[0])]}")
        elif name == "mm":
            a, b = args[-2:]
            self.lines.append(f"    {a.shape[0]} x {a.shape[1]} x {b.shape[1]}")
        elif op.startswith(_KERNEL):
            self.lines.append("    attend" + op.removeprefix(_KERNEL).replace("_", " "))
        return out


def program(module: nn.Module, style: ParallelStyle, *, backward: bool) -> str:
    with fake_world(3, 0):
        parallelize_module(module, context_mesh("cpu", 3), style, src_data_rank=None)
        x = torch.randn(1, 4, 6, requires_grad=True)
        with Program() as forward:
            y = module(x)
        with Program() as gradients:
            y.backward(torch.empty_like(y))
    return "\n".join((gradients if backward else forward).lines)


def feed_forward(*, backward: bool) -> str:
    return program(FeedForward(), METPParallel(up="up", down="down", activation="gelu", check=False), backward=backward)


def attention(*, backward: bool) -> str:
    style = METPAttentionParallel(
        query="query", key="key", value="value", output="output", head_dim=4,
        attention=WallFacerParallel(check=False, rotate="kv"), check=False,
    )  # fmt: skip
    return program(Attention(), style, backward=backward)


def test_a_hop_of_weights_is_in_flight_during_every_block_but_the_last() -> None:
    assert_expected_inline(
        feed_forward(backward=False),
        """\
send #0 60
    4 x 6 x 5
    4 x 5 x 6
wait #0
send #1 60
    4 x 6 x 5
    4 x 5 x 6
wait #1
    4 x 6 x 5
    4 x 5 x 6""",
    )


def test_gradients_follow_their_weights_home() -> None:
    assert_expected_inline(
        feed_forward(backward=True),
        """\
send #0 60
    2 x 6 x 5
    5 x 2 x 6
    2 x 6 x 5
    2 x 5 x 6
    5 x 2 x 6
wait #0
send #1 60
    4 x 6 x 5
    5 x 4 x 6
    4 x 6 x 5
    4 x 5 x 6
    5 x 4 x 6
send #2 60
wait #1
    4 x 6 x 5
    5 x 4 x 6
    4 x 6 x 5
    4 x 5 x 6
    5 x 4 x 6
wait #2
send #3 60
    2 x 6 x 5
    5 x 2 x 6
    2 x 6 x 5
    2 x 5 x 6
    5 x 2 x 6
wait #3""",
    )


def test_the_next_groups_weights_are_in_flight_during_a_groups_attention() -> None:
    assert_expected_inline(
        attention(backward=False),
        """\
broadcast of 0 #0 96
wait #0
broadcast of 1 #1 96
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
send #2 32
    attend
wait #2
send #3 32
    attend
wait #3
    attend
    4 x 4 x 6
wait #1
broadcast of 2 #4 96
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
send #5 32
    attend
wait #5
send #6 32
    attend
wait #6
    attend
    4 x 4 x 6
wait #4
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
send #7 32
    attend
wait #7
send #8 32
    attend
wait #8
    attend
    4 x 4 x 6""",
    )


def test_gradients_are_reduced_behind_the_next_group() -> None:
    assert_expected_inline(
        attention(backward=True),
        """\
broadcast of 0 #0 96
wait #0
broadcast of 1 #1 96
    4 x 4 x 6
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
send #2 32
    attend backward
wait #2
send #3 32
    attend backward
send #4 32
wait #3
    attend backward
wait #4
send #5 32
    attend backward
wait #5
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
send #6 96
wait #1
broadcast of 2 #7 96
    4 x 4 x 6
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
send #8 32
    attend backward
wait #8
send #9 32
    attend backward
send #10 32
wait #9
    attend backward
wait #10
send #11 32
    attend backward
wait #11
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
wait #6
send #12 32
send #13 96
wait #7
    4 x 4 x 6
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
    4 x 6 x 4
send #14 32
    attend backward
wait #14
send #15 32
    attend backward
send #16 32
wait #15
    attend backward
wait #16
send #17 32
    attend backward
wait #17
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
    4 x 4 x 6
wait #12
wait #13
send #18 32
send #19 96
wait #18
wait #19
send #20 32
wait #20""",
    )
