"""What HTTP and streaming cost: tokens per second and time to first token beside the engine's own.

    python -m benchmarks.load.overhead [--rounds 3] [--model SOURCE]

Throughput: the mixed workload, all at once, through the engine in a process of its own, and through 64 streaming
clients of a server, in turn. Time to first token: one request after the other, through the asynchronous engine of this
process and through a server, in turn. The clients share the processors with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time

import uvloop

from benchmarks.load.client import ask
from benchmarks.load.server import Running, serving
from benchmarks.peers.__main__ import run_once
from benchmarks.workload import Job, mixed
from packhorse.config import EngineConfig
from packhorse.engine.async_engine import AsyncEngine
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.loading import load_model

LEAST_RATIO = 0.93
MOST_ADDED_MS = 5.0
SETTINGS = ["--max-num-seqs", "64", "--max-num-batched-tokens", "512", "--num-blocks", "4096"]
ALONE = 40
"""Requests for the time to first token, each way."""


async def throughput(server: Running, jobs: list[Job]) -> float:
    """Output tokens per second of the whole workload."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(ask(server.port, body(job)) for job in jobs))
    seconds = time.perf_counter() - begin
    if any(not answer.ended or answer.failed for answer in answers):
        raise SystemExit("a stream did not end well")
    expected = sum(job.output_len for job in jobs)
    if sum(answer.tokens for answer in answers) != expected:
        raise SystemExit("tokens are missing")
    return expected / seconds


async def first_tokens(server: Running, engine: AsyncEngine, rng: random.Random) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token, over HTTP and of the engine itself, of prompts that nobody has seen."""
    over_http, alone = [], []
    for number in range(ALONE):
        job = Job([rng.randrange(100, 49_000) for _ in range(64)], 4)
        answer = await ask(server.port, body(job))
        if answer.ttft is None:
            raise SystemExit("a stream had no text")
        over_http.append(answer.ttft * 1e3)
        begin = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
        stream = await engine.submit(Request(str(number), job.prompt, params, stream=True))
        await anext(stream)
        alone.append((time.perf_counter() - begin) * 1e3)
        async for _ in stream:
            pass
    return over_http, alone


def body(job: Job) -> dict[str, object]:
    return {"prompt": job.prompt, "max_tokens": job.output_len, "temperature": 0, "ignore_eos": True}


async def compare_first_tokens(model: str, server: Running) -> tuple[float, float]:
    """Medians in milliseconds."""
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, num_blocks=512, warmup_requests=2)
    async with AsyncEngine(load_model(model, config).engine) as engine:
        over_http, alone = await first_tokens(server, engine, random.Random(1))
    return statistics.median(over_http), statistics.median(alone)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    jobs = mixed()
    ours: list[float] = []
    engines: list[float] = []
    for number in range(1, options.rounds + 1):
        engines.append(run_once("packhorse_continuous", options.model)["tokens_per_second"])
        with serving(options.model, *SETTINGS, "--warmup-requests", "4") as server:
            ours.append(uvloop.run(throughput(server, jobs)))
        print(f"round {number}: engine {engines[-1]:.1f}, streamed over HTTP {ours[-1]:.1f} tok/s", flush=True)
    with serving(options.model, *SETTINGS) as server:
        over_http, alone = uvloop.run(compare_first_tokens(options.model, server))
    ratio, added = statistics.median(ours) / statistics.median(engines), over_http - alone
    print(f"throughput: {ratio:.3f} of the engine's (at least {LEAST_RATIO})")
    print(
        f"first token: {over_http:.1f} ms over HTTP, {alone:.1f} in the engine: {added:+.1f} (at most {MOST_ADDED_MS})"
    )
    return 0 if ratio >= LEAST_RATIO and added <= MOST_ADDED_MS else 1


if __name__ == "__main__":
    sys.exit(main())
