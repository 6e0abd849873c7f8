"""Load a source as a Transformers model in float32, with its tokenizer, and check that the two belong together."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from packhorse.errors import SourceError, UnsupportedModel
from packhorse.pack import gguf_tokenizer
from packhorse.pack.source import Source, read_config

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")
# Kinds of rotary embedding whose frequencies depend on the length of the longest sequence in a batch.
GROWING_ROPE = ("longrope", "dynamic")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to be exported, and the ids that mean something to it."""

    model: Any
    tokenizer: Any | None
    vocab_size: int
    context_length: int
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def weight_bytes(self) -> int:
        """Bytes of the parameters in float32. Tied ones count once."""
        return sum({p.data_ptr(): p.numel() * 4 for p in self.model.parameters()}.values())


def load(source: Source, *, allow_pickle: bool = False, with_tokenizer: bool = True) -> Loaded:
    """Load `source` in float32 on the CPU.

    Never runs code from a model repository and never unpickles unless `allow_pickle`, then weights only.
    Raises SourceError for files that are missing, damaged or do not belong together, UnsupportedModel for a model type
    that transformers does not know or a checkpoint that is quantized already.
    """
    if source.gguf is None:
        _check_config(source)
    model = _load_model(source, allow_pickle)
    tokenizer = load_tokenizer(source) if with_tokenizer else None
    return describe(model, tokenizer)


def describe(model: Any, tokenizer: Any | None) -> Loaded:
    """Collect the ids and sizes of a model that is in memory, and check the tokenizer against it."""
    config = model.config.get_text_config()
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    eos = union_of_eos(config.eos_token_id, getattr(model.generation_config, "eos_token_id", None))
    bos, pad = _one_id(config.bos_token_id), _one_id(config.pad_token_id)
    for name, ids in (("eos", eos), ("bos", (bos,)), ("pad", (pad,))):
        outside = [i for i in ids if i is not None and i >= vocab_size]
        if outside:
            raise SourceError(f"The configuration's {name} id {outside[0]} is outside the model's {vocab_size} ids.")
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab_size, eos)
        eos = union_of_eos(eos, tokenizer.eos_token_id)
        bos = tokenizer.bos_token_id if bos is None else bos
        pad = tokenizer.pad_token_id if pad is None else pad
    return Loaded(model, tokenizer, vocab_size, context_length(config), bos, pad, eos)


def union_of_eos(*settings: int | Iterable[int] | None) -> tuple[int, ...]:
    """Every end-of-sequence id that any of the settings (an id, several, or none) names, sorted."""
    found: set[int] = set()
    for setting in settings:
        if setting is None:
            continue
        found.update([setting] if isinstance(setting, int) else setting)
    return tuple(sorted(i for i in found if i >= 0))  # some configurations say -1 for "none"


def context_length(config: Any) -> int:
    """Positions the model was made for. From its configuration: a tokenizer's own maximum may be a huge sentinel."""
    for name in _POSITIONS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            break
    else:
        raise SourceError(f"The configuration gives no context length (looked for {', '.join(_POSITIONS)}).")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in GROWING_ROPE:
        # These change all frequencies once a sequence passes the original length, which a graph that serves many
        # sequences at once cannot follow. Up to that length they are plain rotary embeddings.
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        return min(value, int(original)) if original else value
    return value


def _one_id(setting: int | list[int] | None) -> int | None:
    ids = union_of_eos(setting)
    return ids[0] if ids else None


def _check_config(source: Source) -> None:
    config = read_config(source.folder)
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        reason = (
            "comes with code of its own (auto_map), which Packhorse never runs"
            if "auto_map" in config
            else f"is not known to transformers {transformers.__version__}"
        )
        raise UnsupportedModel(f"{source.name} cannot be converted: its model type {model_type!r} {reason}.")
    if "quantization_config" in config:
        method = (config["quantization_config"] or {}).get("quant_method", "unknown")
        raise UnsupportedModel(
            f"{source.name} is quantized already ({method}). Convert the original weights and quantize the pack."
        )


def _load_model(source: Source, allow_pickle: bool) -> Any:
    safetensors = source.gguf is not None or any(p.suffix == ".safetensors" for p in source.weight_files())
    options: dict[str, Any] = {"gguf_file": source.gguf} if source.gguf else {"use_safetensors": safetensors}
    if not safetensors:
        if not allow_pickle:
            raise SourceError(f"{source.name} has pickled weights only; pass --allow-pickle to read them.")
        options["weights_only"] = True
    try:
        with _quiet():
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                source.folder,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        raise SourceError(f"{source.name} cannot be loaded: {error}") from error
    absent = sorted(report.get("missing_keys") or ())
    if absent:
        raise SourceError(f"{source.name} lacks weights: {', '.join(absent[:5])}{' …' if len(absent) > 5 else ''}.")
    return model.eval().requires_grad_(False)


def load_config(source: Source) -> Any:
    """The source's configuration without its weights. Raises SourceError when it cannot be read."""
    options = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        with _quiet():
            return transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True, **options)
    except Exception as error:
        raise SourceError(f"{source.name} has no configuration that can be read: {error}") from error


def load_tokenizer(source: Source) -> Any:
    """The source's fast tokenizer, without padding or truncation. Raises SourceError when there is none."""
    options = {"gguf_file": source.gguf} if source.gguf else {}
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                source.folder, trust_remote_code=False, local_files_only=True, **options
            )
    except Exception as error:
        raise SourceError(f"{source.name} has no tokenizer that can be loaded: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise SourceError(f"{source.name} has only a slow tokenizer; a tokenizer.json is needed.")
    if source.gguf:
        gguf_tokenizer.restore_pre_tokenizer(tokenizer, source.folder / source.gguf)
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    return tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers while inside: this program reports its own progress."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the GGUF reader has a progress bar that cannot be turned off
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _check_tokenizer(tokenizer: Any, vocab_size: int, eos: tuple[int, ...]) -> None:
    """Raise SourceError when the tokenizer cannot belong to a model of `vocab_size` ids that ends with `eos`."""
    known = set(tokenizer.get_vocab().values())
    if max(known, default=-1) >= vocab_size:
        raise SourceError(
            f"The tokenizer does not belong to the model: it gives ids up to {max(known)}, the model has {vocab_size}."
        )
    unknown = [i for i in eos if i not in known]
    if unknown:
        raise SourceError(f"The tokenizer does not belong to the model: it has no id {unknown[0]}, the model's eos id.")
    own = tokenizer.eos_token_id
    control = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    if own is not None and eos and own not in eos and not control.intersection(eos):
        raise SourceError(
            f"The tokenizer does not belong to the model: it ends a sequence with id {own}, and the model's eos ids "
            f"{list(eos)} are ordinary text to it ({tokenizer.convert_ids_to_tokens(eos[0])!r})."
        )
