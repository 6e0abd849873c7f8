from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.engine.random import philox, stream_key, uniform

ZERO, ONES = 0, 0xFFFFFFFF
# From the known-answer file that comes with Random123, the authors' own implementation.
KNOWN = [
    ((ZERO,) * 4, (ZERO,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
keys_of = st.integers(0, 2**64 - 1)


Words = tuple[int, ...]


def arrays(words: Words) -> tuple[np.ndarray, ...]:
    return tuple(np.array([word], dtype=np.uint64) for word in words)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    found = philox(arrays(counter), arrays(key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in found) == answer


def test_uniform_is_the_first_53_bits_of_philox() -> None:
    expected = ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53
    zero = np.zeros(1, dtype=np.uint64)
    assert uniform(zero, zero)[0] == expected


@given(key=keys_of, position=keys_of)
def test_uniform_is_from_zero_to_below_one(key: int, position: int) -> None:
    value = uniform(np.array([key], dtype=np.uint64), np.array([position], dtype=np.uint64))[0]
    assert 0 <= value < 1


def test_every_bit_set_is_still_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = np.array([0xFFFFFFFF], dtype=np.uint64)
    monkeypatch.setattr("packhorse.engine.random.philox", lambda *_: (ones, ones, ones, ones))
    assert uniform(ones, ones)[0] < 1


@given(
    keys=st.lists(keys_of, min_size=1, max_size=8), positions=st.lists(st.integers(0, 2**40), min_size=8, max_size=8)
)
def test_a_draw_does_not_depend_on_its_neighbours(keys: list[int], positions: list[int]) -> None:
    many = uniform(np.array(keys, dtype=np.uint64), np.array(positions[: len(keys)], dtype=np.uint64))
    for i, key in enumerate(keys):
        alone = uniform(np.array([key], dtype=np.uint64), np.array([positions[i]], dtype=np.uint64))
        assert many[i] == alone[0]


def test_a_stream_is_uniform_and_streams_are_not_alike() -> None:
    positions = np.arange(20_000, dtype=np.uint64)
    streams = [uniform(np.full_like(positions, np.uint64(stream_key(seed, 0))), positions) for seed in (0, 1, 2)]
    for stream in streams:
        counts = np.histogram(stream, bins=20, range=(0, 1))[0]
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(stream[:-1], stream[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(streams[0], streams[1])[0, 1]) < 0.03
    assert abs(np.corrcoef(streams[1], streams[2])[0, 1]) < 0.03


@given(seed=st.integers())
def test_choices_of_one_seed_have_keys_of_their_own(seed: int) -> None:
    keys = [stream_key(seed, choice) for choice in range(128)]
    assert len(set(keys)) == 128
    assert all(0 <= key < 2**64 for key in keys)


def test_nearby_seeds_have_keys_of_their_own() -> None:
    assert len({stream_key(seed, choice) for seed in range(-50, 50) for choice in range(50)}) == 5000
