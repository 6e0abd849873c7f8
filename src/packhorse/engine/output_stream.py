"""What a request gives to its reader in another thread: a stream over a mailbox that holds what was not read yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from packhorse.engine.outputs import CompletionOutput, RequestOutput, joined
from packhorse.engine.request import Request
from packhorse.errors import PackhorseError

T = TypeVar("T")


class OutputStream:
    """The outputs of one request, an async iterator that ends after the finished one.

    A request with `stream=True` gives news as it grows, each output what is new since the one before; who reads slowly
    gets more at once, and nothing is missed. A request that failed ends with an output that carries the `error`;
    nothing is raised.

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

        engine thread    put: unread ◄─ output;  notified? no: set it, and have the loop woken
        event loop       wake: notified is cleared, then the reader, if there is one, takes all of `unread` as one

    At most one wake-up is under way for each mailbox, however slow its loop is. most_unread: outputs that may lie
    there; the engine thread asks `overflows`, and then ends the request and remembers it in `given_up`.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, most_unread: int) -> None:
        self.request = request
        self.loop = loop
        self.num_sequences = 1 if request.params.greedy else request.params.n
        self.refusal: Reply[Exception | None] = Reply(loop)
        self.aborted = False  # before it was taken in
        self.given_up = False
        self._most_unread = most_unread
        self._unread: deque[RequestOutput] = deque()
        self._ended: set[int] = set()  # choices whose end was handed over
        self._notified = False
        self._event = asyncio.Event()

    @property
    def overflows(self) -> bool:
        """Whether the reader is too far behind for another output."""
        return len(self._unread) >= self._most_unread

    def put(self, output: RequestOutput) -> bool:
        """True when the event loop must be told to `wake`."""
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self._ended.add(choice.index)
        self._unread.append(output)
        told, self._notified = self._notified, True
        return not told

    def failed(self, error: PackhorseError) -> RequestOutput:
        """The request's end when the engine cannot make one: its unfinished choices end with the error."""
        request = self.request
        left = [i for i in range(request.params.n) if i not in self._ended]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=[int(i) for i in request.prompt_token_ids],
            outputs=[CompletionOutput(i, "", [], finish_reason="error") for i in left],
            finished=True,
            error=error,
        )

    def wake(self) -> None:
        """In the event loop."""
        self._notified = False
        self._event.set()

    async def take(self) -> RequestOutput:
        """What was not taken yet, once there is something."""
        while not self._unread:
            self._event.clear()
            await self._event.wait()
        news = [self._unread.popleft()]
        while self._unread:
            news.append(self._unread.popleft())
        return joined(news)


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
