"""`messages` and `prompt`: read from a body, then turned into token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packhorse.api.fields import unsupported
from packhorse.errors import ContextLengthExceeded, InvalidRequest

if TYPE_CHECKING:
    from packhorse.text.tokenizer import Tokenizer

MAX_PROMPTS = 2048
"""Prompts one body may carry, as OpenAI allows."""

_MESSAGE_FIELDS = frozenset({"role", "content", "name", "refusal", "tool_call_id"})

Message = dict[str, Any]
TextOrIds = str | list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the engine takes it. `text`: as it was given or rendered, None when it came as ids."""

    token_ids: list[int]
    text: str | None


def read_messages(value: object) -> tuple[list[Message], list[str]]:
    """Messages with their text, and names of fields in them that nobody knows. Raises InvalidRequest with the place.

    Text parts of one message are joined by a line break.
    """
    if value is None:
        raise InvalidRequest("messages is missing.", param="messages", code="missing_parameter")
    if not isinstance(value, list):
        raise InvalidRequest(f"messages must be a list, not {kind(value)}.", param="messages")
    if not value:
        raise InvalidRequest("messages is empty: a chat needs at least one.", param="messages")
    unknown: list[str] = []
    return [_read_message(item, f"messages[{i}]", unknown) for i, item in enumerate(value)], unknown


def _read_message(item: object, where: str, unknown: list[str]) -> Message:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where} must be an object, not {kind(item)}.", param=where)
    for name in ("tool_calls", "function_call", "audio"):
        if item.get(name):
            raise unsupported(f"{where}.{name}", "only text messages can be rendered")
    unknown += [f"{where}.{name}" for name in item if name not in _MESSAGE_FIELDS]
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{where}.role must be a string such as user, not {kind(role)}.", param=f"{where}.role")
    message = {"role": check_text(role, f"{where}.role"), "content": _read_content(item.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if item.get(name) is not None:
            message[name] = _text(item[name], f"{where}.{name}")
    return message


def _read_content(content: object, where: str) -> str:
    where = f"{where}.content"
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{where} must be a string or a list of text parts, not {kind(content)}.", param=where)
    return "\n".join(_read_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _read_part(part: object, where: str) -> str:
    if isinstance(part, str):
        return check_text(part, where)
    if not isinstance(part, dict):
        raise InvalidRequest(f'{where} must be {{"type": "text", "text": …}}, not {kind(part)}.', param=where)
    if part.get("type") != "text":
        raise unsupported(where, f"its type is {part.get('type')!r}, and only text parts can be read")
    return _text(part.get("text"), f"{where}.text")


def read_prompts(value: object) -> list[TextOrIds]:
    """A prompt in any of its four forms as a list of texts or lists of ids. Raises InvalidRequest with the place."""
    if value is None:
        raise InvalidRequest("prompt is missing.", param="prompt", code="missing_parameter")
    if isinstance(value, str):
        return [check_text(value, "prompt")]
    if not isinstance(value, list):
        raise InvalidRequest(f"prompt must be a string or a list, not {kind(value)}.", param="prompt")
    if not value:
        raise _empty("prompt")
    if is_id(value[0]):
        return [_read_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed.", param="prompt")
    return [_read_prompt(item, f"prompt[{i}]") for i, item in enumerate(value)]


def _read_prompt(item: object, where: str) -> TextOrIds:
    if isinstance(item, str):
        return check_text(item, where)
    if isinstance(item, list):
        return _read_ids(item, where)
    raise InvalidRequest(f"{where} must be a string or a list of token ids, not {kind(item)}.", param=where)


def _read_ids(ids: list[Any], where: str) -> list[int]:
    if not ids:
        raise _empty(where)
    for i, item in enumerate(ids):
        if not is_id(item):
            raise InvalidRequest(f"{where}[{i}] must be a token id, not {kind(item)}.", param=f"{where}[{i}]")
    return ids


def encode_prompts(
    prompts: Sequence[TextOrIds], tokenizer: Tokenizer, *, add_special_tokens: bool, most: int | None = None
) -> list[Prompt]:
    """Ids of each. Raises InvalidRequest for a prompt without tokens or an id that the model does not have.

    most: as `Tokenizer.encode` has it.
    """
    places = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]
    encoded = []
    for prompt, where in zip(prompts, places, strict=True):
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt, add_special_tokens, most=most)
            encoded.append(Prompt(ids, prompt))
            if not encoded[-1].token_ids:
                raise _empty(where)
        else:
            if most is not None and len(prompt) > most:
                raise ContextLengthExceeded(f"{where} has {len(prompt):,} ids, and at most {most:,} fit.", param=where)
            _check_ids(prompt, tokenizer.vocab_size, where)
            encoded.append(Prompt(prompt, None))
    return encoded


def _check_ids(ids: list[int], vocab_size: int, where: str) -> None:
    worst = max(ids) if max(ids) >= vocab_size else min(ids)
    if not 0 <= worst < vocab_size:
        raise InvalidRequest(f"{where} holds token id {worst}; ids go from 0 to {vocab_size - 1}.", param=where)


def _empty(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} is empty: there is nothing to continue.", param=where, code="empty_prompt")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string, not {kind(value)}.", param=where)
    return check_text(value, where)


def check_text(text: str, where: str) -> str:
    """The text itself. Raises InvalidRequest when it holds half a UTF-16 pair, which no tokenizer can take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{where} holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}: "
            "it is not valid Unicode.",
            param=where,
        ) from None
    return text


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def kind(value: object) -> str:
    """JSON's name for a value, for messages."""
    names = {type(None): "null", bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
