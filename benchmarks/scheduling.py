"""What a step costs beside the model: planning, preparing, sampling, bookkeeping, at 256 running sequences.

    python -m benchmarks.scheduling [--running N] [--steps N] [--waiting N ...] [--policies P ...]

The runner gives the same logits over a small vocabulary in no time. Nobody finishes while it is measured, so every
step decodes one token of each running sequence, with so many others waiting. Exits 1 above the limit, or when a long
queue makes steps slower.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import numpy as np

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.runner.base import Float32, StepBatch

LIMIT_MS = 1.0
FLAT = 1.4
"""How many times slower than with the best length of queue the median step may be."""

ROUNDS = 5
VOCAB = 32
PROMPT = 32


class ConstantRunner:
    """Token 1 for everybody."""

    vocab_size = VOCAB
    block_size = 16

    def __init__(self, num_blocks: int, most_rows: int) -> None:
        self.num_blocks = num_blocks
        self._logits: Float32 = np.zeros((most_rows, VOCAB), dtype=np.float32)
        self._logits[:, 1] = 1.0

    def run(self, batch: StepBatch) -> Float32:
        return self._logits[: len(batch.rows)]


def loaded_engine(running: int, waiting: int, steps: int, policy: str) -> Engine:
    """`running` sequences that decode for `steps` steps and more, and `waiting` others.

    Their prompts differ in length, so that in every step one in sixteen fills a block, as in real traffic.
    """
    length = 2 * PROMPT + steps
    runner = ConstantRunner(running * (-(-length // 16) + 1), running * 2 * PROMPT)
    config = EngineConfig(
        policy=policy,
        max_num_seqs=running,
        batch_size=running,
        max_num_batched_tokens=running * 2 * PROMPT,
        max_model_len=length,
        length_buckets=(),
    )
    engine = Engine(runner, config, context_length=length)
    params = SamplingParams(temperature=0.0, max_tokens=length)
    rng = np.random.default_rng(0)
    for number in range(running + waiting):
        prompt = rng.integers(0, VOCAB, PROMPT + number % 16).tolist()
        engine.submit(Request(str(number), prompt, params))
    engine.step()
    stats = engine.stats()
    if (stats.num_running, stats.num_waiting) != (running, waiting):
        raise RuntimeError(f"{stats.num_running} run and {stats.num_waiting} wait, not {running} and {waiting}")
    return engine


def step_ms(engine: Engine, steps: int) -> list[float]:
    """Milliseconds of each step."""
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        taken.append((time.perf_counter() - begin) * 1e3)
    return taken


def measure(policy: str, running: int, queues: list[int], steps: int) -> dict[int, list[float]]:
    """For each length of queue the milliseconds of its steps in the best of five rounds.

    The rounds go around the queues, so that what else the machine does meets all alike.
    """
    engines = {waiting: loaded_engine(running, waiting, ROUNDS * steps + 40, policy) for waiting in queues}
    gc.collect()
    gc.freeze()
    rounds: dict[int, list[list[float]]] = {waiting: [] for waiting in queues}
    for _ in range(ROUNDS):
        for waiting, engine in engines.items():
            step_ms(engine, 4)
            rounds[waiting].append(step_ms(engine, steps))
    gc.unfreeze()
    return {waiting: min(taken, key=statistics.median) for waiting, taken in rounds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1_000, 100_000])
    parser.add_argument("--policies", nargs="+", default=["continuous", "dynamic", "static"])
    options = parser.parse_args()
    good = True
    print(f"milliseconds of a step with {options.running} running sequences, without the model")
    print(f"{'policy':12} {'waiting':>8} {'median':>8} {'mean':>8} {'p95':>8}")
    for policy in options.policies:
        found = measure(policy, options.running, options.waiting, options.steps)
        least = min(statistics.median(taken) for taken in found.values())
        for waiting, taken in found.items():
            median, mean, p95 = statistics.median(taken), statistics.mean(taken), float(np.quantile(taken, 0.95))
            flaws = ["above the limit"] * (median > LIMIT_MS) + ["not flat"] * (median > FLAT * least)
            good = good and not flaws
            print(f"{policy:12} {waiting:8} {median:8.3f} {mean:8.3f} {p95:8.3f}  {', '.join(flaws)}".rstrip())
    print(f"limit: {LIMIT_MS} ms, and flat with the length of the queue: {'kept' if good else 'not kept'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
