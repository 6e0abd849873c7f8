"""JSON Schemas of bodies and answers, for the OpenAPI document; those of bodies are made from what checks them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from packhorse.api import fields
from packhorse.api.fields import Endpoint
from packhorse.api.prompts import MAX_PROMPTS
from packhorse.api.requests import ChatBody, CompletionBody
from packhorse.engine.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TOKEN_ID: Schema = {"type": "integer", "minimum": 0}


def request_schema(endpoint: Endpoint) -> Schema:
    """The body of an endpoint. Fields that are accepted without an effect, and those refused, are not in it."""
    own: type[BaseModel] = ChatBody if endpoint == "chat" else CompletionBody
    properties = _properties(own) | {
        name: nullable(schema) for name, schema in _sampling().items() if name in fields.SAMPLING
    }
    if endpoint == "chat":
        del properties["echo"]
        properties["messages"] = {"type": "array", "minItems": 1, "items": _MESSAGE}
    else:
        properties["prompt"] = _PROMPT
    required = "messages" if endpoint == "chat" else "prompt"
    return {"type": "object", "properties": properties, "required": [required]}


def object_schema(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """An object that has all of these but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def array_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind != {"type": "null"}]
    return {"anyOf": [*kinds, {"type": "null"}]}


def response_schema(endpoint: Endpoint) -> Schema:
    """The whole answer, as `responses.py` makes it."""
    chat = endpoint == "chat"
    choice = {
        "index": INTEGER,
        "logprobs": nullable(_CHAT_LOGPROBS if chat else _TEXT_LOGPROBS),
        "finish_reason": {"enum": ["stop", "length", "abort"]},
        "stop_reason": {"anyOf": [STRING, INTEGER, {"type": "null"}]},
        "prompt_logprobs": _PROMPT_LOGPROBS,
    }
    if chat:
        choice["message"] = object_schema(
            {"role": {"const": "assistant"}, "content": STRING, "refusal": nullable(STRING)}
        )
    else:
        choice["text"] = STRING
    return object_schema(
        {
            "id": STRING,
            "object": {"const": "chat.completion" if chat else "text_completion"},
            "created": INTEGER,
            "model": STRING,
            "choices": array_of(object_schema(choice, optional=("prompt_logprobs",))),
            "usage": object_schema(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), INTEGER)),
            "prompt_logprobs": _PROMPT_LOGPROBS,
        },
        optional=("prompt_logprobs",),
    )


ERROR: Schema = object_schema(
    {"error": object_schema({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})}
)


def _properties(body: type[BaseModel]) -> dict[str, Schema]:
    """Its fields, without what pydantic adds for people."""
    found: dict[str, Schema] = body.model_json_schema()["properties"]
    return {name: _bare(schema) for name, schema in found.items()}


def _bare(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key not in ("title", "default")}


def _sampling() -> dict[str, Schema]:
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    return _properties(SamplingParams) | {
        "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOP_STRINGS}]},
        "stop_token_ids": {"anyOf": [TOKEN_ID, array_of(TOKEN_ID)]},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        "top_k": {"type": "integer", "minimum": -1},
    }


_CONTENT: Schema = {
    "anyOf": [
        STRING,
        {
            "type": "array",
            "minItems": 1,
            "items": object_schema({"type": {"const": "text"}, "text": STRING}),
        },
    ]
}
_MESSAGE: Schema = object_schema(
    {"role": {"type": "string", "minLength": 1}, "content": _CONTENT, "name": nullable(STRING)}, optional=("name",)
)
_PROMPT: Schema = {
    "anyOf": [
        STRING,
        {"type": "array", "items": TOKEN_ID, "minItems": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "items": {"anyOf": [STRING, {"type": "array", "items": TOKEN_ID, "minItems": 1}]},
        },
    ]
}
_CHAT_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array_of(INTEGER)}
_CHAT_LOGPROBS: Schema = object_schema(
    {
        "content": array_of(object_schema({**_CHAT_TOKEN, "top_logprobs": array_of(object_schema(_CHAT_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_TEXT_LOGPROBS: Schema = object_schema(
    {
        "tokens": array_of(STRING),
        "token_logprobs": array_of(nullable(NUMBER)),
        "top_logprobs": array_of(nullable({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": array_of(INTEGER),
    }
)
_PROMPT_LOGPROBS: Schema = array_of(
    nullable(
        {
            "type": "object",
            "additionalProperties": object_schema({"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}),
        }
    )
)
