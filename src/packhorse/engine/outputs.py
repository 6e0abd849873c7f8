"""What a request gives back, at once or as it grows. Names follow vLLM's classes of the same names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from packhorse.errors import PackhorseError

T = TypeVar("T")

FinishReason = Literal["stop", "length", "abort", "error"]

LOGPROB_FLOOR = -9999.0
"""Reported instead of minus infinity, which JSON cannot carry."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability from the raw logits; rank 1 is the most probable; its text by itself."""

    logprob: float
    rank: int
    decoded_token: str


# These two are values like all others. They are not frozen because a step makes one of each for every stream, and
# making a frozen one takes three times as long.


@dataclass(slots=True)
class CompletionOutput:
    """One choice, or what is new of it.

    token_ids: generated ids, a final eos included. text: what a reader should see. logprobs: one dict a generated
    token, token id -> Logprob: the chosen one first, then the most probable ones in order; None when not asked.
    text_offsets: for each generated token the index in the whole text where its characters begin (None when logprobs
    were not asked). stop_reason: the stop string or token id that ended it, if one did.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    text_offsets: list[int] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Of these tokens together; None when log-probabilities were not asked."""
        if self.logprobs is None:
            return None
        return sum(next(iter(entry.values())).logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments of one request in seconds of the engine's monotonic clock; None where it never got there."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A finished request; of a streaming one what is new since its last output, `joined` makes it whole.

    outputs: the choices, of a stream those with news. prompt_logprobs: one entry a prompt token, None for the first
    (nothing comes before it); of a stream in its first output only. error: why it failed; then `outputs` holds what
    was generated before. metrics: with the last output.
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


def joined(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """News of one request, in order, as one output; all its news together are what it gives without streaming."""
    first, *others = outputs
    if not others:
        return first
    choices: dict[int, list[CompletionOutput]] = {}
    for output in (first, *others):
        for choice in output.outputs:
            choices.setdefault(choice.index, []).append(choice)
    return replace(
        others[-1],
        outputs=[_joined_choice(choices[index]) for index in sorted(choices)],
        prompt_logprobs=first.prompt_logprobs,
    )


def _joined_choice(news: list[CompletionOutput]) -> CompletionOutput:
    return replace(
        news[-1],
        text="".join(choice.text for choice in news),
        token_ids=[token for choice in news for token in choice.token_ids],
        logprobs=_chain(choice.logprobs for choice in news),
        text_offsets=_chain(choice.text_offsets for choice in news),
    )


def _chain(parts: Iterable[list[T] | None]) -> list[T] | None:
    """None when nobody has any: log-probabilities were not asked."""
    found = [part for part in parts if part is not None]
    return [item for part in found for item in part] if found else None
