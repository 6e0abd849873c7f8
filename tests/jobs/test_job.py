"""A file of requests becomes a file of results: one for each line, whatever is on it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from packhorse.errors import ConfigError, JobError, StepError
from packhorse.jobs.inputs import other_kind
from packhorse.jobs.job import JobModel
from tests.jobs.scripted import Bench, batch, byte_tokenizer, line_of, never, prompt, scripted_model, spoken
from tests.support.engines import scripted_engine
from tests.support.scripted import FakeClock, ScriptedRunner


def test_lines_of_both_forms_and_endpoints_are_answered(bench: Bench) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    bench.write(
        batch("a", {"model": "scripted", "messages": messages, "max_tokens": 2}, url="/v1/chat/completions"),
        batch("b", {"prompt": "Hi", "max_tokens": 3}),
        {"messages": messages, "max_tokens": 4, "custom_id": "c"},
        {"prompt": "Hi", "id": 7},
        {"prompt": ["Hi", "you"], "n": 2, "max_tokens": 1},
    )
    report = bench.run()
    results = bench.results()
    assert [r["custom_id"] for r in results] == ["a", "b", "c", 7, "line-5"]
    assert [r["response"]["body"]["usage"]["completion_tokens"] for r in results] == [2, 3, 4, 16, 4]
    assert [len(r["response"]["body"]["choices"]) for r in results] == [1, 1, 1, 1, 4]
    assert all(r["error"] is None and r["response"]["status_code"] == 200 for r in results)
    assert list(results[0]) == ["id", "custom_id", "response", "error"]
    assert (report.ok, report.failed, report.exit_code) == (5, 0, 0)


def test_a_bad_line_gets_a_record_and_its_neighbours_are_served(bench: Bench) -> None:
    bench.write(
        prompt("good"),
        b"[1,2]",
        b"null",
        b'"x"',
        b"{}",
        batch("f", "x"),  # type: ignore[arg-type]
        b'{"prompt": "\xff"}',
        b'{"prompt": "trunc',
        prompt("good", temperature="hot"),
        prompt(""),
        prompt("x" * 5000),
        prompt("good", id=[1]),
        {"prompt": "a", "messages": []},
        prompt("good"),
    )
    report = bench.run()
    assert bench.codes() == {
        1: None,
        2: "not_an_object",
        3: "not_an_object",
        4: "not_an_object",
        5: "missing_parameter",
        6: "invalid_request",
        7: "invalid_utf8",
        8: "invalid_json",
        9: "invalid_request",
        10: "empty_prompt",
        11: "context_length_exceeded",
        12: "invalid_request",
        13: "invalid_request",
        14: None,
    }
    assert (report.ok, report.failed, report.exit_code) == (2, 12, 1)
    for record in bench.results():
        if record["error"]:
            assert record["error"]["line"] == line_of(record)
            assert record["error"]["message"]
    broken, wrong = bench.results()[1], bench.results()[8]
    assert broken["response"] is None
    assert wrong["response"]["status_code"] == 400
    assert wrong["response"]["body"]["error"]["param"] == wrong["error"]["param"] == "temperature"


def test_a_line_for_another_endpoint_fails_alone(bench: Bench) -> None:
    good = {"prompt": "a", "max_tokens": 1}
    bench.write(
        batch("a", good, url="/v1/foo"),
        batch("b", good, url="/v1/completions/"),
        batch("c", good, method="GET"),
        batch("d", good | {"stream": True}),
        batch("e", {"input": "a"}, url="/v1/embeddings"),
        batch("f", {"input": ["a", ""]}, url="/v1/embeddings"),
        {"custom_id": "g", "method": "POST", "body": good},
        {"custom_id": "h", "method": "POST", "url": "/v1/completions"},
        batch("i", good),
    )
    bench.run()
    assert list(bench.codes().values()) == [
        *["unsupported_endpoint"] * 3,
        "unsupported_parameter",
        *["unsupported_endpoint"] * 2,
        "invalid_request",
        "missing_parameter",
        None,
    ]
    assert [r["custom_id"] for r in bench.results()] == list("abcdefghi")


def test_a_line_may_name_the_model_by_its_names_and_no_other(bench: Bench) -> None:
    bench.write(
        *[batch(name, prompt("a", model=name)) for name in ("scripted", "alias", "other")], batch("none", prompt("a"))
    )
    bench.run(lambda: scripted_model(names=("scripted", "alias")))
    assert list(bench.codes().values()) == [None, None, "model_mismatch", None]
    assert {r["response"]["body"]["model"] for r in bench.results() if not r["error"]} == {"scripted"}


def test_the_later_of_two_equal_ids_is_refused_and_names_the_first(bench: Bench) -> None:
    ids: list[Any] = ["a", "x", 7, "b", "x", "7", "x", 7]
    bench.write(*[prompt("p", custom_id=value) for value in ids])
    report = bench.run()
    failed = {line_of(r): r["error"] for r in bench.results() if r["error"]}
    assert {line: error["code"] for line, error in failed.items()} == dict.fromkeys((5, 7, 8), "duplicate_custom_id")
    assert "line 2 " in failed[5]["message"]
    assert "line 2 " in failed[7]["message"]
    assert "line 3 " in failed[8]["message"]
    assert report.failed == 3


def test_the_same_ids_in_two_jobs_do_not_meet(tmp_path: Path) -> None:
    first, second = Bench(tmp_path / "1"), Bench(tmp_path / "2")
    for place, one in enumerate((first, second)):
        one.input.parent.mkdir()
        one.write(*[prompt(f"{place}", custom_id=f"{i}") for i in range(3)])
        one.run()
    ids = [record["id"] for one in (first, second) for record in one.results()]
    assert len(set(ids)) == 6


SEPARATORS = "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e"


def test_unicode_line_separators_survive_in_prompt_and_answer(bench: Bench) -> None:
    said = f"a{SEPARATORS}b"
    tokenizer = byte_tokenizer()
    length = len(tokenizer.encode(said))
    question = "q" * length  # so that the answer starts with the first byte of `said`
    bench.write(prompt(question, max_tokens=length))
    bench.run(lambda: scripted_model(spoken(tokenizer, said)))
    [record] = bench.results()
    assert record["response"]["body"]["choices"][0]["text"] == said
    assert len(bench.output.read_text(encoding="utf-8").splitlines()) == 1
    bench.write(prompt("x\u2028\u2029\u0085y"))  # raw in the file: orjson escapes none of them
    report = bench.run(restart=True)
    assert (report.total, report.ok) == (1, 1)


def test_crlf_and_blank_lines_change_nothing_but_the_numbers(bench: Bench) -> None:
    lines = [orjson.dumps(prompt(text)) for text in ("a", "b", "c")]
    bench.input.write_bytes(b"\n".join(lines) + b"\n")
    bench.run()
    plain = bench.results()
    bench.input.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n  \r\n" + lines[1] + b"\r\n" + lines[2])
    bench.run(restart=True)
    assert [line_of(r) for r in bench.results()] == [1, 4, 5]
    assert [texts(r) for r in bench.results()] == [texts(r) for r in plain]


def texts(record: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in record["response"]["body"]["choices"]]


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf"])
def test_a_file_without_requests_is_an_error_and_leaves_nothing_behind(bench: Bench, data: bytes) -> None:
    bench.input.write_bytes(data)
    with pytest.raises(JobError, match="no requests"):
        bench.run(never)
    assert list(bench.input.parent.iterdir()) == [bench.input]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(
            [
                b'{"prompt":"a","max_tokens":1}',
                b'{"prompt":""}',
                b"{",
                b"[]",
                b" ",
                b"\r",
                b"",
                b"\xff",
                b'"\xe2\x80\xa8"',
            ]
        )
        | st.binary(max_size=12),
        max_size=12,
    ),
    st.booleans(),
)
def test_every_line_that_is_not_blank_has_exactly_one_record(bench: Bench, parts: list[bytes], ended: bool) -> None:
    data = b"\n".join(parts) + (b"\n" if ended else b"")
    bench.input.write_bytes(data)
    physical = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [number for number, line in enumerate(physical, start=1) if line.strip()]
    assume(expected)
    assume(other_kind(data) is None)
    bench.run(restart=True)
    assert [line_of(record) for record in bench.results()] == expected


def test_answers_stay_with_their_ids_though_they_finish_in_another_order(bench: Bench) -> None:
    lengths = [(i * 7) % 20 + 1 for i in range(20)]
    bench.write(*[prompt(f"id-{i} says", custom_id=f"id-{i}", max_tokens=n) for i, n in enumerate(lengths)])
    bench.run(lambda: scripted_model(max_num_seqs=8), sort=False)
    unsorted = bench.results()
    assert [line_of(r) for r in unsorted] != list(range(1, 21))
    bench.run(lambda: scripted_model(max_num_seqs=8), restart=True)
    assert [line_of(r) for r in bench.results()] == list(range(1, 21))
    for found in (unsorted, bench.results()):
        for record in found:
            assert record["custom_id"] == f"id-{line_of(record) - 1}"
            assert record["response"]["body"]["usage"]["completion_tokens"] == lengths[line_of(record) - 1]


def test_a_step_that_fails_fails_its_lines_and_no_others(bench: Bench) -> None:
    failures = iter([RuntimeError("boom")])

    def broken(_: int) -> None:
        for failure in failures:
            raise failure

    def model() -> JobModel:
        tokenizer = byte_tokenizer()
        runner = ScriptedRunner(lambda _: 65, vocab_size=tokenizer.vocab_size, before_step=broken)
        engine = scripted_engine(tokenizer=tokenizer, max_num_seqs=2)
        engine._runner = runner
        return JobModel("scripted", "0", frozenset({"scripted"}), lambda: (engine, tokenizer))

    bench.write(prompt(["a", "b", "c"]), *[prompt("x") for _ in range(5)])
    bench.run(model)
    assert list(bench.codes().values()) == [StepError.code, *[None] * 5]
    assert bench.results()[0]["response"]["status_code"] == 500


def test_one_prompt_too_long_fails_its_whole_line_at_once(bench: Bench) -> None:
    bench.write(prompt(["a", "b", "x" * 5000]), prompt("good"))
    bench.run()
    assert bench.codes() == {1: "context_length_exceeded", 2: None}


def test_defaults_are_for_simple_lines_and_yield_to_them(bench: Bench) -> None:
    bench.write(
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "a", "max_completion_tokens": 3},
        batch("b", {"prompt": "a"}),
    )
    bench.run(defaults={"max_tokens": 5})
    assert [r["response"]["body"]["usage"]["completion_tokens"] for r in bench.results()] == [5, 2, 3, 16]


def test_strict_refuses_the_file_and_lists_its_bad_lines(bench: Bench) -> None:
    bench.write(prompt("a"), b"{", prompt("x" * 5000), prompt("a", temperature=-1))
    with pytest.raises(JobError) as caught:
        bench.run(strict=True)
    message = caught.value.message
    assert message.startswith("3 lines cannot run")
    assert [f"line {n}:" in message for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert list(bench.input.parent.iterdir()) == [bench.input]
    bench.write(*[prompt("a", id=i) for i in range(30)])
    report = bench.run(strict=True)
    assert (report.ok, report.prompt_tokens) == (30, 30)


def test_unknown_fields_are_counted_or_refused(bench: Bench) -> None:
    bench.write(prompt("a", max_token=5), prompt("a", max_token=5), batch("c", prompt("a")) | {"priorty": 1})
    report = bench.run()
    assert [(f["name"], f["lines"], f["first_line"]) for f in report.unknown_fields] == [
        ("max_token", 2, 1),
        ("priorty", 1, 3),
    ]
    report = bench.run(strict_fields=True, restart=True)
    assert report.failed == 3
    assert set(bench.codes().values()) == {"unknown_parameter"}


def test_csv_and_text_inputs_run_too(bench: Bench) -> None:
    for name, data in (("p.txt", b"a\n\nb\n"), ("p.csv", b"custom_id,prompt\nx,a\ny,\n")):
        path = bench.input.with_name(name)
        path.write_bytes(data)
        bench.run(input=path, restart=True)
        assert len(bench.results()) == 2
    assert [r["custom_id"] for r in bench.results()] == ["x", "y"]
    assert list(bench.codes().values()) == [None, "empty_prompt"]


def test_standard_input_is_kept_until_the_job_is_done(bench: Bench) -> None:
    data = orjson.dumps(prompt("a")) + b"\n" + orjson.dumps(prompt("b")) + b"\n"
    report = bench.run(input=None, stdin=io.BytesIO(data))
    assert report.ok == 2
    assert not bench.files.spool.exists()
    again = bench.run(input=None, stdin=io.BytesIO(data))
    assert again.already_complete
    assert not bench.files.new_spool.exists()


@pytest.mark.parametrize("what", ["input", "folder", "missing folder", "partial"])
def test_an_output_that_cannot_be_is_refused_before_anything_happens(bench: Bench, what: str) -> None:
    bench.write(prompt("a"))
    before = bench.input.read_bytes()
    folder = bench.input.parent
    output, source = {
        "input": (bench.input, bench.input),
        "folder": (folder, bench.input),
        "missing folder": (folder / "no" / "out.jsonl", bench.input),
        "partial": (bench.output, bench.files.partial),
    }[what]
    source.write_bytes(before)
    with pytest.raises(JobError):
        bench.run(never, output=output, input=source)
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["none.jsonl", ""])
def test_an_input_that_cannot_be_read_is_refused(bench: Bench, name: str) -> None:
    with pytest.raises(JobError, match=r"does not exist|folder"):
        bench.run(never, input=bench.input.parent / name)


def test_a_wrong_option_is_refused_before_the_model_is_looked_for(bench: Bench) -> None:
    bench.write(prompt("a"))
    with pytest.raises(ConfigError):
        bench.run(never, column="a")


def test_an_input_that_changes_while_it_runs_is_noticed(bench: Bench) -> None:
    bench.write(*[prompt("a") for _ in range(50)])

    def model() -> JobModel:
        with bench.input.open("ab") as file:
            file.write(orjson.dumps(prompt("late")) + b"\n")
        return scripted_model()

    with pytest.raises(JobError, match="changed"):
        bench.run(model)
    assert not bench.output.exists()


def test_the_report_counts_tokens_time_and_batches(bench: Bench) -> None:
    clock = FakeClock()

    def model() -> JobModel:
        tokenizer = byte_tokenizer()
        engine = scripted_engine(tokenizer=tokenizer, clock=clock, max_num_seqs=4)
        engine._runner = ScriptedRunner(
            lambda _: 65, vocab_size=tokenizer.vocab_size, before_step=lambda _: clock.advance(0.5)
        )
        return JobModel("scripted", "0", frozenset({"scripted"}), lambda: (engine, tokenizer))

    told = []
    bench.write(*[prompt("ab", max_tokens=4) for _ in range(8)])
    report = bench.run(model, clock=clock, on_progress=told.append)
    assert (report.prompt_tokens, report.completion_tokens) == (16, 32)
    assert report.elapsed_s == 4.0
    assert (report.prompt_tokens_per_s, report.completion_tokens_per_s) == (4.0, 8.0)
    assert (report.latency_p50_s, report.latency_p95_s) == (3.0, 4.0)
    assert report.serving.mean_batch_size == 4.0
    assert report.peak_memory_bytes > 10_000_000
    assert [p.stage for p in told if p.stage != "running"] == ["reading", "loading", "sorting"]
    running = [p for p in told if p.stage == "running"]
    assert running[-1].done == running[-1].total == 8
    assert running[-1].generated_tokens == 32
    assert orjson.loads(orjson.dumps(report.to_dict()))["exit_code"] == 0


def test_an_input_that_vanishes_while_it_runs_is_an_error_and_no_crash(bench: Bench) -> None:
    bench.write(*[prompt("a") for _ in range(50)])

    def model() -> JobModel:
        bench.input.unlink()
        return scripted_model()

    with pytest.raises(JobError, match=r"in\.jsonl"):
        bench.run(model)


def test_a_folder_where_nothing_can_be_written_is_an_error_and_no_crash(bench: Bench) -> None:
    bench.write(prompt("a"))
    bench.output = Path("/proc/results.jsonl")  # not even root can make a file there
    with pytest.raises(JobError, match="cannot be written"):
        bench.run()
