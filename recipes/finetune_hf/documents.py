"""Local text as packed sequences: documents one after the other, cut every N tokens, each token with its document.

Shape suffixes: T = tokens of all documents, N = tokens of a sequence.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from recipes.finetune_hf.settings import BYTES, Settings
from recipes.training.settings import RecipeError, first_line
from recipes.training.text import load_documents


class Packed(NamedTuple):
    """A sequence, or a batch of them: int64 tokens, and the number of the document of each."""

    tokens_N: Tensor
    documents_N: Tensor


class PackedDocuments(Dataset[Packed]):
    """Sequences of a text, each token read once in an epoch.

    Args:
        settings: the text, the tokenizer and the length of a sequence.

    Raises:
        RecipeError: text or tokenizer cannot be read, or there are fewer sequences than a step takes.
    """

    def __init__(self, settings: Settings) -> None:
        self._length = settings.sequence
        self.source, texts = load_documents(settings.text)
        documents, self.vocabulary, self.tokenizer = _tokenized(texts, settings)
        self._tokens_T = np.concatenate([np.empty(0, dtype=np.uint8), *documents])
        self.sizes = [len(document) for document in documents]
        self._documents_T = np.repeat(np.arange(len(documents)), self.sizes)
        self.largest = int(self._tokens_T.max(initial=0))
        self.fingerprint = (self._tokens_T.size, zlib.crc32(self._tokens_T.tobytes()), len(documents))
        needed = settings.samples
        if len(self) < needed:
            raise RecipeError(
                f"--text: {self.source} holds {len(self)} sequences of {settings.sequence} tokens, but one step"
                f" takes --batch x --data-parallel = {needed}; give a longer text or lower one of them"
            )

    def __len__(self) -> int:
        """Whole sequences."""
        return self._tokens_T.size // self._length

    def __getitem__(self, index: int) -> Packed:
        """Sequence `index`, whole."""
        part = slice(index * self._length, (index + 1) * self._length)
        return Packed(
            torch.from_numpy(self._tokens_T[part].astype(np.int64)), torch.from_numpy(self._documents_T[part].copy())
        )


def _tokenized(texts: list[bytes], settings: Settings) -> tuple[list[np.ndarray], int, Any]:
    """The tokens of each document that has some, how many kinds there are, and the tokenizer, None for bytes."""
    folder = settings.tokenizer or settings.model or BYTES
    if folder == BYTES:
        return [np.frombuffer(text, dtype=np.uint8) for text in texts if text], 256, None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a vocabulary that is cut short raises others than OSError
        raise _no_tokenizer(settings, first_line(error)) from error
    found = [tokenizer(text.decode(errors="replace"), add_special_tokens=False)["input_ids"] for text in texts]
    if not any(found):  # some are made of nothing, and know no token
        raise _no_tokenizer(settings, f"{type(tokenizer).__name__} finds no token in the text")
    kinds = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))  # ids may leave some out
    return [np.array(tokens, dtype=np.int32) for tokens in found if tokens], kinds, tokenizer


def _no_tokenizer(settings: Settings, why: str) -> RecipeError:
    name = "tokenizer" if settings.tokenizer else "model"
    return RecipeError(
        f"--{name}: {getattr(settings, name)} has no tokenizer that loads: {why}; give --tokenizer, a folder or bytes"
    )
