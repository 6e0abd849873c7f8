from __future__ import annotations

import asyncio
import gc
import logging
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from packhorse.engine import async_engine
from packhorse.engine.async_engine import AsyncEngine
from packhorse.engine.engine import Engine
from packhorse.engine.output_stream import OutputStream
from packhorse.engine.outputs import RequestOutput, joined
from packhorse.engine.request import Request
from packhorse.engine.stats import EngineStats
from packhorse.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    QueueFull,
    ReaderTooSlow,
    StepError,
)
from tests.support.engines import finish_all, request, runner_of, scripted_engine
from tests.support.scripted import FakeClock
from tests.support.stress import Machine, alone, assert_adds, random_params, tokenizer

PATIENCE = 30.0
"""Seconds after which a test that waits for something fails. None waits that long when all is well."""

LEAVING = ["cancel", "aclose", "drop", "abort"]


class Gate:
    """Holds each step of a runner until the test lets it pass."""

    def __init__(self, engine: Engine) -> None:
        self._arrived = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._open = False
        self.runner = runner_of(engine)
        self.runner._before_step = self._hold

    def _hold(self, _: int) -> None:
        if not self._open:
            self._arrived.release()
            assert self._passes.acquire(timeout=PATIENCE)

    async def held(self) -> None:
        """Until a step has come to the gate (each is reported once)."""
        assert await asyncio.to_thread(self._arrived.acquire, timeout=PATIENCE)

    async def pass_one(self) -> None:
        """Let the held step run, and wait for the next one."""
        self._passes.release()
        await self.held()

    def pass_one_and_block(self) -> None:
        """The same, while the event loop stands still."""
        self._passes.release()
        assert self._arrived.acquire(timeout=PATIENCE)

    def open(self) -> None:
        """All steps pass from here on."""
        self._open = True
        self._passes.release()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("packhorse")]
    assert not left


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def serve(engine: Engine, **options: Any) -> AsyncEngine:
    return AsyncEngine(engine, clock=engine._clock, **options)


def streamed(request_id: str, prompt: list[int], **params: Any) -> Request:
    return replace(request(request_id, prompt, **params), stream=True)


def text_engine(**settings: Any) -> Engine:
    """One that streams: that takes text, hence a tokenizer."""
    return scripted_engine(tokenizer=tokenizer(), **settings)


async def collect(stream: OutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def whole(stream: OutputStream) -> RequestOutput:
    return joined(await collect(stream))


async def result(served: AsyncEngine, asked: Request) -> RequestOutput:
    """All of its news together; checks each."""
    outputs = await collect(await served.submit(asked))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for count, output in enumerate(outputs):
        assert_adds(outputs[:count], output)
    return joined(outputs)


def same(found: RequestOutput, asked: Request) -> bool:
    """Whether it is what the request gives by itself."""
    engine = text_engine()
    engine.submit(asked)
    return found.error is None and found.outputs == finish_all(engine)[asked.request_id].outputs


async def settle() -> None:
    """Let everything that is ready in this event loop run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let other threads run until they have brought it about."""
    while not condition():
        await asyncio.sleep(0)


def ids(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


# Results


def many_requests(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, 400) for _ in range(12)]
    found = []
    for number in range(count):
        prompt = (shared if rng.random() < 0.5 else []) + [rng.randrange(3, 400) for _ in range(rng.randint(1, 30))]
        stream, priority = rng.random() < 0.7, rng.choice([0, 0, 1])
        found.append(Request(f"r{number}", prompt, random_params(rng), stream=stream, priority=priority))
    return found


@pytest.mark.parametrize("policy", ["continuous", "dynamic"])
def test_200_concurrent_streams_give_what_each_gives_alone(policy: str) -> None:
    machine = Machine(num_blocks=40, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=80)
    requests = many_requests(200, seed=5)
    engine = scripted_engine(
        tokenizer=tokenizer(),
        eos=(2,),
        num_blocks=machine.num_blocks,
        block_size=machine.block_size,
        policy=policy,
        max_num_seqs=16,
        batch_size=16,
        max_num_batched_tokens=64,
        max_model_len=80,
        max_wait_ms=0.0,
    )
    found: dict[str, RequestOutput] = {}

    async def clients(served: AsyncEngine, some: list[Request]) -> None:
        seen: list[EngineStats] = []

        async def client(asked: Request) -> None:
            found[asked.request_id] = await result(served, asked)
            seen.append(served.stats())

        await asyncio.gather(*(client(asked) for asked in some))
        for name in ("steps", "prompt_tokens", "computed_tokens", "generated_tokens", "preemptions"):
            values = [getattr(stats, name) for stats in seen]
            assert values == sorted(values)
        assert all(sum(stats.finished.values()) > number for number, stats in enumerate(seen))

    async def main() -> None:
        async with serve(engine) as served:
            elsewhere = asyncio.to_thread(lambda: run(clients(served, requests[::2])))  # another event loop
            await asyncio.gather(elsewhere, clients(served, requests[1::2]))
            assert served.healthy

    run(main())
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.blocks_used, stats.num_running, stats.num_waiting, sum(stats.finished.values())) == (0, 0, 0, 200)
    assert stats.preemptions > 0
    assert stats.mean_batch_size > 3
    for asked in requests:
        expected = alone(asked, machine.max_len)
        assert found[asked.request_id].error is None
        assert found[asked.request_id].outputs == expected.outputs
        assert found[asked.request_id].prompt_logprobs == expected.prompt_logprobs


