"""What a request gives to its reader in another thread: a stream over a mailbox that holds the newest output."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from packhorse.engine.outputs import CompletionOutput, RequestOutput
from packhorse.engine.request import Request
from packhorse.errors import PackhorseError

T = TypeVar("T")


class OutputStream:
    """The outputs of one request, an async iterator that ends after the finished one.

    A request with `stream=True` gives news as it grows; who reads slowly misses intermediate outputs, never text: each
    holds everything so far. A request that failed ends with an output that carries the `error`; nothing is raised.

    Read it in the event loop that submitted. Whoever stops reading aborts the request: by cancellation while it waits
    for the next output, by `aclose`, or by dropping the stream.
    """

    def __init__(self, mailbox: Mailbox, leave: Callable[[Mailbox], None]) -> None:
        self._mailbox = mailbox
        self._leave = leave
        self._over = False

    @property
    def request_id(self) -> str:
        return self._mailbox.request.request_id

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._over:
            raise StopAsyncIteration
        try:
            output = await self._mailbox.take()
        except BaseException:
            self._abandon()
            raise
        self._over = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Does not wait for it; `contextlib.aclosing` calls it."""
        self._abandon()

    def __del__(self) -> None:
        self._abandon()

    def _abandon(self) -> None:
        if not self._over:
            self._over = True
            self._leave(self._mailbox)


class Reply(Generic[T]):
    """One value from the engine thread to whoever awaits it in its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[T] = loop.create_future()

    async def wait(self) -> T:
        return await self._future

    def give(self, value: T) -> bool:
        """From any thread. False when the event loop is closed."""
        return call_in(self._loop, self._set, value)

    def _set(self, value: T) -> None:
        if not self._future.done():  # cancelled
            self._future.set_result(value)


class Mailbox:
    """Where the engine thread leaves what a stream reads.

        engine thread    put: newest ◄─ output;  notified? no: set it, and have the loop woken
        event loop       wake: notified is cleared, then the reader, if there is one, takes `newest`

    At most one wake-up is under way for each mailbox, however slow its loop is.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.num_sequences = 1 if request.params.greedy else request.params.n
        self.refusal: Reply[Exception | None] = Reply(loop)
        self.aborted = False  # before it was taken in
        self._newest: deque[RequestOutput] = deque(maxlen=1)
        self._last: RequestOutput | None = None
        self._notified = False
        self._event = asyncio.Event()

    def put(self, output: RequestOutput) -> bool:
        """True when the event loop must be told to `wake`. An output that nobody has taken gives way."""
        self._last = output
        self._newest.append(output)
        told, self._notified = self._notified, True
        return not told

    def failed(self, error: PackhorseError) -> RequestOutput:
        """The request's end when the engine cannot make one: what was handed over last, with the error."""
        if self._last is not None:
            choices = [replace(c, finish_reason=c.finish_reason or "error") for c in self._last.outputs]
            return replace(self._last, outputs=choices, finished=True, error=error)
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=[int(i) for i in request.prompt_token_ids],
            outputs=[CompletionOutput(i, "", [], finish_reason="error") for i in range(request.params.n)],
            finished=True,
            error=error,
        )

    def wake(self) -> None:
        """In the event loop."""
        self._notified = False
        self._event.set()

    async def take(self) -> RequestOutput:
        """The newest output that was not taken yet, once there is one."""
        while not self._newest:
            self._event.clear()
            await self._event.wait()
        return self._newest.popleft()


def wake_all(mailboxes: list[Mailbox]) -> None:
    """In the event loop: wake the readers of all these."""
    for mailbox in mailboxes:
        mailbox.wake()


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> bool:
    """Have the event loop call a function; False when it is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        return False
    return True
