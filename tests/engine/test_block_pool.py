from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from packhorse.engine.block_pool import BlockPool

SIZE = 12


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocations of any size, given back in any order."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(SIZE)
        self.owned: list[set[int]] = []

    @rule(target=held, count=st.integers(0, SIZE))
    def allocate(self, count: int) -> tuple[int, ...]:
        free = SIZE - sum(map(len, self.owned))
        if count > free:
            with pytest.raises(RuntimeError, match=f"{count} blocks asked for, {free} free"):
                self.pool.allocate(count)
            return ()
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        taken = set(blocks.tolist())
        assert len(taken) == count
        assert not any(taken & others for others in self.owned)
        self.owned.append(taken)
        return tuple(blocks.tolist())

    @rule(blocks=consumes(held))
    def release(self, blocks: tuple[int, ...]) -> None:
        self.pool.release(np.array(blocks, dtype=np.int32))
        if set(blocks) in self.owned:
            self.owned.remove(set(blocks))

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == sum(map(len, self.owned))
        assert self.pool.num_free + self.pool.num_used == SIZE


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase


def test_a_block_that_nobody_owns_cannot_be_released() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="nobody owns"):
        pool.release(blocks)
    pool.check_integrity()


def test_a_block_with_two_owners_is_free_after_the_second() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.owners[blocks[0]] += 1
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check_integrity()
    pool.release(blocks[:1])
    assert pool.num_free == 4
    pool.check_integrity()


@pytest.mark.parametrize("harm", ["lost", "free twice", "free and owned"])
def test_the_integrity_check_finds_a_damaged_pool(harm: str) -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    if harm == "lost":
        pool.owners[blocks[0]] = 0
    elif harm == "free and owned":
        pool.owners[pool._stack[0]] = 1
    else:
        pool._stack[0] = pool._stack[1]
    with pytest.raises(AssertionError):
        pool.check_integrity()
