"""Numbers of the running sequences as columns, so that a step is prepared without a loop over tokens or sequences.

row   num_tokens  num_computed  num_blocks  token_ids                  block_table
 0        37           36           3       [ 9 2 7 … t36 . . . ]      [ 4 9 1 . . ]
 1         ·            ·           ·       (free)
 2       120           64           4       [ 5 5 8 … ]                [ 0 2 7 3 . ]      prefilling in chunks
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packhorse.engine.logits_processors import changes_logits
from packhorse.engine.sequence import NOT_RUNNING, Sequence
from packhorse.runner.base import Int32

DIRECT_STOP_IDS = 8
"""Stop ids compared for all rows at once; a sequence with more is looked at on its own."""


class SequenceTable:
    """Columns of `rows` rows; a running sequence owns one.

    token_ids: int32[rows, max_len]. num_tokens, num_computed, num_blocks, end: int32[rows].
    block_table: int32[rows, max_blocks]. stop_ids: int32[rows, DIRECT_STOP_IDS], padded with -1.
    temperature, top_p, min_p: float32[rows]. top_k: int32[rows]. key: uint64[rows].
    last_token_time: float64[rows], seconds. prompt_len: int32[rows].
    num_published: int32[rows], blocks whose contents were made known; prefix_identity: int64[rows], of the last one.
    bool[rows], what a row needs beside argmax or a filter: processed (its logits are changed before sampling), scored
    (log-probabilities of what is sampled), prompt_scored (of its prompt), followed (something after each token).
    """

    def __init__(self, rows: int, max_len: int, block_size: int) -> None:
        max_blocks = -(-max_len // block_size)
        self.token_ids: Int32 = np.zeros((rows, max_len), dtype=np.int32)
        self.block_table: Int32 = np.zeros((rows, max_blocks), dtype=np.int32)
        (
            self.num_tokens,
            self.num_computed,
            self.num_blocks,
            self.num_published,
            self.end,
            self.prompt_len,
            self.top_k,
        ) = (np.zeros(rows, dtype=np.int32) for _ in range(7))
        self.prefix_identity = np.zeros(rows, dtype=np.int64)
        self.temperature, self.top_p, self.min_p = (np.zeros(rows, dtype=np.float32) for _ in range(3))
        self.key = np.zeros(rows, dtype=np.uint64)
        self.last_token_time = np.zeros(rows, dtype=np.float64)
        self.stop_ids: Int32 = np.full((rows, DIRECT_STOP_IDS), -1, dtype=np.int32)
        self.processed, self.scored, self.prompt_scored, self.followed = (
            np.zeros(rows, dtype=np.bool_) for _ in range(4)
        )
        self.sequences: list[Sequence | None] = [None] * rows
        self._free = list(range(rows))[::-1]

    @property
    def num_free_rows(self) -> int:
        return len(self._free)

    def enter(self, sequence: Sequence) -> None:
        """Give the sequence a row; nothing of it is computed yet."""
        row = self._free.pop()
        sequence.row = row
        self.sequences[row] = sequence
        count, params = len(sequence.tokens), sequence.params
        self.token_ids[row, :count] = sequence.tokens
        self.num_tokens[row] = count
        self.num_computed[row] = self.num_blocks[row] = self.num_published[row] = 0
        self.end[row], self.prompt_len[row] = sequence.end, sequence.prompt_len
        self.temperature[row], self.top_k[row] = (0, 0) if params.greedy else (params.temperature, params.top_k)
        self.top_p[row], self.min_p[row] = params.top_p, params.min_p
        self.key[row] = np.uint64(sequence.key)
        self.stop_ids[row] = -1
        direct = sequence.stop_ids[:DIRECT_STOP_IDS]
        self.stop_ids[row, : len(direct)] = direct
        self.last_token_time[row] = sequence.last_token_time
        self.processed[row] = changes_logits(params)
        self.scored[row] = params.logprobs is not None
        self.prompt_scored[row] = params.prompt_logprobs is not None
        self.followed[row] = sequence.text is not None or sequence.stream or len(sequence.stop_ids) > DIRECT_STOP_IDS

    def leave(self, sequence: Sequence) -> None:
        """Take the row back; the tokens go to the sequence."""
        row = sequence.row
        sequence.tokens = self.token_ids[row, : self.num_tokens[row]].copy()
        sequence.last_token_time = float(self.last_token_time[row])
        sequence.row = NOT_RUNNING
        self.sequences[row] = None
        self._free.append(row)

    def add_blocks(self, row: int, blocks: Int32) -> None:
        """Append blocks to the row's."""
        held = int(self.num_blocks[row])
        self.block_table[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] += len(blocks)

    def blocks_of(self, row: int) -> Int32:
        """int32[num_blocks]: a view of the row's blocks."""
        return self.block_table[row, : self.num_blocks[row]]

    def stopped(self, rows: Int32, tokens: Int32) -> npt.NDArray[np.bool_]:
        """bool[N]: which of `rows` their new tokens end; without those rows' stop ids beyond the direct ones."""
        found: npt.NDArray[np.bool_] = (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        return found

    def running(self, rows: Int32) -> list[Sequence]:
        """The sequences of `rows`."""
        return [s for s in map(self.sequences.__getitem__, rows.tolist()) if s is not None]
