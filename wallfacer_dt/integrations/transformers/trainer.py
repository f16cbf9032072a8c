"""transformers' Trainer for a model that :func:`context_parallel` was given. Needs accelerate, as Trainer does.

Note [What Trainer takes for data parallelism]
To Trainer every rank is one of data parallelism: it counts labels over all of them, multiplies each rank's loss by
their number, and DDP or FSDP average gradients. With a shard for a batch that is right as it is, since labels were
shifted before they were cut: the average of W parts, each times W, is their sum. Two things are not. Its loader hands
every rank other sequences, and no rank must take these for shards of one; and what it evaluates it gathers by row.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer
from transformers.trainer_utils import has_length, seed_worker

from wallfacer_dt.agreement.agree import agree, hear_all, refusing_together
from wallfacer_dt.agreement.worlds import name_mesh
from wallfacer_dt.integrations.transformers import upstream
from wallfacer_dt.integrations.transformers.inputs import IGNORED, shard_inputs
from wallfacer_dt.integrations.transformers.model import handle_of
from wallfacer_dt.integrations.transformers.sequence import positions_within
from wallfacer_dt.layout import BY_DOCUMENT
from wallfacer_dt.mesh import mesh_ranks

# What a batch may bring, as `shard_inputs` calls it.
_TAKEN = {"input_ids", "labels", "attention_mask", "document_ids", "cu_seqlens"}
# What collators tell kernels of the documents that position_ids show.
_FOR_KERNELS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class ContextParallelTrainer(Trainer):
    """``Trainer``, in which the ranks of a mesh read the same batches, and each computes its part of them.

    Called and configured as ``Trainer``, with a model that :func:`context_parallel` was given; under torchrun, with
    DDP. ``per_device_train_batch_size`` is that of a mesh. Datasets and collators give whole rows: ``input_ids`` and
    ``labels``, perhaps ``attention_mask``, or where documents are packed ``position_ids`` that restart,
    ``document_ids`` or ``cu_seqlens``. See docs/transformers.md.

    Attributes:
        own_loss_adds_up: to be set in a subclass whose ``compute_loss`` is not Trainer's: the average over all ranks of
            what it gives is the loss of the whole step, as with this rank's sum over ``shift_labels``, divided by
            ``num_items_in_batch``, times the number of ranks.

    Args:
        model: after :func:`context_parallel`.
        *args: as ``Trainer`` takes them.
        **kwargs: likewise.

    Raises:
        ValueError: a model that :func:`context_parallel` was not given, or an argument that goes with shards as little
            as a parallelism of accelerate's own; in training, a batch that ranks do not hold alike.
    """

    own_loss_adds_up = False

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        self._everyone = everyone = name_mesh("world", range(dist.get_world_size()), ())
        with refusing_together(everyone):
            self.context = handle_of(model)
            self._check_bases()
            self._check_own_loss()  # before another base looks at it
            told = args[0] if args else kwargs.get("args")
            _check_parallelism(getattr(told, "parallelism_config", None))  # of which accelerate has errors of its own
        super().__init__(model, *args, **kwargs)
        self.model_accepts_loss_kwargs |= self.context.sums_loss
        with refusing_together(everyone):
            self._check_settings()
            groups = sorted(set(hear_all("Trainer's meshes", mesh_ranks(self.context.mesh), everyone).values()))
            if sum(map(len, groups)) != dist.get_world_size():
                raise ValueError(f"every rank must be in one mesh of context_parallel, got meshes of ranks {groups}")
        self._groups, self._group = len(groups), groups.index(mesh_ranks(self.context.mesh))
        self._evaluated = "", 0  # the prefix of the last evaluation, and its steps, until they are told
        # By which all of its loaders are prepared: not for each rank, but for each mesh.
        self.accelerator.prepare_data_loader = self._prepare_loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, unless what was set since it was made is refused.

        Args:
            *args: as Trainer has them.
            **kwargs: likewise.

        Returns:
            As Trainer's.

        Raises:
            ValueError: on every rank: a setting that goes with shards as little as it does at construction, or
                parameters that are DTensors, which DDP does not take.
        """
        with refusing_together(self._everyone):
            self._check_settings()
            found = next((name for name, p in self.model.named_parameters() if isinstance(p, DTensor)), "")
            if found and not self.is_fsdp_enabled:
                raise ValueError(
                    f"{found} is a DTensor already, and Trainer would put the model into DDP: leave fully_shard out, "
                    "or write a loop of your own, as docs/transformers.md has it"
                )
            agree("Trainer's training", (), self._everyone)  # DDP waits for all, and hears no refusal
            if not self.is_fsdp_enabled and not self._averages():
                self.model_wrapped = self.model
                upstream.forget_evaluation(self.model)  # or it would be put into no DDP
        return super().train(*args, **kwargs)

    def _averages(self) -> bool:
        """Whether the model is in DDP, perhaps compiled, or one rank has all gradients, where accelerate has none."""
        is_in_ddp = isinstance(getattr(self.model_wrapped, "_orig_mod", self.model_wrapped), DistributedDataParallel)
        return is_in_ddp or dist.get_world_size() == 1

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, which adds what no step has logged: of all ranks the mean, as of what was logged."""
        self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return super()._finalize_training(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, Any]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Any]:
        """What Trainer counts labels of and trains on: this rank's part of each batch.

        Args:
            epoch_iterator: whole batches.
            num_batches: of one optimizer step.
            device: of the count.

        Returns:
            This rank's parts, and the counted labels of all ranks' parts.

        Raises:
            ValueError: on every rank: a batch of some mesh is refused, or a setting, or no label of the step counts, or
                nothing averages gradients.
        """
        mesh = self.context.order.mesh_name
        with refusing_together(self._everyone):  # the other meshes would wait for this one
            with refusing_together(mesh):  # whose other ranks deal the batches out
                self._check_settings()  # a callback may have set them
                if not self.is_fsdp_enabled and not self._averages():
                    raise ValueError(
                        f"the model is in no DistributedDataParallel, got {type(self.model_wrapped).__name__}: ranks "
                        "would train by their own gradients"
                    )
                whole = list(islice(epoch_iterator, num_batches))
                agree("a step's batches", [("how many", len(whole))], mesh)
            batches = [self._shard(batch)[0] for batch in whole]
            # Trainer counts labels over all ranks if the first batch has some.
            told = [("how many", len(batches)), ("which have labels", tuple("labels" in batch for batch in batches))]
            agree("a step's batches", told, self._everyone)
        batches, counted = super().get_batch_samples(iter(batches), len(batches), device)
        if batches and counted is not None and not int(counted):
            raise ValueError("no label of a step counts: all are -100, or there is nothing to predict")
        return batches, counted

    def evaluation_loop(self, dataloader: DataLoader, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with rows counted once that several ranks share, or that accelerate repeats.

        Args:
            dataloader: of whole rows.
            *args: as Trainer has them.
            **kwargs: likewise.

        Returns:
            As Trainer's.

        Raises:
            ValueError: on every rank: a setting that is refused at construction, or no label_names; on several meshes,
                where it is not known which rows accelerate repeats.
        """
        with refusing_together(self._everyone):
            self._check_settings()
            if not self.label_names:
                raise ValueError(
                    'label_names must have "labels", of which the loss is evaluated, got none: '
                    'TrainingArguments(label_names=["labels"])'
                )
            if self._groups > 1:
                # An iterable one, too, that has a length.
                if isinstance(dataloader.dataset, IterableDataset) or not has_length(dataloader.dataset):
                    raise ValueError(
                        "of an iterable dataset, or one without a length, it is not known which rows accelerate "
                        f"repeats, so that all {self._groups} meshes have as many: evaluate one that has a length, and "
                        "whose rows are asked for by number"
                    )
                if not self.accelerator.even_batches:
                    raise ValueError(
                        f"accelerator_config with even_batches=False would give the {self._groups} meshes other "
                        "numbers of batches to evaluate: leave it out"
                    )
            agree("Trainer's evaluation", (), self._everyone)  # the others of a mesh would deal out batches meanwhile
        self.gather_function = self._by_row
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        parts = 1 if self.accelerator.split_batches else self._groups  # of a batch, which is all meshes' or one's
        steps = math.ceil(output.num_samples / (self.args.eval_batch_size * parts))
        self._evaluated = kwargs.get("metric_key_prefix", "eval"), steps
        return output

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, but for steps per second: a mesh's, where Trainer takes every rank to have its own.

        Args:
            *args: as Trainer has them.
            **kwargs: likewise.

        Returns:
            As Trainer's.
        """
        output = super().predict(*args, **kwargs)
        self._tell_steps(output.metrics)
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As Trainer's, but for an evaluation's steps per second, as :meth:`predict`.

        Args:
            logs: what is logged.
            *args: as Trainer has them.
            **kwargs: likewise.
        """
        self._tell_steps(logs)
        super().log(logs, *args, **kwargs)

    def _tell_steps(self, metrics: dict[str, float]) -> None:
        prefix, steps = self._evaluated
        if runtime := metrics.get(f"{prefix}_runtime"):
            metrics[f"{prefix}_steps_per_second"] = round(steps / runtime, 3)
            self._evaluated = "", 0

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, None, None]:
        """The loss of all meshes' whole batches, the same on every rank.

        Args:
            model: to evaluate.
            inputs: the whole batch.
            prediction_loss_only: must be true: logits and labels are shards, which Trainer would gather by row.
            ignore_keys: as Trainer has it.

        Returns:
            The loss, and nothing else; NaN where no label counts.

        Raises:
            ValueError: more than the loss is asked for, or nothing to compute it from.
        """
        with refusing_together(self._everyone):
            with refusing_together(self.context.order.mesh_name):  # whose other ranks deal the batch out
                if not prediction_loss_only or inputs.get("labels") is None:
                    raise ValueError(
                        "of shards Trainer evaluates the loss alone: set prediction_loss_only=True, and give it "
                        "labels; for logits call the model within `with handle.whole():`"
                    )
                counting = self._counting(inputs["input_ids"].shape[0]) if "input_ids" in inputs else None
            if counting is not None:
                inputs = {**inputs, "labels": inputs["labels"].clone()}
                inputs["labels"][counting:] = IGNORED
            shard, counted = self._shard(inputs)
            if not any(hear_all("a batch to evaluate", int(counted), self._everyone).values()):
                nothing = counted.new_full((), math.nan, dtype=torch.float32)  # the mean of none, as in one process
                return nothing, None, None
        # Not that of another base, which may take the mean over this rank's tokens, as TRL's does.
        loss, _, _ = Trainer.prediction_step(self, model, shard, prediction_loss_only, ignore_keys)
        return self.accelerator.reduce(loss, "mean"), None, None

    def get_total_train_batch_size(self, args: Any) -> int:
        """Rows of one optimizer step, of which a mesh has as many as Trainer takes a rank to have.

        Args:
            args: Trainer's.

        Returns:
            The number of rows.
        """
        return super().get_total_train_batch_size(args) // self.context.mesh.size()

    def _by_row(self, losses: Tensor) -> Tensor:
        """The loss of each row of all meshes' batches, from that of a mesh's rows; those that are repeated left out."""
        state = self.accelerator.gradient_state
        # All the same; Trainer repeats it for the rows of its loader, which accelerate may divide among meshes.
        rows = losses[:1].repeat(state.active_dataloader.total_batch_size) if self._groups > 1 else losses
        return rows[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else rows

    def _counting(self, rows: int) -> int | None:
        """How many of a mesh's rows count, the first; None for all. Others accelerate repeats in the last batch.

        Meshes take their rows of it in turn, and what is repeated comes after them all.
        """
        state = self.accelerator.gradient_state
        if self._groups == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        prepared = state.active_dataloader.total_batch_size // self._groups
        if rows != prepared:
            raise ValueError(
                f"of a collator that makes {rows} rows of {prepared} it is not known which accelerate repeats, so that "
                f"all {self._groups} meshes have as many: evaluate a multiple of {prepared * self._groups} rows"
            )
        return min(max(state.remainder - self._group * rows, 0), rows)

    def _shard(self, batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """This rank's part of a batch, and the counted labels of the whole, a tensor, or None without labels.

        Or a refusal (ValueError) on every rank.
        """
        order = self.context.order
        with refusing_together(order.mesh_name):
            told = {name: value for name, value in batch.items() if value is not None}
            positions = told.pop("position_ids", None)
            if positions is not None:
                if positions.ndim > 2:
                    raise ValueError(
                        f"position_ids of a batch must have shape (B, N) or (N,), got {(*positions.shape,)}"
                    )
                _drop_what_positions_show(told, positions := positions.cpu())
            if unknown := sorted(told.keys() - _TAKEN):
                raise ValueError(f"a batch has {', '.join(unknown)}, of which Trainer cannot deal out this rank's part")
            if "input_ids" not in told:
                raise ValueError("a batch must have input_ids, which are dealt out")
            if positions is not None:
                is_needed = order.name == BY_DOCUMENT and told.get("attention_mask") is None
                _tell_documents(told, positions, also_of_one=is_needed)
            # They are where the schedule is made.
            documents = {name: told.get(name) for name in ("document_ids", "cu_seqlens")}
            told |= {name: x.cpu() for name, x in documents.items() if x is not None}
        told |= {"order": order, "shift": self.context.shifts_labels, "must_count": False}
        shard = shard_inputs(self.context.mesh, **told)
        return shard, shard.pop("num_items_in_batch", None)  # that of a step Trainer counts

    def _set_signature_columns_if_needed(self) -> None:
        """Keep columns that are dealt out, which the model's forward need not name."""
        super()._set_signature_columns_if_needed()
        self._signature_columns += sorted({*_TAKEN, "position_ids"}.difference(self._signature_columns))

    def _check_bases(self) -> None:
        kinds = takewhile(lambda kind: kind is not ContextParallelTrainer, type(self).__mro__)
        others = [kind for kind in kinds if issubclass(kind, Trainer) and not issubclass(kind, ContextParallelTrainer)]
        if others:
            raise ValueError(
                f"{type(self).__name__} must have ContextParallelTrainer before {others[0].__name__} among its bases, "
                "whose methods would take a whole batch for this rank's part"
            )

    def _check_own_loss(self) -> None:
        if getattr(self.compute_loss, "__func__", None) is not Trainer.compute_loss and not self.own_loss_adds_up:
            raise ValueError(
                f"{type(self).__name__} has a compute_loss that is not Trainer's: labels are shifted already, and "
                "ranks' means, averaged, are not the mean over all tokens; give this rank's sum over shift_labels, "
                "divided by num_items_in_batch, times the number of ranks, and set own_loss_adds_up = True in the "
                "class, or take Trainer's there: compute_loss = Trainer.compute_loss"
            )

    def _check_settings(self) -> None:
        """Refuse (ValueError) what would train another loss; attributes are asked, which may be set at any time."""
        self._check_own_loss()
        args = self.args
        _check_parallelism(
            getattr(self.accelerator, "parallelism_config", None)
        )  # also what accelerate's launcher says
        refused = {
            "compute_loss_func (the loss must be the model's own)": self.compute_loss_func is not None,
            "compute_metrics (logits are of this rank's tokens; the loss alone is evaluated)": (
                self.compute_metrics is not None
            ),
            "loss_type of TRL (the loss is Trainer's)": (
                not self.own_loss_adds_up and getattr(args, "loss_type", "nll") != "nll"
            ),
            'include_for_metrics=["inputs"] (they are shards; the loss alone is evaluated)': (
                "inputs" in args.include_for_metrics
            ),
            "label_names of others than labels (a rank's part of a batch has none)": (
                not {"labels", *["shift_labels"] * self.context.shifts_labels}.issuperset(self.label_names)
            ),
            "label_smoothing_factor (it takes the mean over this rank's tokens)": self.label_smoother is not None,
            "neftune_noise_alpha (its noise is scaled by the tokens of a shard)": self.neftune_noise_alpha is not None,
            'include_num_input_tokens_seen="non_padding" (a shard has no mask of padding; "all" counts all tokens)': (
                args.include_num_input_tokens_seen == "non_padding"
            ),
            "average_tokens_across_devices=False": not args.average_tokens_across_devices,
            "accelerator_config with dispatch_batches": bool(self.accelerator.dispatch_batches),
            "deepspeed": self.is_deepspeed_enabled,
            "distributed_config (a model that transformers itself has sharded)": (
                self.is_distributed_loading_by_transformers
            ),
            'train_sampling_strategy="batch_rebalance" (it gives the ranks of a mesh other rows)': (
                getattr(args, "train_sampling_strategy", "") == "batch_rebalance"
            ),
            "DataParallel": args.n_gpu > 1,
            "a world of one process (start it by torchrun)": self.accelerator.num_processes != dist.get_world_size(),
        }
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__} computes its loss by itself, as the mean over this rank's tokens: write "
                "a loop of your own, as docs/transformers.md has it"
            )
        if found := [name for name, is_set in refused.items() if is_set]:
            raise ValueError(f"ContextParallelTrainer does not go with {found[0]}")

    def _prepare_loader(self, loader: DataLoader, device_placement: bool | None = None, **_: Any) -> DataLoader:
        """As accelerate's, for so many meshes instead of ranks, whose own seeds rows do not follow."""
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        ours = self.accelerator
        told = ours.dataloader_config.data_seed
        seed = loader.worker_init_fn
        if isinstance(seed, partial) and seed.func is seed_worker:  # of which those of a mesh must draw alike
            loader.worker_init_fn = partial(seed, rank=self._group)
        prepared = prepare_data_loader(
            loader, ours.device, num_processes=self._groups, process_index=self._group,
            split_batches=ours.split_batches, put_on_device=ours.device_placement if device_placement is None
            else device_placement, rng_types=ours.rng_types.copy(), dispatch_batches=False,
            even_batches=ours.even_batches, use_seedable_sampler=ours.use_seedable_sampler,
            non_blocking=ours.non_blocking, data_seed=self.args.seed if told is None else told,
            use_stateful_dataloader=ours.use_stateful_dataloader,
        )  # fmt: skip
        prepared._is_accelerate_prepared = True
        return prepared