def test_statistics_only_grow_and_are_those_of_the_last_step() -> None:
    engine = text_engine(max_num_seqs=2)
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine) as served:
            assert served.stats() == engine.stats()
            reading = asyncio.create_task(result(served, streamed("a", [5, 6], max_tokens=4)))
            seen = []
            await gate.held()
            for _ in range(3):
                seen.append(served.stats())
                assert served.stats() is seen[-1]  # nothing new while a step runs
                await gate.pass_one()
            gate.open()
            await reading
            seen.append(served.stats())
            assert [s.steps for s in seen] == [0, 1, 2, 4]
            assert [s.generated_tokens for s in seen] == [0, 1, 2, 4]
            assert [s.num_running for s in seen] == [0, 1, 1, 0]

    run(main())


def test_a_request_that_does_not_stream_gives_one_output() -> None:
    asked = request("a", [5, 6], max_tokens=9)

    async def main() -> None:
        async with serve(text_engine()) as served:
            outputs = await collect(await served.submit(asked))
            assert len(outputs) == 1
            assert same(outputs[0], asked)

    run(main())


# Refusals


def test_a_refused_request_raises_at_once_and_its_neighbours_go_on() -> None:
    asked = streamed("good", [5], max_tokens=20)

    async def main() -> None:
        async with serve(text_engine(max_model_len=64)) as served:
            good = await served.submit(asked)
            for bad, error in (
                (request("empty", []), InvalidRequest),
                (request("long", [5] * 65), ContextLengthExceeded),
                (request("alien", [10**6]), InvalidRequest),
                (replace(request("urgent", [5]), priority=10**9), InvalidRequest),
            ):
                with pytest.raises(error):
                    await served.submit(bad)
            assert same(await whole(good), asked)
            assert (await result(served, request("empty", [5], max_tokens=2))).error is None  # the id is free
            assert served.num_refused == 0

    run(main())


def test_a_refused_namesake_leaves_the_first_alone() -> None:
    engine = text_engine()
    gate = Gate(engine)
    asked = streamed("twin", [5], max_tokens=6)

    async def main() -> None:
        async with serve(engine) as served:
            first = await served.submit(asked)
            await gate.held()
            second = asyncio.create_task(served.submit(streamed("twin", [7])))
            third = asyncio.create_task(served.submit(streamed("twin", [8])))
            await settle()
            third.cancel()  # before it was refused
            fourth = asyncio.create_task(served.submit(streamed("twin", [9])))
            await settle()
            gate.pass_one_and_block()
            fourth.cancel()  # it was refused, but does not know yet
            await settle()
            gate.open()
            with pytest.raises(InvalidRequest, match="twin"):
                await second
            gc.collect()
            assert same(await whole(first), asked)

    run(main())


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_waiting"):
        AsyncEngine(scripted_engine(), max_waiting=-1)
    for seconds in (0.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="watchdog_seconds"):
            AsyncEngine(scripted_engine(), watchdog_seconds=seconds)


# Leaving early


async def leave(how: str, served: AsyncEngine, stream: OutputStream, reader: asyncio.Task[Any] | None) -> None:
    if how == "abort":
        served.abort(stream.request_id)
    elif how == "aclose":
        await stream.aclose()
    elif how == "cancel":
        assert reader is not None
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader


