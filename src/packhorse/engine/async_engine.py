"""The engine in a thread of its own, with an asyncio face.

    event loops, any number                          the engine thread, the only one to touch the Engine
    submit ─┐                                        ┌──────────────────────────────────────────────┐
    abort  ─┼─► inbox (orders, run between steps) ─► │ take orders ─► admit ─► step ─► hand over    │
    drain  ─┘                                        └────┬─────────────────────────────────┬───────┘
    stats, healthy ◄──────────── snapshot, times ─────────┘                                 │
    OutputStream ◄── mailbox (what was not read) ◄── call_soon_threadsafe, once a loop ◄────┘

The engine thread waits for nobody: it runs orders without a lock held, and a request whose mailbox is not read for too
long ends.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from packhorse.engine.engine import Engine
from packhorse.engine.output_stream import Mailbox, OutputStream, Reply, call_in, wake_all
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.stats import EngineStats
from packhorse.errors import ConfigError, Draining, PackhorseError, QueueFull, ReaderTooSlow, StepError

EXIT_SECONDS = 5.0
"""How long the end of the process waits for a step that is under way when nobody closed the engine."""

STUCK_PAUSE = 0.01
"""Seconds between two steps that do nothing although the engine wants them."""

RETRY_PAUSE = 1.0
"""Seconds between two tries of an engine whose steps raise, while nobody asks anything of it."""

CLOSED = "The engine is closed."

log = logging.getLogger(__name__)


class AsyncEngine:
    """Serves one Engine to any number of event loops. Use it with `async with`, or `start` and `close`.

    max_waiting: sequences (choices) that may wait for a place; None for any number. A request is taken in when with it
    no more than that wait, or when nobody waits and not all places are taken. max_unread: outputs that a stream may lie
    behind; its request then ends with a ReaderTooSlow error. watchdog_seconds: without progress, until `healthy` is
    False. clock: seconds, monotonic, the engine's own.

    While it is open the engine expects more requests, so batches of the static and dynamic policies wait to be full; a
    full queue starts them as it is.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_waiting: int | None = None,
        max_unread: int = 1024,
        watchdog_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_waiting is not None and max_waiting < 0:
            raise ConfigError(f"max_waiting is {max_waiting}: it must be 0 or more.", param="max_waiting")
        if max_unread < 1:
            raise ConfigError(f"max_unread is {max_unread}: it must be 1 or more.", param="max_unread")
        if not 0 < watchdog_seconds < math.inf:
            raise ConfigError(
                f"watchdog_seconds is {watchdog_seconds}: it must be a positive number of seconds.",
                param="watchdog_seconds",
            )
        self._engine = engine
        self._max_waiting = max_waiting
        self._max_unread = max_unread
        self._watchdog_seconds = watchdog_seconds
        self._clock = clock
        # Daemons, because the interpreter joins all other threads before it runs what `atexit` knows: a forgotten
        # close would hang it. So `start` registers a close there, which lets a step end before the modules go.
        self._thread = threading.Thread(target=self._main, name="packhorse-engine", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="packhorse-watchdog", daemon=True)

        # For all threads. SimpleQueue, because its put may interrupt itself: the collector runs OutputStream.__del__
        # wherever it likes, which must not meet a lock that its own thread holds.
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ended = threading.Event()
        self._working_since: float | None = None  # no progress since then although there is work
        # Behind the lock, which is never held while something runs.
        self._lock = threading.Lock()
        self._started = False
        self._accepting = True
        self._closing = False
        self._refusal: PackhorseError | None = None  # the thread is gone, and this is why
        self._snapshot = engine.stats()
        self._queued = 0  # sequences in the inbox
        self._freed = False  # by an abort that the snapshot does not know
        self._num_refused = 0
        self._reported = False

        # The engine thread's own.
        self._arrivals: deque[Mailbox] = deque()
        self._mailboxes: dict[str, Mailbox] = {}  # of requests that the engine has
        self._fresh = False  # somebody was taken in since the last step
        self._moved = False  # the last step changed something
        self._doomed: tuple[PackhorseError, list[Mailbox]] | None = None  # must have ended after the next step
        self._failing = False  # the last step raised
        self._drain_deadline = math.inf
        self._drains: list[Reply[None]] = []

    def start(self) -> None:
        """Start the threads. Raises RuntimeError the second time."""
        with self._lock:
            if self._started or self._closing:
                raise RuntimeError("An AsyncEngine runs once: make another one.")
            self._started = True
        atexit.register(self._close_at_exit)
        self._thread.start()
        self._watchdog.start()

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def submit(self, request: Request) -> OutputStream:
        """Hand a request to the engine; returns when it was taken in. From any event loop.

        Raises InvalidRequest or ContextLengthExceeded for one that can never run, QueueFull when too many wait,
        Draining after `drain` or `close`, StepError when the engine thread has died, RuntimeError before `start`.
        """
        mailbox = Mailbox(request, asyncio.get_running_loop(), self._max_unread)
        with self._lock:
            self._check_open()
            if self._surely_full(mailbox.num_sequences):
                self._num_refused += 1
                raise self._queue_full()
            self._queued += mailbox.num_sequences
            self._inbox.put(partial(self._arrivals.append, mailbox))
        try:
            refusal = await mailbox.refusal.wait()
        except BaseException:
            self._leave(mailbox)
            raise
        if refusal is not None:
            raise refusal
        return OutputStream(mailbox, self._leave)

    def check_room(self) -> None:
        """Raises what `submit` would for any request, where it can be told without asking the engine thread.

        For who has work to do before `submit`, and can spare it.
        """
        with self._lock:
            self._check_open()
            if self._surely_full(1):
                self._num_refused += 1
                raise self._queue_full()

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its stream ends with what it has, reason "abort". Unknown ids: nothing.

        From any thread. Returns at once.
        """
        with self._lock:
            self._inbox.put(partial(self._abort, request_id))
            self._freed = True

    async def drain(self, timeout: float | None = None) -> None:
        """Take no new requests, and return when the last one has ended.

        timeout: seconds from now; what is not finished by then ends with a Draining error. None: no limit. A later
        call may shorten the time, not lengthen it. It cannot return while a step hangs.
        """
        reply: Reply[None] = Reply(asyncio.get_running_loop())
        deadline = math.inf if timeout is None else self._clock() + timeout
        with self._lock:
            self._accepting = False
            if not self._started or self._refusal is not None:
                return
            self._inbox.put(partial(self._begin_drain, deadline, reply))
        await reply.wait()

    def close(self, timeout: float | None = None) -> None:
        """End the thread after the step under way; requests that are not finished end with a Draining error.

        timeout: seconds to wait for that step; None: as long as it takes. May be called again. Blocks: in an event
        loop leave the context manager instead, or call it through `asyncio.to_thread`. The Engine is usable afterwards.
        """
        with self._lock:
            self._accepting = False
            self._closing = True
            if not self._started:
                return
        self._inbox.put(_nothing)
        for thread in (self._thread, self._watchdog):
            thread.join(timeout)
        if not self._thread.is_alive():
            atexit.unregister(self._close_at_exit)

    def stats(self) -> EngineStats:
        """What the engine counted up to its last step. From any thread, at no cost to the engine."""
        return self._snapshot

    @property
    def num_refused(self) -> int:
        """Requests refused with QueueFull so far."""
        return self._num_refused

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and, where there is work, a step has finished in the last `watchdog_seconds`.

        The first time that it has not is logged, also when nobody asks. True again once steps finish. A batch that
        waits to be full is not work.
        """
        if self._refusal is not None or not self._thread.is_alive():
            return False
        since = self._working_since
        stuck_for = 0.0 if since is None else self._clock() - since
        healthy = stuck_for < self._watchdog_seconds
        with self._lock:
            changed, self._reported = self._reported == healthy, not healthy
        if changed and not healthy:
            stats = self._snapshot
            log.error(
                "No step has finished for %.0f s. After the last one %d sequences ran and %d waited.",
                stuck_for,
                stats.num_running,
                stats.num_waiting,
            )
        elif changed:
            log.warning("Steps finish again.")
        return healthy

    # Called by other threads.

    def _check_open(self) -> None:
        if self._refusal is not None:
            # A new one each time: a raised exception grows with every frame that it passes.
            raise type(self._refusal)(self._refusal.message) from self._refusal.__cause__
        if self._closing:
            raise Draining(CLOSED)
        if not self._accepting:
            raise Draining("The engine takes no new requests: it shuts down.")
        if not self._started:
            raise RuntimeError("The AsyncEngine was not started.")

    def _surely_full(self, num_sequences: int) -> bool:
        """Whether a request has no chance, even if every place were given to who is here already.

        The engine thread decides exactly. This spares the others the wait for the step under way, and bounds the inbox
        while a step hangs.
        """
        if self._max_waiting is None:
            return False
        stats = self._snapshot
        present = 0 if self._freed else stats.num_running + stats.num_waiting
        waiting = present + self._queued - stats.concurrency_limit
        return waiting >= 0 and waiting + num_sequences > self._max_waiting

    def _queue_full(self) -> QueueFull:
        return QueueFull(f"The queue is full: no more than {self._max_waiting} sequences may wait. Try again later.")

    def _leave(self, mailbox: Mailbox) -> None:
        """Nobody reads this stream any more. Takes no lock: the collector may call it inside of one."""
        self._inbox.put(partial(self._drop, mailbox))
        self._freed = True

    def _close_at_exit(self) -> None:
        self.close(EXIT_SECONDS)

    def _watch(self) -> None:
        while not self._ended.wait(self._watchdog_seconds / 4):
            _ = self.healthy

    # Everything below runs in the engine thread.

    def _main(self) -> None:
        refusal: PackhorseError = Draining(CLOSED)
        try:
            self._serve()
        except BaseException as error:  # whatever it is: nobody must wait for a thread that is gone
            log.critical("The engine thread has died.", exc_info=True)
            refusal = StepError(f"The engine thread has died: {error!r}. Start the process again.")
            refusal.__cause__ = error
        finally:
            self._end(refusal)

    def _serve(self) -> None:
        pause: float | None = None
        while True:
            self._take_orders(pause)
            if self._closing:
                self._engine.more_to_come = False  # for whoever uses it next
                if self._mailboxes:
                    self._fail_all(Draining(CLOSED))
                    self._step()
                return
            self._admit_arrivals()
            if self._mailboxes or self._failing:
                if self._working_since is None:
                    self._working_since = self._clock()
                self._end_late_drain()
                self._step()
            pause = self._pause()
            self._answer_drains()

    def _take_orders(self, pause: float | None) -> None:
        """Run what is in the inbox. pause: seconds to wait for something to be in it; None: until there is."""
        try:
            order = self._inbox.get(timeout=pause) if pause != 0 else self._inbox.get_nowait()
            while True:
                order()
                order = self._inbox.get_nowait()
        except Empty:
            return

    def _pause(self) -> float | None:
        """Seconds until the next step; None when only an order can bring one."""
        if self._arrivals:
            return 0
        if not self._mailboxes:
            if self._failing:
                return RETRY_PAUSE
            self._working_since = None
            return None
        if self._failing:
            return 0
        wanted = min(self._engine.wake_at(), self._drain_deadline) - self._clock()
        if wanted <= 0:
            return 0 if self._moved else STUCK_PAUSE
        self._working_since = None
        return min(wanted, threading.TIMEOUT_MAX) if wanted < math.inf else None

    def _admit_arrivals(self) -> None:
        """Hand new requests to the engine, in the order in which they came."""
        while self._arrivals:
            mailbox = self._arrivals[0]
            refusal: Exception | None = None
            if self._has_room(mailbox.num_sequences):
                refusal = self._submit(mailbox)
            elif self._fresh:
                return  # the next step may give places to some of those who wait
            else:
                refusal = self._queue_full()
            self._settle(self._arrivals.popleft(), refusal)

    def _has_room(self, num_sequences: int) -> bool:
        if self._max_waiting is None:
            return True
        stats = self._engine.stats()
        if not stats.num_waiting and stats.num_running < stats.concurrency_limit:
            return True
        return stats.num_waiting + num_sequences <= self._max_waiting

    def _submit(self, mailbox: Mailbox) -> Exception | None:
        request = mailbox.request
        try:
            self._engine.submit(request)
        except Exception as error:  # the caller's to judge; the others have nothing to do with it
            return error
        self._mailboxes[request.request_id] = mailbox
        self._fresh = True
        if mailbox.aborted:
            self._abort(request.request_id)
        return None

    def _settle(self, mailbox: Mailbox, refusal: Exception | None) -> None:
        """Tell the submitter."""
        with self._lock:
            self._queued -= mailbox.num_sequences
            self._num_refused += isinstance(refusal, QueueFull)
        if not mailbox.refusal.give(refusal) and refusal is None:
            self._abort(mailbox.request.request_id)

    def _abort(self, request_id: str) -> None:
        for mailbox in self._arrivals:
            if mailbox.request.request_id == request_id:
                mailbox.aborted = True
        if request_id in self._mailboxes:
            try:
                self._engine.abort(request_id)
            except Exception as error:
                log.exception("An abort raised; every request under way fails with it.")
                self._fail_all(error)

    def _drop(self, mailbox: Mailbox) -> None:
        """Nobody reads it any more. Not by its id alone: a refused request may share that with one under way."""
        if mailbox in self._arrivals:
            self._arrivals.remove(mailbox)
            self._settle(mailbox, Draining(CLOSED))
        elif self._mailboxes.get(mailbox.request.request_id) is mailbox:
            self._abort(mailbox.request.request_id)

    def _begin_drain(self, deadline: float, reply: Reply[None]) -> None:
        self._drain_deadline = min(self._drain_deadline, deadline)
        self._drains.append(reply)

    def _end_late_drain(self) -> None:
        if self._clock() >= self._drain_deadline:
            self._fail_all(Draining("The engine shut down before the request was finished."))

    def _answer_drains(self) -> None:
        if not self._mailboxes and not self._arrivals:
            for reply in self._drains:
                reply.give(None)
            self._drains.clear()

    def _step(self) -> None:
        engine, before = self._engine, self._snapshot
        engine.more_to_come = self._accepting and not self._queue_is_full()
        self._fresh = False
        try:
            outputs = engine.step()
            snapshot = engine.stats()
        except Exception as error:
            if not self._failing:
                log.exception("A step raised outside the model; every request under way fails with it.")
            self._failing = True
            self._fail_left_over()
            self._fail_all(error)
            return
        self._failing = False
        self._moved = bool(outputs) or snapshot != before
        if self._moved:
            self._working_since = self._clock()
        with self._lock:
            self._snapshot = snapshot
            self._freed = not self._inbox.empty()
        self._hand_over(outputs)
        self._fail_left_over()

    def _queue_is_full(self) -> bool:
        """Then no more will come, and a batch must not wait for it."""
        if self._max_waiting is None:
            return False
        return bool(self._arrivals) or self._engine.stats().num_waiting >= self._max_waiting

    def _fail_all(self, error: Exception) -> None:
        """End every request with the error. The engine gives them back in the next step; what it has lost, we do."""
        failure = error if isinstance(error, PackhorseError) else StepError(f"A step failed: {error!r}.")
        failure.__cause__ = error if failure is not error else error.__cause__
        self._doomed = (failure, list(self._mailboxes.values()))
        try:
            self._engine.fail_all(failure)
        except Exception:
            log.exception("The engine cannot end its requests.")

    def _fail_left_over(self) -> None:
        """End those who must have ended by now and have not."""
        if self._doomed is not None:
            (failure, mailboxes), self._doomed = self._doomed, None
            left = [m for m in mailboxes if self._mailboxes.get(m.request.request_id) is m]
            self._hand_over([m.failed(failure) for m in left])

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        """Put outputs into their mailboxes, and wake each event loop that has news once."""
        news: dict[asyncio.AbstractEventLoop, list[Mailbox]] = {}
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:  # given up already
                continue
            if mailbox.overflows and not output.finished:
                mailbox.given_up = True
                self._abort(output.request_id)
                continue
            if mailbox.given_up:
                output = mailbox.failed(ReaderTooSlow(f"The reader lay {self._max_unread} outputs behind."))
            if output.finished:
                del self._mailboxes[output.request_id]
            if mailbox.put(output):
                news.setdefault(mailbox.loop, []).append(mailbox)
        for loop, mailboxes in news.items():
            if not call_in(loop, wake_all, mailboxes):
                for mailbox in mailboxes:
                    self._abort(mailbox.request.request_id)

    def _end(self, refusal: PackhorseError) -> None:
        """Leave nobody waiting."""
        try:
            with self._lock:  # what is not in the inbox by now is refused by `submit` itself
                self._refusal = refusal
            self._take_orders(0)
            while self._arrivals:
                self._settle(self._arrivals.popleft(), refusal)
            self._doomed = (refusal, list(self._mailboxes.values()))
            self._fail_left_over()
            self._answer_drains()
        finally:
            self._ended.set()


def _nothing() -> None:
    """An order that only wakes the engine thread."""
