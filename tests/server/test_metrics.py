"""/metrics: names that dashboards know, all of them at zero load, and values that are true."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from tests.jobs.scripted import byte_tokenizer, cheap
from tests.support.engines import scripted_engine
from tests.support.servers import ScriptedServer, connect, metric_of, until

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_tokens_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "aborted_tokens": "counter",
    "request_success": "counter",
    "requests_rejected": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "event_loop_lag_seconds": "histogram",
}


def serving(**settings: Any) -> ScriptedServer:
    tokenizer = byte_tokenizer()
    engine = scripted_engine(
        cheap(tokenizer.vocab_size),
        tokenizer=tokenizer,
        num_blocks=512,
        clock=time.monotonic,
        **settings,  # type: ignore[arg-type]
    )
    return ScriptedServer(engine, tokenizer)


def scrape(server: ScriptedServer) -> dict[str, Any]:
    """Families by their name without the prefix."""
    text = httpx2.get(f"{server.url}/metrics").text
    return {family.name.removeprefix("packhorse:"): family for family in text_string_to_metric_families(text)}


def values(family: Any, suffix: str = "") -> dict[str, float]:
    """By the labels beside the model's name."""
    name = family.name + suffix
    found = [sample for sample in family.samples if sample.name == name]
    return {
        ",".join(value for label, value in sample.labels.items() if label != "model_name"): sample.value
        for sample in found
    }


def test_everything_is_there_before_anything_was_asked() -> None:
    with serving() as server:
        families = scrape(server)
    for name, kind in NAMES.items():
        assert families[name].type == kind, name
        assert families[name].documentation
        assert families[name].samples
    assert values(families["request_success"], "_total") == dict.fromkeys(("stop", "length", "abort", "error"), 0)
    rejected = values(families["requests_rejected"], "_total")
    assert {"queue_full", "draining", "not_ready", "invalid_request", "invalid_api_key"} <= rejected.keys()
    assert set(rejected.values()) == {0}


def test_counts_after_a_scenario_computed_by_hand() -> None:
    with serving() as server:
        url = f"{server.url}/v1/completions"
        body = {"temperature": 0, "max_tokens": 4}
        for prompt in ("abcdef", "abcdef", "a" * 40, "a" * 40):
            assert httpx2.post(url, json={"prompt": prompt} | body).status_code == 200
        assert httpx2.post(url, json={"prompt": "a"} | body | {"n": 0}).status_code == 400
        assert httpx2.post(url, json={"prompt": ["a", "b"]} | body | {"model": "no"}).status_code == 404
        families = scrape(server)
    total = {name: values(families[name], "_total").get("") for name in NAMES if NAMES[name] == "counter"}
    assert (total["prompt_tokens"], total["generation_tokens"], total["aborted_tokens"]) == (92, 16, 0)
    assert (total["prefix_cache_queries"], total["prefix_cache_hits"]) == (92, 32)
    assert values(families["request_success"], "_total")["length"] == 4
    assert values(families["requests_rejected"], "_total")["invalid_request"] == 2
    assert values(families["e2e_request_latency_seconds"], "_count") == {"": 4}
    assert values(families["request_prompt_tokens"], "_sum") == {"": 92}
    assert values(families["request_generation_tokens"], "_sum") == {"": 16}
    assert values(families["inter_token_latency_seconds"], "_count") == {"": 12}
    assert values(families["iteration_tokens_total"], "_sum") == {"": 92 - 32 + 12}


def test_buckets_are_cumulative_and_fit_milliseconds_and_minutes() -> None:
    with serving() as server:
        httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 9})
        family = scrape(server)["time_to_first_token_seconds"]
    buckets = values(family, "_bucket")
    edges = [float(edge) for edge in buckets]
    assert edges == sorted(edges)
    assert min(edges) <= 0.001
    assert any(60 <= edge <= 600 for edge in edges)
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets["+Inf"] == 1


def test_gauges_show_what_is_going_on_and_aborted_tokens_are_counted_apart() -> None:
    with serving(max_num_seqs=1) as server:
        body = {"prompt": "abc", "max_tokens": 4000, "ignore_eos": True}
        first, second = (connect(server.port, body) for _ in range(2))
        until(lambda: metric_of(server.url, "num_requests_waiting") == 1)
        assert metric_of(server.url, "num_requests_running") == 1
        assert metric_of(server.url, "num_tokens_waiting") >= 3
        assert 0 < metric_of(server.url, "kv_cache_usage_perc") <= 1
        first.close()
        second.close()
        until(lambda: metric_of(server.url, 'request_success_total{finished_reason="abort"') == 2)
        assert metric_of(server.url, "aborted_tokens_total") == metric_of(server.url, "generation_tokens_total") > 0
        assert metric_of(server.url, "kv_cache_usage_perc") == 0


def test_openmetrics_is_given_to_who_asks_for_it() -> None:
    with serving() as server:
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        response = httpx2.get(f"{server.url}/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_a_scrape_under_load_is_consistent() -> None:
    with serving() as server, ThreadPoolExecutor(8) as pool:
        body = {"prompt": "abc", "max_tokens": 30}
        asked = [pool.submit(httpx2.post, f"{server.url}/v1/completions", json=body) for _ in range(40)]
        while not all(one.done() for one in asked):
            families = scrape(server)
            ended = sum(values(families["request_success"], "_total").values())
            assert values(families["e2e_request_latency_seconds"], "_count")[""] == ended
        assert all(one.result().status_code == 200 for one in asked)
        assert values(scrape(server)["request_success"], "_total")["length"] == 40
