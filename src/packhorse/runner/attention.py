"""Ragged, paged, causal attention over one layer's cache.

The work of a step is a list of *items*: a sequence, one of its key heads, and a run of its queries. All query heads
of the group that shares the key head go into the item as further rows, so keys are read once for all of them:

    rows of an item (group of 3)      q0 of head a, b, c │ q1 of head a, b, c │ …
    keys                              tile 0 (64 keys) │ tile 1 │ … up to the last query's own position

An item walks the tiles of keys once with a running maximum and sum (the online softmax of FlashAttention, Dao et al.
2022), 8 rows or so at a time (`tiles.py`). Items are cut into one share a thread, of about equal cost.

Tiles begin at multiples of 64 in the sequence, not where the item or its queries begin. With row-wise arithmetic that
makes a query's result the same to the last bit in any chunk, batch or share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llvmlite.binding
import numba
import numpy as np

from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.base import Float32, Int32, Int64, StepBatch
from packhorse.runner.compiled import compiled
from packhorse.runner.crew import Crew
from packhorse.runner.kv_cache import LayerCache, flat_rows, store
from packhorse.runner.tiles import (
    LANES,
    LINE,
    SOURCE_VERSION,
    mix_tile,
    prefetch_rows,
    score_tile,
    softmax_tile,
    sum_lanes,
)

TILE_KEYS = 64
MAX_ITEM_ROWS = 96  # rows of queries, sums and outputs that one thread keeps beside a tile: about 50 kB at head size 64

READ_ROWS = 6  # rows whose products take as long as reading their key from memory
LEAST_SHARE = 20_000  # cost, some 30 microseconds: what a thread must get to do before it is worth waking

Integer = Any  # int or numpy's, which differ to a type checker and not to numba
Kernel = Callable[..., int]


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """A step's attention, cut up for the threads; the same for every layer with the same heads and window.

    items: int32[N, 4]: sequence, key head, first query (counted in the step's queries of the sequence), number of
    queries; those of one query come first. shares: int64[members, 2, 2]: for each thread that takes part the beginning
    and end of its single-query items and of its others, for each kind has a kernel of its own.
    """

    items: Int32
    shares: Int64


def plan_attention(batch: StepBatch, spec: AttentionSpec, threads: int) -> AttentionWork:
    """Cut one layer's attention of `batch` into items, and the items into at most `threads` shares of like cost."""
    group = spec.num_heads // spec.num_kv_heads
    items, costs, singles = _list_items(
        batch.cu_seqlens, batch.context_lens, spec.num_kv_heads, group, _queries_per_item(group), spec.window
    )
    members = int(min(threads, max(1, costs.sum() // LEAST_SHARE)))
    return AttentionWork(items, _shares(costs, singles, members))


def _queries_per_item(group: int) -> int:
    """A power of two whose rows (queries times heads of the group) fit MAX_ITEM_ROWS, or 1."""
    return 1 << (max(1, MAX_ITEM_ROWS // group).bit_length() - 1)


@compiled
def _list_items(
    cu_seqlens: Int32, context_lens: Int32, kv_heads: int, group: int, run: int, window: int
) -> tuple[Int32, Int64, int]:
    """(items, their costs, how many of them have one query): runs of `run` queries of each sequence and key head.

    A cost is about proportional to time: keys times rows, where reading a key weighs as much as a few rows' products,
    and every item has something to do before and after its keys.
    """
    total, singles = 0, 0
    for s in range(len(context_lens)):
        queries = np.int64(cu_seqlens[s + 1]) - cu_seqlens[s]
        total += (queries + run - 1) // run * kv_heads
        if queries % run == 1 or run == 1:
            singles += kv_heads if run > 1 else queries * kv_heads
    items = np.empty((total, 4), np.int32)
    costs = np.empty(total, np.int64)
    single, other = 0, singles
    for s in range(len(context_lens)):
        queries = np.int64(cu_seqlens[s + 1]) - cu_seqlens[s]
        for h in range(kv_heads):
            for first in range(0, queries, run):
                count = min(run, queries - first)
                if count == 1:
                    at = single
                    single += 1
                else:
                    at = other
                    other += 1
                position = context_lens[s] - queries + first
                keys = position + count - (max(0, position - window + 1) if window > 0 else 0)
                items[at, 0], items[at, 1], items[at, 2], items[at, 3] = s, h, first, count
                costs[at] = (keys + TILE_KEYS) * (count * group + READ_ROWS)
    return items, costs, singles


def _shares(costs: Int64, singles: int, members: int) -> Int64:
    """Ranges of about equal cost, of the single-query items and of the others apart."""
    shares = np.empty((members, 2, 2), np.int64)
    for kind, (begin, end) in enumerate(((0, singles), (singles, len(costs)))):
        ends = np.cumsum(costs[begin:end])
        targets = np.arange(1, members) * (ends[-1] if len(ends) else 0) / members
        cuts = [begin, *(begin + np.searchsorted(ends - costs[begin:end] / 2, targets)), end]
        shares[:, kind, 0], shares[:, kind, 1] = cuts[:-1], cuts[1:]
    return shares


class PagedAttention:
    """The attention of one layer, or of many with the same spec but for the layer. Owns its threads' scratch memory.

    Raises ValueError for a block size that is no multiple of 16.
    """

    def __init__(self, spec: AttentionSpec, block_size: int, crew: Crew) -> None:
        if block_size % LANES:
            raise ValueError(f"block_size must be a multiple of {LANES}, not {block_size}")
        self.spec = spec
        self._crew = crew
        self._block_size = block_size
        group = spec.num_heads // spec.num_kv_heads
        shape = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            spec.v_head_size,
            block_size,
            spec.softcap > 0,
            spec.sinks is not None,
        )
        self._kernels = (
            _kernel(_single_rows(group), *shape, prefetch=True),
            _kernel(_ROWS, *shape, prefetch=False),
        )
        self._sinks = np.array(spec.sinks or (), np.float32)
        rows = _queries_per_item(group) * group + _ROWS  # an item's rows, filled up to a whole number of tiles
        floats = rows * (spec.head_size + spec.v_head_size + LANES + 1) + _ROWS * (TILE_KEYS + 1)
        self._scratch = [np.empty(floats, np.float32) for _ in range(crew.size)]

    def store(self, cache: LayerCache, k: Float32, v: Float32, slots: Int64) -> None:
        """Write k: float32[T, KV * D] and v: float32[T, KV * Dv] into the cache at slots: int64[T]."""
        spec = self.spec
        k_flat, k_stride = flat_rows(k)
        v_flat, v_stride = flat_rows(v)
        store(
            cache.keys,
            cache.values,
            k_flat,
            k_stride,
            v_flat,
            v_stride,
            slots,
            spec.num_kv_heads,
            spec.head_size,
            spec.v_head_size,
            self._block_size,
        )

    def attend(self, cache: LayerCache, q: Float32, out: Float32, batch: StepBatch, work: AttentionWork) -> None:
        """Attend from q: float32[T, H * D] to the cache, which holds the step's keys already; out: float32[T, H * Dv].

        q may be a view whose rows are apart, out as well.
        """
        q_flat, q_stride = flat_rows(q)
        out_flat, out_stride = flat_rows(out)
        spec = self.spec

        def share(member: int) -> None:
            for kernel, (begin, end) in zip(self._kernels, work.shares[member], strict=True):
                if begin < end:
                    kernel(
                        work.items,
                        begin,
                        end,
                        q_flat,
                        q_stride,
                        cache.keys,
                        cache.values,
                        out_flat,
                        out_stride,
                        batch.cu_seqlens,
                        batch.context_lens,
                        batch.block_table,
                        np.float32(spec.scale),
                        spec.window,
                        np.float32(spec.softcap),
                        self._sinks,
                        self._scratch[member],
                    )

        self._crew.run(share, len(work.shares))


def _host_has_wide_registers() -> bool:
    """Whether 32 vector registers of 64 bytes are there (AVX-512); AVX2 has 16 of 32 bytes, NEON 32 of 16."""
    told = numba.config.CPU_FEATURES  # what numba compiles for, when it is told (NUMBA_CPU_FEATURES)
    if told is not None:
        return "+avx512f" in told
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


# Rows of a tile, and rows times vectors of it that are summed at a time. The sums must leave room in the registers for
# keys and queries: 16 sums of 16 floats fill half of AVX-512's, 6 fill three quarters of AVX2's and of NEON's. Measured
# for prefill on one core: 8 x 2 gives 160 GFLOP/s with AVX-512 (8 x 1: 130), 6 x 1 gives 99 with AVX2 (4 x 1: 93).
_ROWS, _SUMS = (8, 16) if _host_has_wide_registers() else (6, 6)


def _single_rows(group: int) -> int:
    """Rows at a time when an item has one query only: the group's heads, or an even part of them."""
    return next(rows for rows in range(min(group, _ROWS), 0, -1) if group % rows == 0)


@compiled
def _locate(
    tile: Integer,
    first_key: Integer,
    last_key: Integer,
    blocks: Int32,
    head: Integer,
    block_size: int,
    key_block: int,
    value_block: int,
    head_size: int,
    v_head_size: int,
    key_at: Int64,
    value_at: Int64,
) -> Integer:
    """Where the keys and values of each 16 tokens of a tile begin, into key_at and value_at.

    Only those with a key in first_key … last_key; returns how many, with any before them.
    """
    begin = tile * TILE_KEYS
    first_part = max(0, first_key - begin) // LANES
    last_part = (min(TILE_KEYS - 1, last_key - begin)) // LANES
    for part in range(first_part, last_part + 1):
        token = begin + part * LANES
        block = np.int64(blocks[token // block_size])
        inside = token % block_size
        key_at[part] = block * key_block + head * head_size * block_size + inside
        value_at[part] = block * value_block + (head * block_size + inside) * v_head_size
    return last_part + 1


@compiled
def _bound_rows(
    bounds: Int32, row: int, used: Integer, group: int, position: Integer, tile: int, window: int
) -> tuple[Integer, Integer]:
    """Which keys of the tile each row sees, into bounds (low, high a row); returns the lowest and highest of all.

    row: the first of the rows. position: of the item's first query. Rows from `used` on see nothing.
    """
    begin = tile * TILE_KEYS
    lowest: Integer = TILE_KEYS
    highest: Integer = 0
    for m in range(len(bounds) // 2):
        own = position + (row + m) // group - begin
        high = max(0, min(TILE_KEYS, own + 1)) if row + m < used else 0
        low = min(TILE_KEYS, max(0, own - window + 1)) if window > 0 else 0
        bounds[2 * m] = low
        bounds[2 * m + 1] = high
        if low < high:
            lowest = min(lowest, low)
            highest = max(highest, high)
    return lowest, highest


@functools.cache
def _kernel(
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    block_size: int,
    has_softcap: bool,
    has_sinks: bool,
    prefetch: bool,
) -> Kernel:
    """The attention kernel that takes `rows` rows at a time, with everything above compiled in.

    prefetch: fetch the next tile's keys and values while one is computed. It pays where every key is used by few rows,
    so that memory is what one waits for.

    Only numbers may be closed over: they are what numba recognizes kept machine code by.
    """
    group = num_heads // num_kv_heads
    columns = max(1, min(TILE_KEYS // LANES, _SUMS // rows))
    held = max(1, _SUMS // rows)
    softcapped, prefetching = int(has_softcap), int(prefetch)
    tile_keys, lanes, line = TILE_KEYS, LANES, LINE
    value_lines = LANES * v_head_size // LINE
    source_version = SOURCE_VERSION
    key_block = num_kv_heads * head_size * block_size
    value_block = num_kv_heads * v_head_size * block_size
    nothing = -1e30

    def attend(
        items: Int32,
        begin: int,
        end: int,
        q: Float32,
        q_stride: int,
        keys: Float32,
        values: Float32,
        out: Float32,
        out_stride: int,
        cu_seqlens: Int32,
        context_lens: Int32,
        block_table: Int32,
        scale: np.float32,
        window: int,
        softcap: np.float32,
        sinks: Float32,
        scratch: Float32,
    ) -> int:
        # Scratch of one thread:  queries [padded, D] │ outputs [padded, Dv] │ state [padded, 17] │ scores │ shrink
        bounds = np.empty(2 * rows, np.int32)
        key_at = np.zeros(tile_keys // lanes, np.int64)
        value_at = np.zeros(tile_keys // lanes, np.int64)
        key_ahead = np.zeros(tile_keys // lanes, np.int64)
        value_ahead = np.zeros(tile_keys // lanes, np.int64)
        for i in range(begin, end):
            s = items[i, 0]
            h = np.int64(items[i, 1])
            first_token = np.int64(cu_seqlens[s]) + items[i, 2]
            first_position = np.int64(context_lens[s]) - cu_seqlens[s + 1] + first_token
            last_position = first_position + items[i, 3] - 1
            used = np.int64(items[i, 3]) * group
            padded = (used + rows - 1) // rows * rows
            out_at = padded * head_size
            state_at = out_at + padded * v_head_size
            scores_at = state_at + padded * (lanes + 1)
            shrink = scratch[scores_at + rows * tile_keys : scores_at + rows * tile_keys + rows]

            for r in range(used):
                source = (first_token + r // group) * q_stride + (h * group + r % group) * head_size
                for d in range(head_size):
                    scratch[r * head_size + d] = q[source + d] * scale
            scratch[used * head_size : scores_at] = 0.0
            for r in range(padded):
                row_state = state_at + r * (lanes + 1)
                scratch[row_state + lanes] = nothing
                if has_sinks:  # a key of weight 1 = exp(sink - sink), whose value is zero
                    scratch[row_state] = 1.0
                    scratch[row_state + lanes] = sinks[h * group + r % group]

            first_key = max(0, first_position - window + 1) if window > 0 else 0
            for tile in range(first_key // tile_keys, last_position // tile_keys + 1):
                _locate(
                    tile, first_key, last_position, block_table[s], h, block_size,
                    key_block, value_block, head_size, v_head_size, key_at, value_at,
                )  # fmt: skip
                parts_ahead = 0
                if prefetch:
                    next_s, next_h, next_tile, next_first, next_last = s, h, tile + 1, first_key, last_position
                    if next_tile * tile_keys > last_position and i + 1 < end:
                        next_s, next_h = items[i + 1, 0], np.int64(items[i + 1, 1])
                        next_last = np.int64(context_lens[next_s]) - cu_seqlens[next_s + 1] + cu_seqlens[next_s]
                        next_last += items[i + 1, 2]
                        next_first = max(0, next_last - window + 1) if window > 0 else 0
                        next_tile = next_first // tile_keys
                    if next_tile * tile_keys <= next_last:
                        parts_ahead = _locate(
                            next_tile, next_first, next_last, block_table[next_s], next_h, block_size,
                            key_block, value_block, head_size, v_head_size, key_ahead, value_ahead,
                        )  # fmt: skip

                for row in range(0, padded, rows):
                    low, high = _bound_rows(bounds, row, used, group, first_position, tile, window)
                    if low >= high:
                        continue
                    part = low // lanes
                    stop = (high + lanes - 1) // lanes
                    while part + columns <= stop:
                        score_tile(
                            scratch, row * head_size, keys, key_at, part, key_ahead, scratch, scores_at,
                            rows, columns, head_size, block_size, tile_keys, prefetching,
                        )  # fmt: skip
                        part += columns
                    while part < stop:
                        score_tile(
                            scratch, row * head_size, keys, key_at, part, key_ahead, scratch, scores_at,
                            rows, 1, head_size, block_size, tile_keys, prefetching,
                        )  # fmt: skip
                        part += 1
                    softmax_tile(
                        scratch, scores_at, scratch, state_at + row * (lanes + 1), bounds, 0, softcap, shrink,
                        rows, tile_keys, softcapped,
                    )  # fmt: skip
                    mix_tile(
                        scratch, scores_at, values, value_at, value_ahead, low, high, shrink,
                        scratch, out_at + row * v_head_size, rows, held, v_head_size, tile_keys, prefetching,
                    )  # fmt: skip
                    for part in range(stop, parts_ahead):  # a short tile asks for its own part of the next one only
                        prefetch_rows(keys, key_ahead[part], head_size, block_size)
                    for part in range(high // lanes, parts_ahead):
                        prefetch_rows(values, value_ahead[part], value_lines, line)

            for r in range(used):
                weight = np.float32(1.0) / sum_lanes(scratch, state_at + r * (lanes + 1))
                target = (first_token + r // group) * out_stride + (h * group + r % group) * v_head_size
                source = out_at + r * v_head_size
                for d in range(v_head_size):
                    out[target + d] = scratch[source + d] * weight
        return source_version

    return compiled(attend)
