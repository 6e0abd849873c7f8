"""The blocks of the KV cache: which are free, and how many sequences own each of the others."""

from __future__ import annotations

import numpy as np

from packhorse.runner.base import Int32


class BlockPool:
    """Hands out block ids 0 … num_blocks-1.

    free stack   [ 7 3 9 | . . . . ]      taken from and returned to the end of the filled part
                  num_free ┘
    owners[b]    how many sequences hold block b; 0 exactly when b is on the stack
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners: Int32 = np.zeros(num_blocks, dtype=np.int32)
        self._stack: Int32 = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_free

    def allocate(self, count: int) -> Int32:
        """`count` free blocks, each now owned once. The caller has checked `num_free`."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks asked for, {self._num_free} free")
        self._num_free -= count
        blocks = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self.owners[blocks] = 1
        return blocks

    def release(self, blocks: Int32) -> None:
        """One owner less for each of `blocks` (each at most once in the list); those with none left are free."""
        if np.any(self.owners[blocks] <= 0):
            raise RuntimeError("a block was released that nobody owns")
        self.owners[blocks] -= 1
        freed = blocks[self.owners[blocks] == 0]
        self._stack[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free or owned, and none is listed twice."""
        free = self._stack[: self._num_free]
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert not self.owners[free].any(), "a free block is owned"
        assert np.count_nonzero(self.owners) + len(free) == self.num_blocks, "a block is neither free nor owned"
