"""Sampled lines without a seed: the same job gives the same file, and every line its own random numbers."""

from __future__ import annotations

from typing import Any

from tests.jobs.scripted import Bench, StopAfter, byte_tokenizer, prompt, scripted_model


def sampled(text: str, **more: Any) -> dict[str, Any]:
    return prompt(text, temperature=30.0, max_tokens=12, ignore_eos=True) | more


def texts(bench: Bench) -> list[str]:
    return [c["text"] for r in bench.results() for c in r["response"]["body"]["choices"]]


def test_a_job_run_again_gives_the_same_bytes(bench: Bench) -> None:
    bench.write(*[sampled("same") for _ in range(6)])
    bench.run(wall=lambda: 5.0)
    first = bench.output.read_bytes()
    bench.run(restart=True, wall=lambda: 5.0)
    assert bench.output.read_bytes() == first


def test_a_job_that_was_stopped_and_resumed_gives_the_same_results(bench: Bench) -> None:
    bench.write(*[sampled(f"line {i}", max_tokens=10 + i) for i in range(30)])
    bench.run()
    whole = texts(bench)
    bench.run(restart=True, signals=StopAfter(15), window=4)
    assert bench.files.partial.exists()
    bench.run(window=7)
    assert texts(bench) == whole


def test_equal_lines_choices_and_prompts_differ(bench: Bench) -> None:
    bench.write(sampled("same"), sampled("same"), sampled("same", n=3), sampled(["same", "same"]))
    bench.run()
    assert len(set(texts(bench))) == 7


def test_a_line_in_an_other_job_differs_and_a_seed_of_its_own_holds(bench: Bench) -> None:
    bench.write(sampled("same"), sampled("same", seed=7))
    bench.run()
    own, seeded = texts(bench)
    bench.write(sampled("same"), sampled("same", seed=7), sampled("more"))
    bench.run(restart=True)
    assert texts(bench)[0] != own
    assert texts(bench)[1] == seeded


def test_a_jobs_seed_changes_what_is_sampled(bench: Bench) -> None:
    bench.write(sampled("same"), sampled("same", seed=7), prompt("greedy"))
    found = []
    for settings in ({}, {"seed": 1}, {"seed": 2}, {"seed": 1}):
        bench.run(restart=True, result_settings=settings)
        found.append(texts(bench))
    assert found[1] == found[3]
    assert len({tuple(one) for one in found}) == 3
    assert len({one[0] for one in found}) == 3
    assert {one[1] for one in found} == {found[0][1]}
    assert {one[2] for one in found} == {found[0][2]}


def test_lines_are_the_same_however_many_run_at_once(bench: Bench) -> None:
    bench.write(*[sampled(f"line {i}") for i in range(12)])
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 256
    bench.run(lambda: scripted_model(max_num_seqs=1))
    alone = texts(bench)
    bench.run(lambda: scripted_model(max_num_seqs=12), restart=True)
    assert texts(bench) == alone
