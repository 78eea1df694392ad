"""Batches of tokens: fixed-length sequences in an endless order, split over the ranks of any layout.

The documents of a split follow each other, each with its end token. Sequence i is the seq_len + 1 tokens from
i * seq_len on: its last token is the last target, and the first token of sequence i + 1. The rest at the end of the
split is in no sequence. An epoch takes every sequence once, in a different order each (order.py). The epochs make one
endless stream, and a step takes its next sequences, so a run's position in its data is one count.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quaver.lab.data.order import Int64Array, compute_stream_indices
from quaver.lab.data.tokenizer import Tokens
from quaver.lab.settings import Training, Validation
from quaver.lab.settings.parallel_dims import ParallelDims

SINGLE_RANK = ParallelDims()
"""One process, which takes every batch."""


@dataclass(frozen=True)
class Batch:
    """The input of one forward: `tokens`, and `targets`, which are the next tokens; both int64 [B, T].

    `documents`, int64 [B, T], numbers the documents of each row from 0; None if attention may cross them.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), documents)


@dataclass(frozen=True)
class TokenSplit:
    """`tokens`, 1-d unsigned, and `ends`, int64: where each document ends, its end token included. Memory-mapped."""

    tokens: Tokens
    ends: Int64Array

    def count_sequences(self, seq_len: int) -> int:
        """Return the number of sequences in one epoch."""
        return max(0, len(self.tokens) - 1) // seq_len


@dataclass(frozen=True)
class TokenData:
    """Two splits and their `origin`, which is JSON-able and goes into the run folder."""

    train: TokenSplit
    validation: TokenSplit
    origin: dict[str, Any] = field(repr=False)
    document_mask: bool = False

    def make_step_batches(
        self, training: Training, consumed_sequences: int, dims: ParallelDims = SINGLE_RANK
    ) -> list[Batch]:
        """Return this rank's microbatches of the optimizer step after the first `consumed_sequences` of the stream.

        Microbatch m of data-parallel rank r of n is microbatch m * n + r of a single process.

        Args:
            consumed_sequences: the number that earlier steps took on all ranks, training.step_batch_size per step.
        """
        epoch_len = self.train.count_sequences(training.seq_len)
        indices = compute_stream_indices(consumed_sequences, training.step_batch_size, epoch_len, training.seed)
        return self._make_batches(self.train, indices * training.seq_len, training, dims)

    def make_validation_batches(
        self, training: Training, validation: Validation, dims: ParallelDims = SINGLE_RANK
    ) -> list[Batch]:
        """Return this rank's fixed validation batches: windows spread evenly over the validation split.

        If their number is not a multiple of the data-parallel ranks, each rank takes all of them.
        """
        count = validation.steps * training.local_batch_size
        starts = np.linspace(0, len(self.validation.tokens) - training.seq_len - 1, count).astype(np.int64)
        is_divisible = validation.steps % dims.data_parallel_degree == 0
        return self._make_batches(self.validation, starts, training, dims if is_divisible else SINGLE_RANK)

    def _make_batches(
        self, split: TokenSplit, starts: Int64Array, training: Training, dims: ParallelDims
    ) -> list[Batch]:
        size = training.local_batch_size
        batches = [starts[first : first + size] for first in range(0, len(starts), size)]
        batches_of_rank = batches[dims.data_parallel_rank :: dims.data_parallel_degree]
        return [_make_batch(split, rows.tolist(), training.seq_len, self.document_mask) for rows in batches_of_rank]


def _make_batch(split: TokenSplit, starts: Sequence[int], seq_len: int, with_documents: bool) -> Batch:
    rows = np.stack([split.tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
    sequences = torch.from_numpy(rows)
    documents = _number_documents(split, starts, seq_len) if with_documents else None
    return Batch(sequences[:, :-1], sequences[:, 1:], None if documents is None else torch.from_numpy(documents))


def _number_documents(split: TokenSplit, starts: Sequence[int], seq_len: int) -> Int64Array:
    """Return the document number of each token, [windows, seq_len], counted from 0 in each window."""
    document_starts = np.zeros((len(starts), seq_len), dtype=np.int64)
    for row, start in zip(document_starts, starts, strict=True):
        first, last = np.searchsorted(split.ends, [start, start + seq_len - 1], side="right")
        row[split.ends[first:last] - start] = 1
    return document_starts.cumsum(axis=1)
