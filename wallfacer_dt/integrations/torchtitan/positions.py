"""What a decoder is called with on this rank, beside the documents of the whole sequences: it belongs to them, or not.

Rotary embeddings go by positions and masks by documents, and neither shows in a shape that the other is another's.
"""

from typing import Any

from torch import Tensor, nn

from wallfacer_dt.integrations.torchtitan.documents import Documents
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.order import TokenOrder
from wallfacer_dt.sequence import sequence_positions, shard_sequence


def check_positions(model: nn.Module, order: TokenOrder, tokens: Any, positions: Any, documents: Any) -> None:
    """Refuse (TypeError, ValueError) a decoder's call whose positions are not those of this rank's tokens.

    Args:
        model: a decoder, or a pipeline stage's part of one.
        order: in which tokens are dealt out.
        tokens: (B, L), or what the stage before gave, which tensor parallelism may have cut.
        positions: of this rank.
        documents: given as ``attention_masks``; where they are none, it is the style that knows whether it needs them.
    """
    name = type(model).__name__
    if positions is None:
        raise ValueError(
            f"{name} was called without positions, which it would count from each shard's beginning: pass this rank's, "
            "of the whole sequence"
        )
    _check_shape(positions, tokens)
    if isinstance(documents, Documents):
        _check_documents(positions, tokens, documents, order)
    else:
        _check_steps(positions, order)


def _check_shape(positions: Any, tokens: Any) -> None:
    if not isinstance(positions, Tensor) or positions.is_floating_point():
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise TypeError(f"positions must be a tensor of int64 or int32, got {got}")
    shape = tuple(positions.shape)
    if positions.ndim != 2:
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
    expected = shard_sequence(documents.positions, order, dim=1, document_ids=documents.ids)
    if not bool((positions == expected.to(positions.device)).all()):
        raise ValueError(
            f"positions are not this rank's part of those that the Documents were made of, dealt out in order "
            f"{order.name!r}: deal the same positions out, and give Documents.of the same batch"
        )


def _check_steps(positions: Tensor, order: TokenOrder) -> None:
    """Where nothing is known of the whole sequence: tokens that follow each other have positions that do, too."""
    if order.name == BY_DOCUMENT:  # which attention refuses without documents
        return
    known = sequence_positions(positions.shape[1] * order.groups.coordinate.size, order)
    follows = (known.diff() == 1).to(positions.device)
    steps = (positions.diff(dim=1) == 1) | (positions[:, 1:] == 0)
    if not bool((steps | ~follows).all()):
        raise ValueError(
            f"positions neither count on nor restart at 0 between tokens that follow each other in order "
            f"{order.name!r}: pass this rank's part of the whole sequence's"
        )
