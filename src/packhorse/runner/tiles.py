"""The three inner loops of attention, written as LLVM vectors.

They work on a *tile*: a few query rows against `tile_keys` keys.

    scores    s[m, j] = q[m, :] · keys[:, j]                        registers hold s, the loop runs over d
    softmax   p = exp(s - max), and the row's running max and sum   one row at a time
    mix       o[m, :] = o[m, :] * shrink[m] + p[m, :] @ values      registers hold o, the loop runs over the keys

numba compiles loops over arrays, but it cannot say "these twelve sums stay in registers": every pass would go
through memory. Here the sums are values of LLVM vector type, of 16 floats whatever the machine has; LLVM cuts them
into its registers (one of AVX-512, two of AVX2, four of NEON).

Every operation on a row is written down in full, in one order and with explicit fused multiply-adds, so a row's
result is the same to the last bit whichever rows and how many stand beside it in the tile. Batch invariance of the
whole engine begins here.

Arguments in capitals are compile-time constants. All arrays are flat; `*_at` is an offset in floats.
"""

# ruff: noqa: ARG001, N803  (numba calls an intrinsic by its arguments' names; capitals mark the constants)

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

# numba checks only a kernel's own file when it looks for kept machine code. This number goes into the kernels as a
# constant, so that a change here makes them anew too.
SOURCE_VERSION = zlib.crc32(Path(__file__).read_bytes())

LANES = 16
"""Floats in a vector; a block of keys is this long or a multiple of it."""

LINE = 16
"""Floats in a cache line. Where lines are longer, some are asked for twice; that is all."""

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VEC = ir.VectorType(_F32, LANES)
_IVEC = ir.VectorType(_I32, LANES)

