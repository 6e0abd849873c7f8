"""The tokenizer as a pack carries it: files that the `tokenizers` library and a chat template engine read."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from packhorse.pack.manifest import TokenizerRecord
from packhorse.pack.source import sha256_of

# Keys that say where and how the tokenizer was loaded, not what it is.
_OF_THE_MACHINE = ("is_local", "local_files_only", "name_or_path", "_commit_hash", "gguf_file")


def write(tokenizer: Any, folder: Path) -> tuple[TokenizerRecord, str | None]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja (if there is a template) into `folder`."""
    path = folder / "tokenizer.json"
    tokenizer.backend_tokenizer.save(str(path))
    _write_config(tokenizer, folder / "tokenizer_config.json")
    size = max(tokenizer.get_vocab().values()) + 1
    record = TokenizerRecord(file=path.name, sha256=sha256_of(path), vocab_size=size)
    template = default_template(tokenizer.chat_template)
    if template is None:
        return record, None
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    return record, "chat_template.jinja"


def default_template(template: str | dict[str, str] | None) -> str | None:
    """The chat template; of several named ones the one called "default", else the first."""
    if isinstance(template, dict):
        return template.get("default") or next(iter(template.values()), None)
    return template or None


def _write_config(tokenizer: Any, path: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "tokenizer_config.json").read_bytes())
    for key in (*_OF_THE_MACHINE, "chat_template"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
