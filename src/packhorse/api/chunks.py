"""News of the engine as chunks of a streamed `chat.completion.chunk` or `text_completion`.

Joined, the chunks of a choice say what the body of `responses.py` says at once: the text in pieces, the lists of
log-probabilities in parts. A chunk carries one choice; the last of a choice has its finish_reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from packhorse.api.requests import ApiRequest
from packhorse.api.responses import chat_logprobs, prompt_logprobs, text_logprobs, usage_body
from packhorse.engine.outputs import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from packhorse.text.tokenizer import Tokenizer


class Chunks:
    """The chunks of one API request. prompt_tokens, completion_tokens: told so far."""

    def __init__(self, request: ApiRequest, *, request_id: str, model: str, created: int, tokenizer: Tokenizer) -> None:
        chat = request.endpoint == "chat"
        self._request = request
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
        }
        # OpenAI: when usage is asked for, every chunk has the field and only the last one a value in it.
        self._tail: dict[str, Any] = {"usage": None} if request.include_usage else {}
        self._begun: set[int] = set()
        self._first: dict[int, RequestOutput] = {}
        self.prompt_tokens = self.completion_tokens = 0

    def of(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """Chunks for news of the prompt number `place`; what has nothing to show gives none."""
        if place not in self._first:
            self._first[place] = output
            self.prompt_tokens += len(output.prompt_token_ids)
        for choice in output.outputs:
            self.completion_tokens += len(choice.token_ids)
            if choice.text or choice.logprobs or choice.finish_reason is not None:
                yield self._chat(choice) if self._request.endpoint == "chat" else self._completion(place, choice)

    def usage(self) -> dict[str, Any]:
        """The chunk after all others, without choices, for who asked for it."""
        return self._head | {"choices": [], "usage": usage_body(self.prompt_tokens, self.completion_tokens)}

    def _begins(self, index: int) -> bool:
        """Whether this is the first chunk of a choice."""
        if index in self._begun:
            return False
        self._begun.add(index)
        return True

    def _chat(self, choice: CompletionOutput) -> dict[str, Any]:
        params = self._request.params
        delta, more = {"content": choice.text}, {}
        if self._begins(choice.index):
            delta = {"role": "assistant", "content": choice.text}
            if params.prompt_logprobs is not None and len(self._begun) == 1:
                more = {"prompt_logprobs": prompt_logprobs(self._first[0])}
        body: dict[str, Any] = {
            "index": choice.index,
            "delta": delta,
            "logprobs": chat_logprobs(choice, params.logprobs or 0, self._tokenizer),
            "finish_reason": choice.finish_reason,
        }
        return self._head | {"choices": [_ended(body, choice)]} | more | self._tail

    def _completion(self, place: int, choice: CompletionOutput) -> dict[str, Any]:
        params, first = self._request.params, self._first[place]
        index = place * params.n + choice.index
        begins = self._begins(index)
        body: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }
        if choice.logprobs is not None:
            body["logprobs"] = text_logprobs(first, choice, self._tokenizer, echo=params.echo and begins)
        if params.prompt_logprobs is not None and begins:
            body["prompt_logprobs"] = prompt_logprobs(first)
        return self._head | {"choices": [_ended(body, choice)]} | self._tail


def _ended(body: dict[str, Any], choice: CompletionOutput) -> dict[str, Any]:
    return body if choice.finish_reason is None else body | {"stop_reason": choice.stop_reason}
