"""What a request gives back. Names follow vLLM's classes of the same names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packhorse.errors import PackhorseError

FinishReason = Literal["stop", "length", "abort", "error"]

LOGPROB_FLOOR = -9999.0
"""Reported instead of minus infinity, which JSON cannot carry."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability from the raw logits; rank 1 is the most probable; its text decoded alone."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `token_ids` holds every generated id, a final eos included; `text` holds what a reader should see.

    logprobs: one dict a generated token, token id -> Logprob: the chosen one first, then the most probable ones in
    order; None when not asked. text_offsets: for each generated token the index in `text` where its characters begin
    (None when logprobs were not asked). stop_reason: the stop string or token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    text_offsets: list[int] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments of one request in seconds of the engine's monotonic clock; None where it never got there."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of a request: of a finished one everything, of a streaming one what there is so far.

    prompt_logprobs: one entry a prompt token, None for the first (nothing comes before it). error: why it failed;
    then `outputs` holds what was generated before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: PackhorseError | None = None
    metrics: RequestMetrics | None = None

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.outputs)
