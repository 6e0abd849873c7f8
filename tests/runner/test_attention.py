"""The attention kernel against attention by the book, and that nothing around a sequence changes its result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.attention import plan_attention
from tests.runner.ragged import Attention, block_table, blocks_needed, make_spec, random_qkv, reference, step

# Each is compiled once: few, but each different in what the kernel is specialized by.
SHAPES: dict[str, Callable[..., AttentionSpec]] = {
    "grouped": lambda window: make_spec(9, 3, 64, window=window),
    "softcap": lambda window: make_spec(4, 2, 8, window=window, softcap=5.0),
    "sinks, values of another size": lambda window: make_spec(4, 2, 20, 12, window=window, sinks=(0.5, -1.0, 3.0, 9.0)),
    "one key head, many query heads": lambda window: make_spec(12, 1, 16, 32, window=window),
    "no groups": lambda window: make_spec(2, 2, 32, window=window),
}
BLOCK_SIZES = {"grouped": 16, "softcap": 32}


@st.composite
def ragged_batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """(context lengths, queries of each in this step)"""
    lengths = draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    queries = [draw(st.one_of(st.just(1), st.integers(1, n))) for n in lengths]
    return lengths, queries


class Case:
    """Sequences with random q, k, v, and the layer that holds all but the step's tokens already."""

    def __init__(self, spec: AttentionSpec, lengths: list[int], block_size: int, seed: int, threads: int = 2) -> None:
        rng = np.random.default_rng(seed)
        self.spec, self.lengths, self.block_size = spec, lengths, block_size
        self.table = block_table(lengths, block_size, rng)
        self.qkv = [random_qkv(spec, n, rng) for n in lengths]
        self.attention = Attention(spec, blocks_needed(self.table), block_size, threads)

    def run(self, sequences: list[int], context_lens: list[int], queries: list[int]) -> list[np.ndarray]:
        """One step of some of the sequences; the outputs of each."""
        batch = step(self.table[sequences], context_lens, queries, self.block_size)
        parts = zip(sequences, context_lens, queries, strict=True)
        chosen = [[x[c - n : c] for x in self.qkv[s]] for s, c, n in parts]
        q, k, v = (np.concatenate(x) for x in zip(*chosen, strict=True))
        out = self.attention.run(batch, q, k, v)
        return np.split(out, batch.cu_seqlens[1:-1])

    def prefill_all_but(self, queries: list[int]) -> None:
        for s, (length, count) in enumerate(zip(self.lengths, queries, strict=True)):
            if length > count:
                self.run([s], [length - count], [length - count])

    def expected(self, s: int) -> np.ndarray:
        return reference(self.spec, *self.qkv[s])


