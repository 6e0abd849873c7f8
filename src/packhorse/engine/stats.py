"""What the engine is doing, as one snapshot."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts now (num_running, num_waiting sequences; blocks) and since the engine was made (the rest).

    prompt_tokens: of requests taken in. computed_tokens: through the model, recomputation included.
    generated_tokens: sampled for someone. batched_sequences: summed over steps, so / steps is the mean batch size.
    """

    num_running: int
    num_waiting: int
    blocks_used: int
    blocks_total: int
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    steps: int
    batched_sequences: int
    preemptions: int
    failed_requests: int

    @property
    def mean_batch_size(self) -> float:
        """Sequences in a step, on average; 0 before the first."""
        return self.batched_sequences / self.steps if self.steps else 0.0
