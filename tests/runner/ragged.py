"""Ragged steps over a permuted block table, and attention by the book in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.attention import PagedAttention, plan_attention
from packhorse.runner.base import StepBatch
from packhorse.runner.crew import Crew
from packhorse.runner.kv_cache import KVCache


def make_spec(
    heads: int,
    kv_heads: int,
    head_size: int,
    v_head_size: int | None = None,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: tuple[float, ...] | None = None,
) -> AttentionSpec:
    return AttentionSpec(
        layer=0,
        q="q",
        k="k",
        v="v",
        output="out",
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        v_head_size=v_head_size or head_size,
        scale=head_size**-0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def block_table(lengths: Sequence[int], block_size: int, rng: np.random.Generator, spare: int = 3) -> np.ndarray:
    """int32[S, B]: blocks for sequences of these lengths in random order. Entries past a length point nowhere."""
    counts = [-(-n // block_size) for n in lengths]
    free = rng.permutation(sum(counts) + spare).astype(np.int32)
    table = np.full((len(lengths), max(counts)), 2**30, np.int32)
    for row, count in zip(table, counts, strict=True):
        row[:count], free = free[:count], free[count:]
    return table


def step(
    table: np.ndarray,
    context_lens: Sequence[int],
    queries: Sequence[int],
    block_size: int,
    *,
    ids: np.ndarray | None = None,
    rows: Sequence[int] | None = None,
) -> StepBatch:
    """The step that computes the last queries[s] tokens of each context; logits for the last of each by default."""
    cu = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(context_lens, queries, strict=True)])
    sequence = np.repeat(np.arange(len(queries)), queries)
    slots = table[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepBatch(
        ids=np.zeros(cu[-1], np.int64) if ids is None else np.asarray(ids, np.int64),
        positions=positions.astype(np.int64),
        slots=slots,
        cu_seqlens=cu,
        context_lens=np.asarray(context_lens, np.int32),
        block_table=table,
        rows=np.asarray(cu[1:] - 1 if rows is None else rows, np.int64),
    )


def blocks_needed(table: np.ndarray) -> int:
    return int(table[table < 2**30].max()) + 1


class Attention:
    """One layer with its cache, all of it NaN until stored: what is read by mistake shows."""

    def __init__(self, spec: AttentionSpec, num_blocks: int, block_size: int = 16, threads: int = 2) -> None:
        self.spec = spec
        self.crew = Crew(threads)
        self.call = PagedAttention(spec, block_size, self.crew)
        self.cache = KVCache([spec], num_blocks, block_size).layers[0]
        self.cache.keys[:] = np.nan
        self.cache.values[:] = np.nan

    def run(self, batch: StepBatch, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Store k, v and attend: float32[T, H * Dv]."""
        out = np.full((len(q), self.spec.num_heads * self.spec.v_head_size), np.nan, np.float32)
        self.call.store(self.cache, k, v, batch.slots)
        self.call.attend(self.cache, q, out, batch, plan_attention(batch, self.spec, self.crew.size))
        return out

    def close(self) -> None:
        self.crew.close()


def random_qkv(spec: AttentionSpec, tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return (
        rng.standard_normal((tokens, spec.num_heads * spec.head_size), np.float32) * 2,
        rng.standard_normal((tokens, spec.num_kv_heads * spec.head_size), np.float32) * 2,
        rng.standard_normal((tokens, spec.num_kv_heads * spec.v_head_size), np.float32),
    )


def reference(spec: AttentionSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of one whole sequence: q, k, v of all its tokens -> float64[T, H * Dv]."""
    tokens, group = len(q), spec.num_heads // spec.num_kv_heads
    q = q.reshape(tokens, spec.num_heads, -1).astype(np.float64)
    k = np.repeat(k.reshape(tokens, spec.num_kv_heads, -1), group, 1).astype(np.float64)
    v = np.repeat(v.reshape(tokens, spec.num_kv_heads, -1), group, 1).astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    scores[:, distance < 0] = -np.inf
    if spec.window:
        scores[:, distance >= spec.window] = -np.inf
    if spec.sinks is not None:
        extra = np.broadcast_to(np.array(spec.sinks)[:, None, None], (spec.num_heads, tokens, 1))
        scores = np.concatenate([scores, extra], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[:, :, :tokens]
    return np.einsum("hqk,khd->qhd", weights, v).reshape(tokens, -1)
