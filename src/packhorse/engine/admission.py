"""From a request to its sequences: refused here when it can never run, so that what is queued can."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

import numpy as np

from packhorse.engine.random import stream_key
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.engine.sequence import Sequence
from packhorse.engine.text_stream import TextStream
from packhorse.errors import ContextLengthExceeded, InvalidRequest
from packhorse.runner.base import Int32
from packhorse.text.stop import StopStrings
from packhorse.text.tokenizer import Tokenizer

MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sequence may be. max_len: tokens in all, the least of `context_length`, `cache_tokens` and the setting."""

    vocab_size: int
    context_length: int
    cache_tokens: int
    max_model_len: int | None

    @property
    def max_len(self) -> int:
        limits = [self.context_length, self.cache_tokens]
        return min([*limits, self.max_model_len] if self.max_model_len is not None else limits)


class Admission:
    """Checks requests against the limits and makes their sequences."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._eos = eos_token_ids

    def sequences(self, request: Request) -> list[Sequence]:
        """One for n greedy choices, which are identical, else n. Raises InvalidRequest, ContextLengthExceeded."""
        prompt = self._prompt(request)
        params = request.params
        _check_scheduling(request)
        self._check_token_ids(params)
        if self._tokenizer is None and params.stop:
            raise InvalidRequest("stop needs a tokenizer, and this pack has none: use stop_token_ids.", param="stop")
        end = self._limits.max_len
        if params.max_tokens is not None:
            end = min(end, len(prompt) + params.max_tokens)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        stop_ids = params.stop_token_ids if params.ignore_eos else (*self._eos, *params.stop_token_ids)
        return [
            Sequence(
                request_id=request.request_id,
                index=index,
                params=params,
                tokens=prompt,
                prompt_len=len(prompt),
                end=end,
                stop_ids=np.array(sorted(set(stop_ids)), dtype=np.int32),
                key=stream_key(seed, index),
                text=self._text_stream(request),
                stream=request.stream,
                priority=request.priority,
                expected_len=len(prompt) if params.max_tokens is None else end,
            )
            for index in range(1 if params.greedy else params.n)
        ]

    def _prompt(self, request: Request) -> Int32:
        try:
            ids = np.asarray(request.prompt_token_ids)
        except ValueError:  # lists of several lengths
            ids = np.empty((0, 0))
        if ids.ndim != 1:
            raise InvalidRequest("The prompt is not a list of token ids.", param="prompt")
        if not len(ids):
            raise InvalidRequest("The prompt is empty: it needs at least one token.", param="prompt")
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self._limits.vocab_size:
            raise InvalidRequest(
                f"The prompt holds a token id that is not from 0 to {self._limits.vocab_size - 1}.", param="prompt"
            )
        if len(ids) > self._limits.max_len:
            raise ContextLengthExceeded(self._too_long(len(ids)), param="prompt")
        return ids.astype(np.int32)

    def _too_long(self, length: int) -> str:
        limits = self._limits
        message = f"The prompt has {length} tokens and at most {limits.max_len} fit: "
        if limits.max_len == limits.max_model_len:
            return message + "shorten it, or raise max_model_len."
        if limits.max_len == limits.cache_tokens:
            return message + "the cache holds no more. Shorten it, or raise num_blocks or memory_utilization."
        return message + "it is the model's context length. Shorten it."

    def _check_token_ids(self, params: SamplingParams) -> None:
        for field, ids in (("logit_bias", tuple(params.logit_bias)), ("stop_token_ids", params.stop_token_ids)):
            bad = [i for i in ids if i >= self._limits.vocab_size]
            if bad:
                raise InvalidRequest(
                    f"{field} names token id {bad[0]}; ids go from 0 to {self._limits.vocab_size - 1}.", param=field
                )

    def _text_stream(self, request: Request) -> TextStream | None:
        """Text is made while a sequence runs only for who needs it; the others are decoded at their end, at once."""
        params = request.params
        needed = request.stream or params.stop or params.echo or params.logprobs is not None
        if self._tokenizer is None or not needed:
            return None
        decoder = self._tokenizer.stream(params.skip_special_tokens)
        stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        return TextStream(decoder, stops, self._prompt_text(request, self._tokenizer) if params.echo else "")

    def _prompt_text(self, request: Request, tokenizer: Tokenizer) -> str:
        if request.prompt is not None:
            return request.prompt
        return tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)


def _check_scheduling(request: Request) -> None:
    priority: object = request.priority
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        bounds = f"from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidRequest(f"priority is {priority!r}: it must be a whole number {bounds}.", param="priority")
    for field, seconds in (("timeout", request.timeout), ("queue_timeout", request.queue_timeout)):
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (number and 0 < seconds < math.inf):
            raise InvalidRequest(f"{field} is {seconds!r}: it must be a positive number of seconds.", param=field)
