"""Cut one graph at its attention nodes into segments that run token by token.

A node belongs to the segment after the last attention node that it depends on:

    ids, positions ─► 0 ─ q.0 k.0 v.0 ─► attention ─ attn.0 ─► 1 ─► … ─► L ─► logits
                      └─ hidden.0, cos, sin ──────────────────►┴─► …     ▲ rows

The last segment is token-wise like the others, so the tokens that need no logits are dropped at its entrance: every
input with a token axis is gathered at `rows` once, and the last MLP, the norm and the head run on R rows only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import onnx_ir as ir

from packhorse.errors import UnsupportedModel
from packhorse.pack.attention_hook import DOMAIN, OPERATOR
from packhorse.pack.manifest import AttentionSpec, DType, Value

TOKENS, ROWS = "T", "R"

_DTYPES: dict[ir.DataType, DType] = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.INT64: "int64",
    ir.DataType.INT32: "int32",
    ir.DataType.BOOL: "bool",
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "uint8",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment: its graph, and the values at its borders."""

    model: ir.Model
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """L + 1 pieces and the L attention calls between them."""

    pieces: tuple[Piece, ...]
    attention: tuple[AttentionSpec, ...]


def is_attention(node: ir.Node) -> bool:
    """Whether this is the opaque node that the attention hook left."""
    return bool(node.domain == DOMAIN and node.op_type == OPERATOR)


def cut(model: ir.Model) -> Cut:
    """Cut `model`, a graph of ids[T], positions[T] -> logits[T, V]; its border values are renamed in place.

    Raises UnsupportedModel when two attention calls do not depend on one another or a border value has no known shape.
    """
    graph = model.graph
    _refuse_subgraphs(graph)
    segment_of = _assign(graph)
    calls = [node for node in graph if is_attention(node)]
    if [segment_of[call] for call in calls] != list(range(len(calls))):
        raise UnsupportedModel("The graph cannot be cut: its attention calls do not follow one another.")
    _localize(graph, calls, segment_of)
    members: list[list[ir.Node]] = [[] for _ in range(len(calls) + 1)]
    for node in graph:
        if not is_attention(node):
            members[segment_of[node]].append(node)
    _name_borders(graph, calls, segment_of)
    last = len(calls)
    pieces = tuple(_piece(model, number, nodes, is_last=number == last) for number, nodes in enumerate(members))
    return Cut(pieces, tuple(_spec(call) for call in calls))


def _assign(graph: ir.Graph) -> dict[ir.Node, int]:
    """Segment of every node; an attention node has the number of the segment that feeds it."""
    segment_of: dict[ir.Node, int] = {}
    for node in graph:
        producers = (value.producer() for value in node.inputs if value is not None)
        segment_of[node] = max((segment_of[p] + is_attention(p) for p in producers if p is not None), default=0)
    return segment_of


def _refuse_subgraphs(graph: ir.Graph) -> None:
    for node in graph:
        if any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for attribute in node.attributes.values()
        ):
            raise UnsupportedModel(f"The graph cannot be cut: {node.op_type} holds a graph of its own.")


def _localize(graph: ir.Graph, calls: Sequence[ir.Node], segment_of: dict[ir.Node, int]) -> None:
    """Repeat in each segment what is computed from weights and sizes alone, instead of carrying it over the border.

    `Shape` of a graph input gives T, which the last segment must not use: it has R rows. A repeated `Shape` reads the
    segment's attention output instead.
    """
    repeatable = _repeatable(graph)
    copies: dict[tuple[ir.Node, int], ir.Node] = {}

    def local(value: ir.Value, segment: int, before: ir.Node) -> ir.Value:
        producer = value.producer()
        if producer is None or producer not in repeatable or segment_of[producer] == segment:
            return value
        if (producer, segment) not in copies:
            if producer.op_type == "Shape":
                inputs: list[ir.Value | None] = [calls[segment - 1].outputs[0]]
            else:
                inputs = [i and local(i, segment, before) for i in producer.inputs]
            copy = _copy(producer, inputs, suffix=f".{segment}")
            graph.insert_before(before, copy)
            segment_of[copy] = segment
            copies[producer, segment] = copy
        return copies[producer, segment].outputs[value.index() or 0]

    for node in list(graph):
        if node in repeatable or is_attention(node):
            continue
        for index, value in enumerate(node.inputs):
            if value is not None:
                node.replace_input_with(index, local(value, segment_of[node], node))


