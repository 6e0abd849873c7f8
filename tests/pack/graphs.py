"""Hand-made graphs: written as text, run by onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

Arrays = dict[str, np.ndarray]


def graph_of(text: str, **weights: np.ndarray) -> ir.Model:
    """Parse the body of a graph, e.g. "step (float[T, 4] x) => (float[T, 4] y) { y = Relu(x) }", and add weights."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 23, "packhorse" : 1]> {text}')
    for node in model.graph:
        node.name = node.outputs[0].name
    values = {value.name: value for node in model.graph for value in node.inputs if value is not None}
    for name, content in weights.items():
        value = values[name]
        value.const_value = ir.tensor(content, name=name)
        value.shape, value.type = ir.Shape(content.shape), ir.TensorType(value.const_value.dtype)
        model.graph.register_initializer(value)
    return model


def run(model: ir.Model, inputs: Arrays) -> list[np.ndarray]:
    """All outputs, in order, without any rewriting by the runtime."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    return list(session.run(None, {name: array for name, array in inputs.items() if name in wanted}))


def operators(model: ir.Model) -> list[str]:
    """Operator types in order."""
    return [node.op_type for node in model.graph]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
