"""Jobs under the three policies: the same results, full batches, and no waiting for what cannot come."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.jobs.job import JobModel
from packhorse.jobs.loop import window_for
from tests.jobs.scripted import Bench, StopAfter, byte_tokenizer, cheap, prompt, scripted_model
from tests.support.engines import runner_of, scripted_engine
from tests.support.scripted import FakeClock, ScriptedRunner

POLICIES: list[dict[str, Any]] = [
    {"policy": "continuous"},
    {"policy": "continuous", "micro_batch": 3, "enable_prefix_caching": False},
    {"policy": "dynamic", "batch_size": 4},
    {"policy": "dynamic", "batch_size": 3, "length_buckets": [8, 16, 40], "micro_batch": 2},
    {"policy": "dynamic", "batch_size": 4, "max_wait_ms": 0},
    {"policy": "static", "batch_size": 4},
    {"policy": "static", "batch_size": 1, "enable_prefix_caching": False},
]


def watched(clock: FakeClock | None = None, **settings: Any) -> tuple[JobModel, Engine]:
    """A model whose engine may be looked at afterwards."""
    model = scripted_model(clock=clock, max_num_seqs=8, **settings)
    engine, tokenizer = model.load()
    return JobModel(model.name, model.identity, model.names, lambda: (engine, tokenizer)), engine


def test_every_policy_gives_the_same_results(bench: Bench) -> None:
    lines = [prompt("abc" * (i % 7 + 1), max_tokens=(i * 5) % 23 + 1, n=i % 3 + 1, seed=i) for i in range(60)]
    bench.write(*[line | {"temperature": i % 2} for i, line in enumerate(lines)], b"{", prompt(["a", "bc"]))
    found = []
    for settings in POLICIES:
        model, engine = watched(**settings)
        report = bench.run(lambda model=model: model, window=40, wall=lambda: 0.0, restart=True)
        assert (report.ok, report.failed) == (61, 1)
        assert not engine.more_to_come, "whoever has the engine next would wait for ever"
        engine.check_integrity()
        found.append(bench.output.read_bytes())
    assert len(set(found)) == 1


def test_static_batches_are_full_but_the_last(bench: Bench) -> None:
    bench.write(*[prompt("ab", max_tokens=5) for _ in range(22)])
    model, engine = watched(policy="static", batch_size=4)
    runner = runner_of(engine)
    bench.run(lambda: model, window=16)
    assert [len(batch.context_lens) for batch in runner.batches] == [4] * 25 + [2] * 5
    sizes = engine.stats().batch_size
    assert {edge: n for edge, n in zip(sizes.edges, sizes.counts, strict=False) if n} == {2.0: 5, 4.0: 25}


def test_dynamic_batches_wait_for_their_own_kind_while_more_lines_come(bench: Bench) -> None:
    """One line in eight is long, and no time passes: a batch of long ones starts when four of them have come."""
    bench.write(*[prompt(chr(97 + i // 8) * 50 if i % 8 == 3 else "ab", max_tokens=5) for i in range(128)])
    model, engine = watched(policy="dynamic", batch_size=4, length_buckets=[16])
    runner = runner_of(engine)
    config = EngineConfig(policy="dynamic", batch_size=4, length_buckets=[16], max_num_seqs=8)
    assert bench.run(lambda: model, window=window_for(config)).ok == 128
    long = [int((batch.context_lens > 16).sum()) for batch in runner.batches]
    assert set(long) == {0, 4}
    assert sum(long) == 16 * 5, "each of the sixteen was in five steps"


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_a_batch_that_the_window_can_never_fill_is_started_as_it_is(bench: Bench, policy: str) -> None:
    """The clock stands still: whoever waited for it, or for lines that a full window keeps out, would never end."""
    bench.write(*[prompt("a" * (i % 3 * 20 + 1), max_tokens=2) for i in range(30)])
    model, engine = watched(policy=policy, batch_size=8, length_buckets=[10, 30])
    calls = 0
    step = engine.step

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return step()

    engine.step = counted  # type: ignore[method-assign]
    assert bench.run(lambda: model, window=5).ok == 30
    assert calls <= 2 * engine.stats().steps, "the loop turned without doing anything"


def test_a_stopped_job_leaves_no_engine_that_waits_for_more(bench: Bench) -> None:
    bench.write(*[prompt("a", max_tokens=50) for _ in range(50)])
    model, engine = watched(policy="static", batch_size=4)
    bench.run(lambda: model, signals=StopAfter(20), window=16)
    assert (engine.more_to_come, engine.num_unfinished) == (False, 0)
    assert bench.run(lambda: model, window=16).ok == 50


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
@pytest.mark.parametrize("max_num_seqs", [16, 64])
def test_the_window_has_room_for_what_a_policy_chooses_from(policy: Any, max_num_seqs: int) -> None:
    config = EngineConfig(policy=policy, max_num_seqs=max_num_seqs, batch_size=16, length_buckets=[8, 16, 32, 64])
    assert window_for(config) >= 2 * max(config.batch_size, config.max_num_seqs)
    if policy == "dynamic":
        # With everybody else running, some bucket holds a whole batch, whatever lengths come.
        assert window_for(config) - max_num_seqs > 5 * (config.batch_size - 1)


def test_the_report_has_the_engines_latencies_and_hits(bench: Bench) -> None:
    clock = FakeClock()
    tokenizer = byte_tokenizer()
    engine = scripted_engine(cheap(tokenizer.vocab_size), tokenizer=tokenizer, clock=clock, max_num_seqs=2)
    inner: ScriptedRunner = runner_of(engine)
    inner._before_step = lambda _: clock.advance(0.5)
    bench.write(*[prompt("a" * 40, max_tokens=4) for _ in range(4)])
    told: list[Any] = []
    model = JobModel("scripted", "0", frozenset({"scripted"}), lambda: (engine, tokenizer))
    report = bench.run(lambda: model, clock=clock, on_progress=told.append)
    figures = report.serving
    assert figures.mean_batch_size == 16 / 9, "the second waits a step for what the first computes"
    assert figures.itl_p50_s == pytest.approx(0.5, rel=0.5)
    assert figures.ttft_p50_s is not None
    assert figures.ttft_p95_s == pytest.approx(2.5, rel=0.5), "the second pair waited for the first"
    assert figures.queue_p95_s == pytest.approx(2.0, rel=0.5)
    assert figures.prefix_hit_rate == pytest.approx(3 * 32 / (4 * 40))
    assert figures.preemptions == 0
    assert told[-2].serving == figures, "the last look at the running job"


def test_figures_of_a_second_job_on_one_engine_are_its_own(bench: Bench) -> None:
    clock = FakeClock()
    model, engine = watched(clock)
    inner = runner_of(engine)
    seconds = 4.0
    inner._before_step = lambda _: clock.advance(seconds)
    bench.write(*[prompt("ab", max_tokens=4) for _ in range(8)])
    assert bench.run(lambda: model, clock=clock).serving.itl_p50_s == pytest.approx(4, rel=0.5)
    seconds = 0.002
    again = bench.run(lambda: model, clock=clock, restart=True).serving
    assert again.itl_p95_s == pytest.approx(0.002, rel=0.5)
    assert again.ttft_p95_s == pytest.approx(0.002, rel=0.5)


def test_priority_and_timeout_of_a_line_are_the_engines(bench: Bench) -> None:
    clock = FakeClock()
    model, engine = watched(clock)
    runner_of(engine)._before_step = lambda _: clock.advance(1.0)
    lines = [prompt("a", max_tokens=9, timeout=3), prompt("a", max_tokens=9, timeout=30), prompt("a", priority=1000)]
    bench.write(*lines, prompt("a", priority="high"), prompt("a", priority=-5))
    bench.run(lambda: model, clock=clock)
    assert list(bench.codes().values()) == ["deadline_exceeded", None, *["invalid_request"] * 2, None]
    records = bench.results()
    assert records[0]["response"]["status_code"] == 504
    assert [records[i]["error"]["param"] for i in (2, 3)] == ["priority", "priority"]
