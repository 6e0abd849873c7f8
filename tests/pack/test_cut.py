"""The cut: what belongs to which segment, what crosses a border, and that the pieces compute what the whole does."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from packhorse.errors import UnsupportedModel
from packhorse.pack.cut import Cut, cut
from tests.pack.graphs import Arrays, floats, graph_of, run


def _attention(output: str, q: str, k: str, v: str, layer: int) -> str:
    attributes = (
        f"layer = {layer}, scale = 0.5, window = 0, softcap = 0.0, num_heads = 1, num_kv_heads = 1, "
        "head_size = 4, v_head_size = 4"
    )
    return f"{output} = packhorse.PagedAttention <{attributes}> ({q}, {k}, {v})"


def _two_layers() -> ir.Model:
    """Two attention layers with a residual, a table made from positions, and a head."""
    model = graph_of(
        f"""step (int64[T] ids, int64[T] positions) => (float[T, 6] logits)
        <float[T, 4] x, float[T, 4] table, float[T, 4] q, float[T, 4] a, float[T, 4] h, float[T, 4] g, float[T, 4] b,
         float[T, 4] r>
        {{
            x = Gather(embedding, ids)
            angle = Cast <to = 1> (positions)
            column = Unsqueeze(angle, last)
            table = Cos(column)
            q = Mul(x, table)
            {_attention("a", "q", "x", "x", 0)}
            h = Add(x, a)
            g = Mul(h, table)
            {_attention("b", "g", "h", "g", 1)}
            r = Add(h, b)
            logits = MatMul(r, head)
        }}""",
        embedding=floats(10, 4),
        last=np.array([1], np.int64),
        head=floats(4, 6, seed=1),
    )
    for node in model.graph:
        if node.op_type == "Unsqueeze":
            node.outputs[0].shape, node.outputs[0].type = ir.Shape(["T", 1]), ir.TensorType(ir.DataType.FLOAT)
        if node.op_type == "Cos":
            node.outputs[0].shape = ir.Shape(["T", 1])
    return model


def _mix(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Stands in for attention: looks across tokens, as attention does."""
    return np.tril(q @ k.T) @ v / len(q)


def _run_pieces(pieces: Cut, inputs: Arrays) -> np.ndarray:
    values = dict(inputs)
    for number, piece in enumerate(pieces.pieces):
        outputs = run(piece.model, {v.name: values[v.name] for v in piece.inputs})
        values.update(zip((v.name for v in piece.outputs), outputs, strict=True))
        if number < len(pieces.attention):
            spec = pieces.attention[number]
            values[spec.output] = _mix(values[spec.q], values[spec.k], values[spec.v])
    return values["logits"]


INPUTS = {"ids": np.array([3, 1, 4, 1, 5]), "positions": np.arange(5), "rows": np.array([1, 4])}


def test_two_attention_calls_give_three_segments_with_named_borders() -> None:
    pieces = cut(_two_layers())
    borders = [([v.name for v in p.inputs], {v.name for v in p.outputs}) for p in pieces.pieces]
    assert [(a.q, a.output) for a in pieces.attention] == [("q.0", "attn.0"), ("q.1", "attn.1")]
    assert borders[0][1] == {"q.0", "k.0", "cos"}
    assert set(borders[1][0]) == {"k.0", "attn.0", "cos"}
    assert set(borders[2][0]) == {"k.1", "attn.1", "rows"}


def test_the_last_segment_computes_the_asked_rows_only() -> None:
    pieces = cut(_two_layers())
    every = dict(INPUTS, rows=np.arange(5))
    logits = _run_pieces(pieces, INPUTS)
    assert logits.shape == (2, 6)
    np.testing.assert_allclose(logits, _run_pieces(pieces, every)[[1, 4]], rtol=1e-6)
    assert pieces.pieces[-1].outputs[0].shape == ("R", 6)
    products = [n for n in pieces.pieces[-1].model.graph if n.op_type != "Gather"]
    assert all(n.op_type != "Gather" for n in products)
    assert [n.op_type for n in pieces.pieces[-1].model.graph][:2] == ["Gather", "Gather"]


