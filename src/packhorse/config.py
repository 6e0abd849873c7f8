"""Settings of an engine and of a server: the same names on the command line, in `packhorse.toml` and in code."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from packhorse.errors import ConfigError

CONFIG_FILE = "packhorse.toml"
SERVER_TABLE = "server"


class Settings(BaseModel):
    """Named values with a description each, which help texts and docs/settings.md repeat.

    A bad value raises ConfigError that names the setting.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _refusal(error, type(self)) from None


class EngineConfig(Settings):
    """How one model is run."""

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


class ServerConfig(Settings):
    """How the engine is served over HTTP."""

    host: str = Field("127.0.0.1", min_length=1, description="The address to listen on; 0.0.0.0 for all of them.")
    port: int = Field(8000, ge=0, le=65535, description="The port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = Field(
        (), description="A name that requests may call the model; the first is reported. Default: the pack's."
    )
    max_waiting: int = Field(
        256, ge=0, le=1 << 20, description="Sequences that may wait for a place; more are answered with 429."
    )
    max_body_bytes: int = Field(2 << 20, ge=1, le=1 << 30, description="Bytes a request's body may have.")
    max_unread: int = Field(
        1024, ge=1, description="Pieces of a stream that its reader may lie behind; then its request is ended."
    )
    strict_fields: bool = Field(False, description="Unknown fields of a body are refused, not ignored with a warning.")
    drain_timeout: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that requests have to finish after SIGTERM; what is left then ends with an error.",
    )
    watchdog_seconds: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="Seconds without a finished step until the server is not ready."
    )
    api_key: tuple[str, ...] = Field(
        (), description="A key that requests must bring; one of several. Also from PACKHORSE_API_KEY. Default: none."
    )
    api_key_file: Path | None = Field(None, description="More keys, one a line.")
    log_prompts: bool = Field(False, description="The log has the texts of prompts and answers, not only their sizes.")

    @field_validator("api_key")
    @classmethod
    def _no_empty_key(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if any(not key.strip() for key in keys):
            raise ValueError("a key cannot be empty")
        return keys

    @field_validator("served_model_name", "api_key", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


_S = TypeVar("_S", bound=Settings)


def load_config(overrides: dict[str, Any], file: Path | None = None) -> EngineConfig:
    """Settings from `file` (default: packhorse.toml in the working directory, if there), then `overrides` over them.

    Overrides that are None do not count. Raises ConfigError for an unreadable file or an unknown or bad setting.
    """
    settings = {name: value for name, value in _file_settings(file).items() if name != SERVER_TABLE}
    return _over(EngineConfig, settings, overrides)


def load_server_config(overrides: dict[str, Any], file: Path | None = None) -> ServerConfig:
    """The same for the file's table `[server]`."""
    settings = _file_settings(file).get(SERVER_TABLE, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{SERVER_TABLE} must be a table of settings: [{SERVER_TABLE}].", param=SERVER_TABLE)
    return _over(ServerConfig, settings, overrides)


def _over(kind: type[_S], settings: dict[str, Any], overrides: dict[str, Any]) -> _S:
    return kind(**settings | {name: value for name, value in overrides.items() if value is not None})


def _file_settings(file: Path | None) -> dict[str, Any]:
    if file is not None:
        return _read_toml(file)
    return _read_toml(Path(CONFIG_FILE)) if Path(CONFIG_FILE).is_file() else {}


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _refusal(error: ValidationError, kind: type[Settings]) -> ConfigError:
    first = error.errors(include_url=False)[0]
    setting = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden":
        known = ", ".join(kind.model_fields)
        return ConfigError(f"{setting} is not a setting. Settings: {known}.", param=setting)
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error":
        reason = f"it must be {first['ctx']['expected']}"
    if setting is None:
        return ConfigError(f"{reason}.", param=reason.split(" ", 1)[0])
    return ConfigError(f"{setting} is {first['input']!r}: {reason}.", param=setting)
