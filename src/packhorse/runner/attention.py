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

import llvmlite.binding
import numpy as np

from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.base import Float32, Int32, Int64, StepBatch
from packhorse.runner.compiled import compiled
from packhorse.runner.crew import Crew
from packhorse.runner.kv_cache import LayerCache, flat_rows, store
from packhorse.runner.tiles import LANES, SOURCE_VERSION, mix_tile, score_tile, softmax_tile, sum_lanes

TILE_KEYS = 64
MAX_ITEM_ROWS = 96  # rows of queries, sums and outputs that one thread keeps beside a tile: about 50 kB at head size 64

Kernel = Callable[..., int]


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """A step's attention, cut up for the threads; the same for every layer with the same heads and window.

    items: int32[N, 4]: sequence, key head, first query (counted in the step's queries of the sequence), number of
    queries. The first `singles` items have one query each. shares: int64[threads, 2, 2]: for each thread the
    beginning and end of its single-query items and of its others.
    """

    items: Int32
    singles: int
    shares: Int64


def plan_attention(batch: StepBatch, spec: AttentionSpec, threads: int) -> AttentionWork:
    """Cut one layer's attention of `batch` into items, and the items into `threads` shares of about equal cost."""
    group = spec.num_heads // spec.num_kv_heads
    queries = np.diff(batch.cu_seqlens)
    run = _queries_per_item(group)
    runs = -(-queries // run)
    per_sequence = runs * spec.num_kv_heads
    sequence = np.repeat(np.arange(len(queries), dtype=np.int32), per_sequence)
    within = np.arange(len(sequence)) - np.repeat(np.cumsum(per_sequence) - per_sequence, per_sequence)
    head, index = np.divmod(within, runs[sequence])
    first = index * run
    count = np.minimum(run, queries[sequence] - first)
    order = np.argsort(count > 1, kind="stable")
    items = np.stack([sequence, head, first, count], axis=1).astype(np.int32)[order]
    singles = int(np.count_nonzero(count == 1))
    cost = _cost(batch, queries, items, group, spec.window)
    return AttentionWork(items, singles, _shares(cost, singles, threads))


def _queries_per_item(group: int) -> int:
    """A power of two whose rows (queries times heads of the group) fit MAX_ITEM_ROWS, or 1."""
    return int(2 ** np.floor(np.log2(max(1, MAX_ITEM_ROWS // group))))


def _cost(batch: StepBatch, queries: Int32, items: Int32, group: int, window: int) -> Int64:
    """About proportional to an item's time: keys times rows, reading a key weighing as much as a few rows' products."""
    sequence, _, first, count = items.T.astype(np.int64)
    begin = batch.context_lens[sequence] - queries[sequence] + first
    keys = begin + count
    if window:
        keys = keys - np.maximum(0, begin - window + 1)
    cost: Int64 = (keys + TILE_KEYS) * (count * group + 6)
    return cost


def _shares(cost: Int64, singles: int, threads: int) -> Int64:
    """Equal-cost ranges of the singles and of the others apart: each kind has a kernel of its own."""
    shares = np.empty((threads, 2, 2), np.int64)
    for kind, (begin, end) in enumerate(((0, singles), (singles, len(cost)))):
        total = np.concatenate([[0], np.cumsum(cost[begin:end])])
        targets = total[-1] * np.arange(threads + 1) / threads
        cuts = begin + np.searchsorted(total, targets)
        cuts[-1] = end
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
        self._kernels = (_kernel(_single_rows(group), *shape), _kernel(_ROWS, *shape))
        self._sinks = np.array(spec.sinks or (), np.float32)
        rows = _padded(_queries_per_item(group) * group)
        floats = rows * (spec.head_size + spec.v_head_size + LANES + 1) + _MAX_ROWS * (TILE_KEYS + 1)
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

        self._crew.run(share)


def _host_has_wide_registers() -> bool:
    """Whether 32 vector registers of 64 bytes are there (AVX-512); AVX2 has 16 of 32 bytes, NEON 32 of 16."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f", False))


# Rows times vectors of a tile must leave room in the registers for keys and queries. 16 sums of 16 floats fill half of
# AVX-512's registers; 4 fill half of AVX2's and of NEON's.
_SUMS = 16 if _host_has_wide_registers() else 4
_ROWS = 8 if _host_has_wide_registers() else 4
_MAX_ROWS = 8


def _single_rows(group: int) -> int:
    """Rows at a time when an item has one query only: the group's heads, or an even part of them."""
    return next(rows for rows in range(min(group, _ROWS), 0, -1) if group % rows == 0)


def _padded(rows: int) -> int:
    return -(-rows // _MAX_ROWS) * _MAX_ROWS


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
) -> Kernel:
    """The attention kernel that takes `rows` rows at a time, with everything above compiled in.

    Only numbers may be closed over: they are what numba recognizes kept machine code by.
    """
    group = num_heads // num_kv_heads
    columns = max(1, min(TILE_KEYS // LANES, _SUMS // rows))
    held = max(1, _SUMS // rows)
    softcapped = int(has_softcap)
    tile_keys = TILE_KEYS
    lanes = LANES
    sub_blocks = block_size // LANES
    max_rows = _MAX_ROWS
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
        bounds = np.empty(2 * max_rows, np.int32)
        key_at = np.empty(tile_keys // lanes, np.int64)
        value_at = np.empty(tile_keys // lanes, np.int64)
        for i in range(begin, end):
            s = items[i, 0]
            h = np.int64(items[i, 1])
            first_token = np.int64(cu_seqlens[s]) + items[i, 2]
            queries = np.int64(items[i, 3])
            in_step = np.int64(cu_seqlens[s + 1]) - cu_seqlens[s]
            first_position = np.int64(context_lens[s]) - in_step + items[i, 2]
            last_position = first_position + queries - 1
            used = queries * group
            groups = (used + rows - 1) // rows
            padded = groups * rows
            out_at = padded * head_size
            state_at = out_at + padded * v_head_size
            scores_at = state_at + padded * (lanes + 1)
            shrink = scratch[scores_at + rows * tile_keys : scores_at + rows * tile_keys + rows]

            for r in range(used):
                source = (first_token + r // group) * q_stride + (h * group + r % group) * head_size
                for d in range(head_size):
                    scratch[r * head_size + d] = q[source + d] * scale
            for x in range(used * head_size, padded * head_size):
                scratch[x] = 0.0
            for x in range(out_at, scores_at):
                scratch[x] = 0.0
            for r in range(padded):
                row_state = state_at + r * (lanes + 1)
                scratch[row_state + lanes] = nothing
                if has_sinks:  # a key of weight 1 = exp(sink - sink), whose value is zero
                    scratch[row_state] = 1.0
                    scratch[row_state + lanes] = sinks[h * group + r % group]

            first_key = max(0, first_position - window + 1) if window > 0 else 0
            for tile in range(first_key // tile_keys, last_position // tile_keys + 1):
                tile_start = tile * tile_keys
                low_part = max(0, first_key - tile_start) // lanes
                high_part = (min(tile_keys, last_position + 1 - tile_start) + lanes - 1) // lanes
                for part in range(low_part, high_part):
                    place = tile_start // lanes + part
                    block = np.int64(block_table[s, place // sub_blocks])
                    inside = place % sub_blocks * lanes
                    key_at[part] = block * key_block + h * head_size * block_size + inside
                    value_at[part] = block * value_block + (h * block_size + inside) * v_head_size

                for g in range(groups):
                    low = tile_keys
                    high = np.int64(0)
                    for m in range(rows):
                        r = g * rows + m
                        position = first_position + r // group
                        row_high = max(0, min(tile_keys, position + 1 - tile_start)) if r < used else 0
                        row_low = max(0, position - window + 1 - tile_start) if window > 0 else 0
                        bounds[2 * m] = row_low
                        bounds[2 * m + 1] = row_high
                        if row_low < row_high:
                            low = min(low, row_low)
                            high = np.int64(max(high, row_high))
                    if low >= high:
                        continue
                    q_at = g * rows * head_size
                    part = low // lanes
                    stop = (high + lanes - 1) // lanes
                    while part + columns <= stop:
                        score_tile(
                            scratch, q_at, keys, key_at, part, scratch, scores_at,
                            rows, columns, head_size, block_size, tile_keys,
                        )  # fmt: skip
                        part += columns
                    while part < stop:
                        score_tile(
                            scratch, q_at, keys, key_at, part, scratch, scores_at,
                            rows, 1, head_size, block_size, tile_keys,
                        )  # fmt: skip
                        part += 1
                    row_state = state_at + g * rows * (lanes + 1)
                    softmax_tile(
                        scratch, scores_at, scratch, row_state, bounds, 0, softcap, shrink, rows, tile_keys, softcapped
                    )
                    mix_tile(
                        scratch, scores_at, values, value_at, low, high, shrink, scratch,
                        out_at + g * rows * v_head_size, rows, held, v_head_size, tile_keys,
                    )  # fmt: skip

            for r in range(used):
                weight = np.float32(1.0) / sum_lanes(scratch, state_at + r * (lanes + 1))
                target = (first_token + r // group) * out_stride + (h * group + r % group) * v_head_size
                source = out_at + r * v_head_size
                for d in range(v_head_size):
                    out[target + d] = scratch[source + d] * weight
        return source_version

    return compiled(attend)
