"""A request for text: read, checked, tokenized, run, answered."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from packhorse.api.fields import Endpoint
from packhorse.api.requests import ApiRequest, engine_requests, parse_request, refuse_other_model, tokenize
from packhorse.api.responses import response_body
from packhorse.engine.output_stream import OutputStream
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request as EngineRequest
from packhorse.server.body import parse_json, read_body
from packhorse.server.reply import json_reply
from packhorse.server.service import ServedModel, Service


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body that may be run: what it asks for, and a request to the engine for each of its prompts."""

    request_id: str
    request: ApiRequest
    engine_requests: list[EngineRequest]


async def generate(service: Service, endpoint: Endpoint, http: Request) -> Response:
    """The response to one body. Raises PackhorseError for one that is refused or fails."""
    model = service.served()
    raw = await read_body(http, service.settings.max_body_bytes)
    request_id = secrets.token_hex(12)
    loop = asyncio.get_running_loop()
    prepared = await loop.run_in_executor(service.text_threads, prepare, service, model, endpoint, raw, request_id)
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(aclosing(await model.engine.submit(request)))
            for request in prepared.engine_requests
        ]
        outputs = await asyncio.gather(*(_last(stream) for stream in streams))
    for output in outputs:
        if output.error is not None:
            raise output.error
    return json_reply(
        response_body(
            prepared.request,
            outputs,
            request_id=request_id,
            model=model.name,
            created=int(time.time()),
            tokenizer=model.tokenizer,
        )
    )


def prepare(service: Service, model: ServedModel, endpoint: Endpoint, raw: bytes, request_id: str) -> Prepared:
    """Everything that takes time before the engine, in one of the text threads."""
    request = parse_request(endpoint, parse_json(raw), strict_fields=service.settings.strict_fields, allow_stream=True)
    refuse_other_model(request.model, model.names)
    return Prepared(request_id, request, engine_requests(request, tokenize(request, model.tokenizer), request_id))


async def _last(stream: OutputStream) -> RequestOutput:
    outputs = [output async for output in stream]
    return outputs[-1]
