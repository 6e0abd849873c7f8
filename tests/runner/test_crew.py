"""The crew: every share runs once, errors come back, threads end."""

from __future__ import annotations

import gc
import signal
import threading

import pytest

from packhorse.runner.crew import Crew


def test_each_share_runs_once_on_a_thread_of_its_own() -> None:
    crew = Crew(3)
    for members in (1, 2, 3, 3, 1):
        seen: dict[int, int] = {}
        gate = threading.Barrier(members)

        def share(member: int, seen: dict[int, int] = seen, gate: threading.Barrier = gate) -> None:
            gate.wait(5)  # passes only if all run at the same time
            seen[member] = threading.get_ident()

        crew.run(share, members)
        assert sorted(seen) == list(range(members))
        assert len(set(seen.values())) == members
    crew.close()


@pytest.mark.parametrize("guilty", [0, 1, 2])
def test_what_a_member_raised_is_raised_and_the_crew_works_on(guilty: int) -> None:
    crew = Crew(3)

    def share(member: int) -> None:
        if member == guilty:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crew.run(share)
    done: list[int] = []
    crew.run(done.append)
    assert sorted(done) == [0, 1, 2]
    crew.close()


def test_an_interrupt_is_raised_after_the_members_have_ended() -> None:
    crew = Crew(2)
    interrupted, ended = threading.Event(), threading.Event()
    main = threading.get_ident()

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def share(member: int) -> None:
        if member == 1:
            signal.pthread_kill(main, signal.SIGINT)  # which waits for this thread
            interrupted.wait(5)
            ended.set()

    usual = signal.signal(signal.SIGINT, interrupt)  # a process in the background may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            crew.run(share)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert interrupted.is_set()
    assert ended.is_set()
    done: list[int] = []
    for _ in range(100):
        crew.run(done.append)
    assert len(done) == 200
    crew.close()


def test_threads_end_with_the_crew() -> None:
    others = set(threading.enumerate())
    crew = Crew(4)
    crew.run(lambda member: member)
    threads = set(threading.enumerate()) - others
    assert len(threads) == 3
    del crew
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
