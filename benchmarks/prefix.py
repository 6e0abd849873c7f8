"""64 requests that share their first 1,000 tokens, with and without the prefix cache.

python -m benchmarks.prefix [--rounds 3]
"""

from __future__ import annotations

import argparse
import random
import statistics

from benchmarks.serving import at_once, drive, long_tailed, quantiles
from packhorse import LLM
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams

REQUESTS, SHARED, OWN, OUTPUT = 64, 1000, 16, 8


def requests(seed: int) -> list[Request]:
    """A prefix of its own for each seed, so that rounds share nothing."""
    rng = random.Random(seed)
    prefix = [rng.randrange(100, 49_000) for _ in range(SHARED)]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    return [Request(str(i), prefix + [rng.randrange(100, 49_000) for _ in range(OWN)], params) for i in range(REQUESTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    settings = {"max_num_seqs": 64, "num_blocks": 6000}
    engines = {
        name: LLM(arguments.model, enable_prefix_caching=on, **settings).engine
        for name, on in (("without", False), ("with", True))
    }
    prefilled: dict[str, list[int]] = {name: [] for name in engines}
    p50s: dict[str, list[float]] = {name: [] for name in engines}
    answers = {}
    for engine in engines.values():
        drive(engine, at_once(long_tailed(4, seed=9)))
    for round_number in range(arguments.rounds):
        for name, engine in engines.items():
            result = drive(engine, at_once(requests(round_number)))
            # Of the output all but the last token goes through the model too.
            prefilled[name].append(result.stats.computed_tokens - REQUESTS * (OUTPUT - 1))
            p50s[name].append(quantiles(result.times_to_first_token())[0])
            answers[name, round_number] = {i: o.outputs[0].token_ids for i, o in result.outputs.items()}
        same = answers["with", round_number] == answers["without", round_number]
        print(f"round {round_number + 1}: answers {'identical' if same else 'DIFFER'}")
    counts = {name: statistics.median(values) for name, values in prefilled.items()}
    times = {name: statistics.median(values) for name, values in p50s.items()}
    for name in engines:
        print(f"{name} prefix cache: {counts[name]:,.0f} prompt tokens computed, TTFT p50 {times[name]:.2f} s")
    print(f"fewer prompt tokens computed: {100 * (1 - counts['with'] / counts['without']):.1f} %")
    print(f"TTFT p50: {times['without'] / times['with']:.1f}x shorter")


if __name__ == "__main__":
    main()
