"""How one request is sampled and what it wants back. Names follow vLLM's class of the same name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from packhorse.errors import InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024


def _tuple_of_one_or_many(value: Any) -> Any:
    """`stop` and the like may be absent, one value, or a list."""
    if value is None:
        return ()
    if isinstance(value, (str, int)):
        return (value,)
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


def _zero_if_off(value: Any) -> Any:
    return 0 if value is None or (value == -1 and not isinstance(value, bool)) else value


_Strict = Field(strict=True)
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Penalty = Annotated[float, Field(strict=True, ge=-2, le=2, allow_inf_nan=False)]
_TokenId = Annotated[int, Field(strict=True, ge=0)]
_Flag = Annotated[bool, Field(strict=True)]


class SamplingParams(BaseModel):
    """Sampling settings of one request. Immutable; a bad value raises InvalidRequest that names the field.

    temperature: 0 is greedy (argmax of the raw logits, before any filter); else logits are divided by it.
    top_k: keep the k most probable tokens, 0 or -1 for all. top_p: keep the smallest set of tokens whose mass reaches
    it. min_p: drop tokens less probable than min_p times the most probable one. Filters apply in that order.
    repetition_penalty: over prompt and output (>1 discourages); presence_penalty, frequency_penalty: output only.
    logit_bias: added to the logit of a token id, -100 … 100. seed: same seed, same tokens, whatever the neighbours.
    n: choices to return. stop: strings that end the text and are cut from it. stop_token_ids: ids that end it like eos.
    ignore_eos: eos does not end the text. min_tokens: eos and stop_token_ids cannot be sampled before that many.
    max_tokens: tokens to generate at most; None is what the context leaves; 0 scores the prompt and needs `echo` or
    `prompt_logprobs`. logprobs, prompt_logprobs: how many most probable tokens to report beside the chosen one, None
    for no report. echo: the text begins with the prompt's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, BeforeValidator(_zero_if_off), Field(strict=True, ge=0)] = 0
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(strict=True, ge=0.01, le=100, allow_inf_nan=False)] = 1.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    logit_bias: dict[int, _Number] = {}
    seed: Annotated[int, _Strict] | None = None
    stop: Annotated[tuple[Annotated[str, _Strict], ...], BeforeValidator(_tuple_of_one_or_many)] = ()
    stop_token_ids: Annotated[tuple[_TokenId, ...], BeforeValidator(_tuple_of_one_or_many)] = ()
    ignore_eos: _Flag = False
    min_tokens: Annotated[int, Field(strict=True, ge=0)] = 0
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = 16
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    echo: _Flag = False
    skip_special_tokens: _Flag = True
    include_stop_str_in_output: _Flag = False

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise _refusal(error) from None

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax: temperature 0, or only one token survives top_k."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if len(stop) > MAX_STOP_STRINGS:
            raise ValueError(f"has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in stop:
            if not text:
                raise ValueError("holds an empty string, which would match everywhere; leave it out")
            if len(text) > MAX_STOP_LENGTH:
                raise ValueError(f"holds a string of {len(text)} characters; at most {MAX_STOP_LENGTH} are allowed")
        return stop

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, bias: dict[int, float]) -> dict[int, float]:
        if len(bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, value in bias.items():
            if token < 0:
                raise ValueError(f"names token id {token}, which cannot exist")
            if not -100 <= value <= 100:
                raise ValueError(f"gives token {token} a bias of {value}; it must be from -100 to 100")
        return bias

    @model_validator(mode="after")
    def _lengths(self) -> SamplingParams:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0, which only scores the prompt: ask for echo or prompt_logprobs with it")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        return self


def _refusal(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False)[0]
    field = str(first["loc"][0]) if first["loc"] else None
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"{field} is not a sampling parameter.", param=field, code="unknown_parameter")
    if field is None:
        return InvalidRequest(f"{reason}.", param=reason.split(" ", 1)[0])
    if first["type"] == "value_error":
        return InvalidRequest(f"{field} {reason}.", param=field)
    return InvalidRequest(f"{field} is {_shown(first['input'])}: {reason}.", param=field)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
