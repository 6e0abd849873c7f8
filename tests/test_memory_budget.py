"""The number of cache blocks follows from what is free, and never exceeds what can be used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.config import EngineConfig
from packhorse.errors import ConfigError
from packhorse.memory_budget import affordable_blocks, largest_step, num_blocks_after
from packhorse.pack.manifest import AttentionSpec, Manifest
from tests.support.engines import VOCAB
from tests.support.scripted import ScriptedRunner, hashed


def manifest(context_length: int = 1024) -> Manifest:
    """Two layers of one key head of 8 numbers: 128 bytes a token, 2 KiB a block of 16."""
    layers = tuple(
        AttentionSpec(
            layer=i, q="q", k="k", v="v", output="a",
            num_heads=1, num_kv_heads=1, head_size=8, v_head_size=8, scale=1.0,
        )
        for i in range(2)
    )  # fmt: skip
    return Manifest.model_construct(attention=layers, context_length=context_length, vocab_size=VOCAB)


BLOCK = 2048


@given(
    free=st.integers(0, 1 << 40),
    utilization=st.floats(0.01, 1),
    max_num_seqs=st.integers(1, 64),
    max_model_len=st.none() | st.integers(1, 5000),
)
def test_blocks_fit_what_is_free_and_are_no_more_than_can_be_used(
    free: int, utilization: float, max_num_seqs: int, max_model_len: int | None
) -> None:
    config = EngineConfig(
        memory_utilization=utilization, max_num_seqs=max_num_seqs, max_model_len=max_model_len, policy="continuous"
    )
    usable = max_num_seqs * -(-min(max_model_len or 1024, 1024) // 16)
    if free * utilization < BLOCK:
        with pytest.raises(ConfigError, match="cache does not fit"):
            affordable_blocks(free, manifest(), config)
        return
    blocks = affordable_blocks(free, manifest(), config)
    assert blocks * BLOCK <= free * utilization
    assert blocks == usable or (blocks + 1) * BLOCK > free * utilization
    assert blocks <= usable


def test_a_cache_that_does_not_fit_is_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"0\.0 MiB are free.*memory_utilization 0\.75.*block of 0\.00 MiB"):
        affordable_blocks(1000, manifest(), EngineConfig())


def test_the_largest_step_is_run_before_the_rest_of_the_memory_is_given_away() -> None:
    config = EngineConfig(max_num_batched_tokens=100, max_num_seqs=8, micro_batch=3)
    step = largest_step(manifest(), config)
    runner = ScriptedRunner(hashed(VOCAB), vocab_size=VOCAB, num_blocks=step.block_table.shape[1])
    runner.keep_batches = True
    assert num_blocks_after(runner, step, manifest(), config) == 8 * 64
    (ran,) = runner.batches
    assert (len(ran.ids), len(ran.rows)) == (34, 8)


def test_the_largest_step_is_no_longer_than_the_context() -> None:
    assert len(largest_step(manifest(context_length=40), EngineConfig()).ids) == 40
