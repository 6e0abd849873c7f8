"""Changes to a row of logits before sampling: penalties, biases, and tokens that may not come yet."""

from __future__ import annotations

import numpy as np

from packhorse.engine.sampling_params import SamplingParams
from packhorse.runner.base import Float32, Int32


def changes_logits(params: SamplingParams) -> bool:
    """Whether `process` can change anything for these settings."""
    return params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0


def process(logits: Float32, params: SamplingParams, prompt: Int32, output: Int32, stop_ids: Int32) -> None:
    """Change logits float32[V] in place. prompt, output: int32, the sequence's own tokens so far.

    repetition (Keskar et al., "CTRL", 2019): positive logits of seen tokens are divided by it, others multiplied.
    frequency, presence (as OpenAI's API defines them): minus count * frequency, minus presence for any count > 0.
    """
    if params.has_penalties:
        _penalize(logits, params, prompt, output)
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        logits[stop_ids] = -np.inf


def _penalize(logits: Float32, params: SamplingParams, prompt: Int32, output: Int32) -> None:
    if params.repetition_penalty != 1:
        seen = np.unique(np.concatenate([prompt, output]))
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(output, return_counts=True)
        cost = counts * params.frequency_penalty + params.presence_penalty
        logits[seen] -= cost.astype(np.float32)
