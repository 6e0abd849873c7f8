"""Runs a pack on the CPU: onnxruntime for the segments, our own attention in between.

    ids, positions ─► session 0 ─► store k, v │ attend ─► session 1 ─► … ─► session L ─► logits
                          └──────── values stay where they were written (buffers.py); nothing is copied ────────▲

Two sets of threads take turns and never run at once: onnxruntime's pools, one a session, and the crew of the
attention kernels. All of them sleep when they have nothing to do (see `_session_options`).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from packhorse.errors import OutOfMemory, PackError, StepError
from packhorse.machine import usable_cpus
from packhorse.pack.manifest import AttentionSpec, Manifest, load_manifest
from packhorse.runner.attention import AttentionWork, PagedAttention, plan_attention
from packhorse.runner.base import Float32, StepBatch
from packhorse.runner.buffers import StepBuffers
from packhorse.runner.crew import Crew
from packhorse.runner.kv_cache import BLOCK_SIZE, KVCache

KEPT_SHAPES = 32  # bound steps kept, each about 100 kB of small objects


@dataclass(frozen=True, slots=True)
class _Layer:
    """One attention call over views of this step's values: q, k, v, out of shape float32[T, heads * size]."""

    q: Float32
    k: Float32
    v: Float32
    out: Float32


@dataclass(frozen=True, slots=True)
class _BoundStep:
    """Everything a step of T tokens and R rows needs, tied to the buffers."""

    tokens: int
    inputs: dict[str, Any]
    bindings: list[Any]
    layers: list[_Layer]
    logits: Float32


