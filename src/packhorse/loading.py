"""From a model's name to an engine that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.machine import usable_cpus
from packhorse.memory_budget import largest_step, num_blocks_after
from packhorse.pack.manifest import Manifest, load_manifest
from packhorse.runner.onnx_runner import OnnxRunner
from packhorse.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A pack that is ready to run. tokenizer: None when the pack has none, and prompts must be token ids."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer | None
    engine: Engine


def load_model(model: str | Path, config: EngineConfig, progress: Progress | None = None) -> LoadedModel:
    """Load a pack, or convert a source once into the cache directory and load that.

    model: a pack's folder, or anything `packhorse convert` takes. progress(stage, fraction) is told of a conversion.
    Raises SourceError, PackError, UnsupportedModel, ParityError or ConfigError.
    """
    folder = pack_folder(model, progress)
    manifest = load_manifest(folder)
    tokenizer = None
    if manifest.tokenizer is not None:
        tokenizer = Tokenizer.from_pack(folder, manifest, escape_control_tokens=config.escape_control_tokens)
    runner = _make_runner(folder, manifest, config)
    engine = Engine(
        runner,
        config,
        tokenizer=tokenizer,
        eos_token_ids=manifest.eos_token_ids,
        context_length=manifest.context_length,
    )
    if config.warmup_requests:
        warm_up(engine, config.warmup_requests)
    return LoadedModel(folder, manifest, tokenizer, engine)


def pack_folder(model: str | Path, progress: Progress | None = None) -> Path:
    """The folder of a pack: `model` itself, or where its conversion is kept."""
    if (Path(model) / "pack.json").is_file():
        return Path(model)
    from packhorse.pack.convert import convert_cached  # needs what only conversion needs

    return convert_cached(str(model), progress=progress)


def warm_up(engine: Engine, count: int) -> None:
    """Run `count` requests of usual lengths, so that the first real one meets warm code; outside all statistics.

    Prompts of 8 to 512 tokens (at most half of what fits), 8 output tokens each, together as far as the engine allows.
    """
    rng = np.random.default_rng(0)
    longest = max(1, min(512, engine.max_model_len // 2))
    for number in range(count):
        length = int(rng.integers(min(8, longest), longest + 1))
        prompt = rng.integers(0, engine.vocab_size, length)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        engine.submit(Request(f"warm-up {number}", prompt.tolist(), params))
    while engine.num_unfinished:
        engine.step()
    engine.forget()


def _make_runner(folder: Path, manifest: Manifest, config: EngineConfig) -> OnnxRunner:
    threads = config.threads or usable_cpus()
    if config.num_blocks is not None:
        return OnnxRunner(folder, num_blocks=config.num_blocks, block_size=config.block_size, threads=threads)
    step = largest_step(manifest, config)
    blocks = step.block_table.shape[1]
    runner = OnnxRunner(folder, num_blocks=blocks, block_size=config.block_size, threads=threads)
    runner.resize_cache(num_blocks_after(runner, step, manifest, config))
    return runner
