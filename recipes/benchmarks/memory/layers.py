"""The layers of tables 1 and 2, and the ways to share them: METP, TP+SP and FSDP+Ulysses, each on one mesh axis."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as styles
from torch.nn.attention import SDPBackend, sdpa_kernel

from recipes.benchmarks.memory.formulas import Kind, Layer
from wallfacer_dt import METPAttentionParallel, METPParallel, UlyssesParallel, WallFacerParallel, context_mesh

Contender = Literal["tp", "fsdp", "metp"]
CONTENDERS: tuple[Contender, ...] = ("tp", "fsdp", "metp")
NAMES = {"tp": "TP+SP", "rsa": "RSA", "fsdp": "FSDP+Ulysses", "metp": "METP"}


class FeedForward(nn.Module):
    """h to 4h to h with GELU, no gate, no biases (table 1)."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D)."""
        return self.down(F.gelu(self.up(x)))


class Inner(nn.Module):
    """softmax(q k^T) v of (B, L, N, H), with flash attention or with the scores stored."""

    def __init__(self, *, flash: bool) -> None:
        super().__init__()
        self.flash = flash

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As the module says."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not self.flash:
            return (torch.softmax(q * q.shape[-1] ** -0.5 @ k.mT, -1) @ v).transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Attention(nn.Module):
    """Four projections h to h without biases, and attention (table 2)."""

    def __init__(self, hidden: int, heads: int, dtype: torch.dtype, *, flash: bool) -> None:
        super().__init__()
        made = (nn.Linear(hidden, hidden, bias=False, dtype=dtype) for _ in range(4))
        self.query, self.key, self.value, self.out = made
        self.inner = Inner(flash=flash)
        self.head_dim = hidden // heads

    def forward(self, x: Tensor) -> Tensor:
        """x (B, L, D)."""
        qkv = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.query, self.key, self.value))
        return self.out(self.inner(*qkv).flatten(-2))


def mesh_of(contender: Contender, ranks: int) -> DeviceMesh:
    """The mesh that a way to share takes; made outside fake tensors, which have no numbers of ranks in them."""
    if contender == "metp":
        return context_mesh("cpu", ranks)
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp" if contender == "tp" else "cp_ulysses",))


def make(
    kind: Kind, contender: Contender, layer: Layer, mesh: DeviceMesh, *, flash: bool = True, dtype: torch.dtype
) -> nn.Module:
    """A layer as one rank has it, which takes this rank's tokens (B, L / p, D); all ranks call this together."""
    module = (
        FeedForward(layer.hidden, dtype)
        if kind == "feed-forward"
        else Attention(layer.hidden, layer.heads, dtype, flash=flash)
    )
    if contender == "fsdp":
        return _with_fsdp(module, mesh, flash=flash)
    plan = _tp_plan(module) if contender == "tp" else {"": _metp_style(module, flash=flash)}
    return styles.parallelize_module(module, mesh, plan, src_data_rank=None)


def _tp_plan(module: FeedForward | Attention) -> dict[str, styles.ParallelStyle]:
    """Megatron's tensor and sequence parallelism from torch's own styles."""
    back = styles.RowwiseParallel(output_layouts=Shard(1))
    if isinstance(module, FeedForward):
        return {"up": styles.ColwiseParallel(input_layouts=Shard(1)), "down": back}
    # x is gathered once, for all three projections.
    gather = styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    columns = {name: styles.ColwiseParallel() for name in ("query", "key", "value")}
    return {"": gather, **columns, "out": back}


def _metp_style(module: FeedForward | Attention, *, flash: bool) -> styles.ParallelStyle:
    if isinstance(module, FeedForward):
        return METPParallel(up="up", down="down", activation="gelu", check=False)
    inner = WallFacerParallel(kernel="flash" if flash else "reference", check=False)
    return METPAttentionParallel(
        query="query", key="key", value="value", output="out", head_dim=module.head_dim, attention=inner, check=False
    )


def _with_fsdp(module: FeedForward | Attention, mesh: DeviceMesh, *, flash: bool) -> nn.Module:
    """FSDP2, one projection gathered at a time as in the paper's tables, and Ulysses for attention."""
    if isinstance(module, Attention):
        style = UlyssesParallel(kernel="flash" if flash else "reference", check=False)
        styles.parallelize_module(module, mesh, {"inner": style}, src_data_rank=None)
    for child in (*(child for child in module.modules() if isinstance(child, nn.Linear)), module):
        fully_shard(child, mesh=mesh, reshard_after_forward=True)
    return module
