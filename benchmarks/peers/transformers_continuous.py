"""transformers' own continuous batching, fp32, with its sdpa attention."""

from __future__ import annotations

import sys
from collections.abc import Callable

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.peers.measure import measure
from benchmarks.reference import Reference
from benchmarks.workload import Job

POLL_SECONDS = 5


def load() -> Callable[[list[Job]], int]:
    model = Reference(sys.argv[1]).model
    model.set_attn_implementation("sdpa")
    return lambda jobs: run(model, jobs)


def run(model: object, jobs: list[Job]) -> int:
    manager = model.init_continuous_batching(  # type: ignore[attr-defined]
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=256, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=32, num_blocks=1024, max_batch_tokens=256),
    )
    manager.start()
    for job in jobs:
        manager.add_request(job.prompt, max_new_tokens=job.output_len, eos_token_id=-1)
    done = tokens = 0
    while done < len(jobs):
        result = manager.get_result(timeout=POLL_SECONDS)
        if result is not None:
            done, tokens = done + 1, tokens + len(result.generated_tokens)
    manager.stop(block=True)
    return tokens


if __name__ == "__main__":
    measure("transformers continuous batching", load)
