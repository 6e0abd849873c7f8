"""A request for text: read, checked, tokenized, run, answered at once or as it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from copy import copy
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from packhorse.api.chunks import Chunks
from packhorse.api.errors import error_body
from packhorse.api.fields import Endpoint
from packhorse.api.requests import ApiRequest, engine_requests, parse_request, refuse_other_model, tokenize
from packhorse.api.responses import response_body
from packhorse.config import ServerConfig
from packhorse.engine.output_stream import OutputStream
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request as EngineRequest
from packhorse.server.body import parse_json, read_body
from packhorse.server.connection import EventStream, unless_left
from packhorse.server.record import Record, record_of
from packhorse.server.reply import json_reply
from packhorse.server.service import ServedModel, Service

DONE = b"data: [DONE]\n\n"

IGNORED_FIELDS = "x-packhorse-ignored-fields"
"""The header that names what a body had and nobody knows."""

_Numbered = tuple[int, RequestOutput]
"""News of a prompt, and its number among the request's prompts."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A body that may be run: what it asks for, and a request to the engine for each of its prompts."""

    model: ServedModel
    request_id: str
    request: ApiRequest
    engine_requests: list[EngineRequest]


async def generate(service: Service, endpoint: Endpoint, http: Request) -> Response:
    """The response to one body. Raises PackhorseError for one that is refused, or fails before it is answered."""
    model, record = service.served(), record_of(http.scope)
    raw = await read_body(http, service.settings.max_body_bytes)
    model.engine.check_room()  # before the work of reading it, which there will be much of when there is no room
    prepared = await service.in_text_thread(prepare, model, endpoint, raw, record.request_id, service.settings)
    _note_request(record, prepared, service.settings.log_prompts)
    headers = _warning(prepared.request.unknown_fields)
    if prepared.request.stream:
        events = _events(prepared, record)
        # The first event is waited for here: what goes wrong before it has a status of its own.
        first = await unless_left(http.receive, anext(events))
        return EventStream(first, events, record, headers)
    return json_reply(await unless_left(http.receive, _answer(prepared, record)), headers=headers)


def prepare(model: ServedModel, endpoint: Endpoint, raw: bytes, request_id: str, settings: ServerConfig) -> Prepared:
    """Everything that takes time before the engine, in one of the text threads."""
    request = parse_request(endpoint, parse_json(raw), strict_fields=settings.strict_fields, allow_stream=True)
    refuse_other_model(request.model, model.names)
    prompts = tokenize(request, model.tokenizer, model.max_model_len)
    requests = engine_requests(request, prompts, request_id)
    return Prepared(model, request_id, request, requests)


async def _answer(prepared: Prepared, record: Record) -> dict[str, Any]:
    """The whole body. Raises the error of the first prompt that fails; the others end with it."""
    outputs: dict[int, RequestOutput] = {}
    async with aclosing(_run(prepared, record)) as news:
        async for place, output in news:
            if output.error is not None:
                raise copy(output.error)  # others may fail with it too, and what is raised grows
            outputs[place] = output
    return response_body(
        prepared.request,
        [outputs[place] for place in sorted(outputs)],
        request_id=prepared.request_id,
        model=prepared.model.name,
        created=int(time.time()),
        tokenizer=prepared.model.tokenizer,
    )


async def _events(prepared: Prepared, record: Record) -> AsyncGenerator[bytes, None]:
    """The answer in chunks. Raises what goes wrong before the first; later errors are events, and the last ones."""
    chunks = Chunks(
        prepared.request,
        request_id=prepared.request_id,
        model=prepared.model.name,
        created=int(time.time()),
        tokenizer=prepared.model.tokenizer,
    )
    begun = False
    async with aclosing(_run(prepared, record)) as news:
        async for place, output in news:
            if output.error is not None:
                if not begun:
                    raise copy(output.error)
                record.error = output.error
                yield _event(error_body(output.error))
                return
            events = b"".join(map(_event, chunks.of(place, output)))
            if events:
                begun = True
                yield events
    if prepared.request.include_usage:
        yield _event(chunks.usage())
    yield DONE


async def _run(prepared: Prepared, record: Record) -> AsyncGenerator[_Numbered, None]:
    """News of all prompts. Raises when one is refused; whoever leaves early ends them all."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(aclosing(await prepared.model.engine.submit(request)))
            for request in prepared.engine_requests
        ]
        record.taken_in = True
        async with aclosing(_merged(streams)) as news:
            async for place, output in news:
                record.note(output)
                yield place, output


async def _merged(streams: list[OutputStream]) -> AsyncGenerator[_Numbered, None]:
    """Outputs of all streams as they come; none is asked for more before its news were taken."""
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


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def _note_request(record: Record, prepared: Prepared, with_texts: bool) -> None:
    request = prepared.request
    record.model, record.stream, record.choices = prepared.model.name, request.stream, request.num_choices
    record.prompt_tokens = sum(len(one.prompt_token_ids) for one in prepared.engine_requests)
    if with_texts:
        record.prompts = request.messages if request.messages is not None else request.prompts
        record.answers = {}


def _warning(unknown_fields: tuple[str, ...]) -> dict[str, str]:
    """A header that names what was ignored; header values are ASCII and short."""
    names = ", ".join(unknown_fields).encode("ascii", "backslashreplace").decode()
    return {IGNORED_FIELDS: "".join(c if c.isprintable() else "?" for c in names)[:500]} if names else {}
