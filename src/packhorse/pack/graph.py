"""Small verbs on ONNX graphs, shared by the rewrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Dim = int | str
Dims = tuple[Dim, ...]


def dims(value: ir.Value | None) -> Dims | None:
    """Sizes of a value's axes, an int or the name of a symbol each; None when any of them is not known."""
    if value is None or value.shape is None:
        return None
    found: list[Dim] = []
    for dim in value.shape:
        size = dim if isinstance(dim, int) else dim.value
        if size is None:
            return None
        found.append(size)
    return tuple(found)


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The content of a small constant, or None when the value is not one."""
    if value is None or value.const_value is None or value.const_value.size > 64:
        return None
    return np.asarray(value.const_value.numpy())


def new_value(name: str, like: ir.Value, shape: Dims | None) -> ir.Value:
    """A value of the type of `like`."""
    return ir.Value(name=name, shape=None if shape is None else ir.Shape(shape), type=like.type)


def add_constant(graph: ir.Graph, name: str, content: npt.NDArray[Any]) -> ir.Value:
    """Register a small constant; one that is there under `name` must have the same content and is used again."""
    if name in graph.initializers:
        return graph.initializers[name]
    return add_weight(graph, ir.tensor(content, name=name))


def add_weight(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    """Register a tensor as an initializer. Its name must be new."""
    value = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def insert(
    graph: ir.Graph,
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value],
    attributes: Mapping[str, Any] | None = None,
) -> ir.Node:
    """Put a node of the standard operators before `before`. It is named after its first output."""
    attrs = ir.convenience.convert_attributes(attributes or {})
    node = ir.Node("", op_type, inputs, attrs, outputs=outputs, name=outputs[0].name)
    graph.insert_before(before, node)
    return node


def insert_reshape(graph: ir.Graph, before: ir.Node, value: ir.Value, shape: Dims, name: str) -> ir.Value:
    """`value` seen with another shape, of which at most one size is a symbol; `value` itself where nothing changes."""
    if dims(value) == shape:
        return value
    target = [-1 if isinstance(size, str) else size for size in shape]
    key = add_constant(graph, "shape/" + "x".join(map(str, target)), np.array(target, np.int64))
    output = new_value(name, value, shape)
    insert(graph, before, "Reshape", [value, key], [output])
    return output


def replace(old: ir.Value, new: ir.Value) -> None:
    """Let all uses of `old` read `new`, the graph's outputs included."""
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
