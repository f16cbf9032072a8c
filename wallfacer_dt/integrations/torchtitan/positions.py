"""What a decoder is called with on this rank, beside the documents of the whole sequences: it belongs to them, or not.

Rotary embeddings go by positions and masks by documents, and neither shows in a shape that the other is another's.
"""

from typing import Any

import torch
from torch import Tensor, nn

from wallfacer_dt.agreement.agree import agree, hear_all
from wallfacer_dt.documents import digest
from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.layout import BY_DOCUMENT, deal
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import local_shard


def check_positions(model: nn.Module, order: TokenOrder, tokens: Any, positions: Any, documents: Any) -> bool:
    """Refuse (TypeError, ValueError) a decoder's call whose positions are not those of this rank's tokens.

    All ranks of the order's mesh meet here, once a forward: what one of them refuses must not find another in FSDP's
    all-gather, where no refusal is heard.

    Args:
        model: a decoder, or a pipeline stage's part of one.
        order: in which tokens are dealt out.
        tokens: (B, L), or what the stage before gave, which tensor parallelism may have cut.
        positions: of this rank.
        documents: given as ``attention_masks``; where they are none, it is the style that knows whether it needs them.

    Returns:
        Whether positions begin at 0 wherever a rank's part does, on all ranks the same: as they do if each rank counts
        for itself, and seldom if documents happen to begin there.
    """
    name = type(model).__name__
    if positions is None:
        raise ValueError(
            f"{name} was called without positions, which it would count from each shard's beginning: pass this rank's, "
            "of the whole sequence"
        )
    _check_shape(positions, tokens)
    what = f"a forward of {name} on positions {tuple(positions.shape)}"
    if isinstance(documents, Documents):
        _check_documents(positions, tokens, documents, order)
        told = [("the positions of Documents", digest(documents.positions))]
        agree(f"{what} and Documents", told, order.mesh_name)
    elif order.name == BY_DOCUMENT:  # which attention refuses without documents
        agree(f"{what}, without Documents", (), order.mesh_name)
    else:
        return _check_runs(f"{what}, without Documents", positions, order)
    return False


def _check_shape(positions: Any, tokens: Any) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of int64 or int32, got {got}")
    shape = tuple(positions.shape)
    if positions.ndim != 2 or 0 in shape:
        raise ValueError(f"positions must have shape (B, L), got {shape}")
    if not isinstance(tokens, Tensor):  # which the model says itself
        return
    if shape[0] not in (1, tokens.shape[0]) or (tokens.ndim == 2 and shape[1] != tokens.shape[1]):
        raise ValueError(f"positions {shape} are not those of tokens {tuple(tokens.shape)}: pass this rank's of each")


def _check_documents(positions: Tensor, tokens: Any, documents: Documents, order: TokenOrder) -> None:
    (rows, length), ranks = documents.ids.shape, order.groups.coordinate.size
    batch = tokens.shape[0] if isinstance(tokens, Tensor) else positions.shape[0]
    if rows != batch:
        raise ValueError(
            f"Documents of {rows} rows were given for a batch of {batch}: pass Documents.of the whole sequences' "
            "positions (B, N), a row for each of the batch"
        )
    if length % ranks:
        raise ValueError(
            f"the {ranks} ranks of the mesh do not divide sequences of {length} tokens, of which torchtitan's models "
            f"need equal shards: pad or cut sequences to a multiple of {ranks} before they are dealt out"
        )
    if positions.shape[1] != length // ranks:
        raise ValueError(
            f"positions {tuple(positions.shape)} are not a rank's part of Documents of {length} tokens, which is "
            f"{length // ranks}: pass Documents.of the positions before they are dealt out to {ranks} ranks"
        )
    # Of an order that asks for no documents they are not looked at.
    expected = local_shard(documents.positions, order, dim=1, document_ids=documents.ids)
    if not bool((positions == expected.to(positions.device)).all()):
        raise ValueError(
            f"positions are not this rank's part of those that the Documents were made of, dealt out in order "
            f"{order.name!r}: deal the same positions out, and give Documents.of the same batch"
        )


def _check_runs(what: str, positions: Tensor, order: TokenOrder) -> bool:
    """Where nothing is known of whole sequences: between tokens that follow each other positions do, on all ranks.

    A rank holds one run of each sequence or two, and all ranks hear the first position and the last of every run. Gives
    whether all of these begin at 0, on several ranks.
    """
    place = order.groups.coordinate
    spans = deal(positions.shape[1] * place.size, order.axes, order.name)[place.index].tolist()
    runs = positions.split([stop - start for start, stop in spans], dim=1)
    follows = torch.cat([(run.diff(dim=1) == 1) | (run[:, 1:] == 0) for run in runs], 1).all()
    ends = torch.stack([run[:, [0, -1]] for run in runs])  # (runs, B, 2)
    # In one piece, since each waits for a device.
    told = torch.cat([follows.view(1).to(ends.dtype), ends.flatten()]).tolist()
    heard = hear_all(what, ([start for start, _ in spans], told[0], told[1:]), order.mesh_name)
    by_rank, follow, edges = zip(*heard.values(), strict=True)
    turns = torch.tensor(by_rank).flatten().argsort()
    firsts, lasts = torch.tensor(edges).view(len(turns), -1, 2)[turns].unbind(-1)
    begins = firsts == 0
    if not all(follow) or not bool((begins[1:] | (firsts[1:] == lasts[:-1] + 1)).all()):
        raise ValueError(
            f"positions neither count on nor restart at 0 between tokens that follow each other in order "
            f"{order.name!r}: pass this rank's part of the whole sequence's"
        )
    if bool(((firsts[0] != 0) & (firsts[0] == lasts[-1] + 1)).all()):
        raise ValueError(
            f"positions are another rank's part of a sequence, as if ranks in order {order.name!r} began elsewhere: "
            "pass this rank's"
        )
    return place.size > 1 and bool(begins.all())
