"""Rewrites that remove moves of data: views of views, transposes that undo each other, the batch axis of size 1.

Transformers works on [1, T, …] and on [1, heads, T, size]; a segment works on [T, …].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from packhorse.pack.graph import Dim, Dims, constant, dims, insert, insert_reshape, new_value, replace

_RESHAPES = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"}

_ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Neg", "Abs", "Exp", "Sqrt", "Reciprocal", "Clip"),
    *("Sigmoid", "Tanh", "Relu", "Gelu", "Erf", "Softplus", "HardSigmoid", "Elu", "Cast", "Cos", "Sin"),
}
# Operators that work along one axis, counted from the front or the back.
_ALONG_AXIS = {"RMSNormalization", "LayerNormalization", "Softmax", "Split", "Concat"}


def collapse_views(graph: ir.Graph) -> None:
    """Replace each chain of views and transposes that keeps the order of elements by one Reshape, or by nothing."""
    for node in list(graph):
        if not _is_layout(node):
            continue
        value, shape = node.outputs[0], dims(node.outputs[0])
        root = _same_order_root(value)
        if root is None or shape is None or _symbols(shape) > 1:
            continue
        if node.op_type == "Reshape" and root is node.inputs[0] and dims(root) != shape:
            continue  # one Reshape already
        replace(value, insert_reshape(graph, node, root, shape, f"{node.name}/view"))


def flatten_rotary(graph: ir.Graph) -> None:
    """Turn RotaryEmbedding over [1, heads, T, size] into its form over [1, T, heads * size].

    The transposes put around it undo those that the model has; collapse_views then removes both.
    """
    for node in list(graph):
        shape = dims(node.inputs[0]) if node.op_type == "RotaryEmbedding" else None
        if shape is None or len(shape) != 4:
            continue
        one, heads, tokens, size = shape
        if not isinstance(heads, int) or not isinstance(size, int):
            continue
        name = node.name
        split, flat = (one, tokens, heads, size), (one, tokens, heads * size)
        swapped = _transpose(graph, node, node.inputs[0], split, f"{name}/tokens_first")
        merged = insert_reshape(graph, node, swapped, flat, f"{name}/flat")
        rotated = new_value(f"{name}/rotated", merged, flat)
        attributes = {**{k: a.value for k, a in node.attributes.items()}, "num_heads": heads}
        insert(graph, node, "RotaryEmbedding", [merged, *node.inputs[1:]], [rotated], attributes)
        apart = insert_reshape(graph, node, rotated, split, f"{name}/heads")
        replace(node.outputs[0], _transpose(graph, node, apart, shape, f"{name}/heads_first"))


def drop_batch_axis(graph: ir.Graph) -> None:
    """Compute token-wise operators over [T, …] in place of [1, T, …].

    An operator whose batched inputs are views that only prepend the axis is computed without it, and the axis is
    prepended to its output, where the next operator finds it.
    """
    for node in list(graph):
        inputs = _without_batch(graph, node)
        attributes = _attributes_without_batch(node)
        shapes = [dims(output) for output in node.outputs]
        if inputs is None or attributes is None or any(s is None or s[0] != 1 or _symbols(s) > 1 for s in shapes):
            continue
        outputs = [
            new_value(f"{old.name}/flat", old, shape[1:])
            for old, shape in zip(node.outputs, shapes, strict=True)
            if shape is not None
        ]
        insert(graph, node, node.op_type, inputs, outputs, attributes).name = node.name
        for place, (old, new, shape) in enumerate(zip(node.outputs, outputs, shapes, strict=True)):
            if shape is not None:
                replace(old, insert_reshape(graph, node, new, shape, f"{node.name}/batched.{place}"))


def _without_batch(graph: ir.Graph, node: ir.Node) -> list[ir.Value | None] | None:
    """The node's inputs with the leading axis taken off, or None when that is not possible or changes the result."""
    if node.op_type == "Gather":
        return _embedding_without_batch(graph, node)
    if node.op_type not in _ELEMENTWISE | _ALONG_AXIS | {"MatMul"}:
        return None
    shapes = [dims(value) if value is not None else () for value in node.inputs]
    rank = max((len(shape) for shape in shapes if shape is not None), default=0)
    if rank < 2 or any(shape is None for shape in shapes):
        return None
    if node.op_type == "MatMul" and (len(shapes[0] or ()) != rank or len(shapes[1] or ()) != 2 or rank < 3):
        return None
    found: list[ir.Value | None] = []
    for value, shape in zip(node.inputs, shapes, strict=True):
        if value is None or shape is None or len(shape) < rank:
            found.append(value)  # broadcast from the right, so a leading axis does not matter to it
            continue
        flat = _unbatched(graph, node, value)
        if flat is None:
            return None
        found.append(flat)
    return found


