"""Does the pack give the logits that transformers gives on the same weights? If not, nothing is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from packhorse.errors import ParityError
from packhorse.pack.manifest import Manifest, Parity

if TYPE_CHECKING:
    from packhorse.runner.base import Float32, Runner, StepBatch

LENGTHS = (1, 2, 7, 33)
DECODE_STEPS = 16
BLOCK_SIZE = 16
# Largest difference allowed, as a part of the largest logit: float32 sums in another order (see the measured figures
# in docs/decisions). A wrong scale, window or position gives differences a thousand times larger.
TOLERANCE = 5e-5

MakeRunner = Callable[[Path, int], "Runner"]


def check(model: Any, folder: Path, manifest: Manifest, make_runner: MakeRunner | None = None) -> Parity:
    """Compare the pack in `folder` with `model` and return the largest difference.

    Every length of LENGTHS alone with logits for all tokens; all of them in one ragged batch; then DECODE_STEPS steps
    of that batch through the paged cache, each fed the token with the largest logit. `make_runner(folder, num_blocks)`
    gives the runner, by default the ONNX runner. Raises ParityError.
    """
    lengths = _lengths(manifest)
    longest = max(lengths) + DECODE_STEPS
    cache = _Cache(len(lengths), -(-longest // BLOCK_SIZE))
    runner = (make_runner or _onnx_runner)(folder, cache.num_blocks)
    prompts = _prompts(lengths, manifest.vocab_size)
    compared = _Comparison()
    for index, prompt in enumerate(prompts):
        batch = cache.batch([index], [prompt], [0], rows="all")
        compared.add(f"{len(prompt)} tokens alone", runner.run(batch), _reference(model, prompt))
    _decode(model, runner, cache, prompts, compared)
    return compared.result()


def _decode(model: Any, runner: Runner, cache: _Cache, prompts: Sequence[list[int]], compared: _Comparison) -> None:
    """One ragged prefill, then greedy steps; the whole of each sequence is then given to transformers at once."""
    everyone = range(len(prompts))
    sequences = [list(prompt) for prompt in prompts]
    logits = [runner.run(cache.batch(everyone, prompts, [0] * len(prompts), rows="last")).copy()]
    for _ in range(DECODE_STEPS):
        chosen = logits[-1].argmax(axis=1)
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.append(int(token))
        batch = cache.batch(everyone, [s[-1:] for s in sequences], [len(s) - 1 for s in sequences], rows="last")
        logits.append(runner.run(batch).copy())
    for index, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True)):
        ours = np.stack([step[index] for step in logits])
        compared.add(
            f"ragged batch and {DECODE_STEPS} decode steps after {len(prompt)} tokens",
            ours,
            _reference(model, sequence)[len(prompt) - 1 :],
        )


def _lengths(manifest: Manifest) -> list[int]:
    """LENGTHS, and those on both sides of every window that is small enough to be crossed."""
    windows = {a.window for a in manifest.attention if 0 < a.window < max(LENGTHS)}
    lengths = {*LENGTHS, *windows, *(w + 1 for w in windows)}
    return sorted(n for n in lengths if n + DECODE_STEPS <= manifest.context_length)


def _prompts(lengths: Sequence[int], vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[int(i) for i in draw.integers(0, vocab_size, n)] for n in lengths]


def _reference(model: Any, ids: Sequence[int]) -> Float32:
    """float32[len(ids), V] by transformers, in one pass without a cache."""
    with torch.no_grad():
        logits: Float32 = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def _onnx_runner(folder: Path, num_blocks: int) -> Runner:
    from packhorse.machine import usable_cpus
    from packhorse.runner.onnx_runner import OnnxRunner

    return OnnxRunner(folder, num_blocks=num_blocks, block_size=BLOCK_SIZE, threads=usable_cpus())


@dataclass
class _Comparison:
    difference: float = 0.0
    largest: float = 0.0
    checks: int = 0
    worst: str = ""
    broken: list[str] = field(default_factory=list)

    def add(self, what: str, ours: Float32, theirs: Float32) -> None:
        self.checks += 1
        if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
            self.broken.append(what)
            return
        difference = float(np.abs(ours - theirs).max())
        self.largest = max(self.largest, float(np.abs(theirs).max()))
        if difference > self.difference:
            self.difference, self.worst = difference, what

    def result(self) -> Parity:
        if self.broken:
            raise ParityError(f"The converted model gives values that are not finite: {', '.join(self.broken)}.")
        if self.difference > TOLERANCE * self.largest:
            raise ParityError(
                f"The converted model does not reproduce its source: logits differ by up to {self.difference:.3g} "
                f"({self.worst}), allowed is {TOLERANCE * self.largest:.3g}. No pack was written. This is a defect of "
                "the conversion for this model; please report it with the model's name."
            )
        return Parity(max_abs_difference=self.difference, max_logit=self.largest, checks=self.checks)


class _Cache:
    """Block tables for a fixed set of sequences. Blocks of a sequence are scattered, so that a runner that ignores the
    table cannot pass: block j of sequence s is number j * sequences + s.
    """

    def __init__(self, sequences: int, blocks_each: int) -> None:
        self.num_blocks = sequences * blocks_each
        self._table = np.arange(self.num_blocks, dtype=np.int32).reshape(blocks_each, sequences).T.copy()

    def batch(
        self, sequences: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int], rows: str
    ) -> StepBatch:
        """The step that computes `tokens[i]` of sequence `sequences[i]` from position `starts[i]` on."""
        from packhorse.runner.base import StepBatch

        counts = np.array([len(t) for t in tokens])
        positions = np.concatenate([start + np.arange(len(t)) for t, start in zip(tokens, starts, strict=True)])
        owners = np.repeat(np.asarray(sequences), counts)
        ends = np.cumsum(counts)
        return StepBatch(
            ids=np.concatenate([np.asarray(t, np.int64) for t in tokens]),
            positions=positions.astype(np.int64),
            slots=self._table[owners, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
            cu_seqlens=np.concatenate([[0], ends]).astype(np.int32),
            context_lens=(np.asarray(starts) + counts).astype(np.int32),
            block_table=np.ascontiguousarray(self._table[np.asarray(sequences)]),
            rows=np.arange(ends[-1], dtype=np.int64) if rows == "all" else (ends - 1).astype(np.int64),
        )
