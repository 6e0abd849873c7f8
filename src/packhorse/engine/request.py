"""What is asked of the engine: token ids and how to sample from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `request_id` must be unique among the unfinished ones.

    prompt_token_ids: at least one. prompt: its text, only to be given back. stream: every step that has news of it
    yields an output, not only the last. priority: 0 is usual, lower goes first; waiting makes up for a worse one.
    timeout: seconds from arrival to the end of the request. queue_timeout: seconds it may wait before it first runs.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    prompt: str | None = None
    stream: bool = False
    priority: int = 0
    timeout: float | None = None
    queue_timeout: float | None = None
