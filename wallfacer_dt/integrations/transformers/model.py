"""A transformers model on a mesh: what is registered, set and checked, and how it is undone.

Note [State of a model]
What a call of attention needs is never kept beside the model. Mesh and options stand in a function that is registered
for this model alone, under a name of its own. What is known of a batch comes with the batch; for the time of a forward
it stands in the handle, from which the mask function puts it into the mask, and layers that are computed again in the
backward find it there. A forward begins with a check of all that may have changed meanwhile.
"""

import inspect
import math
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from wallfacer_dt.agreement.agree import agree, hear_all, refusing_together
from wallfacer_dt.compiler import untraced
from wallfacer_dt.integrations import adapters
from wallfacer_dt.integrations.handle import Handle, found_on, make_way
from wallfacer_dt.integrations.transformers import upstream
from wallfacer_dt.integrations.transformers.attend import REFUSED, AttentionOnMesh
from wallfacer_dt.integrations.transformers.inputs import IGNORED, SEQUENCE
from wallfacer_dt.integrations.transformers.loss import SummedLoss, SumOfLogits, shifts_labels
from wallfacer_dt.integrations.transformers.masked_tokens import count_masked_tokens
from wallfacer_dt.integrations.transformers.masks import ShardedMask, read_mask
from wallfacer_dt.integrations.transformers.refusals import (
    ROUTER,
    check_adapters,
    check_model_is_known,
    check_modules,
)
from wallfacer_dt.integrations.transformers.rope import largest_matters, tell_largest_position
from wallfacer_dt.integrations.transformers.sequence import PAST_HOOKS, PROMPTS, ForwardPass, ShardedSequence
from wallfacer_dt.kernels.registry import check_kernel
from wallfacer_dt.mesh import name_of
from wallfacer_dt.options import NOT_WAYS, AttentionKeywords, WayKeywords, ways_of, with_options
from wallfacer_dt.order import TokenOrder, check_order_fits, check_token_order

_UNTRACED = "what is known of a batch is another at every call; with fullgraph=True use a style"
_numbers = count(1)
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
# Of a call of the model: what would need all tokens, or gives something that ranks cannot put together.
_REFUSED = {
    **REFUSED,
    "output_router_logits": "the router's loss is no sum over tokens",
    "logits_to_keep": "of a shard the last tokens are not the sequence's",
    "encoder_hidden_states": "cross attention is not implemented",
}
# Arguments by which models with other ones in them take pictures, films and sound.
_OF_TOWERS = re.compile(r"(pixel|image|video|audio|speech)s?(_|$)|input_(features|values)|mm_encoder_outputs")
_TOWER = "what another model makes of pictures or sound, for the whole sequence, is not implemented: text alone is"


