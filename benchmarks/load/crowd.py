"""A crowd of streaming clients that come faster than they can be served.

    python -m benchmarks.load.crowd [--clients 200] [--seconds 180] [--model SOURCE]

As many clients as told ask again and again, each a moment after it has its answer or its refusal. Every request that
is taken in must end, with its end marker or with an error event; what is refused is refused with 429, and the server
counts exactly as many as the clients saw; memory is flat; afterwards nothing runs, nothing waits, every block is free.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter

import uvloop

from benchmarks.load.client import Answer, ask
from benchmarks.load.server import Running, serving
from benchmarks.serving import quantiles

SETTINGS = ["--max-num-seqs", "64", "--max-waiting", "64", "--num-blocks", "2048"]
LONGEST_ANSWER_S = 120.0
MOST_GROWTH_MIB = 64.0
"""Of memory, from the first third of the time to its end."""


async def client(server: Running, number: int, until: float, answers: list[Answer]) -> None:
    rng = random.Random(number)
    while time.perf_counter() < until:
        prompt = [rng.randrange(100, 49_000) for _ in range(rng.randint(8, 128))]
        body = {"prompt": prompt, "max_tokens": rng.randint(4, 96), "temperature": rng.choice([0, 0.8])}
        body |= {"ignore_eos": True, "stop": ["THE END", "\n\n\n"]}
        answer = await asyncio.wait_for(ask(server.port, body), LONGEST_ANSWER_S)
        answers.append(answer)
        await asyncio.sleep(rng.random() if answer.status == 429 else 0.01)


async def watch_memory(server: Running, seen: list[float]) -> None:
    while True:
        await asyncio.sleep(1.0)
        seen.append(server.memory_mib())


async def crowd(server: Running, clients: int, seconds: float) -> tuple[list[Answer], list[float]]:
    answers: list[Answer] = []
    memory: list[float] = []
    watching = asyncio.ensure_future(watch_memory(server, memory))
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client(server, number, until, answers) for number in range(clients)))
    watching.cancel()
    return answers, memory


def flaws(server: Running, answers: list[Answer], memory: list[float]) -> list[str]:
    """What did not hold."""
    found = []
    statuses = Counter(answer.status for answer in answers)
    hanging = sum(answer.status == 200 and not answer.ended and not answer.failed for answer in answers)
    if hanging:
        found.append(f"{hanging} streams ended without an end")
    if set(statuses) - {200, 429}:
        found.append(f"statuses {dict(statuses)}")
    counted = server.metric('requests_rejected_total{reason="queue_full"}')
    if counted != statuses[429]:
        found.append(f"{statuses[429]} refusals seen, {counted:.0f} counted")
    left = {
        name: server.metric(name) for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    }
    if any(left.values()):
        found.append(f"left over: {left}")
    third = len(memory) // 3
    growth = statistics.median(memory[-10:]) - statistics.median(memory[third : third + 10])
    if growth > MOST_GROWTH_MIB:
        found.append(f"memory grew by {growth:.0f} MiB")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    with serving(options.model, *SETTINGS) as server:
        answers, memory = uvloop.run(crowd(server, options.clients, options.seconds))
        found = flaws(server, answers, memory)
    served = [answer for answer in answers if answer.status == 200]
    tokens = sum(answer.tokens for answer in served)
    p50, p95, p99 = quantiles([answer.ttft for answer in served if answer.ttft is not None])
    rate = tokens / options.seconds
    print(f"{options.clients} clients, {options.seconds:.0f} s: {len(served)} answered, {rate:.0f} tok/s")
    print(f"refused with 429: {sum(answer.status == 429 for answer in answers)}")
    print(f"error events: {sum(answer.failed for answer in served)}")
    print(f"first token: p50 {p50:.2f} s, p95 {p95:.2f} s, p99 {p99:.2f} s")
    begin, third, end = memory[0], memory[len(memory) // 3], memory[-1]
    print(f"memory: {begin:.0f} MiB at first, {third:.0f} after a third, {end:.0f} at the end")
    print("everything held" if not found else f"did not hold: {'; '.join(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
