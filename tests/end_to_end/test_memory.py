"""A step that does not fit is made smaller; the process lives on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RUN_SHORT_OF_MEMORY = """
import resource, sys
import numpy as np, psutil
from packhorse import LLM, SamplingParams

llm = LLM(sys.argv[1], num_blocks=600, max_num_batched_tokens=8192)
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
(before,) = llm.generate("The sky is", greedy)
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 49_000, 1200).tolist() for _ in range(6)]
now = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (now + int(sys.argv[2]) * 2**20,) * 2)
served = llm.generate(prompts, greedy)
(after,) = llm.generate("The sky is", greedy)
llm.engine.check_integrity()
print(
    llm.engine._runner.halvings,
    sum(output.error is None for output in served),
    sorted({type(output.error).__name__ for output in served if output.error}),
    before.outputs[0].token_ids == after.outputs[0].token_ids,
)
"""


def run_with(pack: Path, mebibytes: int) -> list[str]:
    command = [sys.executable, "-c", RUN_SHORT_OF_MEMORY, str(pack), str(mebibytes)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return finished.stdout.strip().split(maxsplit=2)


def test_a_step_that_runs_out_of_memory_is_halved_and_everybody_is_served(pack: Path) -> None:
    halvings, served, rest = run_with(pack, 100)
    assert int(halvings) > 0
    assert (served, rest) == ("6", "[] True")


def test_requests_that_cannot_be_served_in_the_memory_there_is_say_so_and_the_engine_lives_on(pack: Path) -> None:
    _, served, rest = run_with(pack, 30)
    assert int(served) < 6
    assert rest == "['OutOfMemory'] True"
