"""Which fields a body may have, and what becomes of each: used, harmless, refused, unknown.

A field that would change the result but is not supported must be refused: an answer without the tools or the schema
that were asked for looks right and is not. A field that cannot change the result is accepted. What is in no table is
a typing error or newer than this version: a warning, or a refusal when fields are strict.
"""

from __future__ import annotations

from typing import Any, Literal

from packhorse.errors import InvalidRequest

Endpoint = Literal["chat", "completions"]

SAMPLING = frozenset(
    {
        "n",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "max_tokens",
        "prompt_logprobs",
        "skip_special_tokens",
        "include_stop_str_in_output",
    }
)
"""Passed on to SamplingParams under the same name by both endpoints."""

SHARED = SAMPLING | {
    "model",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "logprobs",
    "echo",
    "priority",
    "timeout",
}
OF_ENDPOINT: dict[Endpoint, frozenset[str]] = {
    "chat": SHARED | {"messages", "top_logprobs"},
    "completions": SHARED | {"prompt", "best_of", "add_special_tokens"},
}

HARMLESS = frozenset(
    {
        "cache_salt",
        "metadata",
        "parallel_tool_calls",  # says how tools may be called; tools themselves are refused
        "prediction",  # speeds up decoding, does not change it
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": (),
    "function_call": ("none",),
    "functions": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that are refused, with the values that ask for nothing; null, [] and {} always ask for nothing."""


def unknown_fields(body: dict[str, Any], endpoint: Endpoint) -> list[str]:
    """Names that are in no table, in the order of the body."""
    known = OF_ENDPOINT[endpoint]
    return [name for name in body if name not in known and name not in HARMLESS and name not in UNSUPPORTED]


def refuse_unsupported(body: dict[str, Any], endpoint: Endpoint) -> None:
    """Raises InvalidRequest that names the first field that would change the result and cannot be honoured."""
    own = OF_ENDPOINT[endpoint]
    for name in body.keys() & UNSUPPORTED.keys():
        value = body[name]
        if name in own or value is None or value in ([], {}) or value in UNSUPPORTED[name]:
            continue
        raise unsupported(name, "it would change the result, so it is not ignored; leave it out")


def unsupported(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is not supported: {why}.", param=param, code="unsupported_parameter")
