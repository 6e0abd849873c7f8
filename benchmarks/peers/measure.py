"""What every peer's script does: load, warm up, run the workload once, print one line of JSON."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable

from benchmarks.workload import Job, mixed


def measure(name: str, load: Callable[[], Callable[[list[Job]], int]]) -> None:
    """`load()` returns a function that runs jobs and returns how many tokens it generated for them.

    Printed: output tokens a second, seconds, tokens, load seconds, peak resident memory in MiB.
    """
    begin = time.perf_counter()
    run = load()
    loaded = time.perf_counter()
    run(mixed(2, seed=1))
    start = time.perf_counter()
    jobs = mixed()
    tokens = run(jobs)
    seconds = time.perf_counter() - start
    expected = sum(job.output_len for job in jobs)
    if tokens != expected:
        raise SystemExit(f"{name} generated {tokens} tokens, {expected} were asked for")
    result = {
        "engine": name,
        "tokens_per_second": round(tokens / seconds, 1),
        "seconds": round(seconds, 2),
        "tokens": tokens,
        "load_seconds": round(loaded - begin, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(result))
