"""The blocks of the KV cache: which are free, which sequences own the others, and which hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from packhorse.runner.base import Int32

ROOT = 0
"""The parent of a sequence's first block."""

PrefixKey = tuple[int, bytes]
"""The identity of a full block's contents: identity of the block before it, and its own token ids as bytes.

The dictionary compares keys, not only their hashes, so a collision cannot serve another prompt's block; and since an
identity is given once and never again, equal keys mean equal tokens all the way from the beginning.
"""


class BlockPool:
    """Hands out block ids 0 … num_blocks-1, and finds blocks again by what they hold.

        free stack     [ 7 3 9 | . . . ]     hold nothing that is known
        evictable      { 4, 1, 8 }           nobody's, but they hold a known prefix; least recently used first
        owned          owners[b] ≥ 1         in use; may hold a known prefix too, and be shared

    A block is in exactly one of the three. `num_free` counts the first two: an evictable block is given away, and its
    content forgotten, when the stack is empty.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.owners: Int32 = np.zeros(num_blocks, dtype=np.int32)
        self._stack: Int32 = np.arange(num_blocks, dtype=np.int32)[::-1].copy()
        self._stacked = num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}
        self._identity: dict[int, int] = {}
        self._next_identity = ROOT + 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return self._stacked + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody owns and that hold a known prefix."""
        return len(self._evictable)

    def allocate(self, count: int) -> Int32:
        """`count` free blocks, each now owned once. The caller has checked `num_free`."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        while self._stacked < count:
            self._evict()
        self._stacked -= count
        blocks = self._stack[self._stacked : self._stacked + count][::-1].copy()
        self.owners[blocks] = 1
        return blocks

    def release(self, blocks: Int32) -> None:
        """One owner less for each of `blocks`, a sequence's in order; those with none left are free.

        Of a prefix the end is given away first: without its beginning it could never be found again.
        """
        if np.any(self.owners[blocks] <= 0):
            raise RuntimeError("a block was released that nobody owns")
        self.owners[blocks] -= 1
        for block in blocks[self.owners[blocks] == 0][::-1].tolist():
            if block in self._key_of:
                self._evictable[block] = None
            else:
                self._push(block)

    def publish(self, block: int, parent: int, tokens: bytes) -> int:
        """Say what an owned, full block holds; returns the identity of those contents.

        When another block holds the same already, that one stays the one to be found.
        """
        key = (parent, tokens)
        found = self._block_of.get(key)
        if found is None:
            self._block_of[key] = found = block
            self._key_of[block] = key
            self._identity[block] = self._next_identity
            self._next_identity += 1
        return self._identity[found]

    def find(self, tokens: Int32, block_size: int) -> list[int]:
        """Blocks that hold the longest known prefix of `tokens`, in order. Only whole blocks are known."""
        blocks: list[int] = []
        parent = ROOT
        for begin in range(0, len(tokens) - block_size + 1, block_size):
            block = self._block_of.get((parent, tokens[begin : begin + block_size].tobytes()))
            if block is None:
                break
            blocks.append(block)
            parent = self._identity[block]
        return blocks

    def identity_of(self, block: int) -> int:
        """Of what a published block holds."""
        return self._identity[block]

    def share(self, blocks: list[int]) -> None:
        """One owner more for each of `blocks`, found by `find`."""
        for block in blocks:
            self.owners[block] += 1
            self._evictable.pop(block, None)

    def forget(self) -> None:
        """Nothing that nobody owns is known any more."""
        while self._evictable:
            self._evict()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one place and everything known can be found."""
        stacked = set(self._stack[: self._stacked].tolist())
        owned = set(np.flatnonzero(self.owners).tolist())
        evictable = set(self._evictable)
        assert len(stacked) == self._stacked, "a block is free twice"
        assert len(stacked) + len(owned) + len(evictable) == self.num_blocks, "a block is lost, or in two places"
        assert len(stacked | owned | evictable) == self.num_blocks, "a block is in two places"
        assert evictable <= self._key_of.keys(), "an evictable block holds nothing known"
        assert not stacked & self._key_of.keys(), "a block on the stack is still known"
        assert {key: block for block, key in self._key_of.items()} == self._block_of, "a known block cannot be found"
        assert self._identity.keys() == self._key_of.keys(), "identities and keys do not match"

    def _evict(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        del self._identity[block]
        self._push(block)

    def _push(self, block: int) -> None:
        self._stack[self._stacked] = block
        self._stacked += 1
