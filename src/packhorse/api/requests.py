"""Bodies of `/v1/chat/completions` and `/v1/completions` into prompts and sampling parameters.

body ─► parse_request ─► ApiRequest ─► encode_prompts ─► Prompt … ─► engine_requests ─► Request …
        (no tokenizer)                 (tokenizer)                   one a prompt
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from packhorse.api import fields
from packhorse.api.fields import Endpoint, unsupported
from packhorse.api.prompts import (
    MAX_PROMPTS,
    Message,
    Prompt,
    TextOrIds,
    check_text,
    encode_prompts,
    kind,
    read_messages,
    read_prompts,
)
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from packhorse.errors import InvalidRequest, ModelMismatch

if TYPE_CHECKING:
    from packhorse.text.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; a chat may use all that the context leaves."""

_Count = Annotated[int, Field(strict=True, ge=0)]


class _Body(BaseModel):
    """Fields of both endpoints that are not sampling parameters; those are checked by SamplingParams."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    model: str | None = None
    max_completion_tokens: _Count | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    echo: bool | None = None
    priority: Annotated[int, Field(strict=True)] | None = None
    timeout: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] | None = None


class ChatBody(_Body):
    """What a chat has beside its messages and sampling parameters."""

    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None


class CompletionBody(_Body):
    """What completions have beside their prompts and sampling parameters."""

    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: _Count | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A body that was found good; its prompts are not tokenized yet.

    messages: of a chat, else None. prompts: of completions, else None. model: as the body names it.
    priority, timeout: as Request has them. unknown_fields: names that were ignored.
    """

    endpoint: Endpoint
    model: str | None
    params: SamplingParams
    messages: list[Message] | None = None
    prompts: list[TextOrIds] | None = None
    add_special_tokens: bool = True
    stream: bool = False
    include_usage: bool = False
    priority: int = 0
    timeout: float | None = None
    unknown_fields: tuple[str, ...] = ()

    @property
    def num_choices(self) -> int:
        return self.params.n * (len(self.prompts) if self.prompts is not None else 1)


def parse_request(
    endpoint: Endpoint, body: object, *, strict_fields: bool = False, allow_stream: bool = False
) -> ApiRequest:
    """Check a body. Raises InvalidRequest that names the field; unknown fields are an error only if strict_fields."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"The body must be an object, not {kind(body)}.", param="body")
    unknown = fields.unknown_fields(body, endpoint)
    fields.refuse_unsupported(body, endpoint)
    request = _parse_chat(body) if endpoint == "chat" else _parse_completion(body)
    if request.stream and not allow_stream:
        raise unsupported("stream", "a batch gives whole results; leave it out or set it to false")
    unknown += request.unknown_fields
    if unknown and strict_fields:
        raise InvalidRequest(
            f"{unknown[0]} is not a known field: {_advice(unknown[0], endpoint)}.",
            param=unknown[0],
            code="unknown_parameter",
        )
    return replace(request, unknown_fields=tuple(unknown))


def refuse_other_model(asked: object, names: Collection[str]) -> None:
    """Raises ModelMismatch when a body names a model and it is none of these, which are names of the one loaded."""
    if isinstance(asked, str) and asked not in names:
        raise ModelMismatch(
            f"The model {asked!r} is asked for; loaded is {' or '.join(sorted(names))}. "
            f"Ask for that, or let it go by the other name with --served-model-name.",
            param="model",
        )


def tokenize(request: ApiRequest, tokenizer: Tokenizer, most: int | None = None) -> list[Prompt]:
    """The request's prompts as ids. Raises InvalidRequest (empty prompt, foreign id, no chat template …).

    most: tokens that fit; a text that certainly has more raises ContextLengthExceeded without being tokenized.
    """
    if request.messages is not None:
        return [Prompt(tokenizer.encode_chat(list(request.messages), most=most), None)]
    return encode_prompts(request.prompts or [], tokenizer, add_special_tokens=request.add_special_tokens, most=most)


def engine_requests(request: ApiRequest, prompts: Sequence[Prompt], request_id: str) -> list[Request]:
    """One request to the engine for each prompt; their ids are `request_id` and the prompt's number."""
    return [
        Request(
            f"{request_id}-{i}",
            prompt.token_ids,
            request.params,
            prompt=prompt.text,
            stream=request.stream,
            priority=request.priority,
            timeout=request.timeout,
        )
        for i, prompt in enumerate(prompts)
    ]


