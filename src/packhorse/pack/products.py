"""Rewrites of matrix products: constant operands in place, tied weights shared, products of one input merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from packhorse.pack.graph import add_weight, constant, dims, insert, new_value, replace

# More products than this over one input are experts, which gain nothing from being one product.
_MOST_MERGED = 8

Array = npt.NDArray[Any]


def fold_weight_views(graph: ir.Graph) -> None:
    """Compute what only rearranges a weight: a transpose, the slice of one expert. Done when the pack is written.

    A weight that is used elsewhere as it is, such as a tied embedding, is left alone: it would be stored twice.
    """
    for node in list(graph):
        fold = _WEIGHT_VIEWS.get(node.op_type)
        source = node.inputs[0] if node.inputs else None
        if fold is None or source is None or not source.is_initializer() or source.const_value is None:
            continue
        if any(use.node.op_type not in _WEIGHT_VIEWS for use in source.uses()) or _is_table(source):
            continue
        rearrange = fold(node)
        if rearrange is not None:
            replace(node.outputs[0], _derived(graph, node.outputs[0], source.const_value, rearrange))
            graph.remove(node, safe=True)


def share_tied_head(graph: ir.Graph) -> None:
    """Let a product whose weight is the transpose of an embedding table read the table itself: Gemm with transB."""
    tables = [value for value in graph.initializers.values() if _is_table(value)]
    for node in list(graph):
        if node.op_type != "MatMul" or len(dims(node.inputs[0]) or ()) != 2:
            continue
        weight = node.inputs[1]
        table = next((t for t in tables if weight is not None and _is_transpose_of(weight, t)), None)
        if table is not None:
            output = new_value(f"{node.outputs[0].name}/tied", node.outputs[0], dims(node.outputs[0]))
            insert(graph, node, "Gemm", [node.inputs[0], table], [output], {"transB": 1}).name = node.name
            replace(node.outputs[0], output)


def merge_products(graph: ir.Graph) -> None:
    """Narrow products of the same input by constant weights become one product and a Split: q, k, v.

    A product no wider than its input is too small to keep several threads busy; wider ones (gate, up) lose more to the
    copies that Split makes than they gain (see _is_narrow). Biases are merged too, when every product has one.
    """
    order = {node: place for place, node in enumerate(graph)}
    inputs = dict.fromkeys(node.inputs[0] for node in order if node.op_type == "MatMul")
    for value in inputs:
        if value is None:
            continue
        found = [use.node for use in value.uses() if use.idx == 0 and _is_mergeable(use.node)]
        found.sort(key=lambda node: (_has_bias(node), order[node]))
        for has_bias, group in groupby(found, _has_bias):
            members = list(group)
            if 2 <= len(members) <= _MOST_MERGED:
                _merge(graph, members, has_bias)


def _merge(graph: ir.Graph, members: Sequence[ir.Node], has_bias: bool) -> None:
    weights = [_weight(member) for member in members]
    widths = [int(tensor.shape[1]) for tensor in weights]
    name = _joined([str(tensor.name) for tensor in weights])
    first, source = members[0], members[0].inputs[0]
    shape = dims(first.outputs[0])
    assert source is not None
    assert shape is not None
    wide = (*shape[:-1], sum(widths))
    module = name.removesuffix(".weight")
    merged = add_weight(graph, _concatenated(weights, name, axis=1))
    value = new_value(f"{module}/MatMul", first.outputs[0], wide)
    insert(graph, first, "MatMul", [source, merged], [value])
    ends = [member.outputs[0] for member in members]
    if has_bias:
        adds = [_bias_of(member) for member in members]
        biases = [_constant_operand(add) for add in adds if add is not None]
        ends = [add.outputs[0] for add in adds if add is not None]
        bias = add_weight(graph, _concatenated(biases, _joined([str(b.name) for b in biases]), axis=0))
        plain, value = value, new_value(f"{module}/Add", value, wide)
        insert(graph, first, "Add", [plain, bias], [value])
    parts = [new_value(f"{end.name}/part", end, dims(end)) for end in ends]
    sizes = add_weight(graph, ir.tensor(np.array(widths, np.int64), name=f"{module}/widths"))
    insert(graph, first, "Split", [value, sizes], parts, {"axis": -1}).name = f"{module}/Split"
    for end, part in zip(ends, parts, strict=True):
        replace(end, part)


def _is_mergeable(node: ir.Node) -> bool:
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    return (
        weight is not None
        and weight.is_initializer()
        and len(weight.uses()) == 1
        and _is_narrow(weight)
        and not node.outputs[0].is_graph_output()
    )


def _is_narrow(weight: ir.Value) -> bool:
    """Whether a weight [K, N] has N <= K.

    Measured at K = 576 with 2 threads, one product and Split against separate products, for 1, 16, 64 and 256 tokens:
    q, k, v (576, 192, 192) take 20 %, 9 %, 2 % less and 3 % more time; gate, up (1536 each) 7 % less, the same, 2 % and
    10 % more. With a single thread gate and up take 3 % more at any size.
    """
    shape = dims(weight)
    if shape is None or len(shape) != 2:
        return False
    depth, width = shape
    return isinstance(depth, int) and isinstance(width, int) and width <= depth


def _has_bias(node: ir.Node) -> bool:
    return _bias_of(node) is not None


def _bias_of(node: ir.Node) -> ir.Node | None:
    """The Add of a constant vector that is the only use of this product."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    operand = uses[0].node.inputs[1 - uses[0].idx]
    is_vector = operand is not None and operand.is_initializer() and len(dims(operand) or ()) == 1
    return uses[0].node if is_vector and dims(operand) == (dims(node.outputs[0]) or ())[-1:] else None


