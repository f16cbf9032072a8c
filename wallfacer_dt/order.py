"""The token order of a mesh as one object, which the loader, positions and attention share.

Note [One token order, shared]
A shard does not show in which order its tokens were dealt out, and causal attention told another order than the loader
used is silently wrong. So a name and a mesh make one object, and whoever deals tokens out, says their positions or
attends under a mask is handed it. Attention has no default under a mask, and refuses an object of a mesh that deals to
other ranks or in another turn. Nothing is remembered beside the objects: an encoder and a decoder on the same ranks may
have one each.
"""

from dataclasses import InitVar, dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.layout import BY_DOCUMENT, check_order, dealing_turns
from wallfacer_dt.mesh import RING_AXIS, ContextGroups, context_groups, mesh_ranks, name_of

_REMEDY = 'make one, order = TokenOrder("head_tail", mesh), and hand it to the loader, to positions and to attention'


@dataclass(frozen=True, slots=True, repr=False)
class TokenOrder:
    """In which order the tokens of a sequence are dealt out to the ranks of a mesh.

    All ranks of the mesh make one, and hand it to :func:`shard_sequence` or :class:`SequenceDataset`, to
    :func:`sequence_positions` and to the style or call of attention. Equal ones deal every sequence out alike. It is
    plain data of this rank: it can be hashed and pickled, for a loader's workers.

    Attributes:
        name: ``"contiguous"``; ``"head_tail"``, which balances causal attention; or ``"document_head_tail"``, which
            does so within packed documents and needs them at every call.
        mesh: context mesh, or any mesh of one axis; it is not kept.
        axes: sizes of the mesh's axes ulysses, ring and team.
        cuts: those of more than one rank, along which a sequence is cut in turn.
        ranks: the mesh's, its last axis innermost.
        dealt: the mesh's ranks, in the turn in which tokens are dealt out to them.
        groups: this rank's place, and the names of the process groups.
        mesh_name: of the mesh, under which its ranks compare calls.
        device_type: of the mesh.
        rank: this one.

    Raises:
        TypeError: the mesh is none.
        ValueError: an unknown name, or the mesh is no context mesh.
    """

    name: str
    mesh: InitVar[DeviceMesh]
    axes: tuple[int, int, int] = field(init=False, compare=False)
    cuts: tuple[int, ...] = field(init=False)
    ranks: tuple[int, ...] = field(init=False)
    dealt: tuple[int, ...] = field(init=False)
    groups: ContextGroups = field(init=False, compare=False)
    mesh_name: str = field(init=False, compare=False)
    device_type: str = field(init=False, compare=False)
    rank: int = field(init=False, compare=False)

    def __post_init__(self, mesh: DeviceMesh) -> None:
        """Read off the mesh what is kept of it."""
        check_order(self.name)
        groups = context_groups(mesh, any_axis=RING_AXIS)
        axes, ranks = groups.coordinate.axes, mesh_ranks(mesh)
        dealt = tuple(ranks[index] for index in dealing_turns(axes, self.name))
        found = {
            "axes": axes, "cuts": tuple(size for size in axes if size > 1), "ranks": ranks, "dealt": dealt,
            "groups": groups, "mesh_name": name_of(mesh), "device_type": mesh.device_type, "rank": dist.get_rank(),
        }  # fmt: skip
        for attribute, value in found.items():
            object.__setattr__(self, attribute, value)

    def __repr__(self) -> str:
        """Name, and ranks in turn."""
        return f"TokenOrder({self.name!r}, ranks {_some(self.dealt)} in turn)"


def check_token_order(order: object) -> TokenOrder:
    """Refuse (TypeError, ValueError) what is no token order of this rank, or return it."""
    if not isinstance(order, TokenOrder):
        raise TypeError(f"order must be a TokenOrder, got {order!r}; {_REMEDY}")
    if dist.is_initialized() and dist.get_rank() != order.rank:
        raise ValueError(
            f"{order} was made on rank {order.rank} and is used on rank {dist.get_rank()}: every rank makes its own"
        )
    return order


def check_order_is_told(order: TokenOrder | str | None, ranks: int) -> None:
    """Refuse (ValueError) to attend under a mask on several ranks without an order."""
    if not order and ranks > 1:
        raise ValueError(
            f"attention under a mask on {ranks} ranks must be told in which order tokens were dealt out, which shards "
            f"do not show: pass order=; {_REMEDY}"
        )


def check_order_fits(order: TokenOrder, mesh: DeviceMesh) -> None:
    """Refuse (ValueError) an order of a mesh that deals to other ranks than this one, or in another turn."""
    here = TokenOrder(order.name, mesh)
    remedy = f"use one mesh for both: order = TokenOrder({order.name!r}, mesh)"
    if here.dealt != order.dealt:
        raise ValueError(
            f"order={order.name!r} was made of a mesh on which it deals tokens out to ranks {_some(order.dealt)} in "
            f"turn, but on attention's mesh it deals to {_some(here.dealt)}; {remedy}"
        )
    if order.name == BY_DOCUMENT and here.ranks != order.ranks:
        raise ValueError(
            f"order={order.name!r} was made of a mesh of ranks {_some(order.ranks)}, to which it deals in turn what is "
            f"left of documents that do not divide, but attention's mesh is of ranks {_some(here.ranks)}; {remedy}"
        )


def _some(ranks: tuple[int, ...], most: int = 16) -> str:
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
