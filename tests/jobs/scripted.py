"""Jobs over a scripted engine: no model, no weights, and starting takes a fraction of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from packhorse.engine.engine import Engine
from packhorse.jobs.job import JobModel
from packhorse.text.chat_template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer
from tests.support.engines import scripted_engine
from tests.support.scripted import NextToken

NAME = "scripted"
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


def write_lines(path: Path, lines: list[bytes]) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path
