"""`packhorse lengths`: every line of a file measured as the engine would, without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from packhorse.cli.app import app
from packhorse.cli.lengths import bucket_rows, setting_lines
from packhorse.engine.lengths import LengthHistogram
from packhorse.engine.policy import BatchPolicy
from packhorse.jobs.inputs import open_input
from packhorse.jobs.lengths import FileLengths, file_lengths
from packhorse.pack import tokenizer_files
from packhorse.pack.manifest import FileRecord, Manifest, ModelSource, Parity
from packhorse.pack.source import sha256_of
from tests.jobs.scripted import Bench, batch, byte_tokenizer, prompt
from tests.pack.conftest import word_tokenizer
from tests.support.terminal import seen_in_terminal

CHAT = [{"role": "user", "content": "hello"}]  # <user>hello<assistant>: 22 bytes, a token each


def measured(bench: Bench, max_len: int = 1000, **defaults: Any) -> FileLengths:
    source = open_input(bench.input, format=None, column=None, chat=False)
    return file_lengths(source.entries(), byte_tokenizer(), defaults=defaults, max_len=max_len)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command's tokenizer has a token a byte, and its model 1,000 places; the models that were asked for."""
    asked: list[str] = []

    def find(model: str, escape: bool) -> Any:  # noqa: ARG001
        asked.append(model)
        return byte_tokenizer(), 1000

    monkeypatch.setattr("packhorse.cli.lengths._find_tokenizer", find)
    return asked


def run(bench: Bench, *options: str) -> Result:
    return CliRunner().invoke(app, ["lengths", str(bench.input), "--model", "m", *options])


def test_lengths_are_those_of_the_engine(bench: Bench) -> None:
    bench.write(
        prompt("a" * 9, max_tokens=1),
        prompt(["b" * 9, "c" * 9], max_tokens=100),
        {"messages": CHAT, "max_tokens": 10},
        batch("x", {"messages": CHAT}, url="/v1/chat/completions"),
        {"prompt": "d" * 9},
        prompt("e" * 9, max_tokens=5000),
    )
    found = measured(bench)
    assert found.prompts.rows() == [(8, 9, 5), (20, 22, 2)]
    # 10; twice 109; 22 + 10; an open end counts as it is; 16 are the default of a prompt; the context ends the last.
    totals = LengthHistogram()
    for length in (10, 109, 109, 32, 22, 25, 1000):
        totals.add(length)
    assert found.totals.rows() == totals.rows()
    assert (found.open_ended, found.bad_lines) == (1, 0)


def test_max_tokens_of_the_command_is_the_default_of_simple_lines(bench: Bench) -> None:
    bench.write({"prompt": "a"}, {"messages": CHAT}, prompt("a", max_tokens=2))
    found = measured(bench, max_tokens=99)
    assert [count for _, _, count in found.totals.rows()] == [1, 1, 1]
    assert found.open_ended == 0


def test_bad_lines_are_counted_and_named_and_the_others_measured(bench: Bench) -> None:
    bench.write(prompt("a"), b"{", {"prompt": ""}, prompt("x" * 1001), prompt("a", model="any"), *[b"[]"] * 30)
    found = measured(bench)
    assert (found.prompts.total, found.bad_lines, len(found.problems)) == (2, 33, 20)
    assert [line for line, _ in found.problems[:3]] == [2, 3, 4]
    assert "1001 tokens and at most 1000 fit" in found.problems[2][1]


def test_the_proposed_buckets_hold_what_is_said_they_hold() -> None:
    histogram = LengthHistogram()
    lengths = [n for i in range(200) for n in (i % 13 + 3, 40 + i, 7 * i + 300)]
    for n in lengths:
        histogram.add(n)
    edges = histogram.buckets(4)
    policy = BatchPolicy(8, 1.0, edges=edges)
    counts = [0] * policy.num_buckets
    for n in lengths:
        counts[policy.bucket_of(n)] += 1
    assert [count for _, count in bucket_rows(histogram, edges)] == counts


def test_what_is_to_be_pasted_is_what_the_settings_take(tmp_path: Path) -> None:
    from packhorse.config import load_config

    lines = setting_lines((64, 256))
    file = tmp_path / "packhorse.toml"
    file.write_text("\n".join(lines[-2:]), "utf-8")
    assert load_config({}, file) == load_config({"policy": "dynamic", "length_buckets": lines[1].split()[-1]})
    assert setting_lines(()) == ["All are of about one length: no buckets are needed."]


