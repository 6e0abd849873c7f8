"""The paged key and value cache of one model.

A *block* holds `block_size` consecutive tokens of one sequence; a *slot* is block * block_size + offset. Keys lie
transposed inside their block, values do not:

    keys    [num_blocks, kv_heads, head_size, block_size]     values  [num_blocks, kv_heads, block_size, v_head_size]

            token  0    1    2   …  15                                 d   0    1    2   …
      d 0        k0,0 k1,0 k2,0                                token 0   v0,0 v0,1 v0,2
      d 1        k0,1 k1,1 k2,1                                token 1   v1,0 v1,1 v1,2

so that both products of attention run over whole vectors and never sum across one: scores of 16 keys grow together
over d, and the output's d grow together over the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packhorse.pack.manifest import AttentionSpec
from packhorse.runner.base import Float32, Int64
from packhorse.runner.compiled import compiled

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's keys and values, flat: see the module's drawing for their order."""

    keys: Float32
    values: Float32


class KVCache:
    """Keys and values of every layer, `num_blocks` blocks of `block_size` tokens.

    The memory is reserved at once and taken by the system block by block as tokens are stored, so a cache that is
    never filled costs what it holds.
    """

    def __init__(self, attention: Sequence[AttentionSpec], num_blocks: int, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        tokens = num_blocks * block_size
        self.layers = [
            LayerCache(
                keys=np.zeros(tokens * spec.num_kv_heads * spec.head_size, np.float32),
                values=np.zeros(tokens * spec.num_kv_heads * spec.v_head_size, np.float32),
            )
            for spec in attention
        ]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)


@compiled
def store(
    keys: Float32,
    values: Float32,
    k: Float32,
    k_stride: int,
    v: Float32,
    v_stride: int,
    slots: Int64,
    kv_heads: int,
    head_size: int,
    v_head_size: int,
    block_size: int,
) -> None:
    """Write a step's keys and values into one layer's cache.

    keys, values: the layer's flat cache. k, v: flat, token t's row begins at t * stride. slots: int64[T].
    """
    for t in range(len(slots)):
        block = slots[t] // block_size
        offset = slots[t] % block_size
        for h in range(kv_heads):
            head = block * kv_heads + h
            key_at = head * head_size * block_size + offset
            source = t * k_stride + h * head_size
            for d in range(head_size):
                keys[key_at + d * block_size] = k[source + d]
            value_at = (head * block_size + offset) * v_head_size
            source = t * v_stride + h * v_head_size
            for d in range(v_head_size):
                values[value_at + d] = v[source + d]


def flat_rows(array: npt.NDArray[np.float32]) -> tuple[Float32, int]:
    """The memory under float32[T, N], whose rows are contiguous but may be apart, as (flat view, row stride).

    Raises ValueError for columns that are not contiguous.
    """
    rows, columns = array.shape
    if array.flags.c_contiguous:
        return array.reshape(-1), columns
    row_bytes, column_bytes = array.strides
    if column_bytes != 4 or row_bytes % 4 or row_bytes < 0:
        raise ValueError("rows must be contiguous float32")
    stride = row_bytes // 4
    length = (rows - 1) * stride + columns
    return np.lib.stride_tricks.as_strided(array, (length,), (4,), writeable=array.flags.writeable), stride