@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_leaving_frees_everything_before_the_next_step(where: str, how: str, n: int) -> None:
    engine = text_engine(max_num_batched_tokens=16)
    gate = Gate(engine)
    prompt = list(range(3, 103)) if where == "prefill" else [5, 6]
    asked = streamed("a", prompt, max_tokens=500, n=n, temperature=1.0, seed=3)

    async def main() -> None:
        async with serve(engine) as served:
            stream = await served.submit(asked)
            reader = asyncio.create_task(collect(stream)) if how == "cancel" else None
            await gate.held()
            for _ in range(3):
                await gate.pass_one()
            assert served.stats().blocks_used > 0
            await leave(how, served, stream, reader)
            if how == "drop":
                del stream
                gc.collect()
            gate.open()
            await served.drain()
            assert gate.runner.steps == 4  # the one that was held was the last
            stats = served.stats()
            assert (stats.blocks_used, stats.num_running, stats.num_waiting) == (0, 0, 0)
            assert stats.finished == {"abort": 1}
            assert stats.aborted_tokens == stats.generated_tokens
            if how == "abort":
                last = await whole(stream)
                assert last.finished
                assert {choice.finish_reason for choice in last.outputs} == {"abort"}
                assert last.error is None
        engine.check_integrity()

    run(main())


@pytest.mark.parametrize("how", LEAVING)
def test_leaving_while_queued_costs_the_model_nothing(how: str) -> None:
    engine = text_engine(max_num_seqs=1)
    gate = Gate(engine)
    first = streamed("first", [5], max_tokens=4)

    async def main() -> None:
        async with serve(engine) as served:
            running = asyncio.create_task(result(served, first))
            await gate.held()
            submitting = asyncio.create_task(served.submit(streamed("second", [7] * 40, max_tokens=50)))
            await settle()
            await gate.pass_one()
            stream = await submitting
            del submitting
            reader = asyncio.create_task(collect(stream)) if how == "cancel" else None
            await settle()
            await leave(how, served, stream, reader)
            if how == "drop":
                del stream
                gc.collect()
            gate.open()
            assert same(await running, first)
            await served.drain()
            stats = served.stats()
            assert (stats.computed_tokens, stats.blocks_used) == (4, 0)
            assert stats.finished == {"length": 1, "abort": 1}

    run(main())


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_leaving_before_the_request_was_taken_in(how: str) -> None:
    engine = text_engine(max_num_seqs=1)
    gate = Gate(engine)
    first = streamed("first", [5], max_tokens=4)

    async def main() -> None:
        async with serve(engine, max_waiting=1) as served:
            running = asyncio.create_task(result(served, first))
            await gate.held()
            submitting = asyncio.create_task(served.submit(streamed("second", [7] * 40, max_tokens=50)))
            await settle()
            if how == "cancel":
                submitting.cancel()
            else:
                served.abort("second")
            await settle()
            gate.open()
            assert same(await running, first)
            if how == "abort":
                outputs = await collect(await submitting)
                assert [choice.finish_reason for choice in outputs[-1].outputs] == ["abort"]
            else:
                with pytest.raises(asyncio.CancelledError):
                    await submitting
            await served.drain()
            assert served.stats().computed_tokens == 4
            assert served.stats().blocks_used == 0

    run(main())


def test_a_finished_or_unknown_id_can_be_aborted_without_harm() -> None:
    async def main() -> None:
        async with serve(text_engine()) as served:
            asked = request("a", [5], max_tokens=2)
            stream = await served.submit(asked)
            assert same(await whole(stream), asked)
            served.abort("a")
            served.abort("nobody")
            await stream.aclose()
            assert await collect(stream) == []
            await served.drain()
            assert served.stats().finished == {"length": 1}

    run(main())


def test_after_close_the_engine_expects_no_more_requests() -> None:
    engine = text_engine(policy="static", batch_size=2)

    async def main() -> None:
        async with serve(engine) as served:
            some = [request(name, [5], max_tokens=2) for name in "ab"]
            await asyncio.gather(*(result(served, asked) for asked in some))

    run(main())
    engine.submit(request("c", [5], max_tokens=2))
    assert finish_all(engine, max_steps=3)["c"].error is None


def test_leaving_a_loop_by_break_aborts() -> None:
    async def main() -> None:
        async with serve(text_engine()) as served:
            async with aclosing(await served.submit(streamed("a", [5], max_tokens=4000))) as stream:
                async for output in stream:
                    assert not output.finished
                    break
            await served.drain()
            assert served.stats().finished == {"abort": 1}

    run(main())


def test_a_closed_event_loop_aborts_its_requests() -> None:
    engine = text_engine()
    gate = Gate(engine)
    kept = []

    async def vanish(served: AsyncEngine) -> None:
        kept.append(await served.submit(streamed("gone", [5], max_tokens=4000)))

    async def main() -> None:
        async with serve(engine) as served:
            await asyncio.to_thread(lambda: run(vanish(served)))
            await gate.held()
            gate.open()
            asked = request("a", [7], max_tokens=5)
            assert same(await result(served, asked), asked)
            await served.drain()
            assert served.stats().finished == {"length": 1, "abort": 1}
            assert served.stats().blocks_used == 0

    run(main())


# Failures