def test_the_command_prints_plain_lines_into_a_pipe(bench: Bench, scripted: list[str]) -> None:
    bench.write(*[prompt("a" * (n + 1), max_tokens=4) for n in range(40)], b"{", {"messages": CHAT})
    result = run(bench, "--buckets", "3")
    assert result.exit_code == 0
    assert "1 line is no request and not counted:\n  line 41: The line is not JSON" in result.stderr
    for words in ("Tokens of a prompt:", "Proposed buckets:", "1 prompts have no max_tokens", "length_buckets = ["):
        assert words in result.stdout
    assert "\x1b" not in result.stdout
    assert scripted == ["m"]


def test_it_takes_the_formats_and_refusals_of_run(bench: Bench, scripted: list[str], tmp_path: Path) -> None:
    bench.input = tmp_path / "in.csv"
    bench.input.write_text("custom_id,question\na,aaaa\nb,bbbb\n")
    assert "has several columns" in run(bench).stderr
    result = run(bench, "--column", "question", "--chat", "--max-tokens", "3")
    assert result.exit_code == 0
    assert "  20 to 22  2\n" in result.stdout, "four bytes in the template's seventeen"
    bench.input.write_text("question\n")
    refused = run(bench)
    assert (refused.exit_code, "holds no requests" in refused.stderr) == (2, True)
    assert "format is 'yaml'" in run(bench, "--format", "yaml").stderr
    assert scripted


TERMINAL = """
import sys
from packhorse.cli import lengths
from packhorse.cli.app import main
from tests.jobs.scripted import byte_tokenizer
lengths._find_tokenizer = lambda *_: (byte_tokenizer(), 1000)
sys.argv = ["packhorse", "lengths", sys.argv[1], "--model", "m"]
main()
"""


def test_a_terminal_gets_bars(bench: Bench) -> None:
    bench.write(*[prompt("a" * n, max_tokens=4) for n in (1, 30, 30, 30, 30)])
    text = seen_in_terminal([sys.executable, "-c", TERMINAL, str(bench.input)])
    bars = [line.count("█") for line in text.splitlines() if "█" in line]
    assert bars == [10, 40] * 3


def pack_without_weights(folder: Path) -> Path:
    """What a tokenizer needs of a pack, and nothing else."""
    folder.mkdir()
    record, template = tokenizer_files.write(word_tokenizer(), folder)
    paths = sorted(folder.iterdir())
    manifest = Manifest(
        name="words",
        architecture="None",
        model_type="none",
        identity="0",
        source=ModelSource(kind="huggingface", name="words", sha256="0"),
        versions={},
        vocab_size=256,
        hidden_size=1,
        num_layers=0,
        context_length=128,
        bos_token_id=1,
        pad_token_id=0,
        eos_token_ids=(2,),
        tokenizer=record,
        chat_template=template,
        segments=(),
        attention=(),
        files=tuple(FileRecord(file=p.name, bytes=p.stat().st_size, sha256=sha256_of(p)) for p in paths),
        parity=Parity(max_abs_difference=0, max_logit=0, checks=0),
    )
    (folder / "pack.json").write_text(manifest.model_dump_json(), "utf-8")
    return folder


def source_with_broken_weights(folder: Path) -> Path:
    word_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}', "utf-8")
    (folder / "model.safetensors").write_bytes(b"not weights")
    return folder


@pytest.mark.slow
def test_a_pack_and_its_source_say_the_same_and_weights_are_not_read(bench: Bench) -> None:
    chat = {"messages": [{"role": "user", "content": "w5 w6 w7"}], "max_tokens": 4}
    bench.write(*[prompt("w9 " * n, max_tokens=20) for n in (1, 2, 5, 40, 127)], chat, prompt("w9 " * 129))
    shown = []
    for model in (
        pack_without_weights(bench.input.with_name("pack")),
        source_with_broken_weights(bench.input.with_name("source")),
    ):
        result = CliRunner().invoke(app, ["lengths", str(bench.input), "--model", str(model)])
        assert result.exit_code == 0
        assert "line 7: The prompt has 129 tokens and at most 128 fit." in result.stderr
        shown.append(result.stdout)
    assert shown[0] == shown[1]
    assert "Tokens of a prompt:\n           1  1\n           2  1\n           5  2\n" in shown[0]


QUICK = """
import sys
from packhorse.cli.app import main
sys.argv = ["packhorse", "lengths", sys.argv[1], "--model", sys.argv[2]]
try:
    main()
finally:
    print({"numba", "onnxruntime", "torch", "transformers"} & set(sys.modules))
"""


@pytest.mark.slow
def test_with_a_pack_nothing_is_loaded_that_computes(bench: Bench) -> None:
    bench.write(prompt("w5"))
    pack = pack_without_weights(bench.input.with_name("pack"))
    command = [sys.executable, "-c", QUICK, str(bench.input), str(pack)]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.endswith("set()\n")
