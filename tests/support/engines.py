"""Engines over a scripted runner."""

from __future__ import annotations

from typing import Any

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.engine.outputs import RequestOutput, joined
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.text.tokenizer import Tokenizer
from tests.support.scripted import FakeClock, NextToken, ScriptedRunner, hashed

VOCAB = 97


def scripted_engine(
    following: NextToken | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int = VOCAB,
    num_blocks: int = 64,
    block_size: int = 16,
    eos: tuple[int, ...] = (),
    context_length: int = 4096,
    clock: FakeClock | None = None,
    runner_class: type[ScriptedRunner] = ScriptedRunner,
    **settings: Any,
) -> Engine:
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    runner = runner_class(
        following or hashed(vocab_size), vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size
    )
    return Engine(
        runner,
        EngineConfig(**settings),
        tokenizer=tokenizer,
        eos_token_ids=eos,
        context_length=context_length,
        clock=clock or FakeClock(),
    )


def runner_of(engine: Engine) -> ScriptedRunner:
    """The runner of a scripted engine; it keeps its batches from here on."""
    runner = engine._runner._runner  # under the one that splits steps
    assert isinstance(runner, ScriptedRunner)
    runner.keep_batches = True
    return runner


def request(request_id: str, prompt: list[int], **params: Any) -> Request:
    """A greedy request unless told otherwise."""
    return Request(request_id, prompt, SamplingParams(**{"temperature": 0.0} | params))


def finish_all(engine: Engine, *, max_steps: int = 100_000) -> dict[str, RequestOutput]:
    """Step until nothing is left, checking integrity after each; every request's news together by its id."""
    news: dict[str, list[RequestOutput]] = {}
    for _ in range(max_steps):
        if not engine.num_unfinished:
            return {request_id: joined(some) for request_id, some in news.items()}
        for output in engine.step():
            news.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    raise AssertionError(f"{engine.num_unfinished} requests did not finish in {max_steps} steps")
