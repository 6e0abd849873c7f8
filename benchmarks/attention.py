"""The attention kernel alone: bytes of cache read per second in decode, products per second in prefill.

    python -m benchmarks.attention [--threads N] [--heads 9] [--kv-heads 3] [--head-size 64]

Both are printed beside what the machine can do at most (limits.py), measured in the same run. The blocks of the
sequences lie in random order, as they do after a while of serving, and as many layers take turns as it needs for
the cache to be larger than the processor's own.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from benchmarks.limits import product_gflops, read_gigabytes_per_second, round_seconds
from packhorse.machine import usable_cpus
from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.attention import PagedAttention, plan_attention
from packhorse.runner.base import StepBatch
from packhorse.runner.crew import Crew
from packhorse.runner.kv_cache import BLOCK_SIZE, KVCache

CONTEXTS = (128, 512, 2048, 8192)
SEQUENCES = (1, 4, 16, 64)
PREFILLS = (512, 2048)
CACHE_BYTES = 256 * 2**20  # several times the last-level cache of most machines
MOST_BYTES = 2**30


def make_step(contexts: list[int], queries: list[int], rng: np.random.Generator) -> tuple[StepBatch, int]:
    """The step that computes the last `queries` tokens of each context, and how many blocks its sequences have."""
    counts = [-(-n // BLOCK_SIZE) for n in contexts]
    table = np.zeros((len(contexts), max(counts)), np.int32)
    free = rng.permutation(sum(counts)).astype(np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count], free = free[:count], free[count:]
    cu_seqlens = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, queries, strict=True)])
    sequence = np.repeat(np.arange(len(queries)), queries)
    slots = table[sequence, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = StepBatch(
        ids=np.zeros(len(positions), np.int64),
        positions=positions,
        slots=slots,
        cu_seqlens=cu_seqlens,
        context_lens=np.array(contexts, np.int32),
        block_table=table,
        rows=cu_seqlens[1:].astype(np.int64) - 1,
    )
    return batch, sum(counts)


def seconds_per_layer(spec: AttentionSpec, crew: Crew, contexts: list[int], queries: list[int]) -> float:
    """Median seconds of one layer's attention, its keys and values come from memory."""
    rng = np.random.default_rng(0)
    batch, blocks = make_step(contexts, queries, rng)
    bytes_per_layer = blocks * BLOCK_SIZE * spec.num_kv_heads * (spec.head_size + spec.v_head_size) * 4
    layers = max(1, -(-CACHE_BYTES // bytes_per_layer)) if max(queries) == 1 else 1
    caches = KVCache([spec] * layers, blocks).layers
    for cache in caches:
        cache.keys[:] = 0.5
        cache.values[:] = 0.5
    q = rng.standard_normal((len(batch.ids), spec.num_heads * spec.head_size), np.float32)
    out = np.empty((len(batch.ids), spec.num_heads * spec.v_head_size), np.float32)
    attention = PagedAttention(spec, BLOCK_SIZE, crew)
    work = plan_attention(batch, spec, crew.size)

    def step() -> None:
        for cache in caches:
            attention.attend(cache, q, out, batch, work)

    return statistics.median(round_seconds(step)) / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-size", type=int, default=64)
    options = parser.parse_args()
    spec = AttentionSpec(
        layer=0, q="q", k="k", v="v", output="out", num_heads=options.heads, num_kv_heads=options.kv_heads,
        head_size=options.head_size, v_head_size=options.head_size, scale=options.head_size**-0.5,
    )  # fmt: skip
    crew = Crew(options.threads)
    token_bytes = 2 * 4 * spec.num_kv_heads * spec.head_size

    limit = read_gigabytes_per_second(options.threads)
    print(f"decode: this machine reads {limit:.1f} GB/s with {options.threads} threads")
    for context in CONTEXTS:
        for sequences in SEQUENCES:
            if sequences * context * token_bytes > MOST_BYTES:
                continue
            seconds = seconds_per_layer(spec, crew, [context] * sequences, [1] * sequences)
            rate = 1e-9 * sequences * context * token_bytes / seconds
            shape = f"context {context:5d} x {sequences:3d}"
            print(f"  {shape}  {rate:6.1f} GB/s  {rate / limit:4.0%}  {1e6 * seconds:8.0f} us")

    peak = max(gflops for _, gflops in product_gflops(options.threads))
    print(f"prefill: the best of this machine's products is {peak:.0f} GFLOP/s")
    for tokens in PREFILLS:
        seconds = seconds_per_layer(spec, crew, [tokens], [tokens])
        rate = 1e-9 * 2 * tokens * (tokens + 1) * spec.num_heads * spec.head_size / seconds
        print(f"  tokens {tokens:5d}        {rate:6.0f} GFLOP/s  {rate / peak:4.0%}  {1e6 * seconds:8.0f} us")
    crew.close()


if __name__ == "__main__":
    main()
