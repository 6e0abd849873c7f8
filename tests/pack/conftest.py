"""Tiny models and their tokenizer, saved as a Hugging Face folder would be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packhorse.pack.convert import convert
from tests.pack.tiny_models import VOCAB, tiny_model

CHAT_TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"

MakeSource = Callable[..., Path]


def word_tokenizer(size: int = VOCAB, eos: str = "</s>") -> Any:
    """A word-level tokenizer of `size` ids: 0 <pad>, 1 <s>, 2 </s>, 3 <turn>, then w4, w5, …"""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<s>", "</s>", "<turn>"]
    words = [*specials, *(f"w{i}" for i in range(len(specials), size))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w4"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=eos, pad_token="<pad>", unk_token="w4"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture
def make_source(tmp_path: Path, tiny_tokenizer: Any) -> MakeSource:
    """Save a tiny model, by default with its tokenizer, as the folder `source` and return it."""

    def make(
        name: str = "llama_tied", *, tokenizer: Any = tiny_tokenizer, edit: Callable[[Any], None] | None = None
    ) -> Path:
        model = tiny_model(name)
        if edit is not None:
            edit(model)
        folder = tmp_path / "source"
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_pack(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Path:
    """A pack of the tied tiny Llama, with tokenizer and template, made by the real `convert`. Not to be changed."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama_tied").save_pretrained(folder / "source")
    tiny_tokenizer.save_pretrained(folder / "source")
    convert(folder / "source", folder / "pack")
    return folder / "pack"
