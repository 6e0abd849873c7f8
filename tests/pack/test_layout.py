"""Rewrites of layout: the same numbers, fewer moves."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes import common

from packhorse.pack.layout import collapse_views, drop_batch_axis, flatten_rotary
from tests.pack.graphs import Arrays, floats, graph_of, operators, run


def _rewritten(model: ir.Model, inputs: Arrays) -> list[str]:
    """Apply the rewrites of layout, check that the outputs stay what they were, and return the operators left."""
    common.ShapeInferencePass()(model)
    before = run(model, inputs)
    flatten_rotary(model.graph)
    drop_batch_axis(model.graph)
    collapse_views(model.graph)
    common.RemoveUnusedNodesPass()(model)
    for old, new in zip(before, run(model, inputs), strict=True):
        np.testing.assert_array_equal(old, new)
    return operators(model)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_rotary_over_heads_needs_no_transpose() -> None:
    model = graph_of(
        """step (float[T, 24] x, float[1, T, 4] cos, float[1, T, 4] sin) => (float[T, 24] y)
        <float[1, T, 3, 8] a, float[1, 3, T, 8] b, float[1, 3, T, 8] c, float[3, T, 8] d, float[T, 3, 8] e>
        {
            a = Reshape(x, split)
            b = Transpose <perm = [0, 2, 1, 3]> (a)
            c = RotaryEmbedding(b, cos, sin)
            d = Gather <axis = 0> (c, zero)
            e = Transpose <perm = [1, 0, 2]> (d)
            y = Reshape(e, merged)
        }""",
        split=_ints(1, -1, 3, 8),
        zero=np.array(0, np.int64),
        merged=_ints(-1, 24),
    )
    angles = floats(1, 5, 4)
    inputs = {"x": floats(5, 24), "cos": np.cos(angles), "sin": np.sin(angles)}
    assert _rewritten(model, inputs) == ["Reshape", "RotaryEmbedding", "Reshape"]


def test_token_wise_work_loses_the_batch_axis() -> None:
    model = graph_of(
        """step (int64[T] ids) => (float[T, 6] y)
        <int64[1, T] i, float[1, T, 4] x, float[1, T, 4] n, float[1, T, 6] p, float[1, T, 3] u, float[1, T, 3] v,
         float[1, T, 6] w>
        {
            i = Unsqueeze(ids, front)
            x = Gather(table, i)
            n = RMSNormalization <axis = -1> (x, scale)
            p = MatMul(n, weight)
            u, v = Split <axis = 2, num_outputs = 2> (p)
            w = Concat <axis = -1> (v, u)
            y = Gather <axis = 0> (w, zero)
        }""",
        front=_ints(0),
        table=floats(9, 4),
        scale=floats(4),
        weight=floats(4, 6),
        zero=np.array(0, np.int64),
    )
    left = _rewritten(model, {"ids": np.array([1, 8, 2])})
    assert left == ["Gather", "RMSNormalization", "MatMul", "Split", "Concat"]


def test_views_that_undo_each_other_disappear() -> None:
    model = graph_of(
        """step (float[T, 6] x) => (float[T, 6] y)
        <float[T, 2, 3] a, float[1, T, 2, 3] b, float[1, T, 6] c, float[T, 6] d>
        {
            a = Reshape(x, apart)
            b = Unsqueeze(a, front)
            c = Reshape(b, joined)
            d = Squeeze(c, front)
            y = Neg(d)
        }""",
        apart=_ints(-1, 2, 3),
        front=_ints(0),
        joined=_ints(1, -1, 6),
    )
    assert _rewritten(model, {"x": floats(4, 6)}) == ["Neg"]


def test_a_transpose_that_moves_data_stays() -> None:
    model = graph_of(
        """step (float[T, 6] x) => (float[T, 6] y)
        <float[T, 2, 3] a, float[T, 3, 2] b>
        {
            a = Reshape(x, apart)
            b = Transpose <perm = [0, 2, 1]> (a)
            y = Reshape(b, joined)
        }""",
        apart=_ints(-1, 2, 3),
        joined=_ints(-1, 6),
    )
    assert "Transpose" in _rewritten(model, {"x": floats(4, 6)})


def test_a_split_axis_that_is_joined_elsewhere_keeps_its_order() -> None:
    """[T, 2, 6] as [T, 12] as [T, 4, 3]: one view, although no axis is the same."""
    model = graph_of(
        """step (float[T, 2, 6] x) => (float[T, 4, 3] y)
        <float[T, 12] a, float[T, 4, 3] b>
        {
            a = Reshape(x, flat)
            b = Reshape(a, other)
            y = Neg(b)
        }""",
        flat=_ints(-1, 12),
        other=_ints(-1, 4, 3),
    )
    assert _rewritten(model, {"x": floats(5, 2, 6)}) == ["Reshape", "Neg"]


@pytest.mark.parametrize("axis", [0, -3])
def test_work_along_the_batch_axis_keeps_it(axis: int) -> None:
    model = graph_of(
        f"""step (float[T, 4] x) => (float[2, T, 4] y)
        <float[1, T, 4] a>
        {{
            a = Unsqueeze(x, front)
            y = Concat <axis = {axis}> (a, a)
        }}""",
        front=_ints(0),
    )
    assert _rewritten(model, {"x": floats(3, 4)}) == ["Reshape", "Concat"]


def test_a_mask_over_two_token_axes_is_left_alone() -> None:
    model = graph_of(
        """step (float[T, 4] x) => (float[1, T, T] y)
        <float[1, T, 4] a, float[1, 4, T] b>
        {
            a = Unsqueeze(x, front)
            b = Transpose <perm = [0, 2, 1]> (a)
            y = MatMul(a, b)
        }""",
        front=_ints(0),
    )
    assert "MatMul" in _rewritten(model, {"x": floats(3, 4)})
