"""The real model: SmolLM2-135M-Instruct, converted once into the user's cache, as `make run` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packhorse import LLM
from packhorse.loading import pack_folder
from packhorse.pack.manifest import load_manifest
from packhorse.text.tokenizer import Tokenizer

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def pack() -> Path:
    return pack_folder(MODEL)


@pytest.fixture(scope="session")
def llm(pack: Path) -> LLM:
    return LLM(pack, num_blocks=1024)


@pytest.fixture(scope="session")
def tokenizer(pack: Path) -> Tokenizer:
    return Tokenizer.from_pack(pack, load_manifest(pack))


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """The same weights in transformers: the independent answer."""
    from packhorse.pack.load import load
    from packhorse.pack.source import resolve

    model = load(resolve(MODEL), with_tokenizer=False).model.eval()
    model.generation_config.eos_token_id = None  # tests say how many tokens they want
    return model


@pytest.fixture(scope="session")
def examples() -> list[dict[str, Any]]:
    file = Path(__file__).parents[2] / "examples" / "prompts.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