_Emit = Callable[[Any, Any, Any, Sequence[Any]], Any]


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba's decorator, typed. `function(typing_context, *argument_types) -> (signature, code generator)`; kernels
    call the result without the first of them."""
    return cast(Callable[..., Any], numba.extending.intrinsic(function))


# --- writing LLVM ---------------------------------------------------------------------------------------------------


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _splat_const(value: float) -> ir.Constant:
    return ir.Constant(_VEC, [value] * LANES)


def _splat_int(value: int) -> ir.Constant:
    return ir.Constant(_IVEC, [value] * LANES)


def _splat(builder: Any, scalar: Any, width: int = LANES) -> Any:
    """A vector with `scalar` in every lane."""
    vector = ir.VectorType(scalar.type, width)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, width), [0] * width)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _suffix(kind: Any) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return _call(builder, f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)


def _max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _pointer(builder: Any, base: Any, offset: Any, kind: Any = _F32) -> Any:
    place = builder.gep(base, [offset])
    return place if kind is _F32 else builder.bitcast(place, kind.as_pointer())


def _load(builder: Any, base: Any, offset: Any, kind: Any = _F32) -> Any:
    return builder.load(_pointer(builder, base, offset, kind), align=4)


def _save(builder: Any, value: Any, base: Any, offset: Any) -> None:
    builder.store(value, _pointer(builder, base, offset, value.type), align=4)


def _prefetch(builder: Any, base: Any, offset: Any) -> None:
    """Ask for the cache line at base[offset]; any address will do, mapped or not."""
    place = builder.bitcast(builder.gep(base, [offset]), ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, into_first_level, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
    builder.call(function, [place, read, into_first_level, data])


def _block_bases(builder: Any, data: Any, blocks: Any, first: Any, count: int) -> list[Any]:
    """The addresses data + blocks[first + c] for c < count."""
    places = [builder.load(builder.gep(blocks, [builder.add(first, _const(c))])) for c in range(count)]
    return [_pointer(builder, data, place) for place in places]


def _loop(
    builder: Any, start: Any, stop: Any, carried: Sequence[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """for index in range(start, stop): carried = body(index, carried). Returns what is carried at the end."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(_I64)
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    results = body(index, list(values))
    for phi, value in zip(values, results, strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(builder.add(index, _const(1)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The address of an array argument's first element."""
    return context.make_array(kind)(context, builder, value=value).data


def _literals(*kinds: Any) -> list[int] | None:
    """Compile-time constants as numbers, or None while numba still tries the call with plain integers."""
    if not all(isinstance(kind, types.IntegerLiteral) for kind in kinds):
        return None
    return [kind.literal_value for kind in kinds]


def _exp(builder: Any, x: Any) -> Any:
    """e ** x for a vector of x <= 0, within 1 ulp or so; below -87 it is 0; NaN stays NaN.

    2**n * e**r with n = round(x / ln 2) and |r| <= ln 2 / 2; e**r by its Taylor series up to r**7 / 7!, whose error
    there is under half an ulp.
    """
    tiny = builder.fcmp_ordered("<", x, _splat_const(-87.0))
    x = builder.select(tiny, _splat_const(0.0), x)
    # Adding 1.5 * 2**23 rounds to a whole number and leaves it in the low bits of the sum.
    shift = _splat_const(1.5 * 2**23)
    shifted = _fma(builder, x, _splat_const(1.4426950408889634), shift)
    n = builder.fsub(shifted, shift)
    r = _fma(builder, n, _splat_const(-0.693145751953125), x)  # the first 16 bits of ln 2, so that n * them is exact
    r = _fma(builder, n, _splat_const(-1.42860682030941723212e-6), r)
    series = _splat_const(1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        series = _fma(builder, series, r, _splat_const(1 / divisor))
    exponent = builder.add(builder.bitcast(shifted, _IVEC), _splat_int(127))
    power = builder.bitcast(builder.shl(exponent, _splat_int(23)), _VEC)
    return builder.select(tiny, _splat_const(0.0), builder.fmul(series, power))


def _tanh(builder: Any, x: Any) -> Any:
    """tanh(x) = -expm1(-2|x|) / (2 + expm1(-2|x|)) with x's sign; a series near 0, where the difference cancels."""
    size = _call(builder, f"llvm.fabs.v{LANES}f32", _VEC, x)
    e = _exp(builder, builder.fmul(size, _splat_const(-2.0)))
    one = _splat_const(1.0)
    far = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
    square = builder.fmul(size, size)
    series = _splat_const(21844 / 6081075)
    for term in (-1382 / 155925, 62 / 2835, -17 / 315, 2 / 15, -1 / 3):
        series = _fma(builder, series, square, _splat_const(term))
    near = _fma(builder, builder.fmul(series, square), size, size)
    value = builder.select(builder.fcmp_ordered("<", size, _splat_const(0.35)), near, far)
    return _call(builder, f"llvm.copysign.v{LANES}f32", _VEC, value, x)


def _lanes_folded(builder: Any, vector: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """One float from 16 by halving: 16, 8, 4, 2, 1. The order is part of the result, so it is written out."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)

        def half(first: int, source: Any = vector, nothing: Any = undefined, count: int = width) -> Any:
            picks = ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count)))
            return builder.shuffle_vector(source, nothing, picks)

        vector = join(builder, half(0), half(width))
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


# --- the tiles ------------------------------------------------------------------------------------------------------


@_intrinsic
def score_tile(
    typing_context: Any,
    q: Any,
    q_at: Any,
    keys: Any,
    blocks: Any,
    block: Any,
    ahead: Any,
    s: Any,
    s_at: Any,
    ROWS: Any,
    COLUMNS: Any,
    HEAD_SIZE: Any,
    B3K_SIZE: Any,
    TILE_KEYS: Any,
    PREFETCH: Any,
) -> Any:
    """s[m, block * 16 + j] = q[m, :] · keys[blocks[block] : ][:, j] for ROWS rows and COLUMNS vectors of 16 keys.

    q: rows of HEAD_SIZE floats. blocks: int64, where the keys [HEAD_SIZE, B3K_SIZE] of each 16 of the tile begin.
    s: rows of TILE_KEYS floats. With PREFETCH, the same rows of the blocks at `ahead` are asked for on the way: one
    cache line of them for each of these, so that memory works while the registers do.
    """
    constants = _literals(ROWS, COLUMNS, HEAD_SIZE, B3K_SIZE, TILE_KEYS, PREFETCH)
    if constants is None:
        return None
    rows, columns, head_size, block_size, tile_keys, prefetch = constants

    def generate(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        kinds = signature.args
        q_data, keys_data = _data(context, builder, kinds[0], args[0]), _data(context, builder, kinds[2], args[2])
        blocks_data, s_data = _data(context, builder, kinds[3], args[3]), _data(context, builder, kinds[6], args[6])
        ahead_data = _data(context, builder, kinds[5], args[5])
        first = args[4]
        q_base = _pointer(builder, q_data, args[1])
        bases = _block_bases(builder, keys_data, blocks_data, first, columns)
        later = _block_bases(builder, keys_data, ahead_data, first, columns if prefetch else 0)

        def body(d: Any, sums: list[Any]) -> list[Any]:
            row_of_keys = builder.mul(d, _const(block_size))
            vectors = [_load(builder, base, row_of_keys, _VEC) for base in bases]
            for base in later:
                _prefetch(builder, base, row_of_keys)
            for m in range(rows):
                query = _splat(builder, _load(builder, q_base, builder.add(d, _const(m * head_size))))
                for c in range(columns):
                    sums[m * columns + c] = _fma(builder, query, vectors[c], sums[m * columns + c])
            return sums

        sums = _loop(builder, _const(0), _const(head_size), [_splat_const(0.0)] * (rows * columns), body)
        s_base = _pointer(builder, s_data, builder.add(args[7], builder.mul(first, _const(LANES))))
        for m in range(rows):
            for c in range(columns):
                _save(builder, sums[m * columns + c], s_base, _const(m * tile_keys + c * LANES))
        return context.get_dummy_value()

    signature = types.void(
        q, q_at, keys, blocks, block, ahead, s, s_at, ROWS, COLUMNS, HEAD_SIZE, B3K_SIZE, TILE_KEYS, PREFETCH
    )
    return signature, generate


@_intrinsic
def softmax_tile(
    typing_context: Any,
    s: Any,
    s_at: Any,
    state: Any,
    state_at: Any,
    bounds: Any,
    bounds_at: Any,
    softcap: Any,
    shrink: Any,
    ROWS: Any,
    TILE_KEYS: Any,
    HAS_SOFTCAP: Any,
) -> Any:
    """Turn ROWS rows of scores into weights exp(s - max) in place, and fold them into the rows' running state.

    state: LANES + 1 floats a row: 16 partial sums of weights, then the running maximum. bounds: two int32 a row; only
    keys bounds[0] <= j < bounds[1] of the tile are seen. shrink: float32[ROWS], what the row's output so far must be
    multiplied by, since its maximum has changed.
    """
    constants = _literals(ROWS, TILE_KEYS, HAS_SOFTCAP)
    if constants is None:
        return None
    rows, tile_keys, has_softcap = constants
    count = tile_keys // LANES

    def generate(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        kinds = signature.args
        s_base = _pointer(builder, _data(context, builder, kinds[0], args[0]), args[1])
        state_base = _pointer(builder, _data(context, builder, kinds[2], args[2]), args[3])
        bounds_base = builder.gep(_data(context, builder, kinds[4], args[4]), [args[5]])
        shrink_base = _data(context, builder, kinds[7], args[7])

        def seen(c: int, low: Any, high: Any) -> Any:
            places = ir.Constant(_IVEC, list(range(c * LANES, (c + 1) * LANES)))
            return builder.and_(
                builder.icmp_signed(">=", places, _splat(builder, low)),
                builder.icmp_signed("<", places, _splat(builder, high)),
            )

        def capped(scores: Any) -> Any:
            if not has_softcap:
                return scores
            cap = _splat(builder, args[6])
            return builder.fmul(cap, _tanh(builder, builder.fdiv(scores, cap)))

        def body(m: Any, carried: list[Any]) -> list[Any]:
            row = builder.mul(m, _const(tile_keys))
            low = builder.load(builder.gep(bounds_base, [builder.mul(m, _const(2))]))
            high = builder.load(builder.gep(bounds_base, [builder.add(builder.mul(m, _const(2)), _const(1))]))
            nothing = _splat_const(float("-inf"))
            scores = []
            for c in range(count):
                raw = capped(_load(builder, s_base, builder.add(row, _const(c * LANES)), _VEC))
                scores.append(builder.select(seen(c, low, high), raw, nothing))
            highest = scores[0]
            for vector in scores[1:]:
                highest = _max(builder, highest, vector)
            state_row = builder.mul(m, _const(LANES + 1))
            old = _load(builder, state_base, builder.add(state_row, _const(LANES)))
            new = _max(builder, _lanes_folded(builder, highest, _max), old)
            new_everywhere = _splat(builder, new)
            less = _exp(builder, _splat(builder, builder.fsub(old, new)))
            sums = builder.fmul(_load(builder, state_base, state_row, _VEC), less)
            for c, vector in enumerate(scores):
                weights = _exp(builder, builder.fsub(vector, new_everywhere))
                _save(builder, weights, s_base, builder.add(row, _const(c * LANES)))
                sums = builder.fadd(sums, weights)
            _save(builder, sums, state_base, state_row)
            _save(builder, new, state_base, builder.add(state_row, _const(LANES)))
            _save(builder, builder.extract_element(less, ir.Constant(_I32, 0)), shrink_base, m)
            return carried

        _loop(builder, _const(0), _const(rows), [], body)
        return context.get_dummy_value()

    signature = types.void(
        s, s_at, state, state_at, bounds, bounds_at, types.float32, shrink, ROWS, TILE_KEYS, HAS_SOFTCAP
    )
    return signature, generate


@_intrinsic
def mix_tile(
    typing_context: Any,
    weights: Any,
    weights_at: Any,
    values: Any,
    blocks: Any,
    ahead: Any,
    first_key: Any,
    last_key: Any,
    shrink: Any,
    out: Any,
    out_at: Any,
    ROWS: Any,
    VECTORS: Any,
    V_HEAD_SIZE: Any,
    TILE_KEYS: Any,
    PREFETCH: Any,
) -> Any:
    """out[m, :] = out[m, :] * shrink[m] + sum over keys j in [first_key, last_key) of weights[m, j] * values[j, :].

    blocks: int64, where the values [16, V_HEAD_SIZE] of each 16 keys of the tile begin. Keys outside the bounds are
    not read: a block's tail may hold anything, NaN too, and 0 * NaN is not 0. VECTORS: how many vectors of a row are
    held in registers at a time. With PREFETCH, the same rows of the blocks at `ahead` are asked for on the way.
    """
    constants = _literals(ROWS, VECTORS, V_HEAD_SIZE, TILE_KEYS, PREFETCH)
    if constants is None:
        return None
    rows, held, v_head_size, tile_keys, prefetch = constants
    width = _vector_width(v_head_size)
    vector = ir.VectorType(_F32, width)
    total = v_head_size // width

    def generate(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        kinds = signature.args
        weights_base = _pointer(builder, _data(context, builder, kinds[0], args[0]), args[1])
        values_data = _data(context, builder, kinds[2], args[2])
        blocks_data = _data(context, builder, kinds[3], args[3])
        ahead_data = _data(context, builder, kinds[4], args[4])
        shrink_data = _data(context, builder, kinds[7], args[7])
        out_base = _pointer(builder, _data(context, builder, kinds[8], args[8]), args[9])
        shrinks = [_splat(builder, _load(builder, shrink_data, _const(m)), width) for m in range(rows)]

        def columns(begin: int, count: int) -> None:
            places = [(m, c, _const(m * v_head_size + (begin + c) * width)) for m in range(rows) for c in range(count)]
            start = [builder.fmul(_load(builder, out_base, at, vector), shrinks[m]) for m, _, at in places]

            def body(j: Any, sums: list[Any]) -> list[Any]:
                number = builder.lshr(j, _const(LANES.bit_length() - 1))
                block = builder.load(builder.gep(blocks_data, [number]))
                within = builder.mul(builder.and_(j, _const(LANES - 1)), _const(v_head_size))
                row = _pointer(builder, values_data, builder.add(block, within))
                if prefetch:
                    later = _pointer(builder, values_data, builder.load(builder.gep(ahead_data, [number])))
                    for at in range(begin * width, (begin + count) * width, LINE):
                        _prefetch(builder, later, builder.add(within, _const(at)))
                parts = [_load(builder, row, _const((begin + c) * width), vector) for c in range(count)]
                spread = [
                    _splat(builder, _load(builder, weights_base, builder.add(j, _const(m * tile_keys))), width)
                    for m in range(rows)
                ]
                return [_fma(builder, spread[m], parts[c], sums[i]) for i, (m, c, _) in enumerate(places)]

            sums = _loop(builder, args[5], args[6], start, body)
            for (_, _, at), value in zip(places, sums, strict=True):
                _save(builder, value, out_base, at)

        for begin in range(0, total, held):
            columns(begin, min(held, total - begin))
        return context.get_dummy_value()

    signature = types.void(
        weights, weights_at, values, blocks, ahead, types.int64, types.int64, shrink, out, out_at,
        ROWS, VECTORS, V_HEAD_SIZE, TILE_KEYS, PREFETCH,
    )  # fmt: skip
    return signature, generate


@_intrinsic
def prefetch_rows(typing_context: Any, array: Any, at: Any, ROWS: Any, STRIDE: Any) -> Any:
    """Ask for the cache lines at array[at], array[at + STRIDE], … of ROWS rows."""
    constants = _literals(ROWS, STRIDE)
    if constants is None:
        return None
    rows, stride = constants

    def generate(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        base = _pointer(builder, _data(context, builder, signature.args[0], args[0]), args[1])

        def body(row: Any, carried: list[Any]) -> list[Any]:
            _prefetch(builder, base, builder.mul(row, _const(stride)))
            return carried

        _loop(builder, _const(0), _const(rows), [], body)
        return context.get_dummy_value()

    return types.void(array, at, ROWS, STRIDE), generate


@_intrinsic
def sum_lanes(typing_context: Any, state: Any, state_at: Any) -> Any:
    """The sum of the 16 floats at state[state_at]."""

    def generate(context: Any, builder: Any, signature: Any, args: Sequence[Any]) -> Any:
        data = _data(context, builder, signature.args[0], args[0])
        return _lanes_folded(builder, _load(builder, data, args[1], _VEC), _add)

    return types.float32(state, state_at), generate


def _vector_width(size: int) -> int:
    """The widest vector, at most 16 floats, that cuts `size` evenly."""
    width = LANES
    while size % width:
        width //= 2
    return width
