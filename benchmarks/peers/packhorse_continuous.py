"""Packhorse, continuous batching, fp32."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.parity import run
from benchmarks.peers.measure import measure
from benchmarks.workload import Job
from packhorse import LLM


def load() -> Callable[[list[Job]], int]:
    llm = LLM(sys.argv[1], max_num_seqs=64, max_num_batched_tokens=512, num_blocks=4096)
    return lambda jobs: sum(map(len, run(llm, jobs)))


if __name__ == "__main__":
    measure("packhorse", load)
