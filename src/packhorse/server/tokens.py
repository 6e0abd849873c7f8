"""`/tokenize` and `/detokenize`: a prompt as the model sees it, and ids as text. Bodies are those of vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from packhorse.api.prompts import check_text, encode_prompts, kind, read_messages
from packhorse.api.requests import refusal, refuse_other_model
from packhorse.errors import InvalidRequest
from packhorse.server.body import parse_json, read_body
from packhorse.server.reply import json_reply
from packhorse.server.service import ServedModel, Service


class TokenizeBody(BaseModel):
    """A prompt or the messages of a chat. return_token_strs: each token's text too."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    """Token ids, of which each must be one of the model's."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


async def tokenize(service: Service, http: Request) -> Response:
    """{"tokens", "count", "max_model_len", "token_strs"}; raises InvalidRequest and what `read_body` raises."""
    return await _answer(service, http, _tokenized)


async def detokenize(service: Service, http: Request) -> Response:
    """{"prompt": text}; raises InvalidRequest and what `read_body` raises."""
    return await _answer(service, http, _detokenized)


async def _answer(service: Service, http: Request, work: Any) -> Response:
    model = service.served()
    raw = await read_body(http, service.settings.max_body_bytes)
    return json_reply(await service.in_text_thread(work, model, raw))


def _tokenized(model: ServedModel, raw: bytes) -> dict[str, Any]:
    body = _read(TokenizeBody, raw, model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        messages, _ = read_messages(body.messages)
        ids = model.tokenizer.encode_chat(messages, add_generation_prompt=body.add_generation_prompt)
    else:
        text = check_text(body.prompt or "", "prompt")
        ids = model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens)
    return {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "token_strs": [model.tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
    }


def _detokenized(model: ServedModel, raw: bytes) -> dict[str, Any]:
    body = _read(DetokenizeBody, raw, model)
    if body.tokens:
        encode_prompts([body.tokens], model.tokenizer, add_special_tokens=False)  # refuses ids that are none
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _read(shape: type[Any], raw: bytes, model: ServedModel) -> Any:
    body = parse_json(raw)
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be an object, not {kind(body)}.", param="body")
    try:
        found = shape.model_validate(body)
    except ValidationError as error:
        raise refusal(error) from None
    refuse_other_model(found.model, model.names)
    return found
