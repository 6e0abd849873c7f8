"""An independent runner for these tests: segments by onnxruntime, attention in plain numpy, one query at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from packhorse.pack.manifest import AttentionSpec, load_manifest
from packhorse.runner.base import Float32, StepBatch

BLOCK_SIZE = 16


class NumpyRunner:
    """Slow and obvious. Follows pack.json and the docstring of AttentionSpec, nothing else."""

    def __init__(self, folder: Path, num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.manifest = load_manifest(folder)
        self.vocab_size = self.manifest.vocab_size
        self.num_blocks, self.block_size = num_blocks, block_size
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._sessions = [
            ort.InferenceSession(folder / s.file, options, providers=["CPUExecutionProvider"])
            for s in self.manifest.segments
        ]
        slots = num_blocks * block_size
        self._keys = [np.zeros((slots, a.num_kv_heads, a.head_size), np.float32) for a in self.manifest.attention]
        self._values = [np.zeros((slots, a.num_kv_heads, a.v_head_size), np.float32) for a in self.manifest.attention]

    def run(self, batch: StepBatch) -> Float32:
        values: dict[str, np.ndarray] = {"ids": batch.ids, "positions": batch.positions, "rows": batch.rows}
        for number, (segment, session) in enumerate(zip(self.manifest.segments, self._sessions, strict=True)):
            names = [v.name for v in segment.outputs]
            values.update(zip(names, session.run(names, {v.name: values[v.name] for v in segment.inputs}), strict=True))
            if number < len(self.manifest.attention):
                spec = self.manifest.attention[number]
                values[spec.output] = self._attend(number, spec, values, batch)
        return values["logits"]

    def _attend(self, layer: int, spec: AttentionSpec, values: dict[str, np.ndarray], batch: StepBatch) -> Float32:
        keys, cached = self._keys[layer], self._values[layer]
        q = values[spec.q].reshape(-1, spec.num_heads, spec.head_size)
        keys[batch.slots] = values[spec.k].reshape(-1, spec.num_kv_heads, spec.head_size)
        cached[batch.slots] = values[spec.v].reshape(-1, spec.num_kv_heads, spec.v_head_size)
        output = np.zeros((len(q), spec.num_heads, spec.v_head_size), np.float32)
        for sequence, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
            for token in range(start, end):
                position = int(batch.positions[token])
                first = max(0, position - spec.window + 1) if spec.window else 0
                seen = np.arange(first, position + 1)
                slots = batch.block_table[sequence, seen // self.block_size] * self.block_size + seen % self.block_size
                output[token] = _one_query(q[token], keys[slots], cached[slots], spec)
        return output.reshape(len(q), -1)


def _one_query(q: np.ndarray, keys: np.ndarray, values: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    group = spec.num_heads // spec.num_kv_heads
    scores = np.einsum("hd,nhd->hn", q, np.repeat(keys, group, axis=1)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * np.tanh(scores / spec.softcap)
    if spec.sinks is not None:
        scores = np.concatenate([scores, np.array(spec.sinks, np.float32)[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("hn,nhd->hd", weights[:, : len(keys)], np.repeat(values, group, axis=1))
