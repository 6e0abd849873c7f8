"""From a plan to what the runner computes: flat arrays over the step's tokens, built without a loop."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse.engine.scheduler import StepPlan
from packhorse.engine.table import SequenceTable
from packhorse.runner.base import Int32, Int64, StepBatch


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """batch: for the runner. sampled_rows: int32[N], table rows that get a new token.

    sampled_logits: int64[N], the row of the logits that each is sampled from. prompt_logits: for each sequence that
    wants log-probabilities of its prompt (table row, first position, row of the logits of that position, count).
    """

    batch: StepBatch
    sampled_rows: Int32
    sampled_logits: Int64
    prompt_logits: tuple[tuple[int, int, int, int], ...]


def prepare(plan: StepPlan, table: SequenceTable, block_size: int) -> PreparedStep:
    """The arrays of StepBatch for `plan`, T tokens of S sequences."""
    rows, counts = plan.rows, plan.num_tokens
    computed = table.num_computed[rows]
    context = computed + counts
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    token_row, positions = _flatten(rows, counts, computed, cu_seqlens)
    blocks = table.block_table[token_row, positions // block_size].astype(np.int64)
    complete = context == table.num_tokens[rows]
    wanted, prompt_spans = _wanted_logits(rows, counts, cu_seqlens, complete, table)
    logit_row = np.cumsum(wanted) - 1
    last = cu_seqlens[1:][complete] - 1
    batch = StepBatch(
        ids=table.token_ids[token_row, positions].astype(np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        cu_seqlens=cu_seqlens,
        context_lens=context,
        block_table=table.block_table[rows, : int(table.num_blocks[rows].max())],
        rows=np.flatnonzero(wanted),
    )
    prompt_logits = tuple((row, first, int(logit_row[at]), n) for row, first, at, n in prompt_spans)
    return PreparedStep(batch, rows[complete], logit_row[last], prompt_logits)


def _flatten(rows: Int32, counts: Int32, computed: Int32, cu_seqlens: Int32) -> tuple[Int32, Int64]:
    """For each token of the step its table row and its position in the sequence."""
    if len(rows) == cu_seqlens[-1]:  # one token each
        return rows, computed.astype(np.int64)
    offset = (computed - cu_seqlens[:-1]).astype(np.int64)
    positions = np.arange(cu_seqlens[-1], dtype=np.int64) + np.repeat(offset, counts)
    return np.repeat(rows, counts), positions


def _wanted_logits(
    rows: Int32, counts: Int32, cu_seqlens: Int32, complete: npt.NDArray[np.bool_], table: SequenceTable
) -> tuple[npt.NDArray[np.bool_], list[tuple[int, int, int, int]]]:
    """bool[T]: the last token of each complete sequence, and prompt tokens whose successor is to be scored.

    Also the spans of the latter: (table row, first position, index into T, count).
    """
    wanted = np.zeros(int(cu_seqlens[-1]), dtype=np.bool_)
    wanted[cu_seqlens[1:][complete] - 1] = True
    spans = []
    for i in np.flatnonzero(table.prompt_scored[rows]).tolist():
        row = int(rows[i])
        sequence = table.sequences[row]
        if sequence is None or not sequence.wants_prompt_logprobs:
            continue
        begin = int(table.num_computed[row])
        # Position p scores token p + 1; what an earlier chunk (or a run before a preemption) scored is not repeated.
        first = max(begin, len(sequence.prompt_logprobs))
        count = min(begin + int(counts[i]), sequence.prompt_len - 1) - first
        if count > 0:
            at = int(cu_seqlens[i]) + first - begin
            wanted[at : at + count] = True
            spans.append((row, first, at, count))
    return wanted, spans
