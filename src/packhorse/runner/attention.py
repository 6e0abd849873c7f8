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

from dataclasses import dataclass

import numpy as np

from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.attention_kernel import ROWS, TILE_KEYS, attention_kernel, scratch_floats, single_rows
from packhorse.runner.base import Float32, Int32, Int64, StepBatch
from packhorse.runner.compiled import compiled
from packhorse.runner.crew import Crew
from packhorse.runner.kv_cache import LayerCache, flat_rows, store
from packhorse.runner.tiles import LANES

MAX_ITEM_ROWS = 96  # rows of queries, sums and outputs that one thread keeps beside a tile: about 50 kB at head size 64

READ_ROWS = 6  # rows whose products take as long as reading their key from memory
LEAST_SHARE = 20_000  # cost, some 30 microseconds: what a thread must get to do before it is worth waking


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
        self.kernels = (
            attention_kernel(single_rows(group), *shape, prefetch=True),
            attention_kernel(ROWS, *shape, prefetch=False),
        )
        self._sinks = np.array(spec.sinks or (), np.float32)
        floats = scratch_floats(_queries_per_item(group) * group, spec.head_size, spec.v_head_size)
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
            for kernel, (begin, end) in zip(self.kernels, work.shares[member], strict=True):
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
