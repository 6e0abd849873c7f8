"""The check itself: what it compares, and what it does not let through."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packhorse.errors import ParityError
from packhorse.pack import parity
from packhorse.pack.manifest import AttentionSpec, load_manifest
from packhorse.runner.base import Float32, StepBatch
from tests.pack.numpy_runner import NumpyRunner
from tests.pack.tiny_models import tiny_model


class _Recorder(NumpyRunner):
    """Keeps the steps it was given, and spoils the logits of one of them."""

    batches: list[StepBatch]
    spoiled: int | None = None
    spoil_with = np.nan

    def run(self, batch: StepBatch) -> Float32:
        logits = super().run(batch)
        if len(self.batches) == self.spoiled:
            logits[-1, 7] = self.spoil_with
        self.batches.append(batch)
        return logits


@pytest.fixture
def recorder() -> type[_Recorder]:
    class Fresh(_Recorder):
        batches: list[StepBatch] = []  # noqa: RUF012 - one list for each test's own class

    return Fresh


def test_lengths_a_ragged_batch_and_decode_steps_are_compared(tiny_pack: Path, recorder: type[_Recorder]) -> None:
    result = parity.check(tiny_model("llama_tied"), tiny_pack, load_manifest(tiny_pack), recorder)
    steps = [np.diff(batch.cu_seqlens).tolist() for batch in recorder.batches]
    assert steps == [[1], [2], [7], [33], [1, 2, 7, 33], *([[1, 1, 1, 1]] * 16)]
    assert [len(batch.rows) for batch in recorder.batches[:5]] == [1, 2, 7, 33, 4]
    assert recorder.batches[-1].context_lens.tolist() == [17, 18, 23, 49]
    assert result.checks == 8
    assert 0 < result.max_abs_difference < 1e-4


@pytest.mark.parametrize(("value", "message"), [(np.nan, "not finite"), (-np.inf, "not finite"), (1e3, "differ by")])
def test_one_wrong_value_in_one_step_fails(
    tiny_pack: Path, recorder: type[_Recorder], value: float, message: str
) -> None:
    recorder.spoiled, recorder.spoil_with = 12, value
    with pytest.raises(ParityError, match=message):
        parity.check(tiny_model("llama_tied"), tiny_pack, load_manifest(tiny_pack), recorder)


def test_lengths_lie_on_both_sides_of_a_window(tiny_pack: Path) -> None:
    manifest = load_manifest(tiny_pack)
    windowed = [spec.model_copy(update={"window": 8}) for spec in manifest.attention]
    assert parity._lengths(_with(manifest, windowed)) == [1, 2, 7, 8, 9, 33]


def test_lengths_fit_the_context(tiny_pack: Path) -> None:
    manifest = load_manifest(tiny_pack).model_copy(update={"context_length": 24})
    assert parity._lengths(manifest) == [1, 2, 7]


def _with(manifest: parity.Manifest, attention: list[AttentionSpec]) -> parity.Manifest:
    return manifest.model_copy(update={"attention": tuple(attention)})


def test_blocks_of_a_sequence_are_scattered() -> None:
    cache = parity._Cache(sequences=3, blocks_each=2)
    batch = cache.batch([0, 2], [[1] * 20, [1]], [0, 17], rows="last")
    assert batch.block_table.tolist() == [[0, 3], [2, 5]]
    assert batch.slots[[0, 15, 16, 20]].tolist() == [0, 15, 48, 81]
    assert batch.context_lens.tolist() == [20, 18]
