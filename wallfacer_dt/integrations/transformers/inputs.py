"""The loader's side for transformers: what ``model(**batch)`` is called with on this rank."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wallfacer_dt.agreement.agree import agree, refusing_together
from wallfacer_dt.documents import boundaries, check_documents, digest
from wallfacer_dt.integrations.transformers.sequence import ShardedSequence, positions_within
from wallfacer_dt.layout import BY_DOCUMENT, check_length, shard_sizes
from wallfacer_dt.mesh import name_of
from wallfacer_dt.order import TokenOrder, check_order_fits, check_token_order
from wallfacer_dt.sequence import shard_sequence

# Where a batch says what it is a part of: every model looks at its mask, and one that is not set up cannot take this.
SEQUENCE = "attention_mask"
IGNORED = -100  # labels that do not count, as torch's cross_entropy has it


def shard_inputs(
    mesh: DeviceMesh,
    input_ids: Tensor,
    *,
    order: TokenOrder,
    labels: Tensor | None = None,
    shift: bool = True,
    document_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    attention_mask: Tensor | None = None,
    must_count: bool = True,
) -> dict[str, object]:
    """This rank's part of a batch that every rank of the mesh holds whole, for ``model(**batch)``.

    All ranks call it together; they compare what they were given, since a loader that gives every rank other sequences
    is the most likely mistake. Nothing else is sent.

    Args:
        mesh: that :func:`context_parallel` was given.
        input_ids: (B, N), int.
        order: in which tokens are dealt out; the one that :func:`context_parallel` was given.
        labels: (B, N), of the tokens themselves, as transformers has it; -100 where nothing counts. A loss is that of
            one process only if every rank divides by all counted tokens, which the batch says.
        shift: whether the model predicts the next token: labels are shifted before they are cut, since the label of a
            shard's last token is on another rank. False for masked language models and token classification.
        document_ids: (N,) or (B, N), int, on the CPU: packed documents. Tokens see their own document only, and
            positions count from its beginning. Labels are shifted over their ends, as in one process: set those to
            -100 of tokens that begin a document.
        cu_seqlens: instead of them, cumulative lengths (documents + 1,), int, on the CPU.
        attention_mask: (B, N), 0 where there is padding, before or after a row's tokens, which then sees itself alone.
            Labels that padding predicts must be -100: its own, or with ``shift`` those behind it.
        must_count: refuse a batch of which no label counts; not where it is a part of a step, divided by that of all.

    Returns:
        ``input_ids`` (B, L), ``position_ids`` (1, L) or (B, L), ``use_cache`` (False), and as ``attention_mask`` what
        :func:`context_parallel` wants to know of the whole sequence, which other models cannot take; with labels
        ``labels`` (B, L), ``num_items_in_batch``, the counted tokens of the whole batch (with data parallelism to be
        summed over its ranks), and where they are shifted ``shift_labels`` (B, L).

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: shapes or documents that do not fit, nothing that counts, or ranks that were given other things.
    """
    with refusing_together(name_of(mesh)):
        check_order_fits(check_token_order(order), mesh)
    with refusing_together(order.mesh_name):
        _check_rows("input_ids", input_ids, None)
        check_length(length := input_ids.shape[1])
        if 0 in (shards := shard_sizes(length, order.axes, order.name)):
            raise ValueError(
                f"{length} tokens in {order!r} leave a rank without any, which models do not take: pad rows to a "
                f"multiple of {len(shards)}"
            )
        for name, rows in (("labels", labels), ("attention_mask", attention_mask)):
            if rows is not None:
                _check_rows(name, rows, input_ids)
        documents = _documents(input_ids, document_ids, cu_seqlens, attention_mask)
        if documents is None and attention_mask is not None and order.name == BY_DOCUMENT:
            documents = torch.zeros(length, dtype=torch.int64, device="cpu")  # other batches of the loader have padding
        by_document = {"document_ids": documents} if order.name == BY_DOCUMENT else {}
        if by_document and documents is None:
            raise ValueError(f"order={order.name!r} needs document_ids or cu_seqlens")
        if labels is not None and shift:
            labels = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        if labels is not None and attention_mask is not None:
            _check_predicted(labels, attention_mask, shift=shift)
        counted = 0 if labels is None else int((labels != IGNORED).sum())
        if labels is not None and not counted and must_count:
            raise ValueError("no label counts: all are -100, or there is nothing to predict")
        told = {
            "order": order, "the shape of input_ids": tuple(input_ids.shape), "shift": shift,
            "the tokens": digest(input_ids.cpu()), "the documents": digest(documents),
            "the labels": digest(None if labels is None else labels.cpu()),
        }  # fmt: skip
        agree("shard_inputs", told.items(), order.mesh_name)
    is_padded_before = attention_mask is not None and bool((attention_mask[:, 0] == 0).any())
    # Padding is a document to attention, but its positions are those of one process.
    positions = positions_within(None if attention_mask is not None else documents, length)
    positions = positions.expand(1 if documents is None or documents.ndim == 1 else documents.shape[0], -1)

    def mine(x: Tensor) -> Tensor:
        return shard_sequence(x, order, dim=1, **by_document)

    local_positions = mine(positions.to(input_ids.device))
    batch: dict[str, object] = {
        "input_ids": mine(input_ids), "position_ids": local_positions, "use_cache": False,
        SEQUENCE: ShardedSequence(
            length, order, local_positions, int(positions.max()), documents, is_padded_before, counted
        ),
    }  # fmt: skip
    if labels is not None:
        batch["labels"] = mine(labels)
        batch["num_items_in_batch"] = torch.tensor(counted, device=labels.device)
        if shift:
            batch["shift_labels"] = batch["labels"]
    return batch


def _check_predicted(labels: Tensor, attention_mask: Tensor, *, shift: bool) -> None:
    """Refuse (ValueError) labels that padding would predict: here it sees itself alone, elsewhere what it happens to.

    Args:
        labels: of each token what it predicts.
        attention_mask: of the tokens.
        shift: labels were shifted.
    """
    if bool((labels[(attention_mask == 0).to(labels.device)] != IGNORED).any()):
        behind = ", and that of the token behind it" if shift else ""
        raise ValueError(
            "a label counts that padding would predict, which sees whatever an attention implementation makes of that: "
            f"set the labels of padding to {IGNORED}{behind}"
        )


def _check_rows(name: str, rows: Tensor, like: Tensor | None) -> None:
    if not isinstance(rows, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(rows).__name__}")
    if rows.is_floating_point() or rows.is_complex():
        raise TypeError(f"{name} must be whole numbers, got {rows.dtype}")
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"{name} must have shape (B, N), got {tuple(rows.shape)}")
    if like is not None and rows.shape != like.shape:
        raise ValueError(f"{name} must have the shape of input_ids {tuple(like.shape)}, got {tuple(rows.shape)}")


def _documents(
    input_ids: Tensor, document_ids: Tensor | None, cu_seqlens: Tensor | None, attention_mask: Tensor | None
) -> Tensor | None:
    """(B, N) or (N,): the document of every token, whatever says where they are; None for one."""
    told = {"document_ids": document_ids, "cu_seqlens": cu_seqlens, "attention_mask": attention_mask}
    given = [name for name, value in told.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"give one of document_ids, cu_seqlens and attention_mask, got {', '.join(given)}")
    batch, length = input_ids.shape
    if cu_seqlens is not None:
        check_documents(cu_seqlens, "cu_seqlens", batch, length)
        (ends,) = boundaries(cu_seqlens, "cu_seqlens", length)
        begins = torch.tensor(ends[1:-1], dtype=torch.int64, device="cpu")
        return torch.bucketize(torch.arange(length, device="cpu"), begins, right=True)
    if document_ids is not None:
        check_documents(document_ids, "ids", batch, length)
        return document_ids.clone()  # layers read it as late as in the backward, and a loader may write into its own
    if attention_mask is None or bool((attention_mask != 0).all()):
        return None
    seen = (attention_mask != 0).long().cpu()
    if bool((F.pad(seen, (1, 0)).diff(dim=1) == 1).sum(1).ne(1).any()):
        raise ValueError("attention_mask must have one run of tokens in every row, with padding before or after it")
    return F.pad((seen.diff(dim=1) != 0).long(), (1, 0)).cumsum(1)
