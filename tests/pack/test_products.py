"""Rewrites of products: the same numbers, fewer products, every weight once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from packhorse.pack.products import fold_weight_views, merge_products, share_tied_head
from tests.pack.graphs import Arrays, floats, graph_of, operators, run

X = {"x": floats(5, 4)}


def _rewritten(model: ir.Model, rewrite: Callable[[ir.Graph], None], inputs: Arrays = X) -> list[str]:
    common.ShapeInferencePass()(model)
    before = run(model, inputs)
    rewrite(model.graph)
    common.RemoveUnusedNodesPass()(model)
    for old, new in zip(before, run(model, inputs), strict=True):
        np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-6)
    return operators(model)


def test_products_of_one_input_become_one() -> None:
    model = graph_of(
        """step (float[T, 4] x) => (float[T, 4] q, float[T, 2] k, float[T, 2] v)
        { a = MatMul(x, wq)  b = MatMul(x, wk)  c = MatMul(x, wv)  q = Neg(a)  k = Neg(b)  v = Neg(c) }""",
        wq=floats(4, 4),
        wk=floats(4, 2, seed=1),
        wv=floats(4, 2, seed=2),
    )
    assert _rewritten(model, merge_products) == ["MatMul", "Split", "Neg", "Neg", "Neg"]


def test_biases_are_merged_with_their_products() -> None:
    model = graph_of(
        """step (float[T, 4] x) => (float[T, 4] q, float[T, 2] k)
        { a = MatMul(x, wq)  b = Add(bq, a)  c = MatMul(x, wk)  d = Add(c, bk)  q = Neg(b)  k = Neg(d) }""",
        wq=floats(4, 4),
        bq=floats(4, seed=3),
        wk=floats(4, 2, seed=1),
        bk=floats(2, seed=4),
    )
    assert _rewritten(model, merge_products) == ["MatMul", "Add", "Split", "Neg", "Neg"]


def test_a_product_without_a_bias_is_not_merged_with_one_that_has_it() -> None:
    model = graph_of(
        """step (float[T, 4] x) => (float[T, 4] q, float[T, 2] k)
        { a = MatMul(x, wq)  b = Add(a, bq)  c = MatMul(x, wk)  q = Neg(b)  k = Neg(c) }""",
        wq=floats(4, 4),
        bq=floats(4),
        wk=floats(4, 2),
    )
    assert _rewritten(model, merge_products).count("MatMul") == 2


def test_a_weight_used_twice_is_not_merged() -> None:
    model = graph_of(
        """step (float[T, 4] x) => (float[T, 4] q, float[T, 4] k)
        { a = MatMul(x, w)  b = MatMul(a, w)  c = MatMul(x, u)  q = Neg(b)  k = Neg(c) }""",
        w=floats(4, 4),
        u=floats(4, 4, seed=1),
    )
    assert _rewritten(model, merge_products).count("MatMul") == 3


def test_wide_products_stay_apart() -> None:
    """Copying the halves of gate and up out of one product costs more than one product saves."""
    model = graph_of(
        """step (float[T, 4] x) => (float[T, 6] g, float[T, 6] u)
        { a = MatMul(x, wg)  b = MatMul(x, wu)  g = Neg(a)  u = Neg(b) }""",
        wg=floats(4, 6),
        wu=floats(4, 6, seed=1),
    )
    assert _rewritten(model, merge_products).count("MatMul") == 2


def test_a_tied_head_reads_the_embedding_table() -> None:
    model = graph_of(
        """step (int64[T] ids) => (float[T, 9] y)
        { x = Gather(table, ids)  turned = Transpose <perm = [1, 0]> (table)  y = MatMul(x, turned) }""",
        table=floats(9, 4),
    )
    assert _rewritten(model, share_tied_head, {"ids": np.array([3, 8])}) == ["Gather", "Gemm"]


def test_a_head_that_the_exporter_transposed_is_found_by_its_content() -> None:
    model = graph_of(
        "step (int64[T] ids) => (float[T, 9] y) { x = Gather(table, ids)  y = MatMul(x, head) }",
        table=floats(9, 4),
        head=floats(9, 4).T.copy(),
    )
    assert _rewritten(model, share_tied_head, {"ids": np.array([3, 8])}) == ["Gather", "Gemm"]


def test_a_head_of_its_own_stays() -> None:
    model = graph_of(
        "step (int64[T] ids) => (float[T, 9] y) { x = Gather(table, ids)  y = MatMul(x, head) }",
        table=floats(9, 4),
        head=floats(4, 9, seed=1),
    )
    assert _rewritten(model, share_tied_head, {"ids": np.array([3, 8])}) == ["Gather", "MatMul"]


def test_a_transposed_slice_of_stacked_experts_becomes_a_weight() -> None:
    model = graph_of(
        """step (float[T, 4] x) => (float[T, 6] y)
        { one = Gather <axis = 0> (stack, index)  turned = Transpose <perm = [1, 0]> (one)  y = MatMul(x, turned) }""",
        stack=floats(3, 6, 4),
        index=np.array(2, np.int64),
    )
    assert _rewritten(model, fold_weight_views) == ["MatMul"]


def test_a_table_is_not_copied_for_its_transpose() -> None:
    model = graph_of(
        """step (int64[T] ids) => (float[T, 9] y)
        { x = Gather(table, ids)  turned = Transpose <perm = [1, 0]> (table)  y = MatMul(x, turned) }""",
        table=floats(9, 4),
    )
    assert "Transpose" in _rewritten(model, fold_weight_views, {"ids": np.array([3, 8])})
