"""What the engine gave back, as bodies of `chat.completion` and `text_completion`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from packhorse.api.requests import ApiRequest
from packhorse.engine.outputs import LOGPROB_FLOOR, CompletionOutput, Logprob, RequestOutput

if TYPE_CHECKING:
    from packhorse.text.tokenizer import Tokenizer

TokenLogprob = dict[int, Logprob]
"""The chosen token first, then the most probable ones in order."""


def response_body(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    *,
    request_id: str,
    model: str,
    created: int,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The body for a request whose prompts all finished; `outputs` in the order of its prompts.

    created: seconds since 1970. Choices are numbered prompt * n + choice.
    """
    chat = request.endpoint == "chat"
    choices = [
        _chat_choice(choice, request.params.logprobs or 0, tokenizer)
        if chat
        else _text_choice(request, output, choice, place * request.params.n, tokenizer)
        for place, output in enumerate(outputs)
        for choice in output.outputs
    ]
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(outputs),
    }
    if chat and request.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(outputs[0])
    return body


def usage(outputs: Iterable[RequestOutput]) -> dict[str, int]:
    """Prompt tokens once a prompt, whatever n is; generated tokens of all choices together."""
    prompt = completion = 0
    for output in outputs:
        prompt += len(output.prompt_token_ids)
        completion += output.num_generated_tokens
    return usage_body(prompt, completion)


def usage_body(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _chat_choice(choice: CompletionOutput, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": chat_logprobs(choice, top, tokenizer),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def chat_logprobs(choice: CompletionOutput, top: int, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Of a chat's tokens, of a chunk as of the whole answer; None when they were not asked."""
    if choice.logprobs is None:
        return None
    return {"content": [_chat_logprob(entry, top, tokenizer) for entry in choice.logprobs], "refusal": None}


def _chat_logprob(entry: TokenLogprob, top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """`top`: how many most probable tokens were asked for; the chosen one, first in `entry`, may not be among them."""
    chosen, *others = entry.items()
    ranked = others if len(others) == top else sorted(entry.items(), key=lambda item: item[1].rank)
    return {
        **_chat_token(*chosen, tokenizer),
        "top_logprobs": [_chat_token(token, item, tokenizer) for token, item in ranked],
    }


def _chat_token(token: int, item: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    text = list(tokenizer.token_bytes(token))
    return {"token": item.decoded_token, "logprob": floored(item.logprob), "bytes": text}


def _text_choice(
    request: ApiRequest, output: RequestOutput, choice: CompletionOutput, first_index: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": first_index + choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        body["logprobs"] = text_logprobs(output, choice, tokenizer, echo=request.params.echo)
    if request.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(output)
    return body


def text_logprobs(
    output: RequestOutput, choice: CompletionOutput, tokenizer: Tokenizer, *, echo: bool
) -> dict[str, list[Any]]:
    """Four lists of one length: an entry for each token of the returned text, the prompt's too when it is echoed."""
    entries: list[TokenLogprob | None] = list(choice.logprobs or [])
    ids, offsets = choice.token_ids, choice.text_offsets or []
    if echo:
        prompt_ids = output.prompt_token_ids
        entries = [*(output.prompt_logprobs or [None] * len(prompt_ids)), *entries]
        ids = [*prompt_ids, *ids]
        offsets = [*prompt_offsets(prompt_ids, _prompt_text(output, tokenizer), tokenizer), *offsets]
    chosen = [next(iter(entry.values())) if entry else None for entry in entries]
    return {
        "tokens": [tokenizer.token_text(token) for token in ids],
        "token_logprobs": [floored(item.logprob) if item else None for item in chosen],
        "top_logprobs": [_by_text(entry) if entry else None for entry in entries],
        "text_offset": offsets,
    }


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    """Log-probabilities by text, the chosen token among them; a second token of the same text goes by its id."""
    found: dict[str, float] = {}
    for token, item in entry.items():
        text = item.decoded_token
        found[text if text not in found else f"token_id:{token}"] = floored(item.logprob)
    return found


def _prompt_text(output: RequestOutput, tokenizer: Tokenizer) -> str:
    """The echoed part of the text, as the engine puts it in front."""
    if output.prompt is not None:
        return output.prompt
    return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


def prompt_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Where in `text` (what `ids` were made from) each token's characters begin.

    A token that the tokenizer added itself (a bos, say) is not in the text and takes no room.
    """
    decoder = tokenizer.stream(skip_special_tokens=False)
    offsets, place = [], 0
    for token in ids:
        offsets.append(min(place, len(text)))
        piece = decoder.push(token)
        added = not text.startswith(piece, place) and not tokenizer.decode([token], skip_special_tokens=True)
        place += 0 if added else len(piece)
    return offsets


def prompt_logprobs(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None]:
    """As vLLM reports them: a list by prompt token of {token id: {logprob, rank, decoded_token}}, the first null."""
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": floored(item.logprob), "rank": item.rank, "decoded_token": item.decoded_token}
            for token, item in entry.items()
        }
        for entry in output.prompt_logprobs or []
    ]


def floored(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, LOGPROB_FLOOR)
