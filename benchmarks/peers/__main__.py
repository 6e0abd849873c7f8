"""Run Packhorse and its peers in turn on the mixed workload and print tokens per second and ratios.

    python -m benchmarks.peers [--rounds 3] [--only NAME] [--model SOURCE] [--json FILE]

Each run is a process of its own; rounds are interleaved, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

PEERS = {"packhorse": "packhorse_continuous", "transformers": "transformers_continuous"}


def run_once(module: str, model: str) -> dict[str, float]:
    """One process of one engine; its line of JSON. Raises CalledProcessError with what it printed."""
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", model]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{module} failed:\n{finished.stdout}\n{finished.stderr}")
    result: dict[str, float] = json.loads(finished.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(PEERS), action="append")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    names = arguments.only or list(PEERS)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for round_number in range(1, arguments.rounds + 1):
        for name in names:
            result = run_once(PEERS[name], arguments.model)
            results[name].append(result)
            print(f"round {round_number}: {name} {result['tokens_per_second']} tok/s", flush=True)
    medians = {name: statistics.median(r["tokens_per_second"] for r in runs) for name, runs in results.items()}
    print(f"\n{'engine':<14} {'tok/s':>8} {'ratio':>7} {'load s':>7} {'peak MiB':>9}   (medians of {arguments.rounds})")
    for name, runs in results.items():
        load, peak = (statistics.median(r[key] for r in runs) for key in ("load_seconds", "peak_mib"))
        ratio = medians[names[0]] / medians[name]
        print(f"{name:<14} {medians[name]:>8.1f} {ratio:>6.2f}x {load:>7.1f} {peak:>9.0f}")
    print(f"ratio: {names[0]}'s tokens per second over the engine's")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
