"""Chunks of a stream put together again, as a client does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined_chunks(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The body that the request would have had without streaming; "usage" is there when a chunk had it."""
    choices: dict[int, dict[str, Any]] = {}
    body: dict[str, Any] = {}
    for chunk in chunks:
        chat = chunk["object"] == "chat.completion.chunk"
        body |= {name: chunk[name] for name in ("id", "created", "model")}
        body["object"] = "chat.completion" if chat else "text_completion"
        if chunk.get("usage") is not None:
            assert chunk["choices"] == []
            body["usage"] = chunk["usage"]
        if "prompt_logprobs" in chunk:
            body["prompt_logprobs"] = chunk["prompt_logprobs"]
        for new in chunk["choices"]:
            assert "usage" not in body, "a chunk comes after the usage"
            _add(choices, new, chat)
    body["choices"] = [choices[index] for index in sorted(choices)]
    return body


def _add(choices: dict[int, dict[str, Any]], new: dict[str, Any], chat: bool) -> None:
    text = new["delta"]["content"] if chat else new["text"]
    begins = new["index"] not in choices
    if chat:
        assert new["delta"].get("role") == ("assistant" if begins else None)
    empty = {"message": {"role": "assistant", "content": "", "refusal": None}} if chat else {"text": ""}
    choice = choices.setdefault(new["index"], {"index": new["index"], "logprobs": None, "finish_reason": None} | empty)
    assert choice["finish_reason"] is None, "a chunk comes after its choice has ended"
    if chat:
        choice["message"]["content"] += text
    else:
        choice["text"] += text
    choice["finish_reason"] = new["finish_reason"]
    if new["finish_reason"] is not None:
        choice["stop_reason"] = new["stop_reason"]
    if "prompt_logprobs" in new:
        assert begins
        choice["prompt_logprobs"] = new["prompt_logprobs"]
    if new["logprobs"] is not None:
        choice["logprobs"] = _joined_logprobs(choice["logprobs"], new["logprobs"], chat)


def _joined_logprobs(old: dict[str, Any] | None, new: dict[str, Any], chat: bool) -> dict[str, Any]:
    if old is None:
        return new
    if chat:
        return {"content": old["content"] + new["content"], "refusal": None}
    return {name: old[name] + new[name] for name in LISTS}
