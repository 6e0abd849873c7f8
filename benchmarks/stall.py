"""How long streams stand still when a 2,000-token prompt arrives beside them.

    python -m benchmarks.stall [--rounds 3] [--streams 8]

Every token's gap is measured where a stream's reader would feel it. The usual step is the median before the prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from packhorse import LLM
from packhorse.engine.engine import Engine
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams

PROMPT = 2000


def stall(engine: Engine, streams: int, seed: int) -> tuple[float, float, float, float]:
    """Seconds of: the usual step, the longest and the 95th percentile while the prompt is computed, and its TTFT."""
    rng = random.Random(seed)
    engine.forget()
    endless = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    for number in range(streams):
        engine.submit(Request(f"stream {number}", [rng.randrange(100, 49_000) for _ in range(32)], endless))
    for _ in range(20):
        _timed(engine)
    # A short prompt first, from which the engine learns what a prefill token costs.
    once = SamplingParams(temperature=0, max_tokens=1)
    engine.submit(Request("short", [rng.randrange(100, 49_000) for _ in range(64)], once))
    for _ in range(10):
        _timed(engine)
    usual = statistics.median(_timed(engine)[0] for _ in range(20))
    engine.submit(Request("long", [rng.randrange(100, 49_000) for _ in range(PROMPT)], once))
    steps: list[float] = []
    finished = False
    while not finished:
        seconds, ids = _timed(engine)
        steps.append(seconds)
        finished = "long" in ids
    for number in range(streams):
        engine.abort(f"stream {number}")
    engine.step()
    return usual, max(steps), statistics.quantiles(steps, n=20)[-1] if len(steps) > 1 else steps[0], sum(steps)


def _timed(engine: Engine) -> tuple[float, set[str]]:
    begin = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - begin, {output.request_id for output in outputs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    for limit in (None, 2.0):
        engine = LLM(arguments.model, num_blocks=1024, max_decode_stall=limit).engine
        runs = [stall(engine, arguments.streams, seed) for seed in range(arguments.rounds)]
        usual, longest, p95, ttft = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"max_decode_stall {limit}: usual step {1000 * usual:.0f} ms; while the prompt is computed p95 "
            f"{1000 * p95:.0f} ms ({p95 / usual:.1f}x), longest {1000 * longest:.0f} ms ({longest / usual:.1f}x); "
            f"the prompt's first token after {ttft:.1f} s"
        )


if __name__ == "__main__":
    main()