class OnnxRunner:
    """A pack, ready to run on the CPU. Implements `Runner`; not for use by two threads at once.

    folder: the pack. num_blocks, block_size: the KV cache; block_size must be a multiple of 16. threads: processors to
    use, by default all that the process may use. Raises PackError when the pack cannot be loaded, ValueError for a
    wrong size.
    """

    def __init__(
        self, folder: Path, *, num_blocks: int, block_size: int = BLOCK_SIZE, threads: int | None = None
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.manifest = load_manifest(folder)
        self.threads = threads or usable_cpus()
        self._crew = Crew(self.threads)
        self._attention = _attention_calls(self.manifest, block_size, self._crew)
        self._sessions = [_load_session(folder / s.file, self.threads) for s in self.manifest.segments]
        self._cache = KVCache(self.manifest.attention, num_blocks, block_size)
        self._buffers = StepBuffers(self.manifest)
        self._bound: OrderedDict[tuple[int, int], _BoundStep] = OrderedDict()

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    def run(self, batch: StepBatch) -> Float32:
        """Store the step's keys and values, and return logits: float32[R, V], valid until the next call.

        Raises OutOfMemory when the step needs more memory than there is, StepError when a segment fails otherwise; the
        cache then holds part of the step, and the same step may be run again.
        """
        _check(batch, self.num_blocks * self.block_size)
        try:
            step = self._step(len(batch.ids), len(batch.rows))
        except MemoryError as error:
            raise OutOfMemory(f"There is no memory for the values of a step of {len(batch.ids)} tokens.") from error
        for name, array in step.inputs.items():
            array[:] = getattr(batch, name)
        batch = _packed(batch)
        plans = _Plans(batch, self.threads)
        for index, layer in enumerate(step.layers):
            self._run_segment(index, step)
            cache, attention = self._cache.layers[index], self._attention[index]
            attention.store(cache, layer.k, layer.v, batch.slots)
            attention.attend(cache, layer.q, layer.out, batch, plans.of(attention.spec))
        if len(batch.rows):
            self._run_segment(len(step.layers), step)
        return step.logits

    def resize_cache(self, num_blocks: int) -> None:
        """Replace the cache by an empty one of `num_blocks` blocks."""
        self._cache = KVCache(self.manifest.attention, num_blocks, self.block_size)

    def close(self) -> None:
        """End the runner's threads; it cannot run again. Happens by itself when nothing refers to the runner."""
        self._crew.close()

    def _run_segment(self, index: int, step: _BoundStep) -> None:
        try:
            # The session under onnxruntime's Python wrapper: the wrapper adds checks and 3 µs to each of the calls.
            self._sessions[index].run_with_iobinding(step.bindings[index], None)
        except Exception as error:  # onnxruntime's own exceptions share no base but this
            message = f"segment {self.manifest.segments[index].file} failed on {step.tokens} tokens: {error}"
            raise (OutOfMemory if _is_out_of_memory(error) else StepError)(message) from error

    def _step(self, tokens: int, rows: int) -> _BoundStep:
        """The bound step for this shape, from the kept ones if it is there."""
        if not self._buffers.fits(tokens, rows):
            self._bound.clear()  # it holds the memory that is about to be given back
            self._buffers.reserve(tokens, rows)
        key = tokens, rows
        step = self._bound.get(key)
        if step is None:
            step = self._bound[key] = self._bind(tokens, rows)
            if len(self._bound) > KEPT_SHAPES:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        return step

    def _bind(self, tokens: int, rows: int) -> _BoundStep:
        view = functools.partial(self._buffers.view, tokens=tokens, rows=rows)
        bindings = []
        # Without rows the last segment does not run, and onnxruntime would refuse an empty output.
        count = len(self._sessions) - (rows == 0)
        for session, segment in zip(self._sessions[:count], self.manifest.segments[:count], strict=True):
            binding = ort.capi.onnxruntime_pybind11_state.SessionIOBinding(session)
            for value in segment.inputs:
                array = view(value.name)
                binding.bind_input(value.name, _CPU, array.dtype.type, array.shape, array.ctypes.data)
            for value in segment.outputs:
                array = view(value.name)
                binding.bind_output(value.name, _CPU, array.dtype.type, array.shape, array.ctypes.data)
            bindings.append(binding)
        layers = [
            _Layer(*(view(name).reshape(tokens, -1) for name in (spec.q, spec.k, spec.v, spec.output)))
            for spec in self.manifest.attention
        ]
        inputs: dict[str, Any] = {
            name: view(name) for name in ("ids", "positions", "rows") if name in self._buffers.places
        }
        logits = view(self.manifest.segments[-1].outputs[0].name).reshape(rows, self.vocab_size)
        return _BoundStep(tokens, inputs, bindings, layers, logits)


class _Plans:
    """The attention work of one step, planned once for all layers that are cut alike."""

    def __init__(self, batch: StepBatch, threads: int) -> None:
        self._batch = batch
        self._threads = threads
        self._plans: dict[tuple[int, int, int], AttentionWork] = {}

    def of(self, spec: AttentionSpec) -> AttentionWork:
        key = spec.num_heads, spec.num_kv_heads, spec.window
        if key not in self._plans:
            self._plans[key] = plan_attention(self._batch, spec, self._threads)
        return self._plans[key]


def _is_out_of_memory(error: Exception) -> bool:
    """onnxruntime tells it only in words: its arena's, or those of the C++ library."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("Failed to allocate memory", "bad_alloc", "bad allocation")
    )


_CPU = ort.capi.onnxruntime_pybind11_state.OrtDevice(0, 0, 0)


def _attention_calls(manifest: Manifest, block_size: int, crew: Crew) -> list[PagedAttention]:
    """One a layer; layers with the same spec share one, scratch memory included."""
    calls: dict[AttentionSpec, PagedAttention] = {}
    for spec in manifest.attention:
        alike = spec.model_copy(update={"layer": 0, "q": "", "k": "", "v": "", "output": ""})
        if alike not in calls:
            calls[alike] = PagedAttention(alike, block_size, crew)
    return [
        calls[s.model_copy(update={"layer": 0, "q": "", "k": "", "v": "", "output": ""})] for s in manifest.attention
    ]


def _load_session(path: Path, threads: int) -> Any:
    _share_arena()
    try:
        session = ort.InferenceSession(path, _session_options(threads), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions share no base but this
        raise PackError(f"{path} cannot be loaded ({error}). Convert the model again.") from error
    return session._sess


def _session_options(threads: int) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A pool that spins after its session is done takes the processor from the next session and from the crew: with
    # one pool a session a decode step became ten times slower.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@functools.cache
def _share_arena() -> None:
    """One arena for the activations of all sessions of this process.

    Each session's own would keep its largest step's memory for good, times the number of layers; sessions run one
    after another and can all use the same.
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    same_as_requested = 1
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": same_as_requested}))


def _packed(batch: StepBatch) -> StepBatch:
    """The batch with C-contiguous arrays: kernels are compiled for those, and would be again for any other kind."""
    arrays = (np.ascontiguousarray(getattr(batch, field.name)) for field in fields(batch))
    return StepBatch(*arrays)


def _check(batch: StepBatch, num_slots: int) -> None:
    """Refuse what would write outside the cache. Cheap: a few passes over arrays of T and S."""
    tokens = len(batch.ids)
    if tokens == 0:
        raise StepError("a step needs at least one token")
    if not len(batch.positions) == len(batch.slots) == tokens == batch.cu_seqlens[-1]:
        raise StepError("ids, positions, slots and cu_seqlens disagree on the number of tokens")
    if not len(batch.context_lens) == len(batch.block_table) == len(batch.cu_seqlens) - 1:
        raise StepError("cu_seqlens, context_lens and block_table disagree on the number of sequences")
    if batch.slots.min() < 0 or batch.slots.max() >= num_slots:
        raise StepError(f"a slot lies outside the cache of {num_slots} slots")
    if len(batch.rows) and (batch.rows[0] < 0 or batch.rows[-1] >= tokens):
        raise StepError("a row lies outside the step")