def _constant_operand(add: ir.Node) -> ir.TensorProtocol:
    for value in add.inputs:
        if value is not None and value.is_initializer() and value.const_value is not None:
            return value.const_value
    raise AssertionError("the caller has looked")


def _weight(node: ir.Node) -> ir.TensorProtocol:
    weight = node.inputs[1]
    assert weight is not None
    assert weight.const_value is not None
    return weight.const_value


def _joined(names: Sequence[str]) -> str:
    """`layers.0.q_proj.weight`, `layers.0.k_proj.weight` -> `layers.0.q_proj+k_proj.weight`."""
    split = [name.split(".") for name in names]
    if len({len(parts) for parts in split}) != 1:
        return "+".join(names)
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    return ".".join("+".join(column) for column in columns)


def _concatenated(tensors: Sequence[ir.TensorProtocol], name: str, axis: int) -> ir.LazyTensor:
    shape = list(tensors[0].shape)
    shape[axis] = sum(int(tensor.shape[axis]) for tensor in tensors)

    def compute() -> ir.Tensor:
        return ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=axis), name=name)

    return ir.LazyTensor(compute, tensors[0].dtype, ir.Shape(shape), name=name)


def _derived(
    graph: ir.Graph, value: ir.Value, source: ir.TensorProtocol, rearrange: Callable[[Array], Array]
) -> ir.Value:
    """A weight computed from another when it is written, so that memory holds one of them at a time."""
    name = str(value.name)

    def compute() -> ir.Tensor:
        return ir.tensor(np.ascontiguousarray(rearrange(np.asarray(source.numpy()))), name=name)

    return add_weight(graph, ir.LazyTensor(compute, source.dtype, ir.Shape(dims(value) or ()), name=name))


def _transposed(node: ir.Node) -> Callable[[Array], Array]:
    perm = node.attributes.get_ints("perm", ())
    return lambda array: array.transpose(perm or None)


def _selected(node: ir.Node) -> Callable[[Array], Array] | None:
    index, axis = constant(node.inputs[1]), node.attributes.get_int("axis", 0)
    if index is None or index.ndim != 0:
        return None
    return lambda array: array.take(int(index), axis=axis)


_WEIGHT_VIEWS: dict[str, Callable[[ir.Node], Callable[[Array], Array] | None]] = {
    "Transpose": _transposed,
    "Gather": _selected,
}


def _is_table(value: ir.Value) -> bool:
    """Whether rows of this weight are looked up by token or position."""
    return value.is_initializer() and any(
        use.node.op_type == "Gather" and use.idx == 0 and constant(use.node.inputs[1]) is None for use in value.uses()
    )


def _is_transpose_of(weight: ir.Value, table: ir.Value) -> bool:
    producer = weight.producer()
    if producer is not None:
        return producer.op_type == "Transpose" and producer.inputs[0] is table and len(dims(table) or ()) == 2
    if weight.const_value is None or table.const_value is None or dims(weight) != (dims(table) or ())[::-1]:
        return False
    return bool(np.array_equal(weight.const_value.numpy().T, table.const_value.numpy()))
