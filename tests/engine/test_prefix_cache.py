"""Beginnings that were computed before are not computed again, and no answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from packhorse.engine import block_pool
from packhorse.engine.block_pool import ROOT, BlockPool
from packhorse.engine.engine import Engine
from packhorse.runner.base import Int32
from tests.support.engines import finish_all, request, scripted_engine
from tests.support.stress import assert_known_blocks_hold_their_tokens

BASE = [(7 * i * i + 3 * i + 1) % 97 for i in range(2000)]


def answer(engine: Engine, prompt: list[int], **params: Any) -> list[int]:
    engine.submit(request("a", prompt, **{"max_tokens": 6} | params))
    output = finish_all(engine)["a"]
    assert output.error is None
    assert_known_blocks_hold_their_tokens(engine)
    return output.outputs[0].token_ids


def computed_for(engine: Engine, prompt: list[int], **params: Any) -> tuple[list[int], int]:
    """Its answer, and how many tokens of it were found and not computed."""
    before = engine.stats()
    found = answer(engine, prompt, **params)
    after = engine.stats()
    tokens = after.computed_tokens - before.computed_tokens + after.prefix_hits - before.prefix_hits
    assert tokens == len(prompt) + len(found) - 1
    return found, after.prefix_hits - before.prefix_hits


def without(prompt: list[int], **params: Any) -> list[int]:
    return answer(scripted_engine(enable_prefix_caching=False), prompt, **params)


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 32, 33, 48])
def test_prompts_that_share_a_beginning_share_its_whole_blocks(shared: int) -> None:
    engine = scripted_engine()
    first, second = BASE[:shared] + [1] * 20, BASE[:shared] + [2] * 20
    assert computed_for(engine, first) == (without(first), 0)
    assert computed_for(engine, second) == (without(second), shared // 16 * 16)


@pytest.mark.parametrize(("length", "found"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32), (34, 32)])
@pytest.mark.parametrize("budget", [5, 16, 512])
def test_a_prompt_that_is_known_entirely_still_computes_its_last_token(length: int, found: int, budget: int) -> None:
    engine = scripted_engine(max_num_batched_tokens=budget)
    prompt = BASE[:length]
    expected = without(prompt)
    assert computed_for(engine, prompt, max_tokens=6) == (expected, 0)
    for _ in range(2):
        assert computed_for(engine, prompt, max_tokens=6) == (expected, found)


def test_what_was_generated_is_known_too() -> None:
    engine = scripted_engine()
    history = BASE[:20] + answer(engine, BASE[:20], max_tokens=30)
    expected = without([*history, 5])
    assert computed_for(engine, [*history, 5]) == (expected, 48)


@pytest.mark.parametrize("edit", [0, 14, 15, 16])
def test_an_edited_history_does_not_find_the_old_block(edit: int) -> None:
    """15 tokens and one that was generated fill a block; then one of them is another."""
    engine = scripted_engine()
    history = BASE[:15] + answer(engine, BASE[:15], max_tokens=3)
    edited = [*history]
    edited[edit] = (edited[edit] + 1) % 97
    expected = {tuple(prompt): without(prompt) for prompt in (history, edited)}
    for prompt in (edited, history, edited):
        assert answer(engine, prompt) == expected[tuple(prompt)]
    assert engine.stats().prefix_hits == 16 * (2 + (edit == 16))


def test_a_block_that_was_given_away_is_not_found_under_its_old_contents() -> None:
    engine = scripted_engine(num_blocks=4)
    prompts = [BASE[start : start + 40] for start in (0, 100, 200)]
    expected = [without(prompt) for prompt in prompts]
    for i in (0, 1, 2, 0, 1, 1, 0, 2):
        assert answer(engine, prompts[i]) == expected[i]
    assert engine.stats().prefix_hits > 0


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    engine = scripted_engine()
    same = BASE[100:132]
    first, second = BASE[:16] + same, BASE[16:32] + same
    assert computed_for(engine, first) == (without(first), 0)
    assert computed_for(engine, second) == (without(second), 0)
    assert computed_for(engine, same) == (without(same), 0)


def test_a_collision_of_hashes_serves_no_other_prompts_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "hash", lambda _: 7, raising=False)
    engine = scripted_engine()
    engine._scheduler.pool._block_of = Colliding()
    prompts = [BASE[start : start + 40] for start in range(0, 400, 40)]
    for prompt in prompts:
        assert computed_for(engine, prompt) == (without(prompt), 0)
    for prompt in prompts:
        assert computed_for(engine, prompt) == (without(prompt), 32)


class Collision:
    """A key whose hash is everybody's."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collision) and self.key == other.key


