"""Rewrites of the exported graph that keep its meaning and save time."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common


def simplify(model: ir.Model) -> None:
    """Rewrite `model` in place."""
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ShapeInferencePass()(model)
