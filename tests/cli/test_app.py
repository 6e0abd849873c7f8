"""The command line: quick to start, clear when something is wrong, exit codes that scripts can rely on."""

from __future__ import annotations

import json
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
from tests.support.terminal import seen_in_terminal

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
    for verb in ("run", "lengths", "convert", "inspect", "version"):
        assert f" {verb} " in finished.stdout


@pytest.mark.parametrize("verb", ["run", "lengths", "convert", "inspect", "version"])
def test_every_verb_explains_itself(verb: str) -> None:
    assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0


def test_every_setting_of_the_engine_is_an_option_of_the_same_name(bench: Bench, scripted: list[EngineConfig]) -> None:
    bench.write(prompt("a"))
    given = {
        "model_path": "m",
        "policy": "dynamic",
        "max_num_seqs": 3,
        "max_num_batched_tokens": 99,
        "batch_size": 2,
        "max_wait_ms": 7.5,
        "length_buckets": (64, 256, 1024),
        "micro_batch": 2,
        "enable_prefix_caching": False,
        "target_ttft_ms": 900.0,
        "target_itl_ms": 90.0,
        "max_decode_stall": 2.0,
        "priority_seconds": 3.0,
        "max_model_len": 77,
        "block_size": 32,
        "num_blocks": 55,
        "memory_utilization": 0.5,
        "kv_dtype": "fp32",
        "precision": "fp32",
        "threads": 1,
        "warmup_requests": 4,
        "escape_control_tokens": False,
        "use_triton": False,
    }
    assert set(given) == set(EngineConfig.model_fields)
    options: list[str] = []
    for name, value in given.items():
        option = name.replace("_", "-")
        if value is False:
            options.append(f"--no-{option}")
        elif isinstance(value, tuple):
            options += [f"--{option}", ",".join(map(str, value))]
        else:
            options += [f"--{option}", str(value)]
    arguments = ["run", str(bench.input), "-o", str(bench.output), *options]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert scripted[0].model_dump() == given


def test_help_of_run_says_what_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    shown = CliRunner().invoke(app, ["run", "--help"]).output
    for name, field in EngineConfig.model_fields.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert name == "model_path" or str(field.description) in shown
    assert "continuous|dynamic|static" in shown


def test_settings_come_from_the_file_and_the_command_line_stands_over_it(
    bench: Bench, scripted: list[EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.input.parent)
    bench.write(prompt("a"))
    lines = ('model_path = "m"', 'policy = "static"', "length_buckets = [64, 256]", "enable_prefix_caching = false")
    Path("packhorse.toml").write_text("\n".join(lines), "utf-8")
    arguments = ["run", str(bench.input), "-o", str(bench.output), "--enable-prefix-caching"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    [found] = scripted
    assert (found.model_path, found.policy, found.length_buckets) == ("m", "static", (64, 256))
    assert found.enable_prefix_caching


def test_without_a_model_anywhere_it_is_asked_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.input.parent)
    bench.write(prompt("a"))
    result = CliRunner().invoke(app, ["run", str(bench.input), "-o", str(bench.output)])
    assert (result.exit_code, "set model_path in packhorse.toml" in result.stderr) == (2, True)


def test_a_finished_job_is_the_same_under_every_setting_that_cannot_change_results(
    bench: Bench, scripted: list[EngineConfig]
) -> None:
    bench.write(prompt("a"))
    assert run(bench).exit_code == 0
    options = "--policy static --batch-size 2 --max-wait-ms 1 --micro-batch 2 --no-enable-prefix-caching --threads 1"
    more = "--target-itl-ms 9 --priority-seconds 1 --block-size 32 --warmup-requests 1 --length-buckets 9"
    result = run(bench, *options.split(), *more.split())
    assert (result.exit_code, "Nothing to do" in result.stderr) == (0, True)
    for option in (["--max-model-len", "99"], ["--no-escape-control-tokens"]):
        assert "holds results of another job" in run(bench, *option).stderr
    assert len(scripted) == 4


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
        (["--policy", "best"], "policy is 'best': it must be 'continuous', 'dynamic' or 'static'"),
        (["--length-buckets", "256,64"], "length_buckets is '256,64': the lengths must rise"),
        (["--kv-dtype", "fp16"], "kv_dtype is 'fp16': it must be 'fp32'"),
        (["--precision", "int8"], "precision is 'int8': it must be 'fp32'"),
        (["--block-size", "24"], "block_size is 24: it must be a multiple of 16"),
        (["--use-triton"], "use_triton is True: serving through Triton is not there yet"),
        (["--policy", "static", "--max-num-seqs", "4"], "batch_size (16) is more than max_num_seqs (4)"),
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
    figures = {"mean_batch_size", "preemptions", "prefix_hit_rate", "peak_memory_bytes", "elapsed_s"}
    latencies = {f"{name}_{p}_s" for name in ("latency", "queue", "ttft", "itl") for p in ("p50", "p95")}
    assert figures | latencies <= report.keys()
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
    text = seen_in_terminal([sys.executable, "-c", LIVE, str(bench.input), str(bench.output)])
    for words in ("/300 done", "running", "waiting", "of its blocks", "tok/s", "300 ok, 0 failed, of 300"):
        assert words in text
