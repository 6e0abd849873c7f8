"""The attention kernel: one thread's walk through its items, tile by tile.

    item                 queries of one sequence and key head, as rows
      tile of 64 keys    scores │ softmax │ mix, `rows` rows at a time
      tile of 64 keys    …

    a thread's scratch   queries [rows, D] │ outputs [rows, Dv] │ state [rows, 17] │ one tile's scores │ shrink

The arithmetic is in `tiles.py`, the items and their order in `attention.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np

from packhorse.runner.base import Float32, Int32, Int64
from packhorse.runner.compiled import compiled
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

Integer = Any  # int or numpy's, which differ to a type checker and not to numba
Kernel = Callable[..., int]


def _host_has_wide_registers() -> bool:
    """Whether 32 vector registers of 64 bytes are there (AVX-512); AVX2 has 16 of 32 bytes, NEON 32 of 16."""
    told = numba.config.CPU_FEATURES  # what numba compiles for, when it is told (NUMBA_CPU_FEATURES)
    if told is not None:
        return "+avx512f" in told
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


# Rows of a tile, and rows times vectors of it that are summed at a time. The sums must leave room in the registers for
# keys and queries: 16 sums of 16 floats fill half of AVX-512's, 6 fill three quarters of AVX2's and of NEON's. Measured
# for prefill on one core: 8 x 2 gives 160 GFLOP/s with AVX-512 (8 x 1: 130), 6 x 1 gives 99 with AVX2 (4 x 1: 93).
ROWS, SUMS = (8, 16) if _host_has_wide_registers() else (6, 6)


def single_rows(group: int) -> int:
    """Rows at a time when an item has one query only: the group's heads, or an even part of them."""
    return next(rows for rows in range(min(group, ROWS), 0, -1) if group % rows == 0)


def scratch_floats(item_rows: int, head_size: int, v_head_size: int) -> int:
    """Floats of scratch memory that a thread needs for items of up to `item_rows` rows."""
    rows = item_rows + ROWS  # filled up to a whole number of tiles
    return rows * (head_size + v_head_size + LANES + 1) + ROWS * (TILE_KEYS + 1)


@compiled
def _first_position(item: Int32, cu_seqlens: Int32, context_lens: Int32) -> Integer:
    """The position in its sequence of an item's first query."""
    s = item[0]
    return np.int64(context_lens[s]) - cu_seqlens[s + 1] + cu_seqlens[s] + item[2]


@compiled
def _first_key(position: Integer, window: int) -> Integer:
    """The first position that a query at `position` sees."""
    return max(0, position - window + 1) if window > 0 else 0


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


@compiled
def _locate_ahead(
    i: Integer,
    tile: Integer,
    items: Int32,
    end: int,
    cu_seqlens: Int32,
    context_lens: Int32,
    block_table: Int32,
    window: int,
    block_size: int,
    key_block: int,
    value_block: int,
    head_size: int,
    v_head_size: int,
    key_ahead: Int64,
    value_ahead: Int64,
) -> Integer:
    """`_locate` for the tile after `tile` of single-query item i: the item's next one, or the next item's first."""
    position = _first_position(items[i], cu_seqlens, context_lens)
    first_key = _first_key(position, window)
    tile += 1
    if tile * TILE_KEYS > position:
        i += 1
        if i == end:
            return 0
        position = _first_position(items[i], cu_seqlens, context_lens)
        first_key = _first_key(position, window)
        tile = first_key // TILE_KEYS
    return _locate(
        tile, first_key, position, block_table[items[i, 0]], np.int64(items[i, 1]), block_size,
        key_block, value_block, head_size, v_head_size, key_ahead, value_ahead,
    )  # fmt: skip


@compiled
def _load_queries(
    q: Float32,
    q_stride: int,
    token: Integer,
    head: Integer,
    group: int,
    used: Integer,
    size: int,
    scale: np.float32,
    rows: Float32,
) -> None:
    """Gather an item's query rows, times `scale`, into rows: token after token, the group's heads of each."""
    for r in range(used):
        source = (token + r // group) * q_stride + (head * group + r % group) * size
        for d in range(size):
            rows[r * size + d] = q[source + d] * scale


@compiled
def _save_outputs(
    rows: Float32,
    state: Float32,
    out: Float32,
    out_stride: int,
    token: Integer,
    head: Integer,
    group: int,
    used: Integer,
    size: int,
) -> None:
    """Divide an item's output rows by their sums of weights, and put them where `_load_queries` found the queries."""
    for r in range(used):
        weight = np.float32(1.0) / sum_lanes(state, r * (LANES + 1))
        target = (token + r // group) * out_stride + (head * group + r % group) * size
        for d in range(size):
            out[target + d] = rows[r * size + d] * weight


@functools.cache
def attention_kernel(
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
    columns = max(1, min(TILE_KEYS // LANES, SUMS // rows))
    held = max(1, SUMS // rows)
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
        bounds = np.empty(2 * rows, np.int32)
        key_at = np.zeros(tile_keys // lanes, np.int64)
        value_at = np.zeros(tile_keys // lanes, np.int64)
        key_ahead = np.zeros(tile_keys // lanes, np.int64)
        value_ahead = np.zeros(tile_keys // lanes, np.int64)
        for i in range(begin, end):
            s = items[i, 0]
            h = np.int64(items[i, 1])
            first_token = np.int64(cu_seqlens[s]) + items[i, 2]
            first_position = _first_position(items[i], cu_seqlens, context_lens)
            last_position = first_position + items[i, 3] - 1
            first_key = _first_key(first_position, window)
            used = np.int64(items[i, 3]) * group
            padded = (used + rows - 1) // rows * rows
            out_at = padded * head_size
            state_at = out_at + padded * v_head_size
            scores_at = state_at + padded * (lanes + 1)
            shrink = scratch[scores_at + rows * tile_keys : scores_at + rows * tile_keys + rows]

            _load_queries(q, q_stride, first_token, h, group, used, head_size, scale, scratch)
            scratch[used * head_size : scores_at] = 0.0
            for r in range(padded):
                row_state = state_at + r * (lanes + 1)
                scratch[row_state + lanes] = nothing
                if has_sinks:  # a key of weight 1 = exp(sink - sink), whose value is zero
                    scratch[row_state] = 1.0
                    scratch[row_state + lanes] = sinks[h * group + r % group]

            for tile in range(first_key // tile_keys, last_position // tile_keys + 1):
                _locate(
                    tile, first_key, last_position, block_table[s], h, block_size,
                    key_block, value_block, head_size, v_head_size, key_at, value_at,
                )  # fmt: skip
                parts_ahead = 0
                if prefetch:
                    parts_ahead = _locate_ahead(
                        i, tile, items, end, cu_seqlens, context_lens, block_table, window, block_size,
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

            _save_outputs(
                scratch[out_at:state_at], scratch[state_at:scores_at], out, out_stride, first_token, h, group, used,
                v_head_size,
            )  # fmt: skip
        return source_version

    return compiled(attend)
