"""Names that say which module of the model a node or a weight belongs to, as in the model's own state dict.

Profiles, quantization recipes and error messages refer to them.
"""

from __future__ import annotations

import ast
from collections import Counter

import onnx_ir as ir

_SCOPES = "pkg.torch.onnx.name_scopes"
_WRAPPER = "model."  # the traced wrapper holds the model under this name


def name_by_module(graph: ir.Graph) -> None:
    """Name nodes `layers.0.mlp.down_proj/MatMul` and the weights of products `layers.0.mlp.down_proj.weight`.

    Every name of a node has a slash, so none can be taken for the name of a value at a border.
    """
    seen: Counter[str] = Counter()
    for weight in list(graph.initializers.values()):
        _rename(graph, weight, str(weight.name).removeprefix(_WRAPPER))
    for node in graph:
        path = _module(node)
        stem = f"{path}/{node.op_type}"
        count = seen[stem]
        seen[stem] += 1
        node.name = stem if count == 0 else f"{stem}.{count}"
        if node.op_type in ("MatMul", "Gemm") and path:
            _name_weight(graph, node, f"{path}.weight")


def name_values_by_node(graph: ir.Graph) -> None:
    """Name each value after the node that computes it."""
    for node in graph:
        for place, value in enumerate(node.outputs):
            if not value.is_graph_output():
                value.name = str(node.name) if place == 0 else f"{node.name}:{place}"


def _name_weight(graph: ir.Graph, node: ir.Node, name: str) -> None:
    """Give back its name to a weight that the exporter has transposed; it calls those `val_…`."""
    weight = node.inputs[1]
    if weight is not None and weight.is_initializer() and str(weight.name).startswith("val_"):
        _rename(graph, weight, name)


def _rename(graph: ir.Graph, weight: ir.Value, name: str) -> None:
    unique, count = name, 1
    while unique in graph.initializers and graph.initializers[unique] is not weight:
        unique, count = f"{name}.{count}", count + 1
    if unique != weight.name:
        graph.initializers.pop(str(weight.name))
        weight.name = unique
        graph.register_initializer(weight)


def _module(node: ir.Node) -> str:
    """Path of the module whose forward pass made this node; the exporter keeps it as the text of a list."""
    try:
        scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "[]"))
    except (ValueError, SyntaxError):
        return ""
    return str(scopes[-2]).removeprefix(_WRAPPER) if len(scopes) >= 2 else ""
