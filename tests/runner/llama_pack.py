"""Builds a small pack of the llama kind with onnx.helper: what the exporter makes, without torch.

A plain numpy forward over the same weights, with no cache and no batching, is the reference.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

EPSILON = 1e-5


@dataclass(frozen=True)
class Shape:
    """Dimensions of a model. `window` and `softcap` as in AttentionSpec."""

    vocab: int = 97
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    mlp: int = 48
    context: int = 256
    window: int = 0
    softcap: float = 0.0

    @property
    def q_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_size


SMOLLM2_135M = Shape(vocab=49152, hidden=576, layers=30, heads=9, kv_heads=3, head_size=64, mlp=1536, context=8192)


def random_weights(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 arrays by name, drawn so that activations stay near one."""
    rng = np.random.default_rng(seed)

    def dense(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols), np.float32) / np.sqrt(rows)).astype(np.float32)

    half = shape.head_size // 2
    angles = np.arange(shape.context)[:, None] / 10_000.0 ** (np.arange(half) / half)
    weights = {
        "embed": rng.standard_normal((shape.vocab, shape.hidden), np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "final_norm": rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32),
        "head": dense(shape.hidden, shape.vocab),
    }
    for i in range(shape.layers):
        weights[f"norm1.{i}"] = rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32)
        weights[f"norm2.{i}"] = rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32)
        weights[f"qkv.{i}"] = dense(shape.hidden, shape.q_size + 2 * shape.kv_size)
        weights[f"o.{i}"] = dense(shape.q_size, shape.hidden)
        weights[f"gate_up.{i}"] = dense(shape.hidden, 2 * shape.mlp)
        weights[f"down.{i}"] = dense(shape.mlp, shape.hidden)
    return weights


class _Store:
    """Writes weights one after another to segments/weights.bin and hands out external tensors."""

    def __init__(self, folder: Path, weights: dict[str, np.ndarray]) -> None:
        self._weights = weights
        self._places: dict[str, tuple[int, int]] = {}
        with (folder / "segments" / "weights.bin").open("wb") as file:
            for name, array in weights.items():
                file.write(b"\0" * (-file.tell() % 4096))
                self._places[name] = (file.tell(), array.nbytes)
                file.write(array.tobytes())

    def tensor(self, name: str) -> TensorProto:
        offset, length = self._places[name]
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=self._weights[name].shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor


def _project_qkv(shape: Shape, i: int) -> list[Any]:
    sizes = f"sizes.{i}"
    node = helper.make_node
    return [
        node("RMSNormalization", [f"h{i}", f"norm1.{i}"], [f"n1.{i}"], axis=-1, epsilon=EPSILON),
        node("MatMul", [f"n1.{i}", f"qkv.{i}"], [f"qkv_out.{i}"]),
        node("Constant", [], [sizes], value_ints=[shape.q_size, shape.kv_size, shape.kv_size]),
        node("Split", [f"qkv_out.{i}", sizes], [f"q_raw.{i}", f"k_raw.{i}", f"v{i}"], axis=-1),
        node("Constant", [], [f"zero.{i}"], value_ints=[0]),
        node("Unsqueeze", [f"q_raw.{i}", f"zero.{i}"], [f"q3.{i}"]),
        node("Unsqueeze", [f"k_raw.{i}", f"zero.{i}"], [f"k3.{i}"]),
        node("RotaryEmbedding", [f"q3.{i}", "cos_t", "sin_t"], [f"qr.{i}"], num_heads=shape.heads),
        node("RotaryEmbedding", [f"k3.{i}", "cos_t", "sin_t"], [f"kr.{i}"], num_heads=shape.kv_heads),
        node("Squeeze", [f"qr.{i}", f"zero.{i}"], [f"q{i}"]),
        node("Squeeze", [f"kr.{i}", f"zero.{i}"], [f"k{i}"]),
    ]


def _after_attention(i: int, source: str) -> list[Any]:
    node = helper.make_node
    return [
        node("MatMul", [f"a{i}", f"o.{i}"], [f"o_out.{i}"]),
        node("Add", [source, f"o_out.{i}"], [f"r.{i}"]),
        node("RMSNormalization", [f"r.{i}", f"norm2.{i}"], [f"n2.{i}"], axis=-1, epsilon=EPSILON),
        node("MatMul", [f"n2.{i}", f"gate_up.{i}"], [f"gu.{i}"]),
        node("Split", [f"gu.{i}"], [f"g.{i}", f"u.{i}"], axis=-1, num_outputs=2),
        node("Sigmoid", [f"g.{i}"], [f"s.{i}"]),
        node("Mul", [f"g.{i}", f"s.{i}"], [f"gs.{i}"]),
        node("Mul", [f"gs.{i}", f"u.{i}"], [f"m.{i}"]),
        node("MatMul", [f"m.{i}", f"down.{i}"], [f"d.{i}"]),
        node("Add", [f"r.{i}", f"d.{i}"], [f"h{i + 1}"]),
    ]


