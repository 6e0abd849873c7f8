"""docs/server.md and the READMEs say what the server does."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from pathlib import Path

import httpx2
import openai
import pytest

from packhorse import errors
from packhorse.api import fields
from packhorse.server.record import Record
from tests.jobs.scripted import byte_tokenizer, cheap
from tests.support.engines import scripted_engine
from tests.support.servers import ScriptedServer, ServerProcess

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text("utf-8")
NAMED = set(re.findall(r"`([^`\n]+)`", PAGE))
READMES = ["README.md", "README.zh-CN.md"]


def test_every_field_has_its_line() -> None:
    for name in fields.OF_ENDPOINT["chat"] | fields.OF_ENDPOINT["completions"]:
        assert name in NAMED or f"{name}.include_usage" in NAMED or f"chat: `{name}`" in PAGE or f"`{name}`" in PAGE, (
            name
        )


def test_every_route_and_metric_has_its_line_and_no_other() -> None:
    tokenizer = byte_tokenizer()
    engine = scripted_engine(cheap(tokenizer.vocab_size), tokenizer=tokenizer, clock=time.monotonic)  # type: ignore[arg-type]
    with ScriptedServer(engine, tokenizer) as server:
        routes = httpx2.get(f"{server.url}/openapi.json").json()["paths"].keys()
        shown = httpx2.get(f"{server.url}/metrics").text
    for route in routes:
        assert route in NAMED, route
    metrics = {line.split()[2].removeprefix("packhorse:") for line in shown.splitlines() if "# TYPE packhorse:" in line}
    metrics = {name if name.startswith("iteration_tokens") else name.removesuffix("_total") for name in metrics}
    section = PAGE[PAGE.index("## Metrics") :]
    table = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    documented = set(re.findall(r"`([a-z0-9_]+)`", table))
    assert {name for name in metrics if not name.endswith("_created")} == documented


def test_every_field_of_the_log_has_its_line_and_no_other() -> None:
    record = Record("GET", "/")
    possible = {"time", "level", "logger", "message", *record.line()} | {
        name for name in Record.__slots__ if name not in ("began", "taken_in")
    }
    section = PAGE[PAGE.index("## The log") : PAGE.index("## Metrics")]
    table = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`([a-z_]+)`", table)) == possible


def test_every_error_that_a_client_can_meet_has_its_status_and_code() -> None:
    section = PAGE[PAGE.index("## Errors") : PAGE.index("## Under load")]
    rows = [line.split("|")[1:3] for line in section.splitlines() if re.match(r"\| \d", line)]
    documented = {
        (status.strip(), code)
        for statuses, codes in rows
        for status in statuses.split(",")
        for code in re.findall(r"`([a-z_]+)`", codes)
    }
    for kind in (
        errors.InvalidRequest,
        errors.ContextLengthExceeded,
        errors.ModelMismatch,
        errors.BodyTooLarge,
        errors.UnsupportedMediaType,
        errors.StepError,
        errors.OutOfMemory,
        errors.DeadlineExceeded,
        errors.QueueFull,
        errors.Draining,
        errors.NotReady,
        errors.InvalidKey,
        errors.NotServed,
        errors.MethodNotAllowed,
        errors.ReaderTooSlow,
        errors.PackhorseError,
    ):
        assert (str(kind.status), kind.code) in documented, kind


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_the_curl_lines_of_the_readme_run(readme: str, server: ServerProcess) -> None:
    port = server.url.rsplit(":", 1)[1]
    commands = [
        command.removeprefix("$ ")
        for block in blocks(readme, "console")
        for command in re.findall(r"^\$ curl .*?(?=^\$ |\Z|^\{|^data)", block, re.DOTALL | re.MULTILINE)
    ]
    assert len(commands) >= 2
    for command in commands:
        assert ":8000/" in command
        words = shlex.split(command.replace(":8000/", f":{port}/"))
        finished = subprocess.run(
            [*words, "--silent", "--fail"], capture_output=True, text=True, check=True, timeout=60
        )
        assert "Paris" in finished.stdout
        if "stream" not in command:
            assert json.loads(finished.stdout)["choices"][0]["message"]["content"] == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.parametrize("readme", READMES)
def test_the_client_lines_of_the_readme_run(
    readme: str, server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = [block for block in blocks(readme, "python") if "from openai" in block]
    assert openai.__version__
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), readme, "exec"), {})
    assert "The capital of France is Paris." in capsys.readouterr().out
