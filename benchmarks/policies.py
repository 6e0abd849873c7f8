"""Static, dynamic and continuous batching on one engine, with one workload, at equal concurrency.

    python -m benchmarks.policies [--requests 128] [--rounds 3] [--padded] [--plot FILE] [--json FILE]

Offline: all requests are there at once. Open: they arrive at random moments, whatever the engine does, at 70 % of what
continuous batching can serve offline. --padded also runs transformers `generate` on left-padded batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import Result, at_once, drive, long_tailed, poisson, quantiles
from packhorse import LLM
from packhorse.engine.request import Request

POLICIES = ("static", "dynamic", "continuous")
BATCH = 16
SHORT = 48
"""Requests of at most this many tokens, prompt and output together, count as short."""


def engine_settings(policy: str) -> dict[str, Any]:
    """Equal concurrency: dynamic may run a batch of a quarter of the size in each of its four buckets."""
    size = BATCH // 4 if policy == "dynamic" else BATCH
    return {"policy": policy, "batch_size": size, "max_num_seqs": BATCH, "num_blocks": 1024, "max_wait_ms": 200.0}


def figures(result: Result, short: set[str]) -> dict[str, float]:
    """One row of the table."""
    row = {"tok_per_s": result.useful_tokens_per_second, "mean_batch": result.stats.mean_batch_size}
    gaps = result.stats.inter_token_latency
    for name, (p50, p95, p99) in {
        "ttft": quantiles(result.times_to_first_token()),
        "itl": (gaps.quantile(0.5), gaps.quantile(0.95), gaps.quantile(0.99)),
        "latency": quantiles(result.latencies()),
        "short_latency": quantiles(result.latencies(short)),
    }.items():
        row |= {f"{name}_p50": p50, f"{name}_p95": p95, f"{name}_p99": p99}
    return row


def padded(model_name: str, requests: list[Request]) -> float:
    """Useful tokens a second of transformers `generate` on left-padded batches of BATCH, in order of arrival."""
    import torch
    from transformers import GenerationConfig

    from benchmarks.reference import Reference

    model = Reference(model_name).model
    start = time.perf_counter()
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        width = max(len(r.prompt_token_ids) for r in batch)
        longest = max(r.params.max_tokens or 0 for r in batch)
        ids = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + list(r.prompt_token_ids) for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in batch])
        settings = GenerationConfig(do_sample=False, max_new_tokens=longest, pad_token_id=0)
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, generation_config=settings)
    return sum(r.params.max_tokens or 0 for r in requests) / (time.perf_counter() - start)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    """A table in Markdown; times in seconds."""
    print(f"\n{title}\n")
    print(
        "| policy | useful tok/s | mean batch | TTFT p50 / p95 / p99 | ITL p50 / p95 / p99 | latency p50 / p95 / p99 "
        "| short requests' latency p95 |"
    )
    print("|---|---|---|---|---|---|---|")
    for policy, row in table.items():
        times = [
            " / ".join(f"{row[f'{name}_{q}']:.{digits}f}" for q in ("p50", "p95", "p99"))
            for name, digits in (("ttft", 2), ("itl", 3), ("latency", 1))
        ]
        print(
            f"| {policy} | {row['tok_per_s']:.0f} | {row['mean_batch']:.1f} | {' | '.join(times)} "
            f"| {row['short_latency_p95']:.2f} |"
        )


def plot(file: Path, offline: dict[str, dict[str, float]], open_loop: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    panels = (
        ("useful tokens a second\n(all there at once)", offline, "tok_per_s"),
        ("p95 time to first token, s\n(open arrivals)", open_loop, "ttft_p95"),
        ("p95 latency of short requests, s\n(open arrivals)", open_loop, "short_latency_p95"),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 3), layout="constrained")
    for axis, (title, table, column) in zip(axes, panels, strict=True):
        bars = axis.bar(list(table), [row[column] for row in table.values()], color=["#999999", "#7fa7d6", "#2b6cb0"])
        axis.bar_label(bars, fmt="%.3g")
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--padded", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    requests = long_tailed(arguments.requests)
    short = {r.request_id for r in requests if len(r.prompt_token_ids) + (r.params.max_tokens or 0) <= SHORT}
    engines = {policy: LLM(arguments.model, **engine_settings(policy)).engine for policy in POLICIES}
    for engine in engines.values():
        drive(engine, at_once(long_tailed(4, seed=9)))
    rows: dict[str, dict[str, list[dict[str, float]]]] = {"offline": {}, "open": {}}
    rate = 0.0
    for mode, table in rows.items():
        for _ in range(arguments.rounds):
            for policy, engine in engines.items():
                arrivals = at_once(requests) if mode == "offline" else poisson(requests, rate)
                result = drive(engine, arrivals)
                table.setdefault(policy, []).append(figures(result, short))
        if mode == "offline":
            output = sum(r.params.max_tokens or 0 for r in requests)
            rate = 0.7 * medians(table["continuous"])["tok_per_s"] / (output / len(requests))
    offline, open_loop = ({policy: medians(runs) for policy, runs in rows[mode].items()} for mode in rows)
    show(f"All {len(requests)} requests at once, {BATCH} sequences at most", offline)
    show(f"Open arrivals, {rate:.2f} requests a second, {BATCH} sequences at most", open_loop)
    for words, table, better, worse, column in (
        ("continuous / static, useful tok/s, offline", offline, "continuous", "static", "tok_per_s"),
        ("dynamic / static, useful tok/s, offline", offline, "dynamic", "static", "tok_per_s"),
        ("static / continuous, p95 TTFT, open", open_loop, "static", "continuous", "ttft_p95"),
        ("static / dynamic, p95 latency of short requests, open", open_loop, "static", "dynamic", "short_latency_p95"),
    ):
        print(f"{words}: {table[better][column] / table[worse][column]:.2f}x")
    if arguments.padded:
        print(f"transformers generate, padded batches of {BATCH}: {padded(arguments.model, requests):.0f} useful tok/s")
    if arguments.plot:
        plot(arguments.plot, offline, open_loop)
    if arguments.json:
        arguments.json.write_text(json.dumps({"offline": offline, "open": open_loop}, indent=1))


if __name__ == "__main__":
    main()
