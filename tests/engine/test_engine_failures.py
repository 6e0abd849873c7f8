from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from packhorse.engine.engine import Engine
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import PackhorseError, StepError
from tests.support.engines import VOCAB, finish_all, request, runner_of, scripted_engine
from tests.support.scripted import FakeClock, PoisonedRunner
from tests.support.tokenizers import small_tokenizer


def break_step(engine: Engine, number: int, error: BaseException) -> None:
    """The runner raises in that step, after it was called `number` times."""
    calls = iter(range(10**9))

    def before_step(_: int) -> None:
        if next(calls) == number:
            raise error

    runner_of(engine)._before_step = before_step


def alone(prompt: list[int], **params: Any) -> RequestOutput:
    engine = scripted_engine()
    engine.submit(request("a", prompt, **params))
    return finish_all(engine)["a"]


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), MemoryError(), ValueError("bad")])
def test_a_step_that_raises_fails_its_own_requests_and_the_engine_goes_on(error: Exception) -> None:
    engine = scripted_engine(max_num_seqs=2)
    for number in range(4):
        engine.submit(request(str(number), [number, 1], max_tokens=5))
    break_step(engine, 2, error)
    outputs = finish_all(engine)
    for number in (0, 1):
        failed = outputs[str(number)]
        assert isinstance(failed.error, StepError)
        assert repr(error) in failed.error.message
        assert failed.error.__cause__ is error
        assert failed.outputs[0].finish_reason == "error"
        expected = alone([number, 1], max_tokens=5).outputs[0].token_ids
        assert failed.outputs[0].token_ids == expected[:2]  # what was generated before
    for number in (2, 3):
        assert outputs[str(number)].error is None
        assert outputs[str(number)].outputs == alone([number, 1], max_tokens=5).outputs
    stats = engine.stats()
    assert (stats.failed_requests, stats.blocks_used, stats.num_running) == (2, 0, 0)


def test_an_error_of_our_own_keeps_its_kind() -> None:
    class OutOfMemory(PackhorseError):
        code = "out_of_memory"

    engine = scripted_engine()
    engine.submit(request("a", [1]))
    break_step(engine, 0, OutOfMemory("no room"))
    error = finish_all(engine)["a"].error
    assert isinstance(error, OutOfMemory)
    assert error.code == "out_of_memory"


def test_choices_that_waited_fail_with_those_that_ran() -> None:
    engine = scripted_engine(max_num_seqs=2)
    engine.submit(request("many", [1, 2], n=5, temperature=1.0, max_tokens=4))
    engine.submit(request("next", [3], max_tokens=4))
    break_step(engine, 1, RuntimeError())
    outputs = finish_all(engine)
    assert isinstance(outputs["many"].error, StepError)
    assert [choice.finish_reason for choice in outputs["many"].outputs] == ["error"] * 5
    assert outputs["next"].outputs == alone([3], max_tokens=4).outputs
    assert engine.stats().failed_requests == 1


def test_choices_that_were_done_keep_what_they_have() -> None:
    engine = scripted_engine(max_num_seqs=1)
    engine.submit(request("many", [1, 2], n=3, temperature=1.0, seed=1, max_tokens=4))
    break_step(engine, 6, RuntimeError())
    output = finish_all(engine)["many"]
    assert [choice.finish_reason for choice in output.outputs] == ["length", "error", "error"]
    assert [len(choice.token_ids) for choice in output.outputs] == [4, 2, 0]


def test_a_failed_step_in_a_full_cache_frees_it() -> None:
    engine = scripted_engine(num_blocks=5, block_size=4)
    for number in range(6):
        engine.submit(request(str(number), [number] * 4, max_tokens=16))
    break_step(engine, 20, RuntimeError())
    outputs = finish_all(engine)
    assert 0 < sum(output.error is not None for output in outputs.values()) < 6
    assert engine.stats().blocks_used == 0


def test_an_interrupt_passes_and_the_step_can_be_run_again() -> None:
    engine = scripted_engine()
    engine.submit(request("a", [1, 2], max_tokens=5))
    break_step(engine, 2, KeyboardInterrupt())
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_integrity()
    assert finish_all(engine)["a"].outputs == alone([1, 2], max_tokens=5).outputs


