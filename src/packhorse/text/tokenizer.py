"""Text to ids and back, for prompts and chats, with control tokens kept out of what users type."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from packhorse.errors import InvalidRequest, PackError
from packhorse.pack.manifest import Manifest
from packhorse.text.chat_template import ChatTemplate, Messages
from packhorse.text.detokenizer import Detokenizer, IncrementalDecoder

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer and chat template.

    escape_control_tokens: control tokens that stand in a chat message are tokenized as the text they are, so that a
    message cannot forge a turn. Prompts of completions are taken as they stand.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        escape_control_tokens: bool = True,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._escape = escape_control_tokens
        self._control_ids = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        self._decoder = Detokenizer(backend)

    @classmethod
    def from_pack(cls, folder: Path, manifest: Manifest, *, escape_control_tokens: bool = True) -> Tokenizer:
        """The tokenizer of a pack. Raises PackError when the pack has none or it cannot be read."""
        if manifest.tokenizer is None:
            raise PackError(f"{folder} has no tokenizer: give prompts as lists of token ids.")
        try:
            backend = tokenizers.Tokenizer.from_file(str(folder / manifest.tokenizer.file))
        except Exception as error:  # the library raises bare Exception
            raise PackError(f"{folder / manifest.tokenizer.file} cannot be read: {error}. Convert again.") from error
        template = None
        if manifest.chat_template is not None:
            source = (folder / manifest.chat_template).read_text(encoding="utf-8")
            template = ChatTemplate(source, _special_tokens(folder / "tokenizer_config.json"))
        return cls(backend, template, escape_control_tokens=escape_control_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a prompt as it stands; with what the tokenizer itself adds (a bos, say) unless told not to."""
        _refuse_surrogates(text)
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(
        self, messages: Messages, *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat: the template's text with nothing added. Raises InvalidRequest as `render_chat` does."""
        if not self._escape or not self._has_control_text(messages):
            text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return self.encode(text, add_special_tokens=False)
        marks = _Marks(self._control_ids)
        text = self.render_chat(marks.hide(messages), tools=tools, add_generation_prompt=add_generation_prompt)
        return self._encode_with_marks(text, marks)

    def render_chat(
        self, messages: Messages, *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The chat's text. Raises InvalidRequest for a model without a template, or messages it refuses."""
        if self._chat_template is None:
            raise InvalidRequest(
                "This model has no chat template: send a prompt to completions instead.", param="messages"
            )
        if not messages:
            raise InvalidRequest("messages is empty: a chat needs at least one.", param="messages")
        return self._chat_template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of all the ids together; bytes that are no character become U+FFFD."""
        return self._decoder.decode(ids, skip_special_tokens)

    def stream(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder of one sequence, fed token by token."""
        return self._decoder.stream(skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """A token's text decoded alone, control tokens included."""
        return self._decoder.decode([token_id], skip_special_tokens=False)

    def _has_control_text(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._control_pattern.search(value) is not None
        if isinstance(value, dict):
            return any(self._has_control_text(item) for item in value.values())
        return isinstance(value, (list, tuple)) and any(self._has_control_text(item) for item in value)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        return _any_of(self._control_ids)

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        """A copy that takes control tokens for ordinary text."""
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def _encode_with_marks(self, text: str, marks: _Marks) -> list[int]:
        """The template's own control tokens become ids; marked ones become the text they stand for."""
        _refuse_surrogates(text)
        ids: list[int] = []
        for piece in re.split(f"({self._control_pattern.pattern})", text):
            if piece in self._control_ids:
                ids.append(self._control_ids[piece])
            elif piece:
                ids.extend(self._plain_backend.encode(marks.show(piece), add_special_tokens=False).ids)
        return ids


class _Marks:
    """Stand-ins for control tokens inside messages while a template is rendered; a nonce makes them unforgeable."""

    def __init__(self, contents: dict[str, int]) -> None:
        nonce = secrets.token_hex(8)
        self._mark_of = {content: f"\ue000{nonce}.{index}\ue001" for index, content in enumerate(contents)}
        self._content_of = {mark: content for content, mark in self._mark_of.items()}

    def hide(self, value: Any) -> Any:
        if isinstance(value, str):
            return _any_of(self._mark_of).sub(lambda match: self._mark_of[match[0]], value)
        if isinstance(value, dict):
            return {key: self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def show(self, text: str) -> str:
        return _any_of(self._content_of).sub(lambda match: self._content_of[match[0]], text)


def _any_of(texts: dict[str, Any]) -> re.Pattern[str]:
    """Longest first, so that a token that begins another one does not hide it. Nothing matches when there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")


def _special_tokens(config_file: Path) -> dict[str, str]:
    """bos_token and the like from tokenizer_config.json, where each is a string or an object with `content`."""
    config = json.loads(config_file.read_bytes()) if config_file.is_file() else {}
    found = {name: config.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _refuse_surrogates(text: str) -> None:
    """Half a UTF-16 pair is no character; JSON can smuggle one in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}: "
            "it is not valid Unicode."
        ) from error
