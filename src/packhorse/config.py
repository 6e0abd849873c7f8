"""Settings of an engine: one model, the same names on the command line, in `packhorse.toml` and in code."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

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

    policy: continuous (every sequence comes and goes by itself), dynamic (batches of similar length, started when full
    or when the oldest has waited max_wait_ms) or static (batches of batch_size). batch_size: of those two.
    length_buckets: upper lengths, prompt and output, of dynamic's buckets; default learnt from what comes.
    micro_batch: passes that a step is split into, to save activation memory. enable_prefix_caching: beginnings that
    were computed before are not computed again. target_ttft_ms, target_itl_ms: how long a request's first token may
    take from its first step on, and the next ones from token to token; concurrency falls while they are missed.
    priority_seconds: waiting this long makes up for one step of priority. warmup_requests: run before the first real
    one, outside all statistics. kv_dtype, precision: fp32 so far. model_path: the model when none is named.
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
    policy: Literal["continuous", "dynamic", "static"] = "continuous"
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    max_wait_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    length_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    micro_batch: Annotated[int, Field(ge=1, le=1024)] = 1
    enable_prefix_caching: bool = True
    target_ttft_ms: Annotated[float, Field(gt=0)] | None = None
    target_itl_ms: Annotated[float, Field(gt=0)] | None = None
    priority_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    warmup_requests: Annotated[int, Field(ge=0, le=4096)] = 0
    kv_dtype: Literal["fp32"] = "fp32"
    precision: Literal["fp32"] = "fp32"
    use_triton: bool = False
    model_path: str | None = None

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

    @field_validator("use_triton")
    @classmethod
    def _no_triton_yet(cls, use_triton: bool) -> bool:
        if use_triton:
            raise ValueError("serving through Triton is not there yet; leave it out")
        return use_triton

    @field_validator("length_buckets")
    @classmethod
    def _rising(cls, edges: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if edges is not None and list(edges) != sorted(set(edges)):
            raise ValueError("the lengths must rise, as in 64,256,1024")
        return edges

    @model_validator(mode="after")
    def _batches_fit(self) -> EngineConfig:
        if self.policy != "continuous" and self.batch_size > self.max_num_seqs:
            raise ValueError(f"batch_size ({self.batch_size}) is more than max_num_seqs ({self.max_num_seqs})")
        return self


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
