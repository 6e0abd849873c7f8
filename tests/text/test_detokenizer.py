from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packhorse.text import detokenizer
from packhorse.text.detokenizer import Detokenizer
from tests.support.tokenizers import BACKENDS, byte_level_backend

REPLACEMENT = "\ufffd"
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"


def wrapped_byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level, but its decoder is one of a sequence: known to the detokenizer only as "any other"."""
    plan = json.loads(byte_level_backend().to_str())
    plan["decoder"] = {"type": "Sequence", "decoders": [plan["decoder"]]}
    return tokenizers.Tokenizer.from_str(json.dumps(plan))


def bare_backend() -> tokenizers.Tokenizer:
    """No decoder at all: the library puts a space between tokens."""
    plan = json.loads(byte_level_backend().to_str())
    plan["decoder"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(plan))


ALL = {**BACKENDS, "wrapped byte-level": wrapped_byte_level_backend, "no decoder": bare_backend}
MADE = {kind: make() for kind, make in ALL.items()}
every_kind = pytest.mark.parametrize("kind", ALL)
every_real_kind = pytest.mark.parametrize("kind", BACKENDS)


def byte_ids(kind: str, data: bytes) -> list[int]:
    """The ids that spell bytes one by one."""
    backend = MADE[kind]
    if kind == "sentencepiece":
        return [backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    return [backend.token_to_id(detokenizer_character(byte)) for byte in data]


def detokenizer_character(byte: int) -> str:
    return next(c for c, b in detokenizer._BYTE_OF_CHARACTER.items() if b == byte)


def deltas_of(kind: str, ids: Sequence[int], skip: bool) -> list[str]:
    stream = Detokenizer(MADE[kind]).stream(skip)
    return [*(stream.push(i) for i in ids), stream.finish()]


def id_lists(kind: str) -> st.SearchStrategy[list[int]]:
    """Any ids, some that no token has among them, with runs of single bytes to make and break characters."""
    backend = MADE[kind]
    anything = st.integers(0, backend.get_vocab_size() + 3)
    texts = st.text("aé你ざ🎉 ", max_size=4)
    pieces = st.one_of(
        anything.map(lambda i: [i]),
        texts.map(lambda text: backend.encode(text, add_special_tokens=False).ids),
        st.binary(max_size=5).map(lambda data: byte_ids(kind, data)),
        texts.map(lambda text: byte_ids(kind, text.encode()[:-1])),
    )
    return st.lists(pieces, max_size=14).map(lambda lists: [i for one in lists for i in one])


@every_kind
@settings(deadline=None, max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_equal_the_decoding_of_all_ids(kind: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(id_lists(kind))
    assert "".join(deltas_of(kind, ids, skip)) == Detokenizer(MADE[kind]).decode(ids, skip)


@pytest.mark.parametrize("kind", ["byte-level", "wrapped byte-level", "no decoder"])
@settings(deadline=None, max_examples=100)
@given(data=st.data(), skip=st.booleans())
def test_decoding_is_the_librarys_own(kind: str, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(id_lists(kind))
    assert Detokenizer(MADE[kind]).decode(ids, skip) == MADE[kind].decode(ids, skip_special_tokens=skip)


@every_real_kind
@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=30), skip=st.booleans())
@example(text=" leading and trailing ", skip=True)
@example(text="<|im_start|>x<|im_end|>", skip=True)
@example(text="\x00\u2028\u0085", skip=False)
def test_encoded_text_comes_back_as_the_library_decodes_it(kind: str, text: str, skip: bool) -> None:
    ids = MADE[kind].encode(text, add_special_tokens=False).ids
    expected = MADE[kind].decode(ids, skip_special_tokens=skip)
    assert Detokenizer(MADE[kind]).decode(ids, skip) == expected
    assert "".join(deltas_of(kind, ids, skip)) == expected


@every_real_kind
@settings(deadline=None, max_examples=200)
@given(text=st.text("ab 你世好ざ🎉é\U0001f469\u200d\U0001f467", max_size=20))
def test_no_delta_of_whole_text_holds_half_a_character(kind: str, text: str) -> None:
    ids = MADE[kind].encode(text, add_special_tokens=False).ids
    deltas = deltas_of(kind, ids, skip=True)
    assert REPLACEMENT not in "".join(deltas)
    assert "".join(deltas) == text
    assert deltas[-1] == ""  # nothing was left for the end


@every_real_kind
@pytest.mark.parametrize("text", ["你好，世界", "🎉", FAMILY, "ざ"])
def test_characters_spelled_in_bytes_are_released_one_by_one_and_whole(kind: str, text: str) -> None:
    deltas = deltas_of(kind, byte_ids(kind, text.encode()), skip=True)
    assert [delta for delta in deltas if delta] == list(text)


@every_real_kind
def test_streams_side_by_side_do_not_share_half_characters(kind: str) -> None:
    maker = Detokenizer(MADE[kind])
    texts = ["你好，世界", "🎉🎉", "ざざざ", "é and é"]
    ids = [byte_ids(kind, text.encode()) for text in texts]
    streams = [maker.stream(True) for _ in texts]
    shown = ["" for _ in texts]
    for step in range(max(map(len, ids))):
        for row, stream in enumerate(streams):
            if step < len(ids[row]):
                shown[row] += stream.push(ids[row][step])
    assert [text + stream.finish() for text, stream in zip(shown, streams, strict=True)] == texts


@every_real_kind
def test_a_broken_character_does_not_hold_back_what_follows(kind: str) -> None:
    broken = byte_ids(kind, "é".encode() + b"\xff")
    following = MADE[kind].encode("Hello world", add_special_tokens=False).ids
    deltas = deltas_of(kind, [*broken, *following], skip=True)
    assert "".join(deltas).startswith("é" + REPLACEMENT)
    assert "".join(deltas[:-1]).endswith("world")


@every_real_kind
def test_a_broken_character_at_the_end_comes_with_finish(kind: str) -> None:
    deltas = deltas_of(kind, byte_ids(kind, b"a" + "你".encode()[:2]), skip=True)
    assert deltas == ["a", "", "", REPLACEMENT]


def test_a_valid_run_of_byte_tokens_survives_a_broken_neighbour() -> None:
    ids = byte_ids("sentencepiece", "你好".encode() + b"\xff" + b"ok")
    assert Detokenizer(MADE["sentencepiece"]).decode(ids, True) == "你好" + REPLACEMENT + "ok"


def test_a_newline_spelled_as_a_byte_is_released_at_once() -> None:
    assert deltas_of("sentencepiece", byte_ids("sentencepiece", b"\n"), skip=True)[0] == "\n"


def test_the_first_space_of_a_completion_is_kept_where_the_tokenizer_keeps_it() -> None:
    ids = MADE["byte-level"].encode(" world", add_special_tokens=False).ids
    assert "".join(deltas_of("byte-level", ids, skip=True)) == " world"


def test_sentencepiece_drops_one_space_at_the_very_beginning_only() -> None:
    ids = MADE["sentencepiece"].encode("Hello", add_special_tokens=False).ids
    assert "".join(deltas_of("sentencepiece", ids * 3, skip=True)) == "Hello Hello Hello"


@every_real_kind
@pytest.mark.parametrize("skip", [True, False])
def test_control_tokens_show_only_when_not_skipped(kind: str, skip: bool) -> None:
    backend = MADE[kind]
    control = backend.token_to_id("<|im_end|>")
    ids = [control, *byte_ids(kind, b"a"), control, *byte_ids(kind, b"b"), control]
    joined = "".join(deltas_of(kind, ids, skip))
    assert joined == ("ab" if skip else "<|im_end|>a<|im_end|>b<|im_end|>")


@every_real_kind
def test_a_control_token_that_is_skipped_does_not_break_a_character(kind: str) -> None:
    first, second, third = byte_ids(kind, "你".encode())
    control = MADE[kind].token_to_id("<|im_end|>")
    assert "".join(deltas_of(kind, [first, control, second, third], skip=True)) == "你"


class _Counted:
    """A backend that counts the tokens given to its decoder."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.decoded = 0
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        self._count(ids)
        return str(self._backend.decode(ids, **options))

    @property
    def decoder(self) -> Any:
        counted = self

        class Decoder:
            def decode(self, pieces: list[str]) -> str:
                counted._count(pieces)
                return str(counted._backend.decoder.decode(pieces))

        return Decoder()

    def _count(self, items: Sequence[Any]) -> None:
        self.calls += 1
        self.decoded += len(items)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "wrapped byte-level"])
