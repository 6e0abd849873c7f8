"""One choice of one request: its tokens, and how far they are computed.

There are no phases. `num_computed` chases `num_tokens`: a prompt of 100 tokens, a chunk of it, a decode step and the
recomputation after a preemption are all "so many tokens from num_computed on".
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from packhorse.engine.logprobs import TokenLogprobs
from packhorse.engine.outputs import FinishReason
from packhorse.engine.sampling_params import SamplingParams
from packhorse.engine.text_stream import TextStream
from packhorse.runner.base import Int32

NOT_RUNNING = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """State of one choice. While it runs, its numbers live in row `row` of the SequenceTable.

    tokens: int32[n], prompt and output, while it is not running. prompt_len, end: tokens of the prompt, and the most
    it may have in all. stop_ids: what ends it, eos included unless ignored. key: of its random numbers. text: only
    when text is needed while it runs. stream: each of its tokens is news. priority: 0 is usual, lower goes first.
    expected_len: tokens it will have at most as far as the request says, for grouping by length. offsets: where each
    generated token's text begins, beside `logprobs`. told, told_end: of what was generated how many tokens the caller
    knows, and whether it knows the end.

    Kept by the scheduler: arrival_time (seconds), order (urgency: the smallest first), bucket and waiting (its place
    in the waiting queue), in_batch (it has a seat in a batch of the policy).
    """

    request_id: str
    index: int
    params: SamplingParams
    tokens: Int32
    prompt_len: int
    end: int
    stop_ids: Int32
    key: int
    text: TextStream | None = None
    stream: bool = False
    priority: int = 0
    expected_len: int = 0
    arrival_time: float = 0.0
    order: tuple[float, int] = (0.0, 0)
    bucket: int = 0
    waiting: bool = False
    in_batch: bool = False
    row: int = NOT_RUNNING
    num_preemptions: int = 0
    last_token_time: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    told: int = 0
    told_end: bool = False

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of the prompt still need logits; after a preemption what was reported is not asked again."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len - 1

    def output_ids(self) -> Int32:
        """int32[generated], once it is not running."""
        return self.tokens[self.prompt_len :]


def blocks_for(num_tokens: int | Int32, block_size: int) -> np.int32 | int | Int32:
    """How many blocks hold that many tokens; element by element for an array."""
    return -(-num_tokens // block_size)
