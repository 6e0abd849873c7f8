"""What a runner gets and gives: the ragged step and the protocol.

A *ragged batch* lays the tokens of every scheduled sequence end to end. Nothing is padded:

    sequence      A (prefill, 3 of 5)   B (decode)   C (decode)
    ids           a0   a1   a2          b7           c2            T = 5
    positions     0    1    2           7            2
    cu_seqlens    0              3            4            5       S + 1 = 4
    context_lens  3                     8            3             S = 3
    rows                                3            4             R = 2   (A is not done: no logits yet)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens, T in all, of S sequences; R of the tokens need logits.

    ids: int64[T]. positions: int64[T], each token's index in its sequence.
    slots: int64[T], where its key and value are stored: block * block_size + offset.
    cu_seqlens: int32[S+1], where each sequence's tokens begin. context_lens: int32[S], tokens of the sequence in the
    cache after this step (so a sequence's queries are the last cu_seqlens[s+1]-cu_seqlens[s] of its context).
    block_table: int32[S, B], the sequence's blocks in order; entries past its length are not read.
    rows: int64[R], strictly increasing indices into T.
    """

    ids: Int64
    positions: Int64
    slots: Int64
    cu_seqlens: Int32
    context_lens: Int32
    block_table: Int32
    rows: Int64


class Runner(Protocol):
    """Executes a step. Holds weights and the KV cache; knows nothing of requests."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def run(self, batch: StepBatch) -> Float32:
        """Store the step's keys and values, and return logits: float32[R, V], valid until the next call."""
        ...