def test_pieces_compute_what_the_formula_says() -> None:
    model = _two_layers()
    weights = {name: v.const_value.numpy() for name, v in model.graph.initializers.items() if v.const_value}
    x = weights["embedding"][INPUTS["ids"]]
    table = np.cos(INPUTS["positions"].astype(np.float32))[:, None]
    h = x + _mix(x * table, x, x)
    r = h + _mix(h * table, h, h * table)
    expected = (r @ weights["head"])[INPUTS["rows"]]
    np.testing.assert_allclose(_run_pieces(cut(model), INPUTS), expected, rtol=1e-4, atol=1e-5)


def test_a_value_may_skip_a_segment() -> None:
    model = graph_of(
        f"""step (int64[T] ids, int64[T] positions) => (float[T, 4] logits)
        <float[T, 4] x, float[T, 4] first, float[T, 4] a, float[T, 4] n, float[T, 4] b, float[T, 4] c>
        {{
            x = Gather(embedding, ids)
            first = Neg(x)
            {_attention("a", "x", "x", "x", 0)}
            n = Neg(a)
            {_attention("b", "n", "n", "n", 1)}
            logits = Add(first, b)
        }}""",
        embedding=floats(10, 4),
    )
    pieces = cut(model)
    assert [v.name for v in pieces.pieces[1].inputs] == ["attn.0"]
    assert {v.name for v in pieces.pieces[2].inputs} == {"hidden.0", "attn.1", "rows"}


def test_the_number_of_tokens_is_read_again_in_each_segment() -> None:
    """T read from `ids` would be wrong in the last segment, which has R rows."""
    model = graph_of(
        f"""step (int64[T] ids, int64[T] positions) => (float[T, 4] logits)
        <float[T, 4] x, int64[1] tokens, int64[2] shape, float[T, 4] a, float[T, 2, 2] s>
        {{
            x = Gather(embedding, ids)
            tokens = Shape <start = 0, end = 1> (ids)
            shape = Concat <axis = 0> (tokens, four)
            {_attention("a", "x", "x", "x", 0)}
            s = Mul(a, a)
            logits = Reshape(s, shape)
        }}""",
        embedding=floats(10, 4),
        four=np.array([4], np.int64),
    )
    pieces = cut(model)
    assert {v.name for v in pieces.pieces[1].inputs} == {"attn.0", "rows"}
    assert _run_pieces(pieces, INPUTS).shape == (2, 4)


def test_work_on_weights_alone_is_not_carried_over_a_border() -> None:
    model = graph_of(
        f"""step (int64[T] ids, int64[T] positions) => (float[T, 10] logits)
        <float[T, 4] x, float[4, 10] turned, float[T, 4] a>
        {{
            x = Gather(embedding, ids)
            turned = Transpose <perm = [1, 0]> (embedding)
            {_attention("a", "x", "x", "x", 0)}
            logits = MatMul(a, turned)
        }}""",
        embedding=floats(10, 4),
    )
    pieces = cut(model)
    assert {v.name for v in pieces.pieces[0].outputs} == {"hidden.0"} or {v.name for v in pieces.pieces[0].outputs} == {
        "q.0"
    }
    assert _run_pieces(pieces, INPUTS).shape == (2, 10)


def test_attention_calls_side_by_side_are_refused() -> None:
    model = graph_of(
        f"""step (int64[T] ids, int64[T] positions) => (float[T, 4] logits)
        <float[T, 4] x, float[T, 4] a, float[T, 4] b>
        {{
            x = Gather(embedding, ids)
            {_attention("a", "x", "x", "x", 0)}
            {_attention("b", "x", "x", "x", 1)}
            logits = Add(a, b)
        }}""",
        embedding=floats(10, 4),
    )
    with pytest.raises(UnsupportedModel, match="do not follow one another"):
        cut(model)


def test_a_graph_inside_a_node_is_refused() -> None:
    model = graph_of(
        """step (int64[T] ids, int64[T] positions) => (float[T, 4] logits)
        {
            x = Gather(embedding, ids)
            logits = If(flag) <then_branch = yes () => (float[T, 4] y) { y = Neg(x) },
                               else_branch = no () => (float[T, 4] z) { z = Abs(x) }>
        }""",
        embedding=floats(10, 4),
        flag=np.array(True),
    )
    with pytest.raises(UnsupportedModel, match="If holds a graph of its own"):
        cut(model)