def test_a_step_that_fails_in_the_model_takes_only_its_own_requests() -> None:
    engine = text_engine(max_num_seqs=2)

    def break_second_step(number: int) -> None:
        if number == 1:
            runner.steps += 1
            raise RuntimeError("out of luck")

    runner = runner_of(engine)
    runner._before_step = break_second_step
    requests = [streamed(f"r{i}", [5 + i], max_tokens=6) for i in range(6)]

    async def main() -> None:
        async with serve(engine) as served:
            found = await asyncio.gather(*(result(served, asked) for asked in requests))
            failed = [output for output in found if output.error is not None]
            assert 1 <= len(failed) <= 2
            for output, asked in zip(found, requests, strict=True):
                if output.error is None:
                    assert same(output, asked)
                else:
                    assert isinstance(output.error, StepError)
                    assert "out of luck" in output.error.message
            assert served.healthy
            assert served.stats().failed_requests == len(failed)
            assert served.stats().blocks_used == 0

    run(main())


def raising(times: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises so many times first."""
    left = iter(range(times))

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is not None:
            raise RuntimeError("out of luck")
        return function(*args, **kwargs)

    return broken


@pytest.mark.parametrize("times", [1, 2, 3, 10])
@pytest.mark.parametrize("place", ["schedule", "collect", "fail_all"])
def test_a_step_that_raises_elsewhere_fails_who_is_there_and_the_loop_goes_on(
    place: str, times: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_engine, "RETRY_PAUSE", 0.001)
    engine = text_engine(max_num_seqs=2)
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine) as served:
            streams = [await served.submit(streamed("first", [5], max_tokens=60))]
            await gate.held()
            submitting = [asyncio.create_task(served.submit(streamed(f"r{i}", [7 + i]))) for i in range(4)]
            await settle()
            await gate.pass_one()
            streams += [await task for task in submitting]
            if place == "collect":
                engine._collect = raising(times, engine._collect)  # type: ignore[method-assign]
            else:
                engine._scheduler.schedule = raising(times, engine._scheduler.schedule)  # type: ignore[method-assign]
            if place == "fail_all":
                engine.fail_all = raising(1, engine.fail_all)  # type: ignore[method-assign]
            gate.open()
            for stream in streams:
                last = await whole(stream)
                assert isinstance(last.error, StepError)
                assert "out of luck" in last.error.message
                assert [choice.finish_reason for choice in last.outputs] == ["error"]
            asked = streamed("later", [50], max_tokens=5)
            found = await result(served, asked)
            while found.error is not None:  # until it is repaired each fails with the error
                assert "out of luck" in found.error.message
                asked = replace(asked, request_id=asked.request_id + "+")
                found = await result(served, asked)
            assert same(found, asked)
            assert served.stats().blocks_used == 0
            assert served.healthy
        engine.check_integrity()

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "A step raised" in caplog.text


def test_an_engine_that_always_raises_is_unhealthy_until_a_step_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "RETRY_PAUSE", 0.001)
    clock = FakeClock()
    engine = text_engine(clock=clock)
    schedule, tried = engine._scheduler.schedule, threading.Semaphore(0)

    def broken(*_: object) -> None:
        tried.release()
        raise RuntimeError("out of luck")

    engine._scheduler.schedule = broken  # type: ignore[assignment,method-assign]

    async def main() -> None:
        async with serve(engine, watchdog_seconds=10.0) as served:
            for name in "abc":
                assert (await result(served, request(name, [5]))).error is not None
            assert served.healthy
            clock.advance(10.0)
            for _ in range(20):  # it tries by itself
                assert await asyncio.to_thread(tried.acquire, timeout=PATIENCE)
            assert not served.healthy  # although nobody waits
            engine._scheduler.schedule = schedule  # type: ignore[method-assign]
            await until(lambda: served.healthy)
            assert (await result(served, request("d", [5], max_tokens=3))).error is None

    run(main())


def test_when_the_thread_dies_nobody_waits_for_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = text_engine()
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine) as served:
            first = await served.submit(streamed("a", [5], max_tokens=50))
            await gate.held()
            await gate.pass_one()
            queued = asyncio.create_task(served.submit(streamed("b", [5])))
            draining = asyncio.create_task(served.drain())
            await settle()

            def die() -> None:
                raise SystemExit("gone")

            engine.step = die  # type: ignore[assignment,method-assign]
            gate.open()
            outputs = await collect(first)
            assert isinstance(outputs[-1].error, StepError)
            assert len(ids(joined(outputs))) >= 1  # with what it had
            second = await whole(await queued)
            assert "died" in str(second.error)
            await draining
            with pytest.raises(StepError, match="died"):
                await served.submit(request("c", [5]))
            await served.drain()
            assert not served.healthy

    with caplog.at_level(logging.CRITICAL):
        run(main())
    assert "The engine thread has died" in caplog.text


# Watchdog


def test_a_hanging_step_is_unhealthy_and_reported_once_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    engine = text_engine(clock=clock)
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine, watchdog_seconds=10.0) as served:
            clock.advance(100.0)
            assert served.healthy  # nothing to do is no reason
            reading = asyncio.create_task(result(served, streamed("a", [5], max_tokens=3)))
            await gate.held()
            assert served.healthy  # the time it was idle does not count
            clock.advance(9.9)
            assert served.healthy
            clock.advance(0.2)
            assert [served.healthy for _ in range(3)] == [False] * 3
            await gate.pass_one()
            assert served.healthy
            clock.advance(10.1)
            assert not served.healthy
            gate.open()
            assert (await reading).error is None
            await served.drain()
            clock.advance(100.0)
            assert served.healthy

    with caplog.at_level(logging.INFO):
        run(main())
    reports = [record.message for record in caplog.records if record.name == async_engine.__name__]
    assert [text.split(" ")[0] for text in reports] == ["No", "Steps", "No", "Steps"]
    assert "1 sequences ran and 0 waited" in reports[2]


def test_the_watchdog_reports_although_nobody_asks() -> None:
    engine = text_engine()
    gate = Gate(engine)
    reported = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "No step has finished" in record.getMessage():
                reported.set()

    async def main() -> None:
        async with AsyncEngine(engine, watchdog_seconds=0.01) as served:
            reading = asyncio.create_task(result(served, streamed("a", [5], max_tokens=3)))
            await gate.held()
            assert await asyncio.to_thread(reported.wait, PATIENCE)
            gate.open()
            await reading

    async_engine.log.addHandler(listener := Listener())
    try:
        run(main())
    finally:
        async_engine.log.removeHandler(listener)


def test_a_scheduler_that_lets_nobody_in_is_reported() -> None:
    clock = FakeClock()
    engine = text_engine(clock=clock)
    called = threading.Semaphore(0)
    schedule = engine._scheduler.schedule

    def nobody(*_: object) -> None:
        called.release()

    engine._scheduler.schedule = nobody  # type: ignore[assignment,method-assign]

    async def main() -> None:
        async with serve(engine, watchdog_seconds=10.0) as served:
            stream = await served.submit(request("a", [5], max_tokens=3))
            for _ in range(3):
                assert await asyncio.to_thread(called.acquire, timeout=PATIENCE)
            clock.advance(10.1)
            for _ in range(3):
                assert await asyncio.to_thread(called.acquire, timeout=PATIENCE)
                assert not served.healthy
            engine._scheduler.schedule = schedule  # type: ignore[method-assign]
            assert (await whole(stream)).error is None
            assert served.healthy

    run(main())


# Policies and moments


def test_a_static_batch_waits_to_be_full_and_that_is_healthy() -> None:
    clock = FakeClock()
    engine = text_engine(policy="static", batch_size=2, clock=clock)
    runner = runner_of(engine)

    async def main() -> None:
        async with serve(engine, watchdog_seconds=10.0) as served:
            first = await served.submit(request("a", [5], max_tokens=3))
            with pytest.raises(InvalidRequest):  # answered after the engine has looked at the first
                await served.submit(request("bad", []))
            clock.advance(100.0)
            assert served.healthy
            second = await served.submit(request("b", [6], max_tokens=3))
            await asyncio.gather(collect(first), collect(second))
            assert [len(batch.context_lens) for batch in runner.batches] == [2, 2, 2]
            third = await served.submit(request("c", [7], max_tokens=3))
            await served.drain()  # no more will come: it starts alone
            assert (await whole(third)).error is None

    run(main())


def test_a_dynamic_batch_starts_when_its_oldest_has_waited() -> None:
    engine = scripted_engine(policy="dynamic", batch_size=8, max_wait_ms=20.0, clock=time.monotonic)  # type: ignore

    async def main() -> None:
        async with AsyncEngine(engine) as served:
            begin = time.monotonic()
            await result(served, request("a", [5], max_tokens=3))
            assert time.monotonic() - begin >= 0.02

    run(main())


def test_a_queued_request_meets_its_deadline_although_nothing_else_happens() -> None:
    engine = scripted_engine(policy="static", batch_size=8, clock=time.monotonic)  # type: ignore[arg-type]

    async def main() -> None:
        async with AsyncEngine(engine) as served:
            found = await result(served, replace(request("a", [5]), queue_timeout=0.02))
            assert isinstance(found.error, DeadlineExceeded)

    run(main())


# A full queue


async def crowd(served: AsyncEngine, requests: list[Request]) -> tuple[list[OutputStream], list[QueueFull]]:
    found = await asyncio.gather(*(served.submit(asked) for asked in requests), return_exceptions=True)
    refused = [answer for answer in found if isinstance(answer, QueueFull)]
    accepted = [answer for answer in found if isinstance(answer, OutputStream)]
    assert len(accepted) + len(refused) == len(requests)
    return accepted, refused


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic", "blocks"])
def test_of_20_clients_two_run_four_wait_and_the_rest_is_refused(policy: str) -> None:
    """However the engine comes to run no more than two: places, batches, or blocks."""
    machine: dict[str, Any] = {"policy": policy, "batch_size": 2, "max_wait_ms": 1e6, "length_buckets": (4096,)}
    if policy == "continuous":
        machine = {"max_num_seqs": 2}
    elif policy == "blocks":
        machine = {"num_blocks": 9, "block_size": 16}
    engine = text_engine(**machine)
    requests = [request(f"r{i}", [5 + i, *range(40)], max_tokens=20) for i in range(20)]

    async def main() -> None:
        async with serve(engine, max_waiting=4) as served:
            gate = Gate(engine)
            submitting = asyncio.create_task(crowd(served, requests))
            await gate.held()
            await settle()
            assert not submitting.done()
            while not submitting.done():
                await gate.pass_one()
                await settle()
            assert gate.runner.steps < 10  # nobody can have finished
            accepted, refused = await submitting
            assert len(accepted) == 6
            assert served.num_refused == len(refused) == 14
            assert {(error.status, error.code) for error in refused} == {(429, "queue_full")}
            assert served.healthy
            gate.open()
            ends = [await whole(stream) for stream in accepted]
            by_id = {asked.request_id: asked for asked in requests}
            assert all(same(end, by_id[end.request_id]) for end in ends)
            assert served.stats().finished == {"length": 6}
            ends = await asyncio.gather(*(result(served, asked) for asked in requests[:4]))  # there is room again
            assert all(same(end, asked) for end, asked in zip(ends, requests, strict=False))

    run(main())


def test_choices_count_each_and_an_abort_frees_their_places() -> None:
    engine = text_engine(max_num_seqs=2)
    gate = Gate(engine)

    def several(name: str, n: int) -> Request:
        return streamed(name, [5], max_tokens=50, n=n, temperature=1.0, seed=1)

    async def main() -> None:
        async with serve(engine, max_waiting=4) as served:
            streams, refused = await crowd(served, [several("a", 2)])
            await gate.held()
            await gate.pass_one()
            served.abort("nobody")  # so that the engine thread must decide
            large = asyncio.create_task(served.submit(several("large", 5)))
            await settle()
            await gate.pass_one()
            with pytest.raises(QueueFull):  # nobody waits, but all places are taken
                await large
            await gate.pass_one()
            submitting = [asyncio.create_task(served.submit(several(name, n))) for name, n in (("b", 3), ("c", 2))]
            await settle()
            assert not submitting[0].done()
            with pytest.raises(QueueFull):  # at once, though the step is held: 3 and 2 are too many
                await asyncio.wait_for(submitting[1], PATIENCE)
            await gate.pass_one()
            streams.append(await submitting[0])
            greedy = asyncio.create_task(served.submit(streamed("g", [5], n=4, max_tokens=50)))  # computed once
            await settle()
            await gate.pass_one()
            streams.append(await greedy)
            await gate.pass_one()
            assert served.stats().num_waiting == 4
            with pytest.raises(QueueFull):
                await served.submit(several("d", 1))
            served.abort("b")
            submitting = [asyncio.create_task(served.submit(several(name, n))) for name, n in (("e", 3), ("f", 1))]
            await settle()
            await gate.pass_one()
            streams.append(await submitting[0])
            await gate.pass_one()
            with pytest.raises(QueueFull):
                await submitting[1]
            assert served.num_refused == 4
            assert not refused
            gate.open()
            for stream in streams:
                served.abort(stream.request_id)
            await served.drain()

    run(main())


def test_a_full_static_queue_starts_the_batch_it_has() -> None:
    """Else a queue shorter than a batch would wait for ever for those whom it refuses."""
    engine = text_engine(policy="static", batch_size=16)
    gate = Gate(engine)
    requests = [request(f"r{i}", [5 + i], max_tokens=20) for i in range(30)]

    async def main() -> None:
        async with serve(engine, max_waiting=4) as served:
            submitting = asyncio.create_task(crowd(served, requests))
            await gate.held()
            while not submitting.done():
                await gate.pass_one()
                await settle()
            accepted, _ = await submitting
            assert len(accepted) == 8  # a batch of four runs, four wait
            gate.open()
            ends = [await whole(stream) for stream in accepted]
            assert [end.error for end in ends] == [None] * 8

    run(main())


def test_without_a_queue_who_finds_a_place_is_served() -> None:
    engine = text_engine(max_num_seqs=2)
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine, max_waiting=0) as served:
            submitting = asyncio.create_task(crowd(served, [request(f"r{i}", [5 + i], max_tokens=9) for i in range(9)]))
            await gate.held()
            while not submitting.done():
                await gate.pass_one()
                await settle()
            accepted, _ = await submitting
            assert len(accepted) == 2
            gate.open()
            assert all([(await whole(stream)).error is None for stream in accepted])

    run(main())


def test_a_hanging_step_does_not_let_the_inbox_grow() -> None:
    engine = text_engine(max_num_seqs=2)
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine, max_waiting=4) as served:
            first = await served.submit(streamed("first", [5], max_tokens=9))
            await gate.held()
            tasks = [asyncio.create_task(served.submit(request(f"r{i}", [5], max_tokens=2))) for i in range(1000)]
            await settle()
            assert sum(not task.done() for task in tasks) <= 6
            gate.open()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert (await whole(first)).error is None
            await served.drain()

    run(main())


# Slow readers


def test_a_slow_reader_holds_up_nobody_and_misses_nothing() -> None:
    engine = text_engine()
    slow, quick = streamed("slow", [5], max_tokens=300), streamed("quick", [6], max_tokens=300)
    submitted, wake = threading.Event(), threading.Event()
    seen: list[RequestOutput] = []

    async def sleeper(served: AsyncEngine) -> None:
        stream = await served.submit(slow)
        submitted.set()
        assert wake.wait(PATIENCE)  # the whole event loop stands still
        seen.extend(await collect(stream))

    async def main() -> None:
        async with serve(engine) as served:
            elsewhere = asyncio.create_task(asyncio.to_thread(lambda: run(sleeper(served))))
            assert await asyncio.to_thread(submitted.wait, PATIENCE)
            idle = await served.submit(replace(slow, request_id="idle"))  # nobody reads it, in a loop that runs
            assert same(await result(served, quick), quick)
            await served.drain()
            wake.set()
            await elsewhere
            assert len(seen) == 1
            assert same(seen[0], slow)
            outputs = await collect(idle)
            assert len(outputs) == 1
            assert same(outputs[0], slow)

    run(main())


def test_a_stuck_event_loop_gets_one_call_however_many_steps_pass() -> None:
    engine = text_engine()
    submitted, wake = threading.Event(), threading.Event()
    calls = []

    async def sleeper(served: AsyncEngine) -> None:
        stream = await served.submit(streamed("slow", [5], max_tokens=300))
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), call(*args))[1]  # type: ignore
        submitted.set()
        assert wake.wait(PATIENCE)
        await collect(stream)

    async def main() -> None:
        async with serve(engine) as served:
            elsewhere = asyncio.create_task(asyncio.to_thread(lambda: run(sleeper(served))))
            assert await asyncio.to_thread(submitted.wait, PATIENCE)
            await served.drain()
            assert len(calls) <= 2
            wake.set()
            await elsewhere

    run(main())


def test_a_reader_that_lies_too_far_behind_is_given_up() -> None:
    engine = text_engine()
    slow, quick = streamed("slow", [5], max_tokens=480), streamed("quick", [6], max_tokens=480)

    async def main() -> None:
        async with serve(engine, max_unread=400) as served:
            stream = await served.submit(slow)  # nobody reads it
            await result(served, quick)
            await until(lambda: served.stats().num_running == 0)
            last = await whole(stream)
            assert isinstance(last.error, ReaderTooSlow)
            assert last.outputs[0].finish_reason == "error"
            expected = alone(slow, 4096).outputs[0]
            assert 0 < len(ids(last)) < 480
            assert ids(last) == expected.token_ids[: len(ids(last))]
            assert expected.text.startswith(last.outputs[0].text)

    run(main())
    engine.check_integrity()
    assert engine.stats().blocks_used == 0
    assert engine.stats().finished == {"abort": 1, "length": 1}


# Drain and close


def test_drain_finishes_what_is_there_and_refuses_the_rest() -> None:
    engine = text_engine(max_num_seqs=2)
    gate = Gate(engine)
    requests = [streamed("a", [5], max_tokens=6), request("b", [6], max_tokens=6)]
    requests += [request("c", [7], max_tokens=6), request("d", [8], max_tokens=6)]

    async def main() -> None:
        async with serve(engine) as served:
            reading = [asyncio.create_task(result(served, asked)) for asked in requests]
            await gate.held()
            await gate.pass_one()
            draining = asyncio.create_task(served.drain(1000.0))
            await settle()
            with pytest.raises(Draining) as refused:
                await served.submit(request("late", [5]))
            assert (refused.value.status, refused.value.code) == (503, "draining")
            assert not draining.done()
            gate.open()
            await draining
            assert all(
                same(output, asked) for output, asked in zip(await asyncio.gather(*reading), requests, strict=True)
            )
            assert served.stats().finished == {"length": 4}
            assert served.healthy
            await served.drain()  # at once

    run(main())


@pytest.mark.parametrize("times", [(5.0,), (1000.0, 0.0), (0.0,), (5.0, None)])
def test_a_drain_that_runs_out_of_time_ends_the_rest_with_an_error(times: tuple[float | None, ...]) -> None:
    clock = FakeClock()
    engine = text_engine(max_num_seqs=1, clock=clock)
    gate = Gate(engine)

    async def main() -> None:
        async with serve(engine) as served:
            running = asyncio.create_task(result(served, streamed("running", [5], max_tokens=4000)))
            queued = asyncio.create_task(result(served, streamed("queued", [5], max_tokens=4000)))
            await gate.held()
            await settle()
            for _ in range(3):
                await gate.pass_one()
            drains = [asyncio.create_task(served.drain(seconds)) for seconds in times]
            await settle()
            if times[0] == 5.0:
                clock.advance(4.0)
                await gate.pass_one()
                assert not drains[0].done()
                clock.advance(1.0)
            gate.open()
            for output in await asyncio.gather(running, queued):
                assert isinstance(output.error, Draining)
                assert output.outputs[0].finish_reason == "error"
            assert len(ids(await running)) >= 3
            await asyncio.gather(*drains)
            stats = served.stats()
            assert (stats.blocks_used, stats.num_waiting, stats.finished) == (0, 0, {"error": 2})

    run(main())


def test_close_ends_the_thread_and_every_request_and_may_be_repeated() -> None:
    engine = text_engine(max_num_seqs=1)
    gate = Gate(engine)

    async def main() -> None:
        served = serve(engine)
        served.start()
        running = await served.submit(streamed("running", [5], max_tokens=4000))
        await gate.held()
        queued = asyncio.create_task(served.submit(streamed("queued", [5], max_tokens=4000)))
        await settle()
        served.close(timeout=0.0)  # the step is held
        assert served._thread.is_alive()
        with pytest.raises(Draining, match="closed"):
            await served.submit(request("late", [5]))
        gate.open()
        await asyncio.gather(*(asyncio.to_thread(served.close) for _ in range(3)))
        served.close()
        assert not served._thread.is_alive()
        last = await whole(running)
        assert isinstance(last.error, Draining)
        with pytest.raises(Draining, match="closed"):
            await queued
        with pytest.raises(Draining, match="closed"):
            await served.submit(request("later", [5]))
        await served.drain()
        served.abort("running")
        assert not served.healthy
        with pytest.raises(RuntimeError):
            served.start()
        assert engine.num_unfinished == 0  # and may be used again
        assert engine.stats().blocks_used == 0
        engine.check_integrity()

    run(main())


def test_an_engine_that_never_started_can_be_closed_and_says_so_to_submitters() -> None:
    async def main() -> None:
        served = serve(scripted_engine())
        assert not served.healthy
        with pytest.raises(RuntimeError, match="not started"):
            await served.submit(request("a", [5]))
        served.close()
        with pytest.raises(Draining):
            await served.submit(request("a", [5]))

    run(main())


def test_an_exception_in_the_block_closes_too() -> None:
    async def main() -> None:
        served = serve(text_engine())
        streams = []

        async def fail() -> None:
            async with served:
                streams.append(await served.submit(streamed("a", [5], max_tokens=4000)))
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await fail()
        assert not served._thread.is_alive()
        last = await whole(streams[0])
        assert isinstance(last.error, Draining)

    run(main())


@pytest.mark.parametrize("busy", [False, True])
def test_a_forgotten_close_does_not_hang_the_interpreter(busy: bool) -> None:
    script = f"""
        import asyncio
        import atexit
        from packhorse.engine.async_engine import AsyncEngine
        from tests.support.engines import scripted_engine, request

        async def main():
            global served, stream
            served = AsyncEngine(scripted_engine(num_blocks=4096, context_length=1 << 15))
            served.start()
            if {busy}:
                stream = await served.submit(request("a", [5], max_tokens=30000))

        atexit.register(lambda: print("alive:", served._thread.is_alive()))  # called after what `start` registers
        asyncio.run(main())
        print("the end")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\nalive: False\n", "")