def _parse_chat(body: dict[str, Any]) -> ApiRequest:
    read = _read(ChatBody, body)
    stream, include_usage = _streaming(read)
    messages, unknown = read_messages(body.get("messages"))
    if read.echo:
        raise unsupported("echo", "a chat answers and does not continue its prompt; use completions")
    if read.top_logprobs is not None and not read.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true beside it.", param="top_logprobs")
    logprobs = (read.top_logprobs or 0) if read.logprobs else None
    return ApiRequest(
        endpoint="chat",
        model=read.model,
        params=_sampling(body, read, logprobs=logprobs, max_tokens=None),
        messages=messages,
        unknown_fields=tuple(unknown),
        stream=stream,
        include_usage=include_usage,
        priority=read.priority or 0,
        timeout=read.timeout,
    )


def _parse_completion(body: dict[str, Any]) -> ApiRequest:
    read = _read(CompletionBody, body)
    stream, include_usage = _streaming(read)
    prompts = read_prompts(body.get("prompt"))
    echoed: dict[str, Any] = {"echo": bool(read.echo)}
    if read.echo and read.logprobs is not None:
        # Scoring: the prompt's tokens stand in the returned text, so they need their log-probabilities too.
        echoed["prompt_logprobs"] = read.logprobs
    params = _sampling(body, read, logprobs=read.logprobs, max_tokens=DEFAULT_COMPLETION_TOKENS, **echoed)
    if read.best_of is not None and read.best_of != params.n:
        raise unsupported("best_of", f"it must equal n ({params.n}) or be left out")
    if len(prompts) * params.n > MAX_PROMPTS:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n {params.n} are {len(prompts) * params.n} choices; "
            f"at most {MAX_PROMPTS} are allowed in one body.",
            param="n",
        )
    return ApiRequest(
        endpoint="completions",
        model=read.model,
        params=params,
        prompts=prompts,
        add_special_tokens=read.add_special_tokens is not False,
        stream=stream,
        include_usage=include_usage,
        priority=read.priority or 0,
        timeout=read.timeout,
    )


def _sampling(body: dict[str, Any], read: _Body, *, max_tokens: int | None, **more: Any) -> SamplingParams:
    """SamplingParams from the body's own fields; null means that the default holds."""
    given = {name: value for name, value in body.items() if name in fields.SAMPLING and value is not None}
    if read.max_completion_tokens is not None:
        if given.get("max_tokens", read.max_completion_tokens) != read.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ: give one.", param="max_tokens")
        given["max_tokens"] = read.max_completion_tokens
    params = SamplingParams(**{"max_tokens": max_tokens, **more, **given})
    for text in params.stop:
        check_text(text, "stop")
    return params


def _streaming(read: _Body) -> tuple[bool, bool]:
    """Whether to stream, and whether a last chunk with the usage is asked for."""
    options = read.stream_options
    if options is not None and not read.stream:
        raise InvalidRequest("stream_options needs stream: true beside it.", param="stream_options")
    usage = (options or {}).get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        raise InvalidRequest(
            f"stream_options.include_usage must be a boolean, not {kind(usage)}.", param="stream_options"
        )
    return bool(read.stream), bool(usage)


_B = TypeVar("_B", bound=_Body)


def _read(model: type[_B], body: dict[str, Any]) -> _B:
    try:
        read = model.model_validate(body)
    except ValidationError as error:
        raise refusal(error) from None
    if read.model is not None:
        check_text(read.model, "model")
    return read


def refusal(error: ValidationError) -> InvalidRequest:
    """The first thing that is wrong, by its field and in our words."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Input should be ")
    value = first["input"]
    shown = repr(value) if isinstance(value, (bool, int, float)) else kind(value)
    return InvalidRequest(f"{field} must be {message}, not {shown}.", param=field)


def _advice(name: str, endpoint: Endpoint) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, fields.OF_ENDPOINT[endpoint], n=1)
    return f"did you mean {close[0]}?" if close else "leave it out, or do without strict fields"
