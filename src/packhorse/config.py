"""Settings of an engine: one model, the same names on the command line, in `packhorse.toml` and in code."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from packhorse.errors import ConfigError

CONFIG_FILE = "packhorse.toml"


class EngineConfig(BaseModel):
    """How one model is run. A bad value raises ConfigError that names the setting.

    max_num_seqs: sequences decoded at once. max_num_batched_tokens: tokens of one step, prefill chunks included.
    max_model_len: tokens a sequence may have, prompt and output; default the model's context length.
    block_size: tokens a cache block holds. num_blocks: blocks of the cache; default what memory_utilization of the
    memory that is really free gives, at most what max_num_seqs sequences of full length need.
    threads: default what the process may use (affinity and cgroup quota).
    escape_control_tokens: control tokens typed in a chat message stay text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 64
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 512
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.75
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    escape_control_tokens: bool = True

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _refusal(error) from None

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, block_size: int) -> int:
        if block_size & (block_size - 1):
            raise ValueError("it must be a power of two, such as 16")
        return block_size


def load_config(overrides: dict[str, Any], file: Path | None = None) -> EngineConfig:
    """Settings from `file` (default: packhorse.toml in the working directory, if there), then `overrides` over them.

    Overrides that are None do not count. Raises ConfigError for an unreadable file or an unknown or bad setting.
    """
    settings = _read_toml(file) if file is not None else {}
    if file is None and Path(CONFIG_FILE).is_file():
        settings = _read_toml(Path(CONFIG_FILE))
    return EngineConfig(**settings | {name: value for name, value in overrides.items() if value is not None})


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _refusal(error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    setting = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        known = ", ".join(EngineConfig.model_fields)
        return ConfigError(f"{setting} is not a setting. Settings: {known}.", param=setting)
    reason = first["msg"].removeprefix("Value error, ")
    if setting is None:
        return ConfigError(f"{reason}.")
    return ConfigError(f"{setting} is {first['input']!r}: {reason}.", param=setting)