@pytest.fixture
def closing() -> Iterator[list[Case]]:
    cases: list[Case] = []
    yield cases
    for case in cases:
        case.attention.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.sampled_from(sorted(SHAPES)),
    window=st.one_of(st.just(0), st.integers(1, 160)),
    batch=ragged_batches(),
    seed=st.integers(0, 2**31),
)
def test_any_ragged_batch_equals_attention_by_the_book(
    closing: list[Case], shape: str, window: int, batch: tuple[list[int], list[int]], seed: int
) -> None:
    lengths, queries = batch
    case = Case(SHAPES[shape](window), lengths, BLOCK_SIZES.get(shape, 16), seed)
    closing.append(case)
    case.prefill_all_but(queries)
    outputs = case.run(list(range(len(lengths))), lengths, queries)
    for s, (count, output) in enumerate(zip(queries, outputs, strict=True)):
        np.testing.assert_allclose(output, case.expected(s)[-count:], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("window", [0, 70])
def test_batch_mates_and_threads_never_change_a_bit(closing: list[Case], shape: str, window: int) -> None:
    lengths, queries = [130, 1, 77, 300, 64, 65], [1, 1, 40, 300, 64, 2]
    results = []
    for threads, order in ((1, [0, 1, 2, 3, 4, 5]), (3, [5, 3, 4, 1, 2, 0])):
        case = Case(SHAPES[shape](window), lengths, 16, seed=7, threads=threads)
        closing.append(case)
        case.prefill_all_but(queries)
        together = case.run(order, [lengths[s] for s in order], [queries[s] for s in order])
        results.append([together[order.index(s)] for s in range(len(lengths))])
        results.append([case.run([s], [lengths[s]], [queries[s]])[0] for s in range(len(lengths))])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("window", [0, 33])
def test_any_chunks_give_the_bits_of_one_prefill(closing: list[Case], shape: str, window: int) -> None:
    length = 210
    case = Case(SHAPES[shape](window), [length], 16, seed=3)
    closing.append(case)
    whole = case.run([0], [length], [length])[0]
    for chunks in ([1] * length, [100, 110], [7, 63, 64, 1, 75], [209, 1]):
        ends = np.cumsum(chunks)
        parts = [case.run([0], [int(end)], [n])[0] for end, n in zip(ends, chunks, strict=True)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_rows_may_lie_apart(closing: list[Case]) -> None:
    spec = SHAPES["grouped"](0)
    case = Case(spec, [90], 16, seed=1)
    closing.append(case)
    q, k, v = case.qkv[0]
    fused = np.concatenate([q, k, v], axis=1)
    width, kv_width = q.shape[1], k.shape[1]
    views = fused[:, :width], fused[:, width : width + kv_width], fused[:, width + kv_width :]
    batch = step(case.table, [90], [90], 16)
    np.testing.assert_array_equal(case.attention.run(batch, *views), case.attention.run(batch, q, k, v))


def test_columns_that_lie_apart_are_refused(closing: list[Case]) -> None:
    case = Case(SHAPES["grouped"](0), [4], 16, seed=1)
    closing.append(case)
    q, k, v = case.qkv[0]
    with pytest.raises(ValueError, match="contiguous"):
        case.attention.run(step(case.table, [4], [4], 16), np.asfortranarray(q), k, v)


def test_a_sequence_that_overflowed_stays_alone(closing: list[Case]) -> None:
    case = Case(SHAPES["grouped"](0), [70, 70], 16, seed=5)
    closing.append(case)
    clean = case.run([0, 1], [70, 70], [70, 70])
    case.qkv[1][0][:] = np.inf
    case.qkv[1][2][3] = np.nan
    spoilt = case.run([0, 1], [70, 70], [70, 70])
    np.testing.assert_array_equal(spoilt[0], clean[0])
    assert np.isnan(spoilt[1]).any(), "an overflow must show, not turn into numbers"


def test_very_large_scores_are_exact(closing: list[Case]) -> None:
    case = Case(make_spec(9, 3, 64), [200], 16, seed=5)
    closing.append(case)
    q, k, _ = case.qkv[0]
    q *= 30
    k *= 30
    np.testing.assert_allclose(case.run([0], [200], [200])[0], case.expected(0), rtol=1e-3, atol=1e-3)


def test_a_block_size_that_no_vector_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        Attention(SHAPES["grouped"](0), 4, block_size=8)


@given(batch=ragged_batches(), threads=st.integers(1, 5), window=st.sampled_from([0, 20]))
def test_every_query_of_every_head_is_in_exactly_one_share(
    batch: tuple[list[int], list[int]], threads: int, window: int
) -> None:
    lengths, queries = batch
    spec = SHAPES["grouped"](window)
    table = block_table(lengths, 16, np.random.default_rng(0))
    work = plan_attention(step(table, lengths, queries, 16), spec, threads)
    seen = np.zeros((len(lengths), spec.num_kv_heads, max(queries)), int)
    for share in work.shares:
        for kind, (begin, end) in enumerate(share):
            for s, h, first, count in work.items[begin:end]:
                assert (count == 1) == (kind == 0)
                seen[s, h, first : first + count] += 1
    for s, count in enumerate(queries):
        assert (seen[s, :, :count] == 1).all()
        assert (seen[s, :, count:] == 0).all()


def test_one_long_prefill_is_shared_by_all_threads() -> None:
    spec = SHAPES["grouped"](0)
    table = block_table([2000], 16, np.random.default_rng(0))
    work = plan_attention(step(table, [2000], [2000], 16), spec, 4)
    first, count = work.items[:, 2], work.items[:, 3]
    cost = (first + count) * count
    totals = [cost[begin:end].sum() for begin, end in work.shares[:, 1]]
    assert max(totals) < 1.3 * min(totals)
