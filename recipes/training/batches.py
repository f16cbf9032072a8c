"""This rank's batches without end, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from recipes.training.ranks import Ranks
from recipes.training.settings import RecipeError, RunSettings
from wallfacer_dt import SequenceSampler


class Batches(Iterator[Any]):
    """Batches of a dataset, in another order in every epoch; what does not fill a batch is left out of it.

    Args:
        dataset: of which an item is a sequence, or this rank's part of one.
        settings: sequences in a batch, and the seed of their order.
        ranks: which of them share sequences.
        fingerprint: of what the dataset was made of, the same on every rank.
    """

    def __init__(self, dataset: Dataset, settings: RunSettings, ranks: Ranks, fingerprint: tuple[int, ...]) -> None:
        self._batch, self._fingerprint = settings.batch, list(fingerprint)
        self._sampler = SequenceSampler(dataset, ranks.context, data_parallel=ranks.data_parallel, seed=settings.seed)
        self._loader = DataLoader(
            dataset,
            batch_size=settings.batch,
            sampler=self._sampler,
            drop_last=True,
            # Otherwise every epoch draws from the default generator, also one that is begun for a second time.
            generator=torch.Generator(),
        )
        self._consumed = 0
        self._epoch: Iterator[Any] | None = None

    def __next__(self) -> Any:
        """The next batch."""
        if self._epoch is None:
            self._epoch = iter(self._loader)
        try:
            batch = next(self._epoch)
        except StopIteration:
            self._sampler.set_epoch(self._sampler.epoch + 1)
            self._consumed, self._epoch = 0, iter(self._loader)
            batch = next(self._epoch)
        self._consumed += self._batch
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Plain values that say which batch is next, the same on every rank."""
        return {"fingerprint": self._fingerprint, "sampler": self._sampler.state_after(self._consumed)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            RecipeError: it is of other data, or of another number of data-parallel groups.
        """
        if state["fingerprint"] != self._fingerprint:
            raise RecipeError("--resume: the checkpoint was made of other data, or another model, than were found now")
        try:
            self._sampler.load_state_dict(state["sampler"])
        except ValueError as error:
            raise RecipeError(f"--resume: {error}") from error
        self._consumed, self._epoch = state["sampler"]["consumed"], None
