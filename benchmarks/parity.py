"""Is greedy output the same as transformers', request by request, however the requests are batched?

    python -m benchmarks.parity [--model SOURCE] [--only NAME]

A first difference is allowed only where the two largest logits differ by less than 1e-4. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

from benchmarks.reference import Reference
from benchmarks.workload import Job, mixed
from packhorse import LLM, SamplingParams

TIE = 1e-4

# The longest request has 522 tokens: 40 blocks of 16 hold it and little beside it, so that sequences are preempted.
VARIANTS: dict[str, dict[str, Any]] = {
    "token budget 512": {"max_num_batched_tokens": 512},
    "token budget 64": {"max_num_batched_tokens": 64},
    "token budget 16": {"max_num_batched_tokens": 16},
    "small cache": {"num_blocks": 40},
    "another order": {"shuffle": True},
}


def run(llm: LLM, jobs: list[Job]) -> list[list[int]]:
    """Output ids of each job, in order."""
    params = [SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True) for job in jobs]
    return [output.outputs[0].token_ids for output in llm.generate([job.prompt for job in jobs], params)]


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    """Index of the first id that differs (or is missing); None when there is none."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def compare(name: str, reference: Reference, jobs: list[Job], ours: list[list[int]], theirs: list[list[int]]) -> bool:
    """Print what differs; whether every difference is a tie."""
    ties = wrong = 0
    for number, (job, mine, other) in enumerate(zip(jobs, ours, theirs, strict=True)):
        at = first_difference(mine, other)
        if at is None:
            continue
        gap = reference.top_two_gap(job.prompt + other[:at])
        ties, wrong = ties + (gap < TIE), wrong + (gap >= TIE)
        print(f"  request {number}: differs from output token {at} on, where the top two logits are {gap:.2e} apart")
    same = len(jobs) - ties - wrong
    print(f"{name}: {same} of {len(jobs)} identical, {ties} differ after a tie below {TIE:g}, {wrong} differ otherwise")
    return wrong == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", choices=list(VARIANTS))
    arguments = parser.parse_args()
    jobs = mixed()
    reference = Reference(arguments.model)
    theirs = reference.answers(jobs)
    ok = True
    for name in [arguments.only] if arguments.only else VARIANTS:
        settings = dict(VARIANTS[name])
        order = list(range(len(jobs)))
        if settings.pop("shuffle", False):
            random.Random(1).shuffle(order)
        llm = LLM(arguments.model, **({"num_blocks": 4096} | settings))
        ours = dict(zip(order, run(llm, [jobs[i] for i in order]), strict=True))
        stats = llm.engine.stats()
        label = f"{name} ({stats.steps} steps, {stats.preemptions} preemptions)"
        if name == "small cache" and not stats.preemptions:
            sys.exit("The small cache preempted nothing, so it shows nothing: make it smaller.")
        ok &= compare(label, reference, jobs, [ours[i] for i in range(len(jobs))], theirs)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