def _repeatable(graph: ir.Graph) -> set[ir.Node]:
    """Nodes that depend on weights and on the number of tokens alone."""
    found: set[ir.Node] = set()
    for node in graph:
        if node.op_type == "Shape":
            value, attributes = node.inputs[0], node.attributes
            only_tokens = attributes.get_int("start", 0) == 0 and attributes.get_int("end", 0) == 1
            if value is not None and value.is_graph_input() and (only_tokens or len(value.shape or ()) == 1):
                found.add(node)
        else:
            producers = [v.producer() for v in node.inputs if v is not None and not v.is_initializer()]
            if all(p is not None and p in found for p in producers):
                found.add(node)
    return found


def _copy(node: ir.Node, inputs: Iterable[ir.Value | None], suffix: str = "") -> ir.Node:
    outputs = [ir.Value(name=f"{o.name}{suffix}", shape=o.shape, type=o.type) for o in node.outputs]
    return ir.Node(
        node.domain,
        node.op_type,
        inputs=list(inputs),
        attributes=list(node.attributes.values()),
        outputs=outputs,
        name=f"{node.name}{suffix}",
    )


def _name_borders(graph: ir.Graph, calls: Sequence[ir.Node], segment_of: dict[ir.Node, int]) -> None:
    """Rename values that cross a border: q.3 k.3 v.3 attn.3 around attention 3, hidden.3 out of segment 3, cos, sin."""
    taken: set[str] = {v.name for v in [*graph.inputs, *graph.outputs] if v.name}
    fixed = set(graph.outputs)

    def rename(value: ir.Value, stem: str) -> None:
        name, count = stem, 1
        while name in taken:
            name, count = f"{stem}.{count}", count + 1
        taken.add(name)
        value.name = name

    for number, call in enumerate(calls):
        for value, role in [*zip(call.inputs[:3], "qkv", strict=True), (call.outputs[0], "attn")]:
            if value is not None and value not in fixed and not value.is_graph_input():
                fixed.add(value)
                rename(value, f"{role}.{number}")
    for node in graph:
        for value in node.outputs:
            if value in fixed or is_attention(node):
                continue
            home = segment_of[node]
            if any(segment_of[use.node] != home for use in value.uses()):
                rename(value, _role(value) or f"hidden.{home}")


def _role(value: ir.Value) -> str | None:
    """`cos` or `sin` for a table of the rotary embedding, looked for a few steps up from the value."""
    node = value.producer()
    for _ in range(6):
        if node is None:
            return None
        if node.op_type in ("Cos", "Sin"):
            return str(node.op_type).lower()
        if node.op_type not in ("Mul", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Concat", "Expand", "Transpose"):
            return None
        node = next((i.producer() for i in node.inputs if i is not None and i.producer() is not None), None)
    return None


def _spec(call: ir.Node) -> AttentionSpec:
    get = call.attributes
    q, k, v = (cast(ir.Value, i) for i in call.inputs[:3])
    sinks = call.inputs[3] if len(call.inputs) > 3 else None
    if sinks is not None and sinks.const_value is None:
        raise UnsupportedModel("The graph cannot be cut: attention sinks are not constants.")
    return AttentionSpec(
        layer=get.get_int("layer"),
        q=str(q.name),
        k=str(k.name),
        v=str(v.name),
        output=str(call.outputs[0].name),
        num_heads=get.get_int("num_heads"),
        num_kv_heads=get.get_int("num_kv_heads"),
        head_size=get.get_int("head_size"),
        v_head_size=get.get_int("v_head_size"),
        scale=get.get_float("scale"),
        window=get.get_int("window"),
        softcap=get.get_float("softcap"),
        sinks=None if sinks is None else tuple(float(s) for s in sinks.const_value.numpy().reshape(-1)),
    )


class _Builder:
    """Copies the nodes of one segment. What they read from outside becomes a weight or an input of the segment.

    With `rows`, an input that has a token axis is gathered there, and the nodes see the gathered value.
    """

    def __init__(self, rows: ir.Value | None = None) -> None:
        self.inputs: list[ir.Value] = []
        self.weights: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.values: dict[ir.Value, ir.Value] = {}
        self._gathers: list[ir.Node] = []
        self._rows = rows

    def add(self, node: ir.Node) -> None:
        copy = _copy(node, [self._take(value) for value in node.inputs])
        self.values.update(zip(node.outputs, copy.outputs, strict=True))
        self.nodes.append(copy)
        if self._rows is not None:
            for value in copy.outputs:
                _tokens_to_rows(value)

    def model(self, outputs: Sequence[ir.Value], opset: int, name: str) -> ir.Model:
        inputs = self.inputs if self._rows is None else [*self.inputs, self._rows]
        nodes = [*self._gathers, *self.nodes]
        graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=self.weights, opset_imports={"": opset}, name=name)
        return ir.Model(graph, ir_version=10, producer_name="packhorse")

    def _take(self, value: ir.Value | None) -> ir.Value | None:
        if value is not None and value not in self.values:
            self.values[value] = self._from_outside(value)
        return None if value is None else self.values[value]

    def _from_outside(self, value: ir.Value) -> ir.Value:
        own = ir.Value(name=value.name, shape=value.shape, type=value.type, const_value=value.const_value)
        if value.is_initializer():
            self.weights.append(own)
            return own
        self.inputs.append(own)
        dims = _dims(value)
        if self._rows is None or TOKENS not in dims:
            return own
        gathered = ir.Value(name=f"{value.name}.rows", shape=own.shape, type=own.type)
        _tokens_to_rows(gathered)
        axis = ir.AttrInt64("axis", dims.index(TOKENS))
        self._gathers.append(ir.Node("", "Gather", [own, self._rows], [axis], outputs=[gathered], name=gathered.name))
        return gathered