@pytest.mark.parametrize("byte", [0xE4, 0xFF], ids=["never completed", "never a character"])
def test_a_long_run_without_a_character_costs_a_constant_for_each_token(kind: str, byte: int) -> None:
    length = 5000
    counted = _Counted(MADE[kind])
    stream = Detokenizer(counted).stream(True)  # type: ignore[arg-type]
    ids = byte_ids(kind, bytes([byte])) * length
    joined = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert joined == REPLACEMENT * length
    assert counted.decoded < 30 * length


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "wrapped byte-level"])
def test_ordinary_text_decodes_a_short_window_for_each_token(kind: str) -> None:
    counted = _Counted(MADE[kind])
    ids = MADE[kind].encode("The capital of France is Paris. 你好 " * 100, add_special_tokens=False).ids
    stream = Detokenizer(counted).stream(True)  # type: ignore[arg-type]
    for i in ids:
        stream.push(i)
    assert counted.decoded <= 12 * len(ids)


def test_an_added_token_with_characters_outside_the_byte_table_stands_for_its_own_text() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<｜开始▁x｜>"])
    ids = [backend.token_to_id("<｜开始▁x｜>")]
    stream = Detokenizer(backend).stream(True)
    assert stream.push(ids[0]) == "<｜开始▁x｜>" == backend.decode(ids)


@every_real_kind
def test_ids_beyond_the_tokenizer_give_no_text(kind: str) -> None:
    """A model's vocabulary may be padded beyond what its tokenizer knows."""
    assert Detokenizer(MADE[kind]).decode([10_000, 10_001], True) == ""
    assert deltas_of(kind, [10_000, *byte_ids(kind, b"x"), 10_001], True) == ["", "x", "", ""]
