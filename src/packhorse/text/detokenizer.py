"""Token ids to text, at once or token by token, so that joined deltas equal the whole decoded at once.

Two kinds of decoder exist in practice:

- *byte-level* (GPT-2's, Llama 3's, Qwen's …): every token stands for bytes. The text is the bytes' UTF-8, read by an
  incremental decoder that keeps half a character back until its other half comes.
- *any other* (SentencePiece-like: `▁` for spaces, `<0xE4>` for bytes …): a token's text depends on its neighbours, so
  a short window of recent tokens is decoded with and without the new ones, and the difference is the delta. Runs of
  byte tokens are read as UTF-8 first, in the same way as above.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Sequence
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """Decodes one sequence. What `push` has returned is never taken back."""

    def push(self, token_id: int) -> str:
        """Text that is certain now; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was kept back, incomplete characters as U+FFFD."""
        ...


class Detokenizer:
    """Makes decoders for one tokenizer.

    longest: characters that one token can stand for; infinity where that is not known.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        plan = json.loads(backend.to_str())
        self._control_ids = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        decoder = plan.get("decoder") or {}
        self._bytes = TokenBytes(backend) if decoder.get("type") == "ByteLevel" else None
        self._whole: dict[bool, dict[int, str]] = {True: dict.fromkeys(self._control_ids, ""), False: {}}
        self.longest = _longest(backend, plan) if self._bytes is not None else math.inf
        self._texts: dict[int, str] = {}
        self._byte_of = _byte_tokens(backend) if '"ByteFallback"' in json.dumps(decoder) else {}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of all ids together."""
        if not self._byte_of:
            return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))
        skipped = self._control_ids if skip_special_tokens else set()
        pieces = _Pieces(self._backend, self._byte_of)
        found = [piece for i in ids if i not in skipped for piece in pieces.push(int(i))]
        return _join(self._backend, found + pieces.finish())

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, control tokens for their names, as part of a text and not at its beginning."""
        if self._bytes is not None:
            return self._bytes[token_id]
        byte = self._byte_of.get(token_id)
        if byte is not None:
            return bytes([byte])
        piece = self._backend.id_to_token(token_id) or ""
        alone, twice = _join(self._backend, [piece]), _join(self._backend, [piece, piece])
        return (twice.removeprefix(alone) or alone).encode()

    def token_text(self, token_id: int) -> str:
        """The same as text; bytes that are no characters by themselves as OpenAI writes them: bytes:\\xe3\\x81."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = _shown(self.token_bytes(token_id))
        return found

    def stream(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder of one sequence from its first token on."""
        if self._bytes is not None:
            return _ByteDecoder(self._bytes, self._whole[skip_special_tokens])
        skipped = self._control_ids if skip_special_tokens else set()
        return _WindowDecoder(self._backend, _Pieces(self._backend, self._byte_of), skipped)


def _longest(backend: tokenizers.Tokenizer, plan: dict[str, Any]) -> float:
    """Of a byte-level vocabulary; infinity where the tokenizer drops characters, so that nobody knows."""
    swallows = any(token["lstrip"] or token["rstrip"] for token in plan["added_tokens"])
    if plan["normalizer"] is not None or swallows:
        return math.inf
    return max(map(len, backend.get_vocab()))


def _shown(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class TokenBytes:
    """The bytes that each token of a byte-level vocabulary stands for, looked up once."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = _bytes_of(self._backend.id_to_token(token_id) or "")
        return found


class _ByteDecoder:
    """whole: tokens that are whole characters and their text, found by all decoders together; skipped ones are ""."""

    def __init__(self, token_bytes: TokenBytes, whole: dict[int, str]) -> None:
        self._bytes = token_bytes
        self._whole = whole
        self._amid = False  # half a character is kept back
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        known = self._whole.get(token_id)
        if known is not None and (not self._amid or not known):
            return known
        before = self._amid
        text = self._utf8.decode(self._bytes[token_id])
        self._amid = bool(self._utf8.getstate()[0])
        if not before and not self._amid and REPLACEMENT not in text:
            self._whole[token_id] = text
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Pieces:
    """Token ids to the strings that the tokenizer's decoder joins.

    Byte tokens become the characters they spell, read incrementally. The library's ByteFallback would turn a whole
    run of them to U+FFFD for one broken character in it, and so take back characters that were released before.
    """

    def __init__(self, backend: tokenizers.Tokenizer, byte_of: dict[int, int]) -> None:
        self._backend = backend
        self._byte_of = byte_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> list[str]:
        """What is complete with this token."""
        byte = self._byte_of.get(token_id)
        if byte is not None:
            character = self._utf8.decode(bytes([byte]))
            return [character] if character else []
        token = self._backend.id_to_token(token_id)
        return [*self.finish(), token] if token is not None else []

    def finish(self) -> list[str]:
        """A character that will not be completed, as U+FFFD."""
        broken = self._utf8.decode(b"", final=True)
        return [broken] if broken else []


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """Token id -> byte, for the tokens <0x00> … <0xFF>."""
    ids = {backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
    return {i: byte for i, byte in ids.items() if i is not None}


def _join(backend: tokenizers.Tokenizer, pieces: list[str]) -> str:
    return str(backend.decoder.decode(pieces)) if backend.decoder is not None else " ".join(pieces)


class _WindowDecoder:
    """Decodes `pieces[start:]` with and without what comes after `read`; the difference is new text.

        pieces   … a  b  c │ d  e  f │ g
                   start ──┘    read ┘   new token

    The window starts at tokens that gave text already, so that what a decoder does to the first token (dropping its
    space) happens before the part that is returned. Text that ends in U+FFFD may be half a character: it waits.
    """

    def __init__(self, backend: tokenizers.Tokenizer, pieces: _Pieces, skipped: set[int]) -> None:
        self._backend = backend
        self._source = pieces
        self._skipped = skipped
        self._pieces: list[str] = []
        self._start = self._read = 0
        self._next_try = 0

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pieces += self._source.push(token_id)
        if len(self._pieces) < self._next_try or len(self._pieces) == self._read:
            return ""
        before, after = self._decode(self._start, self._read), self._decode(self._start, len(self._pieces))
        if after.endswith(REPLACEMENT) or len(after) <= len(before) or not after.startswith(before):
            # Wait longer each time, so that a run without an end costs no more than a constant times its length.
            self._next_try = len(self._pieces) + 1 + (len(self._pieces) - self._read) // 8
            return ""
        self._start, self._read = self._read, len(self._pieces)
        return after[len(before) :]

    def finish(self) -> str:
        self._pieces += self._source.finish()
        before, after = self._decode(self._start, self._read), self._decode(self._start, len(self._pieces))
        self._start = self._read = len(self._pieces)
        return after[len(before) :]

    def _decode(self, start: int, end: int) -> str:
        return _join(self._backend, self._pieces[start:end])


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the other 68 for the characters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """A token whose characters are not all in the table (an added one) stands for its own text."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
