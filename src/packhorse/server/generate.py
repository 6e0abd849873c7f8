"""A request for text: read, checked, tokenized, run, answered at once or as it grows."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from copy import copy
from dataclasses import dataclass

import orjson
from starlette.requests import Request
from starlette.responses import Response

from packhorse.api.chunks import Chunks
from packhorse.api.errors import error_body
from packhorse.api.fields import Endpoint
from packhorse.api.requests import ApiRequest, engine_requests, parse_request, refuse_other_model, tokenize
from packhorse.api.responses import response_body
from packhorse.engine.output_stream import OutputStream
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request as EngineRequest
from packhorse.server.body import parse_json, read_body
from packhorse.server.connection import EventStream, unless_left
from packhorse.server.reply import json_reply
from packhorse.server.service import ServedModel, Service

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body that may be run: what it asks for, and a request to the engine for each of its prompts."""

    request_id: str
    request: ApiRequest
    engine_requests: list[EngineRequest]


async def generate(service: Service, endpoint: Endpoint, http: Request) -> Response:
    """The response to one body. Raises PackhorseError for one that is refused, or fails before it is answered."""
    model = service.served()
    raw = await read_body(http, service.settings.max_body_bytes)
    request_id = secrets.token_hex(12)
    loop = asyncio.get_running_loop()
    prepared = await loop.run_in_executor(service.text_threads, prepare, service, model, endpoint, raw, request_id)
    if prepared.request.stream:
        events = _events(model, prepared)
        # The first event is waited for here: what goes wrong before it has a status of its own.
        first = await unless_left(http.receive, anext(events))
        return EventStream(_with_first(first, events))
    return json_reply(await unless_left(http.receive, _answer(model, prepared)))


def prepare(service: Service, model: ServedModel, endpoint: Endpoint, raw: bytes, request_id: str) -> Prepared:
    """Everything that takes time before the engine, in one of the text threads."""
    request = parse_request(endpoint, parse_json(raw), strict_fields=service.settings.strict_fields, allow_stream=True)
    refuse_other_model(request.model, model.names)
    return Prepared(request_id, request, engine_requests(request, tokenize(request, model.tokenizer), request_id))


async def _answer(model: ServedModel, prepared: Prepared) -> dict[str, object]:
    """The whole body. Raises the error of the first prompt that fails; the others end with it."""
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(_run(model, prepared)) as news:
        async for place, output in news:
            if output.error is not None:
                raise copy(output.error)  # others may fail with it too, and what is raised grows
            outputs[place] = output
    return response_body(
        prepared.request,
        [outputs[place] for place in sorted(outputs)],
        request_id=prepared.request_id,
        model=model.name,
        created=int(time.time()),
        tokenizer=model.tokenizer,
    )


async def _events(model: ServedModel, prepared: Prepared) -> AsyncGenerator[bytes, None]:
    """The answer in chunks. Raises what goes wrong before the first; later errors are events, and the last ones."""
    chunks = Chunks(
        prepared.request,
        request_id=prepared.request_id,
        model=model.name,
        created=int(time.time()),
        tokenizer=model.tokenizer,
    )
    begun = False
    async with aclosing(_run(model, prepared)) as news:
        async for place, output in news:
            if output.error is not None:
                if not begun:
                    raise copy(output.error)  # others may fail with it too, and what is raised grows
                yield _event(error_body(output.error))
                return
            events = b"".join(map(_event, chunks.of(place, output)))
            if events:
                begun = True
                yield events
    if prepared.request.include_usage:
        yield _event(chunks.usage())
    yield DONE


async def _run(model: ServedModel, prepared: Prepared) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """News of all prompts, each with its number. Raises when one is refused; whoever leaves early ends them all."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(aclosing(await model.engine.submit(request)))
            for request in prepared.engine_requests
        ]
        async with aclosing(_merged(streams)) as news:
            async for item in news:
                yield item


async def _merged(streams: list[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of all streams as they come, with the stream's number; none is asked for more before it is its turn."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    asked = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while asked:
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place, output = asked.pop(task), task.result()
                yield place, output
                if not output.finished:
                    asked[asyncio.ensure_future(anext(streams[place]))] = place
    finally:
        for task in asked:
            task.cancel()


async def _with_first(first: bytes, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


def _event(data: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