class Colliding(dict[Any, int]):
    """A dictionary all of whose keys have one hash."""

    def __getitem__(self, key: Any) -> int:
        return super().__getitem__(Collision(key))

    def __setitem__(self, key: Any, value: int) -> None:
        super().__setitem__(Collision(key), value)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(Collision(key))

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(Collision(key), default)

    def __eq__(self, other: object) -> bool:
        return {key.key: value for key, value in self.items()} == other

    __hash__ = None  # type: ignore[assignment]


def test_the_least_recently_used_prefix_goes_first() -> None:
    engine = scripted_engine(num_blocks=5)
    a, b, c = (BASE[start : start + 33] for start in (0, 100, 200))
    for prompt in (a, b, a, c):  # each has 2 blocks that stay known; c's 3 push out b's
        answer(engine, prompt, max_tokens=1)
    assert computed_for(engine, a, max_tokens=1)[1] == 32
    assert computed_for(engine, b, max_tokens=1)[1] == 0


def test_of_a_prefix_the_end_goes_first() -> None:
    engine = scripted_engine(num_blocks=6)
    long = BASE[:81]
    answer(engine, long, max_tokens=1)  # leaves 5 known blocks and an empty one
    answer(engine, BASE[100:117], max_tokens=1)  # takes the empty one and one of the 5
    assert computed_for(engine, long, max_tokens=1)[1] == 64


def test_a_block_in_use_is_never_given_away() -> None:
    engine = scripted_engine(num_blocks=6, max_num_seqs=2)
    engine.submit(request("runs", BASE[:33], max_tokens=30))
    engine.step()
    blocks = engine._table.blocks_of(engine._scheduler.running[0].row).tolist()
    for number in range(5):
        engine.submit(request(str(number), BASE[100 * number + 100 :][:33], max_tokens=1))
        engine.step()
        assert engine._table.blocks_of(engine._scheduler.running[0].row).tolist()[:3] == blocks
    assert finish_all(engine)["runs"].outputs[0].token_ids == without(BASE[:33], max_tokens=30)


def test_shared_blocks_are_counted_once_and_stay_until_their_last_owner_leaves() -> None:
    engine = scripted_engine(num_blocks=16)
    engine.submit(request("a", [*BASE[:32], 1], max_tokens=9))
    engine.step()
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (3, 0)
    engine.submit(request("b", [*BASE[:32], 2], max_tokens=9))
    engine.submit(request("c", [*BASE[:16], 3], max_tokens=9))
    engine.step()
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (3 + 1 + 1, 0)
    assert engine._scheduler.pool.owners.max() == 3
    engine.abort("a")
    engine.check_integrity()
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (4, 0)
    engine.abort("b")
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (2, 1)
    engine.abort("c")
    assert (engine.stats().blocks_used, engine.stats().blocks_cached) == (0, 2)
    assert engine.stats().blocks_total == 16


def test_a_shared_beginning_costs_no_room() -> None:
    """Ten requests of three blocks each would need 30; nine of them own but one that is not shared."""
    engine = scripted_engine(num_blocks=24, max_num_seqs=10)
    engine.submit(request("0", [*BASE[:32], 0], max_tokens=4))
    engine.step()
    for number in range(1, 10):
        engine.submit(request(str(number), [*BASE[:32], number], max_tokens=4))
    engine.step()
    assert engine.stats().num_running == 10
    assert finish_all(engine)["9"].outputs[0].token_ids == without([*BASE[:32], 9], max_tokens=4)
    assert engine.stats().preemptions == 0


def test_a_preempted_sequence_finds_its_own_beginning() -> None:
    def run(caching: bool) -> tuple[Engine, list[list[int]]]:
        engine = scripted_engine(num_blocks=20, block_size=4, max_num_seqs=4, enable_prefix_caching=caching)
        for number in range(4):
            engine.submit(request(str(number), BASE[number * 50 : number * 50 + 9], max_tokens=24))
        outputs = finish_all(engine)
        return engine, [outputs[str(number)].outputs[0].token_ids for number in range(4)]

    plain, expected = run(False)
    engine, found = run(True)
    assert found == expected
    assert engine.stats().preemptions == plain.stats().preemptions > 0
    assert engine.stats().prefix_hits > 0
    assert engine.stats().computed_tokens + engine.stats().prefix_hits == plain.stats().computed_tokens