def poisoned_engine(first: int, place: int, **settings: Any) -> Engine:
    """The logits after `place` tokens of the context that begins with `first` are no numbers."""
    engine = scripted_engine(runner_class=PoisonedRunner, **settings)
    runner = runner_of(engine)
    assert isinstance(runner, PoisonedRunner)
    runner.poisoned = lambda context: context[0] == first and len(context) == place  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}, {"logprobs": 1, "repetition_penalty": 1.1}])
@pytest.mark.parametrize("place", [2, 3, 5])
def test_logits_that_are_no_numbers_fail_one_request_only(place: int, params: dict[str, Any]) -> None:
    engine = poisoned_engine(9, place)
    prompts = {"before": [1, 1], "bad": [9, 1], "after": [3, 1, 4]}
    for name, prompt in prompts.items():
        engine.submit(request(name, prompt, max_tokens=6, **params))
    outputs = finish_all(engine)
    assert isinstance(outputs["bad"].error, StepError)
    assert "not finite" in outputs["bad"].error.message
    assert len(outputs["bad"].outputs[0].token_ids) == place - 2
    for name in ("before", "after"):
        assert outputs[name].error is None
        assert outputs[name].outputs == alone(prompts[name], max_tokens=6, **params).outputs
    assert engine.stats().failed_requests == 1


def test_bad_logits_of_one_choice_fail_its_siblings_and_no_one_else() -> None:
    engine = poisoned_engine(9, 4)
    engine.submit(request("bad", [9, 1], n=3, temperature=5.0, max_tokens=6, logprobs=0))
    engine.submit(request("good", [3, 1], max_tokens=6, logprobs=2))
    outputs = finish_all(engine)
    assert [choice.finish_reason for choice in outputs["bad"].outputs] == ["error"] * 3
    assert outputs["good"].outputs == alone([3, 1], max_tokens=6, logprobs=2).outputs
    assert engine.stats().failed_requests == 1


@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("place", [1, 3, 5])
def test_bad_logits_inside_a_prompt_that_is_scored_fail_the_request(place: int, max_tokens: int) -> None:
    """A score that is no number must not be handed out as one."""
    engine = poisoned_engine(9, place, max_num_batched_tokens=4)
    engine.submit(request("bad", [9, 1, 2, 3, 4], max_tokens=max_tokens, prompt_logprobs=1))
    engine.submit(request("good", [3, 1, 2, 3, 4], max_tokens=max_tokens, prompt_logprobs=1))
    outputs = finish_all(engine)
    assert isinstance(outputs["bad"].error, StepError)
    assert outputs["good"].error is None
    assert outputs["good"].prompt_logprobs == alone([3, 1, 2, 3, 4], max_tokens=0, prompt_logprobs=1).prompt_logprobs


def test_logits_pushed_out_of_range_by_a_request_fail_that_request_only() -> None:
    engine = scripted_engine(lambda _: 7)
    # Every token is forbidden: all ids of the vocabulary stop it, and it may not stop yet.
    engine.submit(request("bad", [1], stop_token_ids=list(range(VOCAB)), min_tokens=2, max_tokens=3))
    engine.submit(request("good", [2], max_tokens=3))
    outputs = finish_all(engine)
    assert isinstance(outputs["bad"].error, StepError)
    assert outputs["good"].outputs[0].token_ids == [7] * 3


# Aborts


def busy_engine(**settings: Any) -> Engine:
    return scripted_engine(**{"num_blocks": 10, "block_size": 4, "max_num_batched_tokens": 8} | settings)


@pytest.mark.parametrize("where", ["queued", "in prefill", "decoding", "preempted"])
def test_an_abort_frees_everything_wherever_the_request_is(where: str) -> None:
    engine = busy_engine(max_num_seqs=1 if where == "queued" else 8)
    if where in ("queued", "preempted"):
        engine.submit(request("other", [2] * 3, max_tokens=30))
    prompt = [1] * (20 if where == "in prefill" else 3)
    engine.submit(request("a", prompt, max_tokens=15))
    for _ in range(100):
        if where == "queued" or (where == "in prefill" and engine.stats().computed_tokens == 8):
            break
        if where == "decoding" and engine.stats().generated_tokens == 4:
            break
        if where == "preempted" and engine.stats().preemptions:
            break
        if where == "preempted" and not engine.stats().num_waiting and engine.num_unfinished == 2:
            engine.submit(request("third", [3] * 9, max_tokens=25))  # to make room scarce
        engine.step()
        engine.check_integrity()
    victim = engine._states["a"].sequences[0]
    if where == "preempted":
        victim = next(iter(engine._scheduler.waiting))
    name = victim.request_id
    state = engine._states[name].sequences[0]
    assert (state.row == -1) == (where in ("queued", "preempted"))
    engine.abort(name)
    engine.check_integrity()
    output = next(output for output in engine.step() if output.request_id == name)
    assert (output.finished, output.outputs[0].finish_reason, output.error) == (True, "abort", None)
    if where == "decoding":
        assert len(output.outputs[0].token_ids) == 4
    for rest in list(engine._states):
        engine.abort(rest)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, engine.num_unfinished) == (0, 0, 0, 0)


