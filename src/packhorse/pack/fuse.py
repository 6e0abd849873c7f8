"""The rewrites of an exported graph, in order. Each keeps the graph's meaning; none knows an architecture."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from packhorse.pack.layout import collapse_views, drop_batch_axis, flatten_rotary
from packhorse.pack.names import name_by_module, name_values_by_node
from packhorse.pack.products import fold_weight_views, merge_products, share_tied_head


def simplify(model: ir.Model) -> None:
    """Rewrite `model` in place: fewer moves of data, fewer and larger products, every weight once."""
    graph = model.graph
    _clean(model)
    common.ShapeInferencePass()(model)
    name_by_module(graph)
    fold_weight_views(graph)
    flatten_rotary(graph)
    drop_batch_axis(graph)
    collapse_views(graph)
    _clean(model)
    share_tied_head(graph)
    merge_products(graph)
    _clean(model)
    name_values_by_node(graph)
    graph.outputs[0].name = "logits"


def _clean(model: ir.Model) -> None:
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
