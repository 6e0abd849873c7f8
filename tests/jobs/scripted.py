"""Jobs over a scripted engine: no model, no weights, and starting takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import tokenizers
from tokenizers import decoders, pre_tokenizers

from packhorse.engine.engine import Engine
from packhorse.jobs.files import JobFiles
from packhorse.jobs.job import JobModel, JobSpec, run_job
from packhorse.jobs.report import JobReport
from packhorse.jobs.signals import NoSignals
from packhorse.text.chat_template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer
from tests.support.engines import scripted_engine
from tests.support.scripted import NextToken

NAME = "scripted"
RUN_OPTIONS = {"on_progress", "signals", "stdin", "clock", "wall"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """A token a byte: every text has ids, and every list of ids has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, ChatTemplate(template, {}) if template else None)


def spoken(tokenizer: Tokenizer, text: str) -> NextToken:
    """Says the bytes of `text` over and over, by the length of the context."""
    ids = tokenizer.encode(text)
    return lambda context: ids[len(context) % len(ids)]


def cheap(vocab_size: int) -> NextToken:
    """A next token that depends on the context and costs next to nothing."""
    return lambda context: (context[0] * 31 + context[-1] * 7 + len(context)) % vocab_size


def scripted_model(
    following: NextToken | None = None, *, identity: str = "0" * 64, names: tuple[str, ...] = (NAME,), **settings: Any
) -> JobModel:
    """A JobModel whose engine follows `following` (default: a function of the context)."""

    def load() -> tuple[Engine, Tokenizer]:
        tokenizer = byte_tokenizer()
        engine = scripted_engine(following or cheap(tokenizer.vocab_size), tokenizer=tokenizer, **settings)
        return engine, tokenizer

    return JobModel(name=names[0], identity=identity, names=frozenset(names), load=load)


def never() -> JobModel:
    """For jobs that must be refused before a model is looked for."""
    raise AssertionError("the model was looked for")


class Bench:
    """A folder with an input and an output, and jobs over a scripted model."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"
        self.files = JobFiles(self.output)

    def write(self, *lines: bytes | dict[str, Any]) -> None:
        self.input.write_bytes(
            b"".join((line if isinstance(line, bytes) else orjson.dumps(line)) + b"\n" for line in lines)
        )

    def run(self, model: Callable[[], JobModel] | None = None, **options: Any) -> JobReport:
        run_options = {name: options.pop(name) for name in RUN_OPTIONS & options.keys()}
        spec = JobSpec(**{"input": self.input, "output": self.output} | options)
        return run_job(spec, model or scripted_model, **run_options)

    def results(self, path: Path | None = None) -> list[dict[str, Any]]:
        """Records of the output, split as a strict reader of JSON lines does."""
        data = (path or self.output).read_bytes()
        assert data.endswith(b"\n")
        return [orjson.loads(line) for line in data.split(b"\n")[:-1]]

    def codes(self) -> dict[int, str | None]:
        """By line: the error's code, None for a result."""
        return {line_of(record): record["error"] and record["error"]["code"] for record in self.results()}


def line_of(record: dict[str, Any]) -> int:
    return int(record["id"].rpartition("_")[2])


def prompt(text: str, **more: Any) -> dict[str, Any]:
    """A simple line."""
    return {"prompt": text, "max_tokens": 3, "temperature": 0} | more


def batch(custom_id: str, body: dict[str, Any], url: str = "/v1/completions", method: str = "POST") -> dict[str, Any]:
    """OpenAI's batch line."""
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


class StopAfter(NoSignals):
    """As if a signal came after so many looks at `signum`."""

    def __init__(self, looks: int, signum: int = 15) -> None:
        self._looks = looks
        self._signum = signum

    @property
    def signum(self) -> int | None:  # type: ignore[override]
        self._looks -= 1
        return self._signum if self._looks < 0 else None