def test_an_abort_of_all_choices_and_of_none() -> None:
    engine = scripted_engine(max_num_seqs=2)
    engine.submit(request("many", [1, 2], n=4, temperature=1.0))
    engine.step()
    engine.abort("nobody")
    engine.abort("many")
    engine.abort("many")
    (output,) = engine.step()
    assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 4
    engine.abort("many")
    assert engine.step() == []


def test_an_abort_after_the_end_changes_nothing() -> None:
    engine = scripted_engine()
    engine.submit(request("a", [1], max_tokens=1))
    (output,) = engine.step()
    engine.abort("a")
    assert output.outputs[0].finish_reason == "length"
    assert engine.step() == []


def test_an_aborted_stream_gives_back_what_it_held() -> None:
    tokenizer = small_tokenizer()
    half = tokenizer.encode("🎉", add_special_tokens=False)[:2]
    engine = scripted_engine(lambda context: half[(len(context) - 1) % 2], tokenizer=tokenizer)
    params = SamplingParams(temperature=0.0, stop="\ufffd", max_tokens=9)
    engine.submit(Request("a", [5], params, stream=True))
    engine.step()
    engine.abort("a")
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].stop_reason is None


def test_neighbours_of_an_aborted_request_are_not_touched() -> None:
    engine = busy_engine()
    for number in range(4):
        engine.submit(request(str(number), [number] * 4, max_tokens=10))
    for _ in range(3):
        engine.step()
    engine.abort("1")
    outputs = finish_all(engine)
    for number in (0, 2, 3):
        assert outputs[str(number)].outputs == alone([number] * 4, max_tokens=10).outputs


# Moments and counts


def test_moments_are_in_order_and_by_the_engines_clock() -> None:
    clock = FakeClock()
    engine = scripted_engine(clock=clock, max_num_seqs=1, max_num_batched_tokens=4)
    clock.advance(10)
    engine.submit(request("first", [1] * 6, max_tokens=3))
    clock.advance(1)
    engine.submit(request("second", [2] * 3, max_tokens=2))
    outputs = {}
    while engine.num_unfinished:
        clock.advance(1)
        outputs |= {output.request_id: output for output in engine.step()}
    first, second = outputs["first"].metrics, outputs["second"].metrics
    assert first is not None
    assert second is not None
    assert (first.arrival_time, first.first_scheduled_time, first.first_token_time, first.finished_time) == (
        10,
        12,
        13,
        15,
    )
    assert (second.arrival_time, second.first_scheduled_time, second.first_token_time, second.finished_time) == (
        11,
        16,
        16,
        17,
    )


def test_preemption_does_not_move_the_first_moments() -> None:
    clock = FakeClock()
    engine = scripted_engine(clock=clock, num_blocks=7, block_size=4)
    for number in range(4):
        engine.submit(request(str(number), [number] * 4, max_tokens=14))
    first_seen: dict[str, float] = {}
    outputs: dict[str, RequestOutput] = {}
    while engine.num_unfinished:
        clock.advance(1)
        news = engine.step()
        for name, state in engine._states.items():
            if state.first_token_time is not None:
                first_seen.setdefault(name, state.first_token_time)
        outputs |= {output.request_id: output for output in news}
    assert sum(output.metrics.num_preemptions for output in outputs.values() if output.metrics) > 0
    for name, output in outputs.items():
        assert output.metrics is not None
        times = [output.metrics.arrival_time, output.metrics.first_scheduled_time, output.metrics.first_token_time]
        assert times[2] == first_seen[name]
        assert times == sorted(times)  # type: ignore[type-var]
        assert output.metrics.finished_time is not None
        assert times[2] < output.metrics.finished_time
    assert engine.stats().preemptions == sum(o.metrics.num_preemptions for o in outputs.values() if o.metrics)


