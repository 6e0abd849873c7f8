"""Drive an engine with requests that arrive at given moments, and collect what their users would have felt."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np

from packhorse.engine.engine import Engine
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it arrives, in seconds from the start."""

    at: float
    request: Request


@dataclass(frozen=True, slots=True)
class Result:
    """seconds: of the whole run. outputs: by request id. arrivals: by request id. stats: of the engine at the end."""

    seconds: float
    outputs: dict[str, RequestOutput]
    arrivals: dict[str, float]
    stats: EngineStats

    @property
    def useful_tokens_per_second(self) -> float:
        return sum(output.num_generated_tokens for output in self.outputs.values()) / self.seconds

    def times_to_first_token(self) -> list[float]:
        """Seconds from the moment a request was to arrive, not from when the busy engine took it in."""
        return [_moment(o, "first_token_time") - self.arrivals[i] for i, o in self.outputs.items()]

    def latencies(self, ids: set[str] | None = None) -> list[float]:
        """Seconds from the moment a request was to arrive to its last token; of all requests or only `ids`."""
        chosen = self.outputs.keys() if ids is None else ids
        return [_moment(self.outputs[i], "finished_time") - self.arrivals[i] for i in chosen]


def drive(engine: Engine, arrivals: list[Arrival]) -> Result:
    """Submit each request when its moment has come (open loop) and step until all are done.

    Begins with nothing cached and nothing counted.
    """
    engine.forget()
    outputs: dict[str, RequestOutput] = {}
    due = sorted(arrivals, key=lambda arrival: arrival.at)[::-1]
    start = time.monotonic()
    planned = {arrival.request.request_id: start + arrival.at for arrival in arrivals}
    while due or engine.num_unfinished:
        while due and start + due[-1].at <= time.monotonic():
            engine.submit(due.pop().request)
        engine.more_to_come = bool(due)
        for output in engine.step():
            if output.error is not None:
                raise output.error
            outputs[output.request_id] = output
        wake = min(start + due[-1].at if due else float("inf"), engine.wake_at())
        if engine.num_unfinished or due:
            time.sleep(min(max(0.0, wake - time.monotonic()), 1.0))
    return Result(time.monotonic() - start, outputs, planned, engine.stats())


def long_tailed(count: int, seed: int = 0, vocab_size: int = 49_000) -> list[Request]:
    """Prompts of 8 to 256 tokens, most of them short; outputs of 4 to 384, a few of them long; greedy."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        prompt_len = int(min(256, max(8, rng.lognormvariate(3.6, 0.8))))
        output_len = int(min(384, max(4, rng.lognormvariate(3.2, 1.1))))
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        requests.append(Request(str(number), [rng.randrange(100, vocab_size) for _ in range(prompt_len)], params))
    return requests


def at_once(requests: list[Request]) -> list[Arrival]:
    return [Arrival(0.0, request) for request in requests]


def poisson(requests: list[Request], per_second: float, seed: int = 1) -> list[Arrival]:
    """Independent arrivals at an average rate."""
    rng = random.Random(seed)
    moment, arrivals = 0.0, []
    for request in requests:
        moment += rng.expovariate(per_second)
        arrivals.append(Arrival(moment, request))
    return arrivals


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """p50, p95, p99."""
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99))
    return float(p50), float(p95), float(p99)


def _moment(output: RequestOutput, name: str) -> float:
    moment = getattr(output.metrics, name)
    if moment is None:
        raise RuntimeError(f"request {output.request_id} has no {name}")
    return float(moment)
