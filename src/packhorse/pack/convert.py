"""From a source to a pack: load, export, rewrite, cut, write, check, and only then give the folder its name."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.errors import PackError, SourceError
from packhorse.pack import manifest as manifests
from packhorse.pack.manifest import FileRecord, Manifest, ModelSource, Parity, Segment, TokenizerRecord
from packhorse.pack.source import Source, resolve, sha256_of

if TYPE_CHECKING:
    from packhorse.pack.cut import Cut
    from packhorse.pack.load import Loaded

Progress = Callable[[str, float], None]

_SPARE_BYTES = 64 << 20
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
    report = progress or (lambda stage, fraction: None)
    target = Path(out).expanduser().absolute()
    _check_target(target, force)
    _require_libraries()
    report("find", 0.0)
    found = resolve(source, allow_pickle=allow_pickle)
    with _building(target, force) as folder:
        return _build(found, folder, allow_pickle, with_tokenizer, report)


def _build(source: Source, folder: Path, allow_pickle: bool, with_tokenizer: bool, report: Progress) -> Manifest:
    from packhorse.pack import export, parity
    from packhorse.pack.cut import cut
    from packhorse.pack.fuse import simplify
    from packhorse.pack.load import load

    report("load", 0.02)
    loaded = load(source, allow_pickle=allow_pickle, with_tokenizer=with_tokenizer)
    _check_space(loaded.model, folder)
    report("export", 0.15)
    graph = export.export(loaded.model, loaded.context_length)
    report("rewrite", 0.65)
    simplify(graph)
    pieces = cut(graph)
    report("write", 0.72)
    segments = _write_segments(pieces, folder)
    tokenizer, template = _write_tokenizer(loaded, folder)
    result = Manifest(
        name=source.name,
        architecture=type(loaded.model).__name__,
        model_type=loaded.model.config.model_type,
        identity="",
        source=ModelSource(kind=source.kind, name=source.name, sha256=source.weights_sha256()),
        versions=_versions(),
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
    result = _record_files(result, folder)
    _write_manifest(result, folder)
    report("check", 0.8)
    result = result.model_copy(update={"parity": parity.check(loaded.model, folder, result)})
    _write_manifest(result, folder)
    report("done", 1.0)
    return result


def _check_target(target: Path, force: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / "pack.json").is_file():
        raise PackError(f"{target} exists and is not a pack, so it is not replaced. Choose another folder.")
    if not force:
        raise PackError(f"{target} exists. Pass --force to replace it.")


@contextmanager
def _building(target: Path, force: bool) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name at the end, or disappears on any failure."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        folder.chmod(0o755)
        yield folder
        _sync(folder)
        _check_target(target, force)
        _take_name(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _take_name(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`. A pack that is there is moved aside first and removed last."""
    aside = folder.with_suffix(".replaced")
    if target.exists():
        target.rename(aside)
    try:
        folder.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    _sync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Bring everything in `folder` to the disk before its name makes it valid."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    for path in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        _sync_directory(path)


def _sync_directory(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_space(model: Any, folder: Path) -> None:
    """Raise PackError when the disk cannot hold the weights. Parameters that are tied count once."""
    needed = sum({p.data_ptr(): p.numel() * 4 for p in model.parameters()}.values()) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PackError(f"{folder.parent} has {free >> 20} MiB free; the pack needs about {needed >> 20} MiB.")


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

    loaded.model.generation_config.to_json_file(folder / "generation_config.json")
    if loaded.tokenizer is None:
        return None, None
    return tokenizer_files.write(loaded.tokenizer, folder)


def _record_files(manifest: Manifest, folder: Path) -> Manifest:
    """Add size and hash of every file, and the identity that follows from them."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "pack.json")
    files = tuple(
        FileRecord(file=p.relative_to(folder).as_posix(), bytes=p.stat().st_size, sha256=sha256_of(p)) for p in paths
    )
    lines = "".join(f"{f.file} {f.sha256}\n" for f in files)
    return manifest.model_copy(update={"files": files, "identity": hashlib.sha256(lines.encode()).hexdigest()})


def _write_manifest(manifest: Manifest, folder: Path) -> None:
    (folder / "pack.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _LIBRARIES}


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
