"""The runner on a small pack made here, against the same model in plain numpy; and the memory between its segments."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse.errors import PackError, StepError
from packhorse.pack.manifest import load_manifest
from packhorse.runner import onnx_runner
from packhorse.runner.base import StepBatch
from packhorse.runner.buffers import StepBuffers, program
from packhorse.runner.onnx_runner import OnnxRunner
from tests.runner.llama_pack import Shape, build_pack, random_weights, reference_logits
from tests.runner.ragged import block_table, step

PLAIN = Shape()
SHAPES = {"plain": PLAIN, "window and softcap": Shape(window=9, softcap=4.0, layers=3)}
LENGTHS = [23, 1, 60, 17]


class Model:
    """A pack, its runner, and sequences of random ids with their reference logits."""

    def __init__(self, folder: Path, shape: Shape, threads: int = 2) -> None:
        weights = random_weights(shape)
        rng = np.random.default_rng(1)
        self.folder = build_pack(folder, shape, weights)
        self.ids = [rng.integers(0, shape.vocab, n) for n in LENGTHS]
        self.expected = [reference_logits(shape, weights, ids) for ids in self.ids]
        self.table = block_table(LENGTHS, 16, rng)
        self.runner = OnnxRunner(self.folder, num_blocks=20, threads=threads)

    def batch(
        self, context_lens: Sequence[int], queries: Sequence[int], rows: Sequence[int] | None = None
    ) -> StepBatch:
        """The step that computes the last queries[s] of context_lens[s]; sequences with 0 queries are left out."""
        chosen = [s for s, n in enumerate(queries) if n]
        contexts, counts = [context_lens[s] for s in chosen], [queries[s] for s in chosen]
        parts = zip(chosen, contexts, counts, strict=True)
        ids = np.concatenate([self.ids[s][c - n : c] for s, c, n in parts])
        return step(self.table[chosen], contexts, counts, 16, ids=ids, rows=rows)

    def last_logits(self) -> np.ndarray:
        return np.stack([logits[-1] for logits in self.expected])


@pytest.fixture(params=sorted(SHAPES))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(tmp_path, SHAPES[request.param])


@pytest.fixture
def plain(tmp_path: Path) -> Model:
    return Model(tmp_path, PLAIN)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_ragged_prefill_gives_the_logits_of_each_sequence_alone(model: Model) -> None:
    assert_close(model.runner.run(model.batch(LENGTHS, LENGTHS)), model.last_logits())


def test_rows_pick_the_tokens_that_need_logits(model: Model) -> None:
    rows = [0, 5, 22, 23, 24, 100]
    expected = np.concatenate(model.expected)[rows]
    assert_close(model.runner.run(model.batch(LENGTHS, LENGTHS, rows)), expected)


def test_chunks_beside_decodes_give_the_logits_of_one_prefill(model: Model) -> None:
    done = [0, 0, 0, 0]
    for queries in ([20, 0, 31, 1], [1, 1, 25, 1], [1, 0, 1, 14], [1, 0, 3, 1]):
        done = [d + n for d, n in zip(done, queries, strict=True)]
        logits = model.runner.run(model.batch(done, queries))
        expected = [model.expected[s][done[s] - 1] for s, n in enumerate(queries) if n]
        assert_close(logits, np.stack(expected))
    assert done == LENGTHS


def test_one_token_alone_works(plain: Model) -> None:
    assert_close(plain.runner.run(plain.batch([0, 1, 0, 0], [0, 1, 0, 0])), plain.expected[1])


def test_a_step_without_rows_gives_no_logits_and_still_fills_the_cache(plain: Model) -> None:
    most = [n - 1 for n in LENGTHS]
    logits = plain.runner.run(plain.batch(most, most, rows=[]))
    assert logits.shape == (0, PLAIN.vocab)
    assert logits.dtype == np.float32
    assert_close(plain.runner.run(plain.batch(LENGTHS, [1] * 4)), plain.last_logits())


def test_steps_of_changing_size_move_the_buffers_and_change_nothing(plain: Model) -> None:
    whole = plain.batch(LENGTHS, LENGTHS)
    one = plain.batch([0, 1, 0, 0], [0, 1, 0, 0])
    first = plain.runner.run(one).copy()
    for _ in range(2):
        assert_close(plain.runner.run(whole), plain.last_logits())
        np.testing.assert_array_equal(plain.runner.run(one), first)


def test_bound_steps_are_kept_up_to_a_limit(plain: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runner, "KEPT_SHAPES", 3)
    for count in range(1, 18):
        assert_close(
            plain.runner.run(plain.batch([count, 0, 0, 0], [count, 0, 0, 0])), plain.expected[0][count - 1 : count]
        )
    assert len(plain.runner._bound) <= 3


def test_a_sequence_gets_the_same_logits_from_any_number_of_threads(plain: Model) -> None:
    other = OnnxRunner(plain.folder, num_blocks=20, threads=1)
    assert_close(other.run(plain.batch(LENGTHS, LENGTHS)), plain.runner.run(plain.batch(LENGTHS, LENGTHS)))


def test_a_failing_segment_is_named(plain: Model) -> None:
    class OutOfMemory:
        def run_with_iobinding(self, *_: object) -> None:
            raise RuntimeError("Failed to allocate memory for requested buffer")

    plain.runner.run(plain.batch(LENGTHS, LENGTHS))
    plain.runner._sessions[1] = OutOfMemory()
    with pytest.raises(StepError, match=r"segments/01\.onnx failed on 101 tokens: Failed to allocate"):
        plain.runner.run(plain.batch(LENGTHS, LENGTHS))


def test_a_token_outside_the_vocabulary_is_a_step_error(plain: Model) -> None:
    batch = plain.batch([0, 1, 0, 0], [0, 1, 0, 0])
    batch.ids[0] = PLAIN.vocab
    with pytest.raises(StepError, match=r"segments/00\.onnx"):
        plain.runner.run(batch)


def test_what_lies_outside_the_cache_or_the_step_is_refused(plain: Model) -> None:
    outside = plain.batch(LENGTHS, LENGTHS)
    outside.slots[3] = 20 * 16
    with pytest.raises(StepError, match="slot"):
        plain.runner.run(outside)
    for rows in ([-1], [101]):
        with pytest.raises(StepError, match="row"):
            plain.runner.run(plain.batch(LENGTHS, LENGTHS, rows))


def test_a_damaged_segment_is_a_pack_error(tmp_path: Path) -> None:
    folder = build_pack(tmp_path, PLAIN)
    (folder / "segments" / "01.onnx").write_bytes(b"not a graph")
    with pytest.raises(PackError, match=r"01\.onnx"):
        OnnxRunner(folder, num_blocks=4)


@pytest.mark.parametrize(("settings", "word"), [({"num_blocks": 0}, "num_blocks"), ({"block_size": 12}, "block_size")])
def test_a_wrong_size_is_refused(tmp_path: Path, settings: dict[str, int], word: str) -> None:
    folder = build_pack(tmp_path, PLAIN)
    with pytest.raises(ValueError, match=word):
        OnnxRunner(folder, **{"num_blocks": 4, **settings})


def test_no_value_is_overwritten_before_its_last_reader(tmp_path: Path) -> None:
    manifest = load_manifest(build_pack(tmp_path, Shape(layers=6)))
    buffers = StepBuffers(manifest)
    buffers.reserve(5, 5)
    holder: dict[int, str] = {}
    for reads, writes in program(manifest):
        for name in reads:
            assert holder[buffers.places[name].buffer] == name
        for name in writes:
            holder[buffers.places[name].buffer] = name
        for name in reads:
            for other in writes:
                assert not np.shares_memory(buffers.view(name, 5, 5), buffers.view(other, 5, 5))


def test_memory_between_segments_does_not_grow_with_depth(tmp_path: Path) -> None:
    sizes = []
    for layers in (4, 12):
        buffers = StepBuffers(load_manifest(build_pack(tmp_path / str(layers), Shape(layers=layers))))
        buffers.reserve(64, 64)
        sizes.append(buffers.nbytes)
    assert sizes[0] == sizes[1]


def test_room_grows_by_doubling(tmp_path: Path) -> None:
    buffers = StepBuffers(load_manifest(build_pack(tmp_path, PLAIN)))
    moves = sum(buffers.reserve(tokens, 1) for tokens in range(1, 257))
    assert moves <= 9


def test_memory_that_could_not_be_had_leaves_none_and_a_smaller_step_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = StepBuffers(load_manifest(build_pack(tmp_path, PLAIN)))
    buffers.reserve(8, 1)
    zeros, calls = np.zeros, itertools.count()

    def short(*some: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise MemoryError
        return zeros(*some, **more)

    monkeypatch.setattr("packhorse.runner.buffers.np.zeros", short)
    with pytest.raises(MemoryError):
        buffers.reserve(64, 1)
    assert buffers.nbytes == 0
    assert not buffers.fits(1, 1)
    assert buffers.reserve(16, 1)
    assert buffers.fits(16, 1)
    assert not buffers.fits(17, 1)