def test_a_sequence_sent_back_for_want_of_memory_computes_only_its_last_block_again() -> None:
    engine = scripted_engine(max_num_seqs=2)
    for number in range(2):
        engine.submit(request(str(number), BASE[number * 50 : number * 50 + 20], max_tokens=24))
    for _ in range(16):
        engine.step()
    engine._scheduler.make_room()  # the second has 36 tokens, 35 of them computed, in two blocks and a part
    engine._scheduler._crowd = 2
    computed = engine.stats().computed_tokens
    engine.step()
    assert engine.stats().num_running == 2
    assert engine.stats().computed_tokens - computed == 1 + 36 - 32
    outputs = finish_all(engine)
    assert outputs["1"].outputs[0].token_ids == without(BASE[50:70], max_tokens=24)


def test_prompt_log_probabilities_are_computed_and_not_looked_up() -> None:
    engine = scripted_engine()
    outputs = []
    for _ in range(2):
        engine.submit(request("a", BASE[:40], max_tokens=2, prompt_logprobs=1))
        outputs.append(finish_all(engine)["a"])
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
    assert len(outputs[1].prompt_logprobs or []) == 40
    assert (engine.stats().prefix_hits, engine.stats().prefix_queries) == (0, 0)
    assert computed_for(engine, BASE[:40])[1] == 32  # others may find what they computed


def test_hits_are_counted_against_what_was_looked_up() -> None:
    engine = scripted_engine()
    answer(engine, BASE[:40])
    answer(engine, BASE[:40])
    assert (engine.stats().prefix_queries, engine.stats().prefix_hits) == (80, 32)


def test_without_the_cache_nothing_is_kept_and_nothing_looked_up() -> None:
    engine = scripted_engine(enable_prefix_caching=False)
    for _ in range(2):
        answer(engine, BASE[:40])
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.blocks_cached) == (0, 0, 0)
    assert stats.computed_tokens == 2 * 45


def test_a_step_that_failed_leaves_nothing_known() -> None:
    """Its keys and values may be half written."""
    engine = scripted_engine(max_num_batched_tokens=16)
    engine.submit(request("a", BASE[:64], max_tokens=2))
    engine.step()
    run = engine._runner.run

    def fail(batch: Any) -> Any:
        run(batch)
        raise RuntimeError

    engine._runner.run = fail  # type: ignore[method-assign]
    assert engine.step()[0].error is not None
    engine._runner.run = run  # type: ignore[method-assign]
    assert engine.stats().blocks_cached == 1
    assert computed_for(engine, BASE[:64]) == (without(BASE[:64]), 16)


@pytest.mark.parametrize("policy", ["continuous", "dynamic", "static"])
def test_a_beginning_of_1000_tokens_is_computed_once_for_64_requests(policy: str) -> None:
    def run(caching: bool) -> tuple[int, list[list[int]]]:
        engine = scripted_engine(
            lambda context: (context[-1] * 31 + len(context)) % 97,
            num_blocks=6000,
            policy=policy,
            enable_prefix_caching=caching,
        )
        for number in range(64):
            engine.submit(request(str(number), [*BASE[:1000], number, number + 1], max_tokens=4))
        outputs = finish_all(engine)
        stats = engine.stats()
        return stats.computed_tokens - stats.generated_tokens, [
            outputs[str(number)].outputs[0].token_ids for number in range(64)
        ]

    whole, expected = run(False)
    computed, found = run(True)
    assert found == expected
    assert computed <= 0.1 * whole


