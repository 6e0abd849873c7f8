"""A crew: threads that run one kernel together, each on its own share.

    caller:   run(f) ──► f(0) ─────────► wait ─► return
    thread 1:      └──► f(1) ──► done ──────┘

Why not numba's `parallel=True`: its OpenMP layer keeps its threads spinning after a kernel, in the way of
onnxruntime's, unless OMP_WAIT_POLICY was set before the library was loaded; it needs libgomp, which slim containers
lack; and its fallback layer must not be entered by two threads at once. A crew sleeps between kernels, and waking a
member takes some 5 microseconds.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable

Share = Callable[[int], object]


class _Flag:
    """Raised by one thread, waited for and lowered by one other. A bare lock is the cheapest thing to sleep on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def raise_(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is up already
            self._lock.release()

    def wait(self) -> None:
        self._lock.acquire()


class _Member:
    """What the caller and one thread share. The thread writes `finished` and `error` before it raises `done`."""

    def __init__(self) -> None:
        self.go = _Flag()
        self.done = _Flag()
        self.share: Share | None = None
        self.started = 0
        self.finished = 0
        self.error: BaseException | None = None


class Crew:
    """`size` threads, the caller's among them. `run` must not be called by two threads at once.

    The threads end with `close`, or when nothing refers to the crew any more.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._members = [_Member() for _ in range(size - 1)]
        threads = [
            threading.Thread(target=_work, args=(member, i), name=f"packhorse-crew-{i}", daemon=True)
            for i, member in enumerate(self._members, 1)
        ]
        for thread in threads:
            thread.start()
        # The threads know their member and not the crew, or they would keep it alive.
        self._dismiss = weakref.finalize(self, _dismiss, self._members, threads)

    def run(self, share: Share, members: int | None = None) -> None:
        """Call share(0) … share(members - 1), each on a thread of its own; the first error is raised again.

        Returns or raises only when all have ended, KeyboardInterrupt included: what a share writes to is the caller's
        again afterwards.
        """
        others = self._members[: (self.size if members is None else members) - 1]
        for member in others:
            member.share, member.error = share, None
            member.started += 1
            member.go.raise_()
        try:
            share(0)
        finally:
            _wait_for(others)
        for member in others:
            if member.error is not None:
                raise member.error

    def close(self) -> None:
        """End the threads. The crew cannot be used again."""
        self._dismiss()


def _wait_for(members: list[_Member]) -> None:
    interrupt: KeyboardInterrupt | None = None
    for member in members:
        # The flag only wakes; the count tells. So an interrupt between the two is neither lost nor waited for twice.
        while member.finished != member.started:
            try:
                member.done.wait()
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _work(member: _Member, index: int) -> None:
    while True:
        member.go.wait()
        share, member.share = member.share, None
        if share is None:
            return
        try:
            share(index)
        except BaseException as error:  # handed to the caller of run
            member.error = error
        share = None  # an idle thread must not keep a step's arrays alive
        member.finished += 1
        member.done.raise_()


def _dismiss(members: list[_Member], threads: list[threading.Thread]) -> None:
    for member in members:
        member.share = None
        member.go.raise_()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
