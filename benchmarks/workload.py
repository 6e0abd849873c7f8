"""The common workload: 64 requests of log-normal lengths, seeded; greedy, end of sequence ignored.

5,859 prompt tokens and 4,646 output tokens in all. Token ids are random, so nothing can be cached between requests.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """One request: token ids of the prompt, and how many tokens to generate."""

    prompt: list[int]
    output_len: int


def mixed(count: int = 64, seed: int = 0, vocab_size: int = 49_000) -> list[Job]:
    """Prompts of 8 to 512 tokens, outputs of 4 to 256."""
    rng = random.Random(seed)
    jobs = []
    for _ in range(count):
        prompt_len = _length(rng, median_log=4.3, least=8, most=512)
        output_len = _length(rng, median_log=4.0, least=4, most=256)
        jobs.append(Job([rng.randrange(100, vocab_size) for _ in range(prompt_len)], output_len))
    return jobs


def _length(rng: random.Random, *, median_log: float, least: int, most: int) -> int:
    return int(min(most, max(least, rng.lognormvariate(median_log, 0.8))))