@pytest.mark.parametrize("policy", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("budget", [64, 512, 65_536])
def test_who_arrives_in_the_same_step_computes_a_common_beginning_once(policy: str, budget: int) -> None:
    engine = scripted_engine(
        num_blocks=6000, policy=policy, batch_size=16, max_num_batched_tokens=budget, max_model_len=2000
    )
    prompts = [[*BASE[:200], number, 90 - number] for number in range(16)]
    for number, prompt in enumerate(prompts):
        engine.submit(request(str(number), prompt, max_tokens=4))
    outputs = finish_all(engine)
    assert engine.stats().prefix_hits == 15 * 192
    assert [outputs[str(number)].outputs[0].token_ids for number in range(16)] == [
        without(prompt, max_tokens=4) for prompt in prompts
    ]


def test_who_waits_for_a_common_beginning_waits_one_step_and_others_do_not() -> None:
    engine = scripted_engine()
    for name, prompt in (("a", BASE[:40]), ("b", BASE[100:140]), ("c", BASE[:40])):
        engine.submit(request(name, prompt, max_tokens=9))
    engine.step()
    assert (engine.stats().num_running, engine.stats().computed_tokens) == (2, 80)
    engine.step()
    assert (engine.stats().num_running, engine.stats().prefix_hits) == (3, 32)
    finish_all(engine)


def test_nobody_waits_for_a_beginning_that_is_no_whole_block() -> None:
    engine = scripted_engine()
    for name in "ab":
        engine.submit(request(name, [*BASE[:15], ord(name) - 90, 3], max_tokens=2))
    engine.step()
    assert engine.stats().num_running == 2
    finish_all(engine)


@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 30), st.lists(st.integers(0, 2), max_size=6), st.integers(1, 9)),
        min_size=2,
        max_size=10,
    ),
    num_blocks=st.sampled_from([14, 20, 64]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    budget=st.sampled_from([3, 8, 64]),
    together=st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_no_answer_changes(
    prompts: list[tuple[int, int, list[int], int]], num_blocks: int, block_size: int, budget: int, together: int
) -> None:
    def run(caching: bool) -> Iterator[list[int]]:
        engine = scripted_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            max_model_len=14 * block_size,
        )
        for batch in (prompts[i : i + together] for i in range(0, len(prompts), together)):
            for number, (base, shared, tail, max_tokens) in enumerate(batch):
                prompt = [base, *BASE[: min(shared, 13 * block_size - 7)], *tail][: 14 * block_size]
                engine.submit(request(str(number), prompt, max_tokens=max_tokens))
            outputs = finish_all(engine)
            assert_known_blocks_hold_their_tokens(engine)
            yield from (outputs[str(number)].outputs[0].token_ids for number in range(len(batch)))

    assert list(run(True)) == list(run(False))


BLOCKS = 10
SIZE = 2


class PoolMachine(RuleBasedStateMachine):
    """Sequences of a tiny alphabet come and go; a shadow of the cache says what each block really holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.holds: dict[int, tuple[int, ...]] = {}
        self.sequences: list[Int32] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), known=st.booleans())
    def enter(self, tokens: list[int], known: bool) -> None:
        ids = np.array(tokens, dtype=np.int32)
        found = self.pool.find(ids, SIZE) if known else []
        for i, block in enumerate(found):
            assert self.holds[block] == tuple(tokens[: (i + 1) * SIZE])
        needed = -(-len(tokens) // SIZE) - len(found)
        if needed + sum(self.pool.owners[block] == 0 for block in found) > self.pool.num_free:
            return
        self.pool.share(found)
        fresh = self.pool.allocate(needed)
        assert not set(fresh.tolist()) & set(found)
        blocks = np.concatenate([np.array(found, dtype=np.int32), fresh])
        for block in fresh.tolist():
            self.holds.pop(block, None)
        identity = self.pool.identity_of(found[-1]) if found else ROOT
        for i in range(len(found), len(tokens) // SIZE):
            self.holds[int(blocks[i])] = tuple(tokens[: (i + 1) * SIZE])
            identity = self.pool.publish(int(blocks[i]), identity, ids[i * SIZE : (i + 1) * SIZE].tobytes())
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, 100))
    def leave(self, number: int) -> None:
        self.pool.release(self.sequences.pop(number % len(self.sequences)))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.pool.check_integrity()
        owners = np.zeros(BLOCKS, dtype=np.int32)
        for blocks in self.sequences:
            owners[blocks] += 1
        assert np.array_equal(owners, self.pool.owners)
        assert self.pool.num_used == np.count_nonzero(owners)

    def teardown(self) -> None:
        for blocks in self.sequences:
            self.pool.release(blocks)
        assert self.pool.num_free == BLOCKS
        assert set(self.pool.allocate(BLOCKS).tolist()) == set(range(BLOCKS))
        assert self.pool.num_cached == 0


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPrefixPool = PoolMachine.TestCase
