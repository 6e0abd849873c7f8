"""A GGUF file's tokenizer gives the ids that the model was trained with."""

from __future__ import annotations

from typing import Any

import pytest

from packhorse.errors import SourceError
from packhorse.pack.gguf_tokenizer import pre_tokenizer
from packhorse.pack.load import load_tokenizer
from packhorse.pack.source import resolve


@pytest.fixture(scope="module")
def smollm() -> Any:
    return load_tokenizer(resolve("smollm2-135m-instruct"))


@pytest.mark.slow
def test_smollm_spells_numbers_digit_by_digit(smollm: Any) -> None:
    assert smollm("12345").input_ids == [33, 34, 35, 36, 37]
    assert smollm("DEFGHIJ").input_ids == [33203, 23960, 57, 58]
    assert smollm("").input_ids == []


@pytest.mark.slow
def test_smollm_takes_spaces_before_a_digit_together(smollm: Any) -> None:
    """The splitting rule that the file only names: a digit is cut off first, so both spaces are one token."""
    assert smollm.convert_ids_to_tokens(smollm("a  1").input_ids) == ["a", "ĠĠ", "1"]


@pytest.mark.slow
def test_smollm_has_its_seventeen_control_tokens(smollm: Any) -> None:
    control = {i for i, token in smollm.added_tokens_decoder.items() if token.special}
    assert control == set(range(17))
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.pad_token_id) == (1, 2, 2)


def _pieces(rule: str, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer(rule, "model.gguf").pre_tokenize_str(text)]


def test_rules_split_numbers_each_in_their_way() -> None:
    assert _pieces("gpt-2", "a 12345") == ["a", "Ġ12345"]
    assert _pieces("smollm", "a 12345") == ["a", "Ġ", "1", "2", "3", "4", "5"]
    assert _pieces("llama-bpe", "a 12345") == ["a", "Ġ", "123", "45"]
    assert _pieces("qwen2", "a 12345") == ["a", "Ġ", "1", "2", "3", "4", "5"]


def test_an_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(SourceError, match=r"model\.gguf splits text by a rule called 'martian'"):
        pre_tokenizer("martian", "model.gguf")