def _piece(model: ir.Model, number: int, nodes: Sequence[ir.Node], *, is_last: bool) -> Piece:
    """Build the graph of one segment."""
    rows = ir.Value(name="rows", shape=ir.Shape([ROWS]), type=ir.TensorType(ir.DataType.INT64)) if is_last else None
    builder = _Builder(rows)
    for node in nodes:
        builder.add(node)
    inside = set(nodes)
    outputs = [
        builder.values[value]
        for node in nodes
        for value in node.outputs
        if value.is_graph_output() or any(use.node not in inside for use in value.uses())
    ]
    piece = builder.model(outputs, model.opset_imports[""], f"segment_{number:02d}")
    described = Piece(piece, tuple(map(_describe, piece.graph.inputs)), tuple(map(_describe, outputs)))
    _forget_token_axis(piece.graph, builder)
    return described


def _forget_token_axis(graph: ir.Graph, builder: _Builder) -> None:
    """Leave the token axis unnamed in the graph, except where attention's output comes in; pack.json names it.

    Were the residual stream known to have as many rows as a product, onnxruntime would start the product's sum from
    the residual (MatMulAddFusion). That saves no time and triples the largest rounding error of the logits.
    """
    attention_outputs = {own for value, own in builder.values.items() if _is_attention_output(value)}
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = None
    for value in [*graph.inputs, *graph.outputs]:
        if value not in attention_outputs and value.shape is not None:
            value.shape = ir.Shape([None if _dim(d) in (TOKENS, ROWS) else d for d in value.shape])


def _is_attention_output(value: ir.Value) -> bool:
    producer = value.producer()
    return producer is not None and is_attention(producer)


def _tokens_to_rows(value: ir.Value) -> None:
    if value.shape is not None:
        value.shape = ir.Shape([ROWS if _dim(d) == TOKENS else d for d in value.shape])


def _describe(value: ir.Value) -> Value:
    dtype = _DTYPES.get(value.dtype) if value.dtype is not None else None
    if dtype is None:
        raise UnsupportedModel(
            f"The graph cannot be cut: the value {value.name} between segments has type {value.dtype}."
        )
    return Value(name=str(value.name), dtype=dtype, shape=tuple(_dims(value)))


def _dims(value: ir.Value) -> list[int | str]:
    if value.shape is None:
        raise UnsupportedModel(f"The graph cannot be cut: the value {value.name} between segments has no known shape.")
    return [_dim(d) for d in value.shape]


def _dim(dim: int | ir.SymbolicDim) -> int | str:
    return dim if isinstance(dim, int) else str(dim.value)
