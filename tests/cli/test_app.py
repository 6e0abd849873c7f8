"""The command line: quick to start, clear when something is wrong, exit codes that scripts can rely on."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from packhorse.cli.app import app
from packhorse.config import EngineConfig
from packhorse.errors import SourceError
from packhorse.jobs.job import JobModel
from tests.jobs.scripted import Bench, prompt, scripted_model

HELP = """
import sys
from packhorse.cli.app import main
sys.argv = ["packhorse", "--help"]
try:
    main()
finally:
    print({"numpy", "numba", "onnxruntime", "torch", "transformers", "pydantic", "tokenizers"} & set(sys.modules))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """The command's model is a scripted one; the settings that it was asked for."""
    asked: list[EngineConfig] = []

    def find(model: str, config: EngineConfig, served_names: list[str], on_conversion: Any) -> JobModel:
        asked.append(config)
        on_conversion("load", 0.5)
        if model == "missing":
            raise SourceError("There is no model called missing.")
        return scripted_model(names=tuple(served_names) or ("scripted",))

    monkeypatch.setattr("packhorse.cli.run._find_model", find)
    return asked


def run(bench: Bench, *options: str, input: str | None = None, model: str = "m") -> Result:
    source = input if input is not None else str(bench.input)
    return CliRunner().invoke(app, ["run", source, "-o", str(bench.output), "--model", model, *options])


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    finished = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert finished.stdout.endswith("set()\n")
    for verb in ("run", "convert", "inspect", "version"):
        assert f" {verb} " in finished.stdout


@pytest.mark.parametrize("verb", ["run", "convert", "inspect", "version"])
def test_every_verb_explains_itself(verb: str) -> None:
    assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0


def test_every_setting_of_the_engine_is_an_option_of_the_same_name(bench: Bench, scripted: list[EngineConfig]) -> None:
    bench.write(prompt("a"))
    given = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 99,
        "max_model_len": 77,
        "block_size": 8,
        "num_blocks": 55,
        "memory_utilization": 0.5,
        "threads": 1,
        "escape_control_tokens": False,
    }
    assert set(given) == set(EngineConfig.model_fields)
    options: list[str] = ["--no-escape-control-tokens"]
    for name, value in given.items():
        if not isinstance(value, bool):
            options += [f"--{name.replace('_', '-')}", str(value)]
    assert run(bench, *options).exit_code == 0
    assert scripted[0].model_dump() == given


@pytest.mark.usefixtures("scripted")
def test_exit_codes_say_how_it_went(bench: Bench) -> None:
    bench.write(prompt("a"), prompt("b"))
    assert run(bench).exit_code == 0
    assert run(bench).exit_code == 0
    bench.write(prompt("a"), b"{")
    assert run(bench).exit_code == 2
    assert run(bench, "--restart").exit_code == 1
    assert run(bench).exit_code == 1
    assert run(bench, "--restart", "--strict").exit_code == 2
    assert len(bench.results()) == 2, "a refused start throws nothing away"


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--format", "yaml"], "format is 'yaml'"),
        (["--column", "a"], "column is for .csv"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--report", "no/such/folder.json"], "no/such does not exist"),
    ],
)
def test_a_wrong_option_is_one_line_on_standard_error(bench: Bench, options: list[str], said: str) -> None:
    bench.write(prompt("a"))
    result = run(bench, *options)
    assert result.exit_code == 2
    assert f"error: {said}" in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not bench.output.exists()


@pytest.mark.usefixtures("scripted")
def test_a_model_that_is_not_there_is_an_error_after_the_input_was_found_good(bench: Bench) -> None:
    assert "does not exist" in run(bench, model="missing").stderr
    bench.write(prompt("a"))
    result = run(bench, model="missing")
    assert (result.exit_code, "no model called missing" in result.stderr) == (2, True)


@pytest.mark.usefixtures("scripted")
def test_the_summary_is_for_people_and_the_report_for_programs(bench: Bench) -> None:
    bench.write(prompt("ab", max_token=1), b"{")
    path = bench.output.with_name("report.json")
    result = run(bench, "--report", str(path))
    for words in ("1 ok, 1 failed, of 2", "2 in, 3 out", "max_token on 1 line, first line 1", "peak memory"):
        assert words in result.stderr
    report = json.loads(path.read_text())
    assert (report["ok"], report["failed"], report["total"], report["exit_code"]) == (1, 1, 2, 1)
    assert {"elapsed_s", "latency_p50_s", "latency_p95_s", "mean_batch_size", "peak_memory_bytes"} <= report.keys()
    assert "Nothing to do" in run(bench).stderr


@pytest.mark.usefixtures("scripted")
def test_sampling_options_are_defaults_of_simple_lines(bench: Bench) -> None:
    bench.write({"prompt": "a"})
    assert run(bench, "--max-tokens", "5", "--temperature", "0", "--stop", "zzz").exit_code == 0
    assert bench.results()[0]["response"]["body"]["usage"]["completion_tokens"] == 5


@pytest.mark.usefixtures("scripted")
def test_lines_may_call_the_model_by_a_served_name(bench: Bench) -> None:
    bench.write(prompt("a", model="gpt"), prompt("a", model="other"), prompt("a", model="scripted"))
    assert run(bench, "--served-model-name", "gpt", "--served-model-name", "other").exit_code == 1
    assert list(bench.codes().values()) == [None, None, "model_mismatch"]
    assert bench.results()[1]["response"]["body"]["model"] == "gpt"


@pytest.mark.usefixtures("scripted")
def test_standard_input_is_a_dash(bench: Bench) -> None:
    arguments = ["run", "-", "-o", str(bench.output), "--model", "m"]
    result = CliRunner().invoke(app, arguments, input=json.dumps(prompt("a")) + "\n")
    assert result.exit_code == 0
    assert len(bench.results()) == 1


def test_a_folder_that_is_no_pack_is_said_to_be_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert (result.exit_code, "is not a pack" in result.stderr) == (2, True)


def test_an_interrupt_before_the_job_runs_has_the_exit_code_of_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> JobModel:
        raise KeyboardInterrupt

    monkeypatch.setattr("packhorse.cli.run._find_model", interrupted)
    bench.write(prompt("a"))
    assert run(bench).exit_code == 130
    assert not bench.files.lock.exists()


LIVE = """
import sys
from packhorse.cli import run as verb
from packhorse.cli.app import main
from tests.jobs.scripted import scripted_model
verb._find_model = lambda *_: scripted_model()
sys.argv = ["packhorse", "run", sys.argv[1], "-o", sys.argv[2], "--model", "m"]
main()
"""


def test_a_terminal_gets_a_live_panel_and_a_table(bench: Bench) -> None:
    bench.write(*[prompt("a", max_tokens=200) for _ in range(300)])
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", LIVE, str(bench.input), str(bench.output)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        seen += data
    os.close(ours)
    assert process.wait() == 0
    text = seen.decode()
    for words in ("/300 done", "running", "waiting", "of its blocks", "tok/s", "300 ok, 0 failed, of 300"):
        assert words in text
