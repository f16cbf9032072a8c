"""Gradients of all ranks together: their average and norm, and which of them torch's foreach kernels take at a time.

Note [Kinds of weights]: most weights are whole on every rank, plain tensors whose gradients are averaged over all
ranks. METP's are DTensors, a part on every rank of a sequence, whose gradients are sums over these ranks already; those
of groups with other sequences are still to be added. FSDP's are DTensors over all ranks, averaged by FSDP itself.
Torch's foreach kernels, of clipping and of AdamW, take tensors of one kind at a time. Where columns do not divide torch
2.11 gives METP's gradients whole to every rank: of these each takes its part, as of its weight.

Note [The same sums after a restart]: DistributedDataParallel puts gradients into buckets once more after its first
step, and where a gradient lies in a bucket decides in which turn ranks are added up. A run that goes on from a
checkpoint would have other roundings than one that was never interrupted. So whole gradients are averaged here, in one
tensor, once the backward is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.training.ranks import Ranks, sum_over_groups
from wallfacer_dt.agreement.progress import Waiting


class WholeGradients:
    """Of weights that every rank has whole, or of which METP gives it a part; see Note [Kinds of weights]."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._whole: list[nn.Parameter] = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        self._shared: list[nn.Parameter] = [parameter for parameter in trained if isinstance(parameter, DTensor)]
        self.kinds = [kind for kind in (self._whole, self._shared) if kind]
        self._finite: Tensor | None = None

    @property
    def are_finite(self) -> bool | None:
        """Whether this rank's were before they were averaged."""
        return None if self._finite is None else bool(self._finite)

    @torch.no_grad()
    def average(self) -> Tensor:
        """Average over all ranks; returns the norm of the whole gradient, the same on every rank."""
        world = self._ranks.launch.world
        if world > 1 and self._whole:
            self._agree_on_used()
        for parameter in self._shared:
            grad, own = parameter.grad, parameter.placements if isinstance(parameter, DTensor) else ()
            if isinstance(grad, DTensor) and grad.placements != own:
                parameter.grad = grad.redistribute(placements=own)
        whole = [parameter.grad for parameter in self._whole if parameter.grad is not None]
        mine = [*whole, *(p.grad.to_local() for p in self._shared if isinstance(p.grad, DTensor))]
        # Of METP's weights a rank may have nothing, which has no largest element.
        largest = [torch.linalg.vector_norm(grad, torch.inf) for grad in mine if grad.numel()]
        self._finite = torch.stack(largest).isfinite().all() if largest else None
        if world > 1 and whole:
            _average_in_one(whole, world)
        norm = nn.utils.get_total_norm(whole)
        shared = self._average_shared()
        if not shared:
            return norm
        # Over all ranks, so that all clip alike; every data-parallel group has the same parts.
        groups = 1 if self._ranks.data_parallel is None else self._ranks.data_parallel.size()
        square = nn.utils.get_total_norm(shared) ** 2 / groups
        with Waiting("all_reduce of the gradient norm"):
            dist.all_reduce(square)
        return torch.hypot(norm, square.sqrt())

    def _agree_on_used(self) -> None:
        """Give a weight that other ranks have a gradient of one of zeros; what none uses an optimizer leaves alone."""
        used = torch.tensor([parameter.grad is not None for parameter in self._whole], dtype=torch.int32)
        used = used.to(self._ranks.device)
        with Waiting("all_reduce of which weights have gradients"):
            dist.all_reduce(used, dist.ReduceOp.MAX)
        for parameter, is_used in zip(self._whole, used.tolist(), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _average_shared(self) -> list[Tensor]:
        """Average METP's gradients over all ranks; returns this rank's part of them."""
        grads = [parameter.grad.to_local() for parameter in self._shared if isinstance(parameter.grad, DTensor)]
        for grad in grads:
            sum_over_groups(grad, "METP's gradients", self._ranks)
            grad /= self._ranks.launch.world
        return grads


class ShardedGradients:
    """Of a model under FSDP2, which averages them over its ranks in the backward."""

    def __init__(self, model: nn.Module) -> None:
        self.kinds = [list(model.parameters())]
        self.are_finite: bool | None = None  # FSDP averages them first

    @torch.no_grad()
    def average(self) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        norm = nn.utils.get_total_norm([p.grad for p in self.kinds[0] if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _average_in_one(grads: Sequence[Tensor], world: int) -> None:
    """In one collective; see Note [The same sums after a restart]."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    with Waiting("all_reduce of the gradients"):
        dist.all_reduce(flat)
    flat /= world
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))
