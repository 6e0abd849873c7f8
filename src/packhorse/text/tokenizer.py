"""Text to ids and back, for prompts and chats, with control tokens kept out of what users type."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from packhorse.errors import ContextLengthExceeded, InvalidRequest, PackError
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

    def encode(self, text: str, add_special_tokens: bool = True, *, most: int | None = None) -> list[int]:
        """Ids of a prompt as it stands; with what the tokenizer itself adds (a bos, say) unless told not to.

        most: raises ContextLengthExceeded, without the work, for a text that certainly has more tokens.
        """
        self._refuse_too_long(text, most)
        _refuse_surrogates(text)
        return _ids(self._backend, text, add_special_tokens)

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Ids of a chat: the template's text with nothing added. Raises what `render_chat` and `encode` do."""
        if not self._escape or not self._control_text.found_in([messages, tools]):
            text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
            return self.encode(text, add_special_tokens=False, most=most)
        marks = _Marks(self._control_text)
        text = self.render_chat(
            marks.hide(messages), tools=marks.hide(tools), add_generation_prompt=add_generation_prompt
        )
        self._refuse_too_long(text, most)
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
        """A token's text by itself, control tokens included; of a part of a character its bytes: bytes:\\xe3\\x81."""
        return self._decoder.token_text(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for; of a part of a character that part of its UTF-8."""
        return self._decoder.token_bytes(token_id)

    def _refuse_too_long(self, text: str, most: int | None) -> None:
        longest = self._decoder.longest
        if most is not None and len(text) > most * longest:
            least = len(text) // int(longest)
            raise ContextLengthExceeded(
                f"The prompt has {len(text):,} characters, so at least {least:,} tokens, and at most {most:,} fit.",
                param="prompt",
            )

    @cached_property
    def _control_text(self) -> _ControlText:
        return _ControlText(self._control_ids)

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """Control token -> its name in the renamed backend."""
        nonce = secrets.token_hex(8)
        return {content: f"\ue000{nonce}:{index}\ue001" for index, content in enumerate(self._control_ids)}

    @cached_property
    def _renamed_backend(self) -> tokenizers.Tokenizer:
        """A copy whose control tokens have names that nobody can write, so that their old names are ordinary text.

        Ids and flags are the same, and the whole text is encoded at once, because what a tokenizer does to a word
        depends on where it stands: first in the text, after a token that swallows white space, …
        """
        plan = json.loads(self._backend.to_str())
        for token in plan["added_tokens"]:
            token["content"] = self._stand_ins.get(token["content"], token["content"])
        plan["model"] = _rename(plan["model"], self._stand_ins)
        return tokenizers.Tokenizer.from_str(json.dumps(plan))

    def _encode_with_marks(self, text: str, marks: _Marks) -> list[int]:
        """The template's own control tokens become ids; marked ones become the text they stand for."""
        _refuse_surrogates(text)
        own = self._control_text.pattern.sub(lambda match: self._stand_ins[match[0]], text)
        return _ids(self._renamed_backend, marks.show(own), add_special_tokens=False)


class _ControlText:
    """Finds control tokens in what users wrote, and halves of them at its ends, which a template could join."""

    def __init__(self, contents: Iterable[str]) -> None:
        self.contents = tuple(contents)
        self.pattern = _any_of(self.contents)
        self._heads = tuple({c[:i] for c in self.contents for i in range(1, len(c))})
        self._tails = tuple({c[i:] for c in self.contents for i in range(1, len(c))})

    def found_in(self, value: Any) -> bool:
        """Whether any string of a nested value needs hiding."""
        if isinstance(value, str):
            return self.pattern.search(value) is not None or self.begins_amid(value) or self.ends_amid(value)
        if isinstance(value, dict):
            return any(self.found_in(part) for item in value.items() for part in item)
        return isinstance(value, (list, tuple)) and any(self.found_in(item) for item in value)

    def begins_amid(self, text: str) -> bool:
        """Whether it begins with the end of a control token, white space aside (templates trim)."""
        return text.lstrip().startswith(self._tails)

    def ends_amid(self, text: str) -> bool:
        """Whether it ends with the beginning of one."""
        return text.rstrip().endswith(self._heads)


class _Marks:
    """Stand-ins for control tokens inside messages while a template is rendered; a nonce makes them unforgeable."""

    def __init__(self, control_text: _ControlText) -> None:
        nonce = secrets.token_hex(8)
        contents = control_text.contents
        self._control_text = control_text
        self._seam = f"\ue000{nonce}\ue001"
        self._mark_of = {content: f"\ue000{nonce}.{index}\ue001" for index, content in enumerate(contents)}
        self._content_of = {mark: content for content, mark in self._mark_of.items()} | {self._seam: ""}
        self._mark_pattern = _any_of(self._content_of)

    def hide(self, value: Any) -> Any:
        """The same nested value with every string's control tokens marked, and a seam where half of one stands."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, (list, tuple)) else value

    def show(self, text: str) -> str:
        return self._mark_pattern.sub(lambda match: self._content_of[match[0]], text)

    def _hide_text(self, text: str) -> str:
        hidden = self._control_text.pattern.sub(lambda match: self._mark_of[match[0]], text)
        before, after = len(hidden) - len(hidden.lstrip()), len(hidden.rstrip())
        if self._control_text.ends_amid(hidden):
            hidden = hidden[:after] + self._seam + hidden[after:]
        if self._control_text.begins_amid(hidden):
            hidden = hidden[:before] + self._seam + hidden[before:]
        return hidden


def _rename(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A model of tokenizer.json with some of its vocabulary renamed: Unigram lists pieces, the others map them to ids.

    Without this a Unigram model, or one that looks whole words up, would find a control token's name in plain text.
    """
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed: Any = {names.get(piece, piece): i for piece, i in vocab.items()}
    else:
        renamed = [[names.get(piece, piece), score] for piece, score in vocab]
    unknown = {"unk_token": names.get(model["unk_token"], model["unk_token"])} if model.get("unk_token") else {}
    return model | unknown | {"vocab": renamed}


def _ids(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """A batch of one, because only for batches the library lets other threads run meanwhile."""
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
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