def build_pack(folder: Path, shape: Shape, weights: dict[str, np.ndarray] | None = None) -> Path:
    """Write a pack to `folder` and return it."""
    weights = weights or random_weights(shape)
    (folder / "segments").mkdir(parents=True, exist_ok=True)
    store = _Store(folder, weights)
    half = shape.head_size // 2
    values = {
        "ids": ("int64", ("T",)),
        "positions": ("int64", ("T",)),
        "rows": ("int64", ("R",)),
        "cos_t": ("float32", (1, "T", half)),
        "sin_t": ("float32", (1, "T", half)),
        "logits": ("float32", ("R", shape.vocab)),
    }
    for i in range(shape.layers + 1):
        values[f"h{i}"] = ("float32", ("T", shape.hidden))
        values[f"q{i}"] = values[f"a{i}"] = ("float32", ("T", shape.q_size))
        values[f"k{i}"] = values[f"v{i}"] = ("float32", ("T", shape.kv_size))

    def value(name: str) -> dict[str, Any]:
        dtype, dims = values[name]
        return {"name": name, "dtype": dtype, "shape": list(dims)}

    segments = []

    def segment(nodes: list[Any], inputs: list[str], outputs: list[str]) -> None:
        used = dict.fromkeys(name for n in nodes for name in n.input)
        infos = {}
        for name in (*inputs, *outputs):
            dtype, dims = values[name]
            kind = TensorProto.FLOAT if dtype == "float32" else TensorProto.INT64
            infos[name] = helper.make_tensor_value_info(name, kind, dims)
        index = len(segments)
        graph = helper.make_graph(
            nodes,
            f"segment_{index:02d}",
            [infos[n] for n in inputs],
            [infos[n] for n in outputs],
            [store.tensor(n) for n in used if n in weights],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
        file = f"segments/{index:02d}.onnx"
        (folder / file).write_bytes(model.SerializeToString())
        segments.append({"file": file, "inputs": [value(n) for n in inputs], "outputs": [value(n) for n in outputs]})

    start = [
        helper.make_node("Gather", ["embed", "ids"], ["h0"]),
        helper.make_node("Constant", [], ["front"], value_ints=[0]),
        helper.make_node("Gather", ["cos", "positions"], ["cos_2"]),
        helper.make_node("Gather", ["sin", "positions"], ["sin_2"]),
        helper.make_node("Unsqueeze", ["cos_2", "front"], ["cos_t"]),
        helper.make_node("Unsqueeze", ["sin_2", "front"], ["sin_t"]),
        *_project_qkv(shape, 0),
    ]
    segment(start, ["ids", "positions"], ["h0", "cos_t", "sin_t", "q0", "k0", "v0"])
    for i in range(1, shape.layers):
        nodes = [*_after_attention(i - 1, f"h{i - 1}"), *_project_qkv(shape, i)]
        segment(nodes, [f"h{i - 1}", f"a{i - 1}", "cos_t", "sin_t"], [f"h{i}", f"q{i}", f"k{i}", f"v{i}"])
    last = shape.layers - 1
    end = [
        # The rows that need logits are picked before the MLP: what the last layer does after attention is per token.
        helper.make_node("Gather", [f"a{last}", "rows"], ["a_rows"]),
        helper.make_node("Gather", [f"h{last}", "rows"], ["h_rows"]),
        *_after_attention(last, "h_rows"),
        helper.make_node("RMSNormalization", [f"h{last + 1}", "final_norm"], ["final"], axis=-1, epsilon=EPSILON),
        helper.make_node("MatMul", ["final", "head"], ["logits"]),
    ]
    end[2].input[0] = "a_rows"
    segment(end, [f"h{last}", f"a{last}", "rows"], ["logits"])
    _write_manifest(folder, shape, segments)
    return folder


def _write_manifest(folder: Path, shape: Shape, segments: list[dict[str, Any]]) -> None:
    attention = [
        {
            "layer": i,
            "q": f"q{i}",
            "k": f"k{i}",
            "v": f"v{i}",
            "output": f"a{i}",
            "num_heads": shape.heads,
            "num_kv_heads": shape.kv_heads,
            "head_size": shape.head_size,
            "v_head_size": shape.head_size,
            "scale": shape.head_size**-0.5,
            "window": shape.window,
            "softcap": shape.softcap,
        }
        for i in range(shape.layers)
    ]
    manifest = {
        "name": "tiny-llama",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "identity": "0" * 64,
        "source": {"kind": "huggingface", "name": "tiny", "sha256": "0" * 64},
        "versions": {},
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_layers": shape.layers,
        "context_length": shape.context,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_ids": [0],
        "tokenizer": None,
        "chat_template": None,
        "segments": segments,
        "attention": attention,
        "files": [],
        "parity": {"max_abs_difference": 0.0, "max_logit": 1.0, "checks": 0},
    }
    (folder / "pack.json").write_text(json.dumps(manifest))


def reference_logits(shape: Shape, weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits of one whole sequence in float64: float64[len(ids), vocab]. No cache, no batch."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    n, half = len(ids), shape.head_size // 2

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight

    def rotate(x: np.ndarray) -> np.ndarray:
        cos, sin = w["cos"][:n, None], w["sin"][:n, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    distance = np.arange(n)[:, None] - np.arange(n)
    hidden_from = (distance < 0) | ((distance >= shape.window) if shape.window else False)
    h = w["embed"][ids]
    for i in range(shape.layers):
        qkv = norm(h, w[f"norm1.{i}"]) @ w[f"qkv.{i}"]
        q, k, v = np.split(qkv, [shape.q_size, shape.q_size + shape.kv_size], -1)
        q = rotate(q.reshape(n, shape.heads, -1))
        k = np.repeat(rotate(k.reshape(n, shape.kv_heads, -1)), shape.heads // shape.kv_heads, 1)
        v = np.repeat(v.reshape(n, shape.kv_heads, -1), shape.heads // shape.kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * shape.head_size**-0.5
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        scores[:, hidden_from] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        h = h + np.einsum("hqk,khd->qhd", p, v).reshape(n, -1) @ w[f"o.{i}"]
        gate, up = np.split(norm(h, w[f"norm2.{i}"]) @ w[f"gate_up.{i}"], 2, -1)
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[f"down.{i}"]
    return norm(h, w["final_norm"]) @ w["head"]