class ContextParallel(Handle[PreTrainedModel]):
    """A model that runs on a mesh, as :func:`context_parallel` has set it up; ``name`` is that of its attention.

    Attributes:
        alora_offsets_are_told: to be set where calls of a model with peft's aLoRA bring ``alora_offsets``, of each row
            the number of this rank's tokens from its invocation on; of itself peft looks for that in a shard.

    Args:
        model: of transformers.
        mesh: context mesh.
        options: of attention that are the same at every call.
        order: in which batches are dealt out.
    """

    alora_offsets_are_told = False

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, options: AttentionKeywords, order: TokenOrder) -> None:
        super().__init__(model)
        self.mesh, self.order, self.name = mesh, order, f"wallfacer_dt-{next(_numbers)}"
        self._forward: ForwardPass | None = None
        self._loss: Callable[..., Any] | None = None
        self._before = upstream.implementation(model.config) or "sdpa"
        self._signature = inspect.signature(model.forward)
        attend = AttentionOnMesh(mesh, options)
        AttentionInterface.register(self.name, attend)
        AttentionMaskInterface.register(self.name, self._mask)
        self._turn_on(model)

    @property
    def shifts_labels(self) -> bool:
        """Whether the model's own loss predicts the next token."""
        model = self._model()
        return model is not None and shifts_labels(self._loss or upstream.own_loss(model))

    @property
    def sums_loss(self) -> bool:
        """Whether the loss is computed here, of a head that would take a mean of its own logits."""
        model = self._model()
        return model is not None and upstream.takes_mean_of_logits(model)

    @contextmanager
    def whole(self, attn_implementation: str | None = None) -> Iterator[PreTrainedModel]:
        """The model as it was, for a whole sequence on one process, for as long as the context lasts.

        Args:
            attn_implementation: of transformers, the one that the model had by default; soft caps need ``"eager"``.

        Yields:
            The model.

        Raises:
            ValueError: the model is gone, or is no longer set up by this.
        """
        self._set_up_model()
        if not self._hooks:
            raise ValueError("the model is within `whole()` already")
        with self._turned_off(implementation=attn_implementation) as model:
            yield model

    def _turn_on(self, model: PreTrainedModel) -> None:
        upstream.set_implementation(model, self.name)
        self._leave_on(model)
        self._loss = upstream.swap_loss(model, None)
        upstream.swap_loss(model, SummedLoss(self._loss or upstream.own_loss(model), self._in_forward))
        self._told = weakref.WeakSet(
            module for module in model.modules() if largest_matters(module) or upstream.scales_by_masked_tokens(module)
        )
        self._hooks = [
            model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True, always_call=True),
            *tell_largest_position(model, self._in_forward),
            *count_masked_tokens(model, self._in_forward),
        ]

    def _turn_off(self, model: PreTrainedModel, implementation: str | None = None) -> None:
        self._remove_hooks()
        self._forward = None
        found = upstream.swap_loss(model, None)
        # One that somebody has set meanwhile stays.
        upstream.swap_loss(model, self._loss if isinstance(found, SummedLoss) else found)
        upstream.set_implementation(model, implementation or self._before)

    def _in_forward(self) -> ForwardPass:
        if self._forward is None:
            raise ValueError(
                "attention on a mesh outside a forward of the model that context_parallel was given: call that model, "
                f"not a part or a copy of it; or {PAST_HOOKS}"
            )
        return self._forward

    @untraced(_UNTRACED)
    def _mask(self, *, mask_function: Callable[..., Any], **asked: Any) -> ShardedMask:
        """What transformers calls to make a mask of local size; what is unsaid here is about the mask's making."""
        with refusing_together(name_of(self.mesh)):
            forward = self._in_forward()
            padding = asked.get("attention_mask")
            if padding is not None and not bool(padding.all()):
                raise ValueError(_PADDED)
            if asked.get("q_length") != asked.get("kv_length") or _offset(asked):
                raise ValueError("a mask of caches or of cross attention is not implemented: pass use_cache=False")
            of, ours = type(asked.get("config")), type(self._set_up_model().config.get_text_config())
            if of is not ours or asked["q_length"] != forward.sequence.shard:
                raise ValueError(
                    f"a mask of {asked['q_length']} tokens for {of.__name__}, where this rank has "
                    f"{forward.sequence.shard} of {ours.__name__}: {_TOWER}"
                )
            return read_mask(mask_function, forward)

    @untraced(_UNTRACED)
    def _begin(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Before each forward: whether this is what was set up, and its inputs are this rank's part of a sequence."""
        self._forward = None
        with refusing_together(name_of(self.mesh)):
            self._check_still_set_up(model)
            if outer := upstream.called_by(model):
                raise ValueError(
                    f"{type(model).__name__} was called by {outer}, whose head sees this rank's tokens only, and whose "
                    f"loss may be their mean: give {outer} to context_parallel, or, where that is refused, call "
                    f"{type(model).__name__} by itself, and compute the head from what it gives, on the rank that has "
                    "the token"
                )
            sequence = self._named(args, kwargs).get(SEQUENCE)
            if isinstance(sequence, ShardedSequence):
                args = tuple(None if x is sequence else x for x in args)
                kwargs = {name: value for name, value in kwargs.items() if value is not sequence}
            else:
                sequence = None
            takes_mean = upstream.takes_mean_of_logits(model)
            if not takes_mean:
                self._check_passes_on(kwargs)
            sequence = self._checked(sequence, self._named(args, kwargs))
            if sequence.is_padded_before and upstream.counts_from_mask(model):
                raise ValueError(
                    f"{type(model).__name__} counts positions from the first token of a row that is no padding, which "
                    'shard_inputs does not: pad behind the tokens (padding_side="right")'
                )
            if self._takes("use_cache", model):
                kwargs.setdefault("use_cache", False)
            # What one rank refuses must not find another in FSDP's next all-gather, where no refusal is heard; nor the
            # loss, which refuses what is not given, in a backward.
            given = self._named(args, kwargs)
            told: list[tuple[str, Any]] = [
                (f"whether {name} are given", given.get(name) is not None) for name in ("input_ids", *_OF_LOSS)
            ]
            if (items := given.get("num_items_in_batch")) is not None:
                told.append(("num_items_in_batch", _checked_count(items, sequence.counted)))
            told.append(("how many labels of the whole batch are known to count", sequence.counted))
            told.append(("whether the loss is the mean of logits", takes_mean))
            told.append(
                ("how many modules count masked tokens", sum(map(upstream.scales_by_masked_tokens, self._told)))
            )
            if adapters.draw_for_all(model):
                told.append((adapters.STATE, adapters.random_state(self.mesh.device_type)))
            agree(f"a forward of {type(model).__name__}", told, name_of(self.mesh))
            if items is not None and given.get("labels") is not None and not sequence.counted:
                mine = given["labels" if given.get("shift_labels") is None else "shift_labels"]
                _check_count_of_all(items, mine, name_of(self.mesh))
            self._forward = ForwardPass(sequence)
            if takes_mean and given.get("labels") is not None:
                self._forward.own_loss = SumOfLogits.taken_from(given, type(model).__name__)
                place = [*self._signature.parameters].index("labels")
                args = tuple(None if number == place else x for number, x in enumerate(args))
                kwargs = {name: x for name, x in kwargs.items() if name not in _OF_LOSS}
        return args, kwargs

    @untraced(_UNTRACED)
    def _end(self, model: PreTrainedModel, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """After each forward: whether attention and loss were computed where they should be."""
        forward, self._forward = self._forward, None
        if forward is None or output is None:  # it has raised
            return None
        with refusing_together(name_of(self.mesh)):
            layers = getattr(model.config.get_text_config(), "num_hidden_layers", 1)
            if forward.calls < layers:
                raise ValueError(
                    f"of {layers} layers of {type(model).__name__} {forward.calls} computed attention on the mesh; the "
                    "others look at several tokens in another way, not by transformers' AttentionInterface, or are not "
                    "there: then set num_hidden_layers of its config"
                )
            if self._named(args, kwargs).get("labels") is not None and not forward.losses:
                raise ValueError(
                    f"{type(model).__name__} computes its loss by itself, as the mean over this rank's tokens, or by a "
                    "forward that TRL or Liger put in its place (leave that out): leave labels out, and compute it "
                    "from logits, divided by num_items_in_batch"
                )
        return None if forward.own_loss is None else forward.own_loss.added_to(output)

    def _check_still_set_up(self, model: PreTrainedModel) -> None:
        self._check_is_of(model)
        check_adapters(model, offsets_are_told=self.alora_offsets_are_told)
        check_modules(model, self._told)
        for config in upstream.configs(model):
            if upstream.implementation(config) != self.name:
                raise ValueError(
                    f"context_parallel set attention of {type(model).__name__} to {self.name!r}, which is "
                    f"{upstream.implementation(config)!r} now: call remove() before you set another, and give models "
                    "configs of their own"
                )
            if getattr(config, "output_router_logits", False):
                raise ValueError(f"{type(model).__name__} cannot run context parallel: {ROUTER}")

    def _check_passes_on(self, kwargs: dict[str, Any]) -> None:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        if (
            not takes_all
            and kwargs.get("labels") is not None
            and "num_items_in_batch" not in self._signature.parameters
        ):
            raise ValueError("the model computes its loss by itself: leave labels out, and compute it from logits")

    def _takes(self, name: str, model: PreTrainedModel) -> bool:
        parameters = self._signature.parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return name in self._signature.parameters or (takes_all and hasattr(model.config, name))

    def _named(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call of the model by name, but those it was not given."""
        names = [p.name for p in self._signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        return dict(zip(names, args, strict=False)) | kwargs

    def _checked(self, sequence: ShardedSequence | None, given: dict[str, Any]) -> ShardedSequence:
        """The whole sequence that a call's inputs are this rank's part of, or a refusal (ValueError)."""
        for name, why in _REFUSED.items():
            value = given.get(name)
            if isinstance(value, Tensor) or value not in (None, False, 0):
                raise ValueError(f"the model was called with {name}: {why}")
        if found := [name for name, value in given.items() if value is not None and _OF_TOWERS.match(name)]:
            raise ValueError(f"the model was called with {found[0]}: {_TOWER}")
        tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise ValueError("the model must be called with input_ids (B, L) or inputs_embeds: this rank's tokens")
        shard = tokens.shape[1]
        mask = given.get("attention_mask")
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2] or not bool(mask.all())
        ):
            raise ValueError(_PADDED)
        if sequence is None:
            sequence = ShardedSequence.of_equal_shards(shard, self.order)
        elif sequence.order != self.order:
            raise ValueError(f"the batch was dealt out in {sequence.order!r}, attention was told {self.order!r}")
        positions = given.get("position_ids")
        if positions is None:
            raise ValueError(
                "position_ids are missing: the model would count from 0 on every rank; call it with all that "
                f"shard_inputs gives, or with position_ids=sequence_positions(N, order)[None]; {_TRAINER}; {PROMPTS}"
            )
        if shard != sequence.shard or not _are(positions, sequence.positions):
            raise ValueError(
                f"position_ids and the {shard} tokens must be this rank's of a sequence of {sequence.length} in "
                f"{self.order!r}, as shard_inputs gives them (packed documents are told to shard_inputs, and the whole "
                f"of its batch to the model); got position_ids {tuple(positions.shape)}, {_some(positions)}, expected "
                f"{tuple(sequence.positions.shape)}, {_some(sequence.positions)}"
            )
        return sequence


_TRAINER = "instead of transformers' Trainer, whose ranks read other sequences, use ContextParallelTrainer"
_PADDED = (
    "attention_mask has padding, or is not this rank's: tell shard_inputs attention_mask of the whole sequence, and "
    f"leave it out of the model's call; {_TRAINER}"
)


def context_parallel(
    model: PreTrainedModel, mesh: DeviceMesh, *, order: TokenOrder, **options: Unpack[WayKeywords]
) -> ContextParallel:
    """Have a transformers model compute its attention on a mesh. The model is edited nowhere; all ranks call it.

    Every forward then takes what :func:`shard_inputs` gives. What a call brings besides is implemented, or refused by
    name on every rank: see docs/transformers.md. A second call on a model takes the place of the first.

    Args:
        model: of transformers, before or after ``fully_shard``; parts of it are not called by themselves.
        mesh: context mesh; see :func:`context_mesh`.
        order: in which batches are dealt out.
        **options: ``schedule``, ``rotate``, ``rotate_forward`` and ``kernel``, as :class:`AttentionOptions` has them;
            what else is an option there, the model says. Soft caps need a kernel that has them, ``"reference"`` on the
            CPU.

    Returns:
        A handle: ``remove()`` undoes it, ``whole()`` is a context in which the model runs as before.

    Raises:
        TypeError: the model is not transformers', or an option of the wrong type.
        ValueError: a model in which more than attention looks at several tokens; a mesh, order or option that does not
            fit, or differs between ranks.
    """
    name = name_of(mesh)
    with refusing_together(name):
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model must be a PreTrainedModel of transformers, got {type(model).__name__}; a model of peft has it "
                "inside: peft_model.get_base_model()"
            )
        check_token_order(order)
        check_order_fits(order, mesh)
        ways = ways_of("context_parallel", options, own=("order",))
        check_kernel(ways["kernel"])
        check_model_is_known(model)
        check_adapters(model, offsets_are_told=True)  # of these a forward asks
        told = {"order": order, **ways, "model": type(model).__name__, "layers": len(list(model.modules()))}
        agree("context_parallel", told.items(), name)
    make_way(model, name)
    with refusing_together(name):
        return ContextParallel(model, mesh, {"order": order, **ways}, order)


context_parallel.__signature__ = with_options(context_parallel, NOT_WAYS)  # pyrefly: ignore[missing-attribute]


def handle_of(model: Any) -> ContextParallel:
    """What :func:`context_parallel` returned for a model, or a refusal (ValueError)."""
    found = found_on(model)
    if not isinstance(found, ContextParallel):
        raise ValueError(f"{type(model).__name__} was not given to context_parallel: do so first")
    return found


def _checked_count(given: Any, counted: int) -> float:
    """What a loss is divided by, or a refusal (ValueError) where more labels than that count in this batch alone."""
    count = float(given)
    # Trainer has it in float32, which rounds it above 2**24.
    is_rounded = isinstance(given, Tensor) and given.is_floating_point()
    least = float(torch.tensor(counted, dtype=given.dtype, device="cpu")) if is_rounded else counted
    if not least <= count < math.inf:
        raise ValueError(
            f"num_items_in_batch must be that of the whole batch, of which {counted} labels count, got {count:.12g}: "
            "pass on what shard_inputs gives, or a sum of these; blank labels before it, and where gradients are "
            "averaged multiply the loss"
        )
    return count


def _check_count_of_all(given: Any, labels: Tensor, mesh: str) -> None:
    """Refuse (ValueError) 0, or less than the labels of all ranks that count, where no batch of shard_inputs tells."""
    heard = hear_all("how many labels count", int((labels != IGNORED).sum()), mesh)
    if not _checked_count(given, sum(heard.values())):
        raise ValueError(
            "num_items_in_batch must be more than 0, got 0: all labels are -100, or there is nothing to predict"
        )


def _offset(asked: dict[str, Any]) -> bool:
    return any(isinstance(asked.get(name), Tensor) or asked.get(name, 0) != 0 for name in ("q_offset", "kv_offset"))


def _are(positions: Any, expected: Tensor) -> bool:
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[-1] != expected.shape[-1]:
        return False
    if expected.shape[0] not in (1, positions.shape[0]) and positions.shape[0] != 1:
        return False
    return torch.equal(*torch.broadcast_tensors(positions, expected.to(positions.device)))


def _some(positions: Tensor) -> str:
    values = positions.reshape(-1)[:8].tolist()
    return f"[{', '.join(map(str, values))}{', ...' if positions.numel() > len(values) else ''}]"
