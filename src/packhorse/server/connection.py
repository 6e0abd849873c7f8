"""A client that may leave at any moment: whatever is done for it ends then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from packhorse.errors import ClientLeft
from packhorse.server.record import Record

T = TypeVar("T")


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives; cancelled, and ClientLeft raised, when the client leaves before. Its body has been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft("The client closed the connection before it had its answer.")
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), each sent as it comes.

    `send` waits while the client's buffer is full, and `events` is not asked for more. first: the first event, which
    was taken from `events` already.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], record: Record, headers: Mapping[str, str]
    ) -> None:
        self._first = first
        self._events = events
        self._record = record
        # Without the second, nginx collects what it passes on.
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await unless_left(receive, self._send_all(send))
        except ClientLeft as error:  # there is nobody to answer
            self._record.error = error
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