def test_the_first_token_of_a_request_is_that_of_its_first_choice() -> None:
    clock = FakeClock()
    engine = scripted_engine(clock=clock, max_num_seqs=1)
    engine.submit(request("a", [1], n=3, temperature=1.0, max_tokens=4))
    while engine.num_unfinished:
        clock.advance(1)
        outputs = engine.step()
    assert outputs[0].metrics is not None
    assert (outputs[0].metrics.first_scheduled_time, outputs[0].metrics.first_token_time) == (1, 1)
    assert outputs[0].metrics.finished_time == 12


def test_moments_that_never_came_are_none() -> None:
    engine = scripted_engine()
    engine.submit(request("a", [1]))
    engine.abort("a")
    (output,) = engine.step()
    assert output.metrics is not None
    assert (output.metrics.first_scheduled_time, output.metrics.first_token_time) == (None, None)


def test_counts_add_up() -> None:
    engine = scripted_engine(num_blocks=64, block_size=4)
    assert engine.stats().mean_batch_size == 0
    for number in range(3):
        engine.submit(request(str(number), [number] * 5, max_tokens=4))
    assert (engine.stats().num_waiting, engine.stats().prompt_tokens) == (3, 15)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.blocks_total) == (3, 0, 6, 64)
    finish_all(engine)
    stats = engine.stats()
    assert (stats.steps, stats.generated_tokens, stats.computed_tokens) == (4, 12, 15 + 9)
    assert stats.batched_sequences == 12
    assert stats.mean_batch_size == 3
    assert stats.preemptions == stats.failed_requests == 0


def test_batches_are_what_a_runner_is_promised() -> None:
    engine = scripted_engine(num_blocks=12, block_size=4, max_num_batched_tokens=9)
    runner = runner_of(engine)
    for number in range(6):
        engine.submit(request(str(number), [number] * (3 * number + 1), max_tokens=6, prompt_logprobs=0))
    finish_all(engine)
    for batch in runner.batches:
        lengths = np.diff(batch.cu_seqlens)
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == len(batch.ids) == len(batch.positions) == len(batch.slots)
        assert (lengths > 0).all()
        assert (np.diff(batch.rows) > 0).all()
        assert len(np.unique(batch.slots)) == len(batch.slots)
        for s, length in enumerate(lengths):
            begin, end = batch.cu_seqlens[s], batch.cu_seqlens[s + 1]
            context = int(batch.context_lens[s])
            assert batch.positions[begin:end].tolist() == list(range(context - length, context))
            blocks = batch.block_table[s, batch.positions[begin:end] // 4]
            assert batch.slots[begin:end].tolist() == (blocks * 4 + batch.positions[begin:end] % 4).tolist()
        types = [batch.ids.dtype, batch.positions.dtype, batch.slots.dtype, batch.rows.dtype]
        assert types == [np.int64] * 4
        assert [batch.cu_seqlens.dtype, batch.context_lens.dtype, batch.block_table.dtype] == [np.int32] * 3


def test_an_output_that_cannot_be_made_fails_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted_engine()
    build = engine._outputs.build

    def faulty(state: Any, now: float) -> Any:
        if state.request.request_id.startswith("bad"):
            raise ZeroDivisionError
        return build(state, now)

    monkeypatch.setattr(engine._outputs, "build", faulty)
    engine.submit(request("bad", [1], max_tokens=2))
    engine.submit(Request("bad stream", [2], SamplingParams(temperature=0, max_tokens=5), stream=True))
    engine.submit(request("good", [3], max_tokens=2))
    outputs = finish_all(engine)
    assert isinstance(outputs["bad"].error, StepError)
    assert isinstance(outputs["bad stream"].error, StepError)
    assert outputs["good"].error is None
    assert len(outputs["good"].outputs[0].token_ids) == 2


def test_a_stream_without_a_tokenizer_has_news_of_every_token() -> None:
    engine = scripted_engine()
    engine.submit(Request("a", [1], SamplingParams(temperature=0, max_tokens=5), stream=True))
    lengths = []
    while engine.num_unfinished:
        lengths += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert lengths == [1, 1, 1, 1, 1]
