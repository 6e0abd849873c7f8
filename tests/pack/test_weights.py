"""The shared weight file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from packhorse.pack.weights import ALIGNMENT, INLINE_BYTES, WeightFile
from tests.pack.graphs import floats, graph_of


def _model(**weights: np.ndarray) -> ir.Model:
    names = list(weights)
    body = " ".join(f"y{i} = MatMul(x, {name})" for i, name in enumerate(names))
    outputs = ", ".join(f"float[T, {weights[name].shape[1]}] y{i}" for i, name in enumerate(names))
    return graph_of(f"step (float[T, {weights[names[0]].shape[0]}] x) => ({outputs}) {{ {body} }}", **weights)


def test_equal_tensors_are_stored_once_also_over_graphs(tmp_path: Path) -> None:
    first, second = _model(a=floats(64, 32), b=floats(64, 32)), _model(c=floats(64, 32), d=floats(64, 32, seed=1))
    with WeightFile(tmp_path / "weights.bin") as weights:
        weights.externalize(first.graph)
        weights.externalize(second.graph)
    assert (tmp_path / "weights.bin").stat().st_size == 2 * 64 * 32 * 4


def test_every_tensor_begins_at_a_page(tmp_path: Path) -> None:
    model = _model(a=floats(33, 9), b=floats(33, 10), c=floats(33, 11))
    with WeightFile(tmp_path / "weights.bin") as weights:
        weights.externalize(model.graph)
    offsets = [v.const_value.offset for v in model.graph.initializers.values()]
    assert [o % ALIGNMENT for o in offsets] == [0, 0, 0]
    assert len(set(offsets)) == 3


def test_small_constants_stay_in_the_graph(tmp_path: Path) -> None:
    model = _model(small=floats(2, 4))
    with WeightFile(tmp_path / "weights.bin") as weights:
        weights.externalize(model.graph)
    assert (tmp_path / "weights.bin").stat().st_size == 0
    assert model.graph.initializers["small"].const_value.nbytes <= INLINE_BYTES


def test_the_location_is_relative(tmp_path: Path) -> None:
    model = _model(a=floats(64, 32))
    with WeightFile(tmp_path / "weights.bin") as weights:
        weights.externalize(model.graph)
    ir.save(model, tmp_path / "graph.onnx")
    assert str(tmp_path).encode() not in (tmp_path / "graph.onnx").read_bytes()
