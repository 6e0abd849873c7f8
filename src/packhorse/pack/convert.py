"""From a source to a pack: load, export, rewrite, cut, write, check, and only then give the folder its name."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packhorse.errors import PackError, SourceError
from packhorse.pack.manifest import (
    FORMAT_VERSION,
    FileRecord,
    Manifest,
    ModelSource,
    Parity,
    Segment,
    TokenizerRecord,
    load_manifest,
)
from packhorse.pack.source import Source, resolve, sha256_of
from packhorse.pack.staging import check_space, check_target, remove_leftovers, staged

if TYPE_CHECKING:
    from packhorse.pack.cut import Cut
    from packhorse.pack.load import Loaded

Progress = Callable[[str, float], None]

# Raised when the same source gives other graphs than before, so that cached packs are made again.
REVISION = 1

_SPARE_BYTES = 64 << 20  # graphs, tokenizer, alignment
_UNCHECKED = Parity(max_abs_difference=0.0, max_logit=0.0, checks=0)
_LIBRARIES = ("packhorse", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers")


def convert(
    source: str | Path,
    out: str | Path,
    *,
    force: bool = False,
    allow_pickle: bool = False,
    with_tokenizer: bool = True,
    progress: Progress | None = None,
) -> Manifest:
    """Convert `source` (Hugging Face folder, hub id, .gguf file or alias) into the pack folder `out`.

    `force` replaces a pack that is there. `allow_pickle` reads pickled weights, weights only. Without a tokenizer
    (`with_tokenizer=False`) the pack takes token ids only. `progress(stage, fraction)` is told how far it is.
    `out` appears whole or not at all. Raises SourceError, UnsupportedModel, ParityError, PackError.
    """
    report = progress or _silent
    target = Path(out).expanduser().absolute()
    check_target(target, force=force)
    _require_libraries()
    report("find", 0.0)
    found = resolve(source, allow_pickle=allow_pickle)
    with staged(target, force=force) as folder:
        return _build(found, folder, allow_pickle, with_tokenizer, report)


def convert_cached(source: str | Path, *, allow_pickle: bool = False, progress: Progress | None = None) -> Path:
    """The pack of `source`, converted once into the cache folder (see `home`); a pack's own folder is returned as is.

    The cache is keyed by the content of the source, the format version and the converter's revision. Two processes do
    not both convert: the second waits for the first. Raises what `convert` raises.
    """
    if (Path(source).expanduser() / "pack.json").is_file():
        return Path(source).expanduser()
    found = resolve(source, allow_pickle=allow_pickle)
    stem = re.sub(r"[^\w.-]+", "-", found.name)
    target = home() / "packs" / f"{stem}-{found.fingerprint()[:32]}-v{FORMAT_VERSION}.{REVISION}"
    if _is_whole(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if not _is_whole(target):
            remove_leftovers(target)
            convert(source, target, force=True, allow_pickle=allow_pickle, progress=progress)
    return target


def home() -> Path:
    """Where packs are cached: PACKHORSE_HOME, else `packhorse` in the user's cache folder (XDG_CACHE_HOME)."""
    own = os.environ.get("PACKHORSE_HOME")
    if own:
        return Path(own).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "packhorse"


def _build(source: Source, folder: Path, allow_pickle: bool, with_tokenizer: bool, report: Progress) -> Manifest:
    from packhorse.pack import parity
    from packhorse.pack.cut import cut
    from packhorse.pack.export import export
    from packhorse.pack.fuse import simplify
    from packhorse.pack.load import load

    report("load", 0.02)
    loaded = load(source, allow_pickle=allow_pickle, with_tokenizer=with_tokenizer)
    check_space(folder, loaded.weight_bytes() + _SPARE_BYTES)
    report("export", 0.15)
    graph = export(loaded.model, loaded.context_length)
    report("rewrite", 0.65)
    simplify(graph)
    pieces = cut(graph)
    report("write", 0.72)
    segments = _write_segments(pieces, folder)
    tokenizer, template = _write_tokenizer(loaded, folder)
    manifest = Manifest(
        name=source.name,
        architecture=type(loaded.model).__name__,
        model_type=loaded.model.config.model_type,
        identity="",
        source=ModelSource(kind=source.kind, name=source.name, sha256=source.weights_sha256()),
        versions={name: metadata.version(name) for name in _LIBRARIES},
        vocab_size=loaded.vocab_size,
        hidden_size=loaded.model.config.get_text_config().hidden_size,
        num_layers=len(pieces.attention),
        context_length=loaded.context_length,
        bos_token_id=loaded.bos_token_id,
        pad_token_id=loaded.pad_token_id,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=tokenizer,
        chat_template=template,
        segments=segments,
        attention=pieces.attention,
        files=(),
        parity=_UNCHECKED,
    )
    manifest = _with_files(manifest, folder)
    _write_manifest(manifest, folder)
    report("check", 0.8)
    manifest = manifest.model_copy(update={"parity": parity.check(loaded.model, folder, manifest)})
    _write_manifest(manifest, folder)
    report("done", 1.0)
    return manifest


def _write_segments(pieces: Cut, folder: Path) -> tuple[Segment, ...]:
    import onnx_ir as ir

    from packhorse.pack.weights import WeightFile

    (folder / "segments").mkdir()
    segments = []
    with WeightFile(folder / "segments" / "weights.bin") as weights:
        for number, piece in enumerate(pieces.pieces):
            weights.externalize(piece.model.graph)
            file = f"segments/{number:02d}.onnx"
            ir.save(piece.model, folder / file)
            segments.append(Segment(file=file, inputs=piece.inputs, outputs=piece.outputs))
    return tuple(segments)


def _write_tokenizer(loaded: Loaded, folder: Path) -> tuple[TokenizerRecord | None, str | None]:
    from packhorse.pack import tokenizer_files

    if loaded.model.generation_config is not None:
        loaded.model.generation_config.to_json_file(folder / "generation_config.json")
    if loaded.tokenizer is None:
        return None, None
    return tokenizer_files.write(loaded.tokenizer, folder)


def _with_files(manifest: Manifest, folder: Path) -> Manifest:
    """Add size and hash of every file, and the identity that follows from them."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    files = tuple(
        FileRecord(file=p.relative_to(folder).as_posix(), bytes=p.stat().st_size, sha256=sha256_of(p)) for p in paths
    )
    lines = "".join(f"{f.file} {f.sha256}\n" for f in files)
    return manifest.model_copy(update={"files": files, "identity": hashlib.sha256(lines.encode()).hexdigest()})


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / "pack.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _is_whole(folder: Path) -> bool:
    """Whether a pack is there that this version reads. A damaged one in the cache is converted again."""
    try:
        load_manifest(folder)
    except PackError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` between processes; the kernel drops it when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _silent(stage: str, fraction: float) -> None:
    """The progress of a caller that does not ask for it."""


def _require_libraries() -> None:
    """Raise SourceError with the command that installs what conversion needs."""
    try:
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise SourceError(
            f"Converting a model needs {error.name}, which is not installed: pip install 'packhorse[convert]'"
        ) from error
