"""A crew: threads that run one kernel together, each on its own share.

    caller:   run(f) ──► f(0) ─────────► wait ─► return
    thread 1:      └──► f(1) ──► done ──────┘

Why not numba's `parallel=True`: its OpenMP layer keeps its threads spinning after a kernel, in the way of
onnxruntime's, unless OMP_WAIT_POLICY was set before the library was loaded; it needs libgomp, which slim containers
lack; and its fallback layer must not be entered by two threads at once. A crew sleeps between kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Share = Callable[[int], object]


class Crew:
    """`size` threads, the caller's among them. `run` must not be called by two threads at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Bare locks, used as flags: a released `_go` says "work", a released `_done` says "finished". They are the
        # cheapest thing in the language to sleep on.
        self._go = [_taken_lock() for _ in range(size)]
        self._done = [_taken_lock() for _ in range(size)]
        self._share: Share | None = None
        self._errors: list[BaseException | None] = [None] * size
        self._threads = [
            threading.Thread(target=self._work, args=(i,), name=f"packhorse-crew-{i}", daemon=True)
            for i in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, share: Share, members: int | None = None) -> None:
        """Call share(0) … share(members - 1), each on a thread of its own; the first error is raised again."""
        members = self.size if members is None else members
        self._share = share
        for i in range(1, members):
            self._go[i].release()
        try:
            share(0)
        finally:
            for i in range(1, members):
                self._done[i].acquire()
        for i in range(1, members):
            error, self._errors[i] = self._errors[i], None
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads. The crew cannot be used again."""
        self._share = None
        for i in range(1, self.size):
            self._go[i].release()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self.size = 1

    def _work(self, index: int) -> None:
        while True:
            self._go[index].acquire()
            share = self._share
            if share is None:
                return
            try:
                share(index)
            except BaseException as error:  # handed to the caller of run
                self._errors[index] = error
            self._done[index].release()


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
