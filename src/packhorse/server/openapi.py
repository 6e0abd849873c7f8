"""What the OpenAPI document says of each route: bodies, answers, errors."""

from __future__ import annotations

from typing import Any

from packhorse.api.fields import Endpoint
from packhorse.api.schema import (
    ERROR,
    INTEGER,
    STRING,
    TOKEN_ID,
    array_of,
    nullable,
    object_schema,
    request_schema,
    response_schema,
)

Extra = dict[str, Any]


def text_route(endpoint: Endpoint) -> Extra:
    """A route that generates text, at once or as server-sent events."""
    event = object_schema({"data": STRING | {"contentMediaType": "application/json"}})
    streamed = {"text/event-stream": {"schema": event}}
    return _extra(request_schema(endpoint), response_schema(endpoint), more_content=streamed)


def tokenize_route() -> Extra:
    body = {
        "model": nullable(STRING),
        "prompt": nullable(STRING),
        "messages": nullable(array_of({"type": "object"})),
        "add_special_tokens": {"type": "boolean"},
        "add_generation_prompt": {"type": "boolean"},
        "return_token_strs": {"type": "boolean"},
    }
    answer = {
        "tokens": array_of(TOKEN_ID),
        "count": INTEGER,
        "max_model_len": INTEGER,
        "token_strs": nullable(array_of(STRING)),
    }
    return _extra(object_schema(body, optional=tuple(body)), object_schema(answer))


def detokenize_route() -> Extra:
    body = object_schema({"model": nullable(STRING), "tokens": array_of(TOKEN_ID)}, optional=("model",))
    return _extra(body, object_schema({"prompt": STRING}))


def models_route() -> Extra:
    return _extra(None, object_schema({"object": {"const": "list"}, "data": array_of(_MODEL_CARD)}))


def model_route() -> Extra:
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return _extra(None, _MODEL_CARD) | {"parameters": [name]}


def probe_route() -> Extra:
    """Of the two health routes: 503 is an answer here, not an error."""
    answer = _json(object_schema({"status": STRING}))
    return {"responses": {"200": answer, "503": answer, **_errors("4XX")}}


def version_route() -> Extra:
    return _extra(None, object_schema({"version": STRING}))


def metrics_route() -> Extra:
    kinds = ("text/plain; version=0.0.4; charset=utf-8", "application/openmetrics-text")
    content = {kind: {"schema": {"type": "string"}} for kind in kinds}
    return {"responses": {"200": {"description": "Prometheus metrics.", "content": content}, **_errors("4XX", "5XX")}}


def _extra(body: Any, answer: Any, more_content: Extra | None = None) -> Extra:
    good = _json(answer)
    good["content"] |= more_content or {}
    extra: Extra = {"responses": {"200": good, **_errors("4XX", "5XX")}}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return extra


def _json(schema: Any) -> Extra:
    return {"description": "The answer.", "content": {"application/json": {"schema": schema}}}


def _errors(*statuses: str) -> Extra:
    return {
        status: {"description": "An error.", "content": {"application/json": {"schema": ERROR}}} for status in statuses
    }


_MODEL_CARD = object_schema(
    {
        "id": STRING,
        "object": {"const": "model"},
        "created": INTEGER,
        "owned_by": STRING,
        "root": STRING,
        "max_model_len": INTEGER,
    }
)