def _embedding_without_batch(graph: ir.Graph, node: ir.Node) -> list[ir.Value | None] | None:
    table, index = node.inputs
    if table is None or index is None or not table.is_initializer() or node.attributes.get_int("axis", 0) != 0:
        return None
    flat = _unbatched(graph, node, index)
    return None if flat is None else [table, flat]


def _unbatched(graph: ir.Graph, before: ir.Node, value: ir.Value) -> ir.Value | None:
    """`value`, a view of shape [1, …], without its first axis; None when it is not such a view."""
    shape, producer = dims(value), value.producer()
    if shape is None or len(shape) < 2 or shape[0] != 1 or producer is None or not _is_reshape(producer):
        return None
    root = producer.inputs[0]
    if root is None:
        return None
    return insert_reshape(graph, before, root, shape[1:], f"{value.name}/unbatched.{before.name}")


def _attributes_without_batch(node: ir.Node) -> dict[str, object] | None:
    """Attributes with `axis` counted without the leading axis; None when the node works along that axis."""
    attributes: dict[str, object] = {name: attribute.value for name, attribute in node.attributes.items()}
    if node.op_type in _ALONG_AXIS:
        default = 0 if node.op_type == "Split" else -1
        axis = node.attributes.get_int("axis", default)
        rank = len(dims(node.outputs[0]) or ())
        if axis == 0 or axis == -rank:
            return None
        attributes["axis"] = axis - rank if axis > 0 else axis
    return attributes


def _transpose(graph: ir.Graph, before: ir.Node, value: ir.Value | None, shape: Dims, name: str) -> ir.Value:
    """Swap the second and third axis of four."""
    assert value is not None
    output = new_value(name, value, shape)
    insert(graph, before, "Transpose", [value], [output], {"perm": (0, 2, 1, 3)})
    return output


def _symbols(shape: Dims) -> int:
    return sum(isinstance(size, str) for size in shape)


def _is_layout(node: ir.Node) -> bool:
    return node.domain == "" and (node.op_type == "Transpose" or _is_reshape(node))


def _is_reshape(node: ir.Node) -> bool:
    """Whether the node changes shape alone. Taking element 0 of an axis of size 1 does."""
    if node.op_type in _RESHAPES:
        return node.inputs[0] is not None and not node.inputs[0].is_initializer()
    if node.op_type != "Gather":
        return False
    shape, index = dims(node.inputs[0]), constant(node.inputs[1])
    axis = node.attributes.get_int("axis", 0)
    return shape is not None and shape[axis] == 1 and index is not None and index.ndim == 0 and int(index) in (0, -1)


@dataclass(slots=True, eq=False)
class _Atom:
    """A piece of an axis that stays together. One that a Reshape splits has `parts`."""

    size: Dim
    parts: tuple[_Atom, ...] = ()

    def leaves(self) -> Iterator[_Atom]:
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


_Axes = list[list[_Atom]]


def _same_order_root(value: ir.Value) -> ir.Value | None:
    """The farthest value above, through views and transposes alone, whose elements lie in the same order."""
    chain: list[ir.Node] = []
    node = value.producer()
    while node is not None and _is_layout(node) and node.inputs[0] is not None:
        chain.append(node)
        node = node.inputs[0].producer()
    for length in range(len(chain), 0, -1):
        if _keeps_order(chain[:length][::-1]):
            return chain[length - 1].inputs[0]
    return None


def _keeps_order(chain: Sequence[ir.Node]) -> bool:
    shape = dims(chain[0].inputs[0])
    if shape is None:
        return False
    start: _Axes = [[_Atom(size)] for size in shape]
    axes: _Axes | None = start
    for node in chain:
        target = dims(node.outputs[0])
        if axes is None or target is None:
            return False
        if node.op_type == "Transpose":
            perm = node.attributes.get_ints("perm", tuple(range(len(axes)))[::-1])
            axes = [axes[axis] for axis in perm]
        else:
            axes = _reshape(axes, target)
    return axes is not None and _leaves(axes) == _leaves(start)


def _leaves(axes: _Axes) -> list[_Atom]:
    return [leaf for axis in axes for atom in axis for leaf in atom.leaves() if leaf.size != 1]


def _reshape(axes: _Axes, target: Dims) -> _Axes | None:
    """Deal the atoms out to the target's axes, splitting one where an axis ends inside it."""
    rest = _leaves(axes)[::-1]
    result: _Axes = []
    for size in target:
        axis: list[_Atom] = []
        need: Dim = size
        while need != 1:
            if not rest:
                return None
            atom = rest.pop()
            if atom.size == need:
                need = 1
            elif isinstance(need, str) or isinstance(atom.size, str):
                return None
            elif need % atom.size == 0:
                need //= atom.size
            elif atom.size % need == 0:
                atom.parts = (_Atom(need), _Atom(atom.size // need))
                rest.append(atom.parts[1])
                atom, need = atom.parts[0], 1
            else:
                return None
            axis.append(atom)
        result.append(axis)
    return result if not rest else None
