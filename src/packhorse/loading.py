"""From a model's name to an engine that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packhorse.config import EngineConfig
from packhorse.engine.engine import Engine
from packhorse.engine.sequence import blocks_for
from packhorse.errors import ConfigError
from packhorse.machine import available_memory, usable_cpus
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
    runner = OnnxRunner(
        folder,
        num_blocks=config.num_blocks or default_num_blocks(manifest, config),
        block_size=config.block_size,
        threads=config.threads or usable_cpus(),
    )
    engine = Engine(
        runner,
        config,
        tokenizer=tokenizer,
        eos_token_ids=manifest.eos_token_ids,
        context_length=manifest.context_length,
    )
    return LoadedModel(folder, manifest, tokenizer, engine)


def pack_folder(model: str | Path, progress: Progress | None = None) -> Path:
    """The folder of a pack: `model` itself, or where its conversion is kept."""
    if (Path(model) / "pack.json").is_file():
        return Path(model)
    from packhorse.pack.convert import convert_cached  # needs what only conversion needs

    return convert_cached(str(model), progress=progress)


def default_num_blocks(manifest: Manifest, config: EngineConfig) -> int:
    """Blocks that `memory_utilization` of the free memory holds beside the weights, and no more than can be used.

    Raises ConfigError, with the sizes, when not even one block fits.
    """
    max_len = min(config.max_model_len or manifest.context_length, manifest.context_length)
    usable = config.max_num_seqs * int(blocks_for(max_len, config.block_size))
    weights = sum(record.bytes for record in manifest.files)
    free = available_memory()
    block = manifest.kv_bytes_per_token() * config.block_size
    affordable = (int(free * config.memory_utilization) - weights) // block
    if affordable < 1:
        raise ConfigError(
            f"The cache does not fit: {free / 2**30:.2f} GiB are free, memory_utilization {config.memory_utilization} "
            f"of that less {weights / 2**30:.2f} GiB of weights leaves no block of {block / 2**20:.2f} MiB. "
            "Free memory, raise memory_utilization, or set num_blocks.",
            param="memory_utilization",
        )
    return min(usable, affordable)