def _check_parallelism(config: Any) -> None:
    sizes = {f"{name}_size": getattr(config, f"{name}_size", None) or 1 for name in ("cp", "sp", "tp")}
    if found := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        raise ValueError(
            f"ContextParallelTrainer does not go with parallelism_config of {', '.join(found)}: leave it out, since "
            "ranks that share a sequence are those of the mesh that context_parallel was given"
        )


def _drop_what_positions_show(told: dict[str, Any], positions: Tensor) -> None:
    """Leave out what a batch tells kernels, or refuse (ValueError) what positions do not show."""
    begins = positions == 0
    ends = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel())
    for name in sorted(_FOR_KERNELS & told.keys()):
        value = torch.as_tensor(told.pop(name)).cpu()
        if name == "seq_idx":
            is_shown = torch.equal(value.diff(dim=-1) != 0, begins[..., 1:])
        elif name.startswith("cu_"):
            is_shown = value.tolist() == ends.tolist()
        else:
            is_shown = value.tolist() == max(ends.diff().tolist(), default=0)
        if not is_shown:
            raise ValueError(
                f"{name} of a batch tells other documents than its position_ids, which are 0 where one begins: leave "
                f"{name} out, or begin position_ids anew there"
            )


def _tell_documents(told: dict[str, Any], positions: Tensor, *, also_of_one: bool) -> None:
    """Documents as positions show them, unless a batch has them, of which these must be the positions."""
    length, ends = positions.shape[-1], told.get("cu_seqlens")
    given = told.get("document_ids")
    if ends is not None:
        given = torch.bucketize(torch.arange(length, device="cpu"), ends.cpu(), right=True)
    if given is None:
        told["document_ids"] = _documents(positions, also_of_one=also_of_one)
        mask = told.get("attention_mask")
        if mask is not None and mask.shape == told["input_ids"].shape and told["document_ids"] is not None:
            if not bool(mask.all()):
                raise ValueError(
                    "position_ids of a batch whose attention_mask has padding must count from 0 to the end of each "
                    "row: leave position_ids out, or padding, which does not go with packed documents"
                )
            del told["attention_mask"]
        return
    given = given.cpu()
    # Those of other sequences are refused where they are dealt out.
    if given.shape[-1] == length and bool((positions_within(given, length) != positions).any()):
        raise ValueError(
            "position_ids must count from 0 in every document that document_ids or cu_seqlens tell: leave them out, as "
            "they follow from these"
        )


def _documents(positions: Tensor, *, also_of_one: bool) -> Tensor | None:
    """(B, N): the document of every token, from positions that restart; others are refused.

    Of one document (N,) where that is asked for, else None, with which attention has less to do.
    """
    documents = (positions == 0).long().cumsum(-1)
    if not torch.equal(positions_within(documents, positions.shape[-1]).expand_as(positions), positions):
        raise ValueError("position_ids must count from 0 in every document, which is how Trainer finds them")
    if bool((documents != 1).any()):
        return documents
    return torch.zeros(positions.shape[-1], dtype=torch.int64, device="cpu") if also_of_one else None
