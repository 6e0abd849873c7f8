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

    The descriptions below are what `packhorse run --help` and docs/settings.md say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_path: str | None = Field(None, description="The model where none is named: a pack, or what is made into one.")
    policy: Literal["continuous", "dynamic", "static"] = Field(
        "continuous",
        description="continuous: every sequence comes and goes by itself. dynamic: batches of similar length, started "
        "when full or when the oldest has waited max_wait_ms. static: full batches, one after the other.",
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Sequences decoded at once.")
    max_num_batched_tokens: int = Field(
        512, ge=1, le=1 << 20, description="Tokens of one step, chunks of prompts included."
    )
    batch_size: int = Field(16, ge=1, le=4096, description="static, dynamic: sequences of a batch.")
    max_wait_ms: float = Field(
        50.0,
        ge=0,
        allow_inf_nan=False,
        description="dynamic: milliseconds the oldest waits for its batch to fill while more requests come.",
    )
    length_buckets: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        None,
        description="dynamic: upper lengths in tokens, prompt and output, of the groups but the last. Default: learnt "
        "from what comes; `packhorse lengths` proposes them for a file.",
    )
    micro_batch: int = Field(
        1, ge=1, le=1024, description="Passes that a step is split into: less memory, the same results."
    )
    enable_prefix_caching: bool = Field(
        True, description="Beginnings that were computed before are not computed again; results stay the same."
    )
    target_ttft_ms: float | None = Field(
        None,
        gt=0,
        description="Milliseconds from a request's first step to its first token; while it takes longer, fewer "
        "sequences run at once. Default: no target.",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0,
        description="Milliseconds from one token of a sequence to the next; while it takes longer, fewer sequences run "
        "at once. Default: no target.",
    )
    max_decode_stall: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="How many times its usual duration a step may take because it also computes prompts: 2 keeps "
        "streams smooth while long prompts come. Default: prompts take what max_num_batched_tokens allows.",
    )
    priority_seconds: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="Waiting this long makes up for one step of priority."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens a sequence may have, prompt and output. Default: the model's context length."
    )
    block_size: int = Field(16, ge=16, le=256, description="Tokens a cache block holds, a multiple of 16.")
    num_blocks: int | None = Field(
        None, ge=1, description="Blocks of the cache. Default: by free memory, see memory_utilization."
    )
    memory_utilization: float = Field(
        0.75,
        gt=0,
        le=1,
        description="Share of the memory that is free beside weights and activations to use for the cache.",
    )
    kv_dtype: Literal["fp32"] = Field("fp32", description="Numbers in the cache; there is only fp32 so far.")
    precision: Literal["fp32"] = Field(
        "fp32", description="Numbers the model computes with; there is only fp32 so far."
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="Threads to compute with. Default: the processors this process may use."
    )
    warmup_requests: int = Field(
        0, ge=0, le=4096, description="Requests run before the first real one, outside all statistics."
    )
    escape_control_tokens: bool = Field(True, description="Control tokens typed in a chat message stay text.")
    use_triton: bool = Field(False, description="Serve through Triton: not there yet.")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _refusal(error) from None

    @field_validator("block_size")
    @classmethod
    def _whole_vectors(cls, block_size: int) -> int:
        if block_size % 16:
            raise ValueError("it must be a multiple of 16, which is what attention reads at once")
        return block_size

    @field_validator("use_triton")
    @classmethod
    def _no_triton_yet(cls, use_triton: bool) -> bool:
        if use_triton:
            raise ValueError("serving through Triton is not there yet; leave it out")
        return use_triton

    @field_validator("length_buckets", mode="before")
    @classmethod
    def _split(cls, edges: Any) -> Any:
        """The command line gives them as one text."""
        return [edge.strip() for edge in edges.split(",")] if isinstance(edges, str) else edges

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
    if first["type"] == "literal_error":
        reason = f"it must be {first['ctx']['expected']}"
    if setting is None:
        return ConfigError(f"{reason}.", param=reason.split(" ", 1)[0])
    return ConfigError(f"{setting} is {first['input']!r}: {reason}.", param=setting)
