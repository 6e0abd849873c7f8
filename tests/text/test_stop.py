from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packhorse.text.stop import StopStrings

texts = st.text("abc.", max_size=40)
stop_lists = st.lists(st.text("abc.", min_size=1, max_size=5), max_size=4).map(tuple)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def run(stops: tuple[str, ...], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """What each piece released, until a match; then what finish released."""
    stream = StopStrings(stops, include=include)
    released = []
    for piece in pieces:
        released.append(stream.push(piece))
        if stream.matched is not None:
            return released, stream.matched
    return [*released, stream.finish()], None


def reference(stops: tuple[str, ...], text: str, *, include: bool) -> tuple[str, str | None]:
    """The stop that is complete first ends the text; of two complete at once the one that begins first."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=500)
@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=12), stops=stop_lists, include=st.booleans())
@example(text="abcc", cuts=[1, 2, 3], stops=("abcc", "bc"), include=False)
@example(text="abcc", cuts=[], stops=("abcc", "bc"), include=False)
def test_text_is_cut_at_the_first_match_however_it_is_split(
    text: str, cuts: list[int], stops: tuple[str, ...], include: bool
) -> None:
    released, matched = run(stops, pieces_of(text, cuts), include=include)
    assert ("".join(released), matched) == reference(stops, text, include=include)


@settings(max_examples=300)
@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=12), stops=stop_lists)
def test_nothing_of_a_stop_string_is_ever_released(text: str, cuts: list[int], stops: tuple[str, ...]) -> None:
    released, matched = run(stops, pieces_of(text, cuts))
    joined = "".join(released)
    assert not any(stop in joined for stop in stops)
    if matched is not None:
        assert text.startswith(joined + matched)


@settings(max_examples=200)
@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=12), stops=stop_lists)
def test_only_a_possible_beginning_of_a_stop_string_is_kept_back(
    text: str, cuts: list[int], stops: tuple[str, ...]
) -> None:
    stream = StopStrings(stops)
    seen = released = ""
    for piece in pieces_of(text, cuts):
        seen, released = seen + piece, released + stream.push(piece)
        if stream.matched is not None:
            return
        kept = seen[len(released) :]
        assert kept == "" or any(stop.startswith(kept) for stop in stops)


@settings(max_examples=200)
@given(text=texts, cuts=st.lists(st.integers(0, 100), max_size=12), stops=stop_lists, boundary=st.integers(0, 12))
def test_text_before_stops_are_active_passes_and_cannot_match(
    text: str, cuts: list[int], stops: tuple[str, ...], boundary: int
) -> None:
    pieces = pieces_of(text, cuts)
    stream = StopStrings(stops)
    early = "".join(stream.push(piece, active=False) for piece in pieces[:boundary])
    assert early == "".join(pieces[:boundary])
    assert stream.matched is None
    late = []
    for piece in pieces[boundary:]:
        late.append(stream.push(piece))
        if stream.matched is not None:
            break
    else:
        late.append(stream.finish())
    assert ("".join(late), stream.matched) == reference(stops, "".join(pieces[boundary:]), include=False)


def test_a_stop_string_spread_over_pieces_never_shows() -> None:
    assert run(("DEFGHIJ",), ["ABC ", "DEF", "GHI", "J", " more"]) == (["ABC ", "", "", ""], "DEFGHIJ")


def test_a_beginning_that_comes_to_nothing_is_released_later() -> None:
    released, matched = run(("DEFGHIJ",), ["DEF", "X", "DE"])
    assert (released, matched) == (["", "DEFX", "", "DE"], None)


def test_text_is_cut_at_the_first_matching_character_inside_a_piece() -> None:
    assert run(("..",), ["wait", "..."]) == (["wait", ""], "..")
    assert run(("..",), ["wait", "..."], include=True) == (["wait", ".."], "..")


def test_without_stop_strings_everything_passes_at_once() -> None:
    assert run((), ["a", "", "b"]) == (["a", "", "b", ""], None)


@pytest.mark.parametrize("order", [("ab", "abc"), ("abc", "ab")])
def test_the_order_of_stop_strings_does_not_matter(order: tuple[str, ...]) -> None:
    assert run(order, ["xabc"]) == (["x"], "ab")
