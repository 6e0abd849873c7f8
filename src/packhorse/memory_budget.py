"""How many cache blocks the memory holds, beside weights and activations that are measured and not guessed."""

from __future__ import annotations

import numpy as np

from packhorse.config import EngineConfig
from packhorse.engine.sequence import blocks_for
from packhorse.errors import ConfigError
from packhorse.machine import available_memory
from packhorse.pack.manifest import Manifest
from packhorse.runner.base import Runner, StepBatch


def largest_step(manifest: Manifest, config: EngineConfig) -> StepBatch:
    """One pass as large as the settings allow: a prefill of max_num_batched_tokens, logits for max_num_seqs rows."""
    tokens = min(-(-config.max_num_batched_tokens // config.micro_batch), manifest.context_length)
    places = np.arange(tokens, dtype=np.int64)
    return StepBatch(
        ids=places % manifest.vocab_size,
        positions=places,
        slots=places,
        cu_seqlens=np.array([0, tokens], dtype=np.int32),
        context_lens=np.array([tokens], dtype=np.int32),
        block_table=np.arange(int(blocks_for(tokens, config.block_size)), dtype=np.int32)[None],
        rows=places[-min(tokens, config.max_num_seqs) :],
    )


def num_blocks_after(runner: Runner, step: StepBatch, manifest: Manifest, config: EngineConfig) -> int:
    """Blocks that `memory_utilization` of the memory holds that is free once `step` has run, or fewer if they suffice.

    The step leaves the runner's buffers at their largest, so what is free then is free of weights and activations.
    Raises ConfigError, with the sizes, when not even one block fits.
    """
    runner.run(step)
    return affordable_blocks(available_memory(), manifest, config)


def affordable_blocks(free: int, manifest: Manifest, config: EngineConfig) -> int:
    """free: bytes. At most what max_num_seqs sequences of the greatest length can use."""
    max_len = min(config.max_model_len or manifest.context_length, manifest.context_length)
    usable = config.max_num_seqs * int(blocks_for(max_len, config.block_size))
    block = manifest.kv_bytes_per_token() * config.block_size
    affordable = int(free * config.memory_utilization) // block
    if affordable < 1:
        raise ConfigError(
            f"The cache does not fit: {free / 2**20:.1f} MiB are free beside the weights and a step's activations, and "
            f"memory_utilization {config.memory_utilization} of that holds no block of {block / 2**20:.2f} MiB. "
            "Free memory, raise memory_utilization, lower max_num_batched_tokens, or set num_blocks.",
            param="memory_utilization",
        )
    return min(usable, affordable)
