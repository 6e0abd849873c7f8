"""What a step costs the host beside the model, by what its sequences ask for, at 256 running ones.

    python -m benchmarks.streaming [--running N] [--steps N] [--model SOURCE]

The model's own tokenizer, and a runner that says ordinary tokens in no time. Counted is what the engine's thread does
in a step but for the runner: planning, sampling, text, stop strings, news. Exits 1 when streams with stop strings cost
more than the limit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any

import numpy as np

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.loading import pack_folder
from packhorse.pack.manifest import load_manifest
from packhorse.runner.base import Float32, StepBatch
from packhorse.text.tokenizer import Tokenizer

LIMIT_MS = 1.5
LIMITED = "stream, stop strings"
VOCAB = 1024
PROMPT = 32
ROUNDS = 5

ASKED: dict[str, tuple[bool, dict[str, Any]]] = {
    "nothing": (False, {}),
    "stop strings": (False, {"stop": ["END", "\n\n", "User:"]}),
    "stream": (True, {}),
    LIMITED: (True, {"stop": ["END", "\n\n", "User:"]}),
    "log-probabilities": (False, {"logprobs": 1}),
}


class TalkingRunner:
    """The same token for everybody, another one at each step. seconds: spent here."""

    vocab_size = VOCAB
    block_size = 16

    def __init__(self, num_blocks: int, most_rows: int) -> None:
        self.num_blocks = num_blocks
        self.seconds = 0.0
        self._said = np.random.default_rng(1).integers(300, VOCAB, 97)
        self._logits: Float32 = np.zeros((most_rows, VOCAB), dtype=np.float32)
        self._steps = 0

    def run(self, batch: StepBatch) -> Float32:
        begin = time.perf_counter()
        logits = self._logits[: len(batch.rows)]
        logits[:] = 0.0
        logits[:, self._said[self._steps % len(self._said)]] = 1.0
        self._steps += 1
        self.seconds += time.perf_counter() - begin
        return logits


def loaded(tokenizer: Tokenizer, running: int, steps: int, stream: bool, params: dict[str, Any]) -> Engine:
    """An engine in which `running` sequences decode for `steps` steps and more."""
    length = PROMPT + steps + 1
    runner = TalkingRunner(running * (-(-length // 16) + 1), running)
    config = EngineConfig(max_num_seqs=running, max_num_batched_tokens=running * PROMPT, max_model_len=length)
    engine = Engine(runner, config, tokenizer=tokenizer, context_length=length)
    rng = np.random.default_rng(0)
    for number in range(running):
        prompt = rng.integers(0, VOCAB, PROMPT).tolist()
        asked = SamplingParams(temperature=0, max_tokens=length, **params)
        engine.submit(Request(str(number), prompt, asked, stream=stream))
    engine.step()
    return engine


def step_ms(engine: Engine, steps: int) -> float:
    """The median, less what the runner took."""
    runner: Any = engine._runner._runner  # under the one that splits steps
    taken = []
    for _ in range(steps):
        runner.seconds = 0.0
        begin = time.perf_counter()
        engine.step()
        taken.append((time.perf_counter() - begin - runner.seconds) * 1e3)
    return statistics.median(taken)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    folder = pack_folder(options.model)
    tokenizer = Tokenizer.from_pack(folder, load_manifest(folder))
    steps = ROUNDS * (options.steps + 5)
    engines = {name: loaded(tokenizer, options.running, steps, *asked) for name, asked in ASKED.items()}
    gc.collect()
    gc.freeze()
    rounds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(ROUNDS):  # in turn, so that what else the machine does meets all alike
        for name, engine in engines.items():
            step_ms(engine, 5)
            rounds[name].append(step_ms(engine, options.steps))
    print(f"milliseconds of a step with {options.running} sequences, without the model")
    print(f"{'asked for':24} {'best round':>10} {'median':>8}")
    for name, taken in rounds.items():
        print(f"{name:24} {min(taken):10.2f} {statistics.median(taken):8.2f}")
    kept = statistics.median(rounds[LIMITED]) <= LIMIT_MS
    print(f"limit: {LIMIT_MS} ms for {LIMITED!r}: {'kept' if kept else 'not kept'}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
