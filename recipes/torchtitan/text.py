"""A local text as torchtitan's data: a tokenizer that needs no files, and sequences of consecutive tokens.

Shape suffixes: T = tokens of the text, L = tokens of a sequence.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer

from recipes.training.ranks import load_alike
from recipes.training.settings import Launch, RecipeError
from recipes.training.text import load_text

# Every character of a text is in one, empty lines in the one that they end; the first has those before it, too.
_PARAGRAPH = re.compile(r"(?:\r?\n)*.+?(?:(?:\r?\n){2,}|\Z)", re.DOTALL)


class ByteTokenizer(BaseTokenizer):
    """Bytes as tokens, 0 to 255; no token begins or ends a text."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to configure."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:  # pyrefly: ignore[bad-override]
        """The bytes of a text in UTF-8."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:  # pyrefly: ignore[bad-override]
        """The text that has these bytes."""
        return bytes(ids).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """256."""
        return 256


class TextLoader(ParallelAwareDataloader):
    """Sequences of a local text, one after the other and round again; positions are from 0 in each, or in documents.

    Ranks that share a sequence read it whole and torchtitan deals it out. In a step, the data-parallel ranks together
    take the same sequences whatever their number, if the global batch is the same.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        """`dataset_path` is the file; None means the source of Python's standard library."""

        documents: bool = False
        """Whether paragraphs, which empty lines end, are documents, of which tokens see their own only."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **_: Any,
    ) -> None:
        if config.num_workers > 1 or config.persistent_workers:
            raise ValueError(
                "--dataloader.num_workers must be 0 or 1, without --dataloader.persistent_workers, got "
                f"{config.num_workers}: workers count for themselves what they have given"
            )
        source = config.dataset_path or "the standard library"
        try:
            tokens_T, starts_T = load_alike(
                lambda: _encoded(config, tokenizer), Launch.from_environment(), f"the tokens of {source}"
            )
        except RecipeError as error:
            raise ValueError(str(error).replace("--text", "--dataloader.dataset_path")) from error
        if config.documents and starts_T.sum() < 2:
            raise ValueError(
                f"--dataloader.documents: {source} is one document: paragraphs must end in an empty line; leave the "
                "option out, or give another text"
            )
        self._made_of = {
            "dataset_path": f"{len(tokens_T)} tokens with CRC-32 {zlib.crc32(tokens_T.numpy().data):08x}",
            "seq_len": seq_len,
            # With where they begin: earlier versions cut them otherwise.
            "documents": config.documents and f"True, {zlib.crc32(starts_T.numpy().data):08x}",
        }
        self._sequences = _Sequences(tokens_T, starts_T, seq_len, dp_rank, dp_world_size)
        self._source = source
        self.check_step(dp_world_size * local_batch_size)
        self._batch, self._batches = local_batch_size, 0
        super().__init__(
            self._sequences,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=snapshot_every_n_steps,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            prefetch_factor=config.prefetch_factor,
            pin_memory=config.pin_memory,
        )

    def check_step(self, sequences: int) -> None:
        """Refuse (ValueError) a text of fewer sequences than a step takes over all data-parallel ranks."""
        tokens, needed = len(self._sequences.tokens_T), self._sequences.length * sequences + 1
        if tokens < needed:
            raise ValueError(
                f"--dataloader.dataset_path: {self._source} has {tokens} tokens, but one step of {sequences} sequences "
                f"needs {needed}; give a longer text, or a smaller --training.seq_len, --training.local_batch_size or "
                "--training.global_batch_size"
            )

    def __iter__(self) -> Iterator[Any]:  # pyrefly: ignore[bad-override]
        """This data-parallel rank's batches, from the first that has not been given."""
        self._sequences.given = self._batches * self._batch
        for batch in super().__iter__():
            self._batches += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many sequences all data-parallel ranks have taken together, of what; any number of them can go on."""
        return {"sequences": self._batches * self._batch * self.dp_world_size, **self._made_of}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a checkpoint was made; refused (ValueError) of other sequences, or within those of one step."""
        if not state_dict:
            return
        for name, mine in self._made_of.items():
            if state_dict.get(name) != mine:
                option = f"--{'training' if name == 'seq_len' else 'dataloader'}.{name}"
                raise ValueError(
                    f"the checkpoint was made with {option} of {state_dict.get(name)}, this run has {mine}: resume with"
                    " the same"
                )
        taken, together = state_dict["sequences"], self._batch * self.dp_world_size
        if taken % together:
            raise ValueError(
                f"the checkpoint was made after {taken} sequences, of which {self.dp_world_size} data-parallel ranks "
                f"take {together} at a time: resume with another --training.local_batch_size"
            )
        self._batches = taken // together


def _encoded(
    config: TextLoader.Config, tokenizer: BaseTokenizer
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, ...]]:
    """The tokens of the text, and which of them begin a document; and what must be the same on all ranks."""
    whole = load_text(config.dataset_path).bytes_S.tobytes().decode(errors="replace")
    parts = _PARAGRAPH.findall(whole) if config.documents else [whole]
    encoded = [tokenizer.encode(part) for part in parts]
    tokens_T = torch.tensor([token for part in encoded for token in part])
    starts_T = torch.tensor([start for part in encoded for start in [True] * bool(part) + [False] * (len(part) - 1)])
    return (tokens_T, starts_T), (len(tokens_T), zlib.crc32(tokens_T.numpy().data), zlib.crc32(starts_T.numpy().data))


class _Sequences(IterableDataset):
    """This data-parallel rank's sequences, of which it has given some."""

    def __init__(self, tokens_T: torch.Tensor, starts_T: torch.Tensor, length: int, rank: int, world: int) -> None:
        self.tokens_T, self.starts_T, self.length, self.rank, self.world = tokens_T, starts_T, length, rank, world
        self.given = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        sequences = (len(self.tokens_T) - 1) // self.length
        while True:
            start = (self.given * self.world + self.rank) % sequences * self.length
            self.given += 1
            window = self.tokens_T[start : start + self.length + 1]
            yield {"input": window[:-1], "positions": self._positions(start)}, window[1:]

    def _positions(self, start: int) -> torch.Tensor:
        """From 0 where a document begins, and at the sequence's first token."""
        index_L = torch.arange(self.length)
        starts_L = torch.where(self.starts_T[start : start + self.length], index_L, 0)
        return index_L - starts_L.cummax(0).values
