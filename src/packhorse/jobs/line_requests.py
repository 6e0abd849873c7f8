"""What one entry of the input asks for: whose it is, which endpoint, and the body for it.

Two forms, told apart by their keys:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}     OpenAI's batch line
    {"messages": […], "temperature": 0, "id": "a"}   {"prompt": "…", "max_tokens": 20}   simple: the body itself
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packhorse.api.fields import Endpoint
from packhorse.api.prompts import check_text, is_id, kind
from packhorse.errors import InvalidRequest, UnsupportedEndpoint
from packhorse.jobs.inputs import Fields

CustomId = str | int

ENDPOINTS: dict[str, Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

_BATCH_KEYS = frozenset({"method", "url", "body"})


@dataclass(frozen=True, slots=True)
class LineRequest:
    """unknown_fields: keys of a batch line beside its own, which were ignored."""

    endpoint: Endpoint
    body: Any
    unknown_fields: tuple[str, ...] = ()


def is_batch_line(fields: Fields) -> bool:
    return not _BATCH_KEYS.isdisjoint(fields)


def custom_id_of(fields: Fields, line: int) -> CustomId:
    """The id that the result will carry; `line-N` where the line has none. Raises InvalidRequest for another type."""
    name = "custom_id" if is_batch_line(fields) or fields.get("custom_id") is not None else "id"
    value = fields.get(name)
    if value is None:
        return f"line-{line}"
    if isinstance(value, str):
        return check_text(value, name)
    if not is_id(value):
        raise InvalidRequest(f"{name} must be a string, not {kind(value)}.", param=name)
    return int(value)


def read_line(fields: Fields, defaults: dict[str, Any]) -> LineRequest:
    """Raises InvalidRequest or UnsupportedEndpoint that names the field. `defaults`: sampling of simple lines."""
    return _read_batch_line(fields) if is_batch_line(fields) else _read_simple_line(fields, defaults)


def _read_batch_line(fields: Fields) -> LineRequest:
    method, url = fields.get("method", "POST"), fields.get("url")
    if method != "POST":
        raise UnsupportedEndpoint(f"method is {method!r}; only POST is served.", param="method")
    if not isinstance(url, str):
        raise InvalidRequest(f"url must be a string, not {kind(url)}.", param="url")
    if url not in ENDPOINTS:
        raise UnsupportedEndpoint(f"url is {url!r}; served are {' and '.join(ENDPOINTS)}.", param="url")
    if "body" not in fields:
        raise InvalidRequest("body is missing.", param="body", code="missing_parameter")
    unknown = tuple(key for key in fields if key not in _BATCH_KEYS and key != "custom_id")
    return LineRequest(ENDPOINTS[url], fields["body"], unknown)


def _read_simple_line(fields: Fields, defaults: dict[str, Any]) -> LineRequest:
    body = {name: value for name, value in fields.items() if name not in ("custom_id", "id")}
    if body.get("prompt") is not None and body.get("messages") is not None:
        raise InvalidRequest("The line has both prompt and messages: give one.", param="messages")
    if body.get("prompt") is None and body.get("messages") is None:
        raise InvalidRequest(
            "The line is no request: it has neither prompt nor messages, nor url and body.", code="missing_parameter"
        )
    endpoint: Endpoint = "completions" if body.get("prompt") is not None else "chat"
    body.pop("messages" if endpoint == "completions" else "prompt", None)
    return LineRequest(endpoint, _with_defaults(body, defaults))


def _with_defaults(body: Fields, defaults: dict[str, Any]) -> Fields:
    given = {name for name, value in body.items() if value is not None}
    if "max_completion_tokens" in given:
        given.add("max_tokens")
    return body | {name: value for name, value in defaults.items() if name not in given}
