"""Put back what a GGUF file's tokenizer loses on the way through transformers: how text is split before the merges.

A GGUF file names its splitting rule (`tokenizer.ggml.pre`) but does not carry it. A byte-level BPE vocabulary gives
other ids under another rule, so a name that is not known here is an error. The rules are those of the models' own
tokenizer.json files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from packhorse.errors import SourceError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_PLAIN = {"gpt-2", "gpt2", "default"}
_SINGLE_DIGITS = {"smollm", "starcoder", "refact"}
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}


def restore_pre_tokenizer(tokenizer: Any, path: Path) -> None:
    """Set the pre-tokenizer of a byte-level BPE `tokenizer` to the rule that the GGUF file at `path` names.

    Raises SourceError for a rule that is not known. Other kinds of vocabulary (SentencePiece) are left alone.
    """
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    kind, rule = (_text(fields, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if kind == "gpt2":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer(rule or "default", path.name)


def pre_tokenizer(rule: str, name: str) -> Any:
    """The `tokenizers` object for a splitting rule by its GGUF name."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if rule in _PLAIN:
        return ByteLevel(add_prefix_space=False, use_regex=True)
    if rule in _SINGLE_DIGITS:
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
    if rule in _PATTERNS:
        split = Split(Regex(_PATTERNS[rule]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise SourceError(
        f"{name} splits text by a rule called {rule!r}, which Packhorse does not know; its ids would be wrong. "
        "Convert the model from its Hugging Face folder."
    )


def _text(fields: Any, key: str) -> str | None:
    return str(fields[key].contents()) if key in fields else None
