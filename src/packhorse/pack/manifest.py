"""`pack.json`: what a pack holds, and all that a runner needs to know about it.

    a pack/
      pack.json              this file
      segments/00.onnx …     L+1 graphs; values flow from one to the next by name
      segments/weights.bin   external data that all segments share; tied weights are stored once. It lies beside the
                             graphs because ONNX refuses external data outside a graph's own folder
      tokenizer.json         and tokenizer_config.json
      chat_template.jinja    when the model has one
      generation_config.json

One step walks the segments in order, with one attention call after each but the last:

    ids, positions ─► segment 0 ─► q0 k0 v0 ─► attention 0 ─► a0 ─► segment 1 ─► … ─► segment L ─► logits
                          └────────── hidden, cos, sin … (carried by name) ──────────▲        rows ▲
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from packhorse.errors import PackError

FORMAT_VERSION = 1

DType = Literal["float32", "float16", "bfloat16", "int64", "int32", "bool", "int8", "uint8"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Value(_Frozen):
    """A tensor that crosses a segment's border.

    `shape`: one entry an axis, an int where it is fixed, "T" (tokens of the step) or "R" (rows that need logits).
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...]


class Segment(_Frozen):
    """One graph between two attention calls. Its only dynamic axes are T and R."""

    file: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class AttentionSpec(_Frozen):
    """The attention call after one segment, over the values named here.

    q: float32[T, num_heads * head_size], k: float32[T, num_kv_heads * head_size],
    v: float32[T, num_kv_heads * v_head_size] -> output: float32[T, num_heads * v_head_size].
    score = scale * q·k, then softcap * tanh(score / softcap) if softcap > 0; keys at positions p - window + 1 … p only
    if window > 0; `sinks`: one float a head, the logit of an extra key with no value (GPT-OSS), or None.
    """

    layer: int
    q: str
    k: str
    v: str
    output: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: tuple[float, ...] | None = None


class FileRecord(_Frozen):
    """A file of the pack: path relative to pack.json, size in bytes, SHA-256 in hex."""

    file: str
    bytes: int
    sha256: str


class ModelSource(_Frozen):
    """Where the weights came from. `name` never holds a machine's path, only the last part of it."""

    kind: Literal["huggingface", "hub", "gguf", "alias"]
    name: str
    sha256: str


class TokenizerRecord(_Frozen):
    """`vocab_size`: number of ids the tokenizer can give, added tokens included."""

    file: str
    sha256: str
    vocab_size: int


class Parity(_Frozen):
    """Largest absolute and relative difference of logits to transformers, as measured when the pack was made."""

    max_abs_difference: float
    max_logit: float
    checks: int


class Manifest(_Frozen):
    """The whole of pack.json. `identity` is a SHA-256 over every file's hash: equal identity, equal results."""

    format: Literal["packhorse-pack"] = "packhorse-pack"
    format_version: int = FORMAT_VERSION
    name: str
    architecture: str
    model_type: str
    identity: str
    source: ModelSource
    versions: dict[str, str]
    precision: str = "fp32"
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer: TokenizerRecord | None
    chat_template: str | None
    segments: tuple[Segment, ...]
    attention: tuple[AttentionSpec, ...]
    files: tuple[FileRecord, ...]
    parity: Parity

    def kv_bytes_per_token(self, bytes_per_value: int = 4) -> int:
        """Bytes of key and value cache that one token takes over all layers."""
        values = sum(a.num_kv_heads * (a.head_size + a.v_head_size) for a in self.attention)
        return values * bytes_per_value


def load_manifest(folder: Path) -> Manifest:
    """Read `folder/pack.json`. Raises PackError when it is absent, damaged or of another format version."""
    path = folder / "pack.json"
    if not path.is_file():
        raise PackError(
            f"{folder} is not a pack: it has no pack.json. Make one with `packhorse convert SOURCE {folder}`."
        )
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (ValidationError, ValueError) as error:
        raise PackError(f"{path} cannot be read ({error}). Convert the model again.") from error
    if manifest.format_version != FORMAT_VERSION:
        raise PackError(
            f"{path} has format version {manifest.format_version}; this Packhorse reads {FORMAT_VERSION}. "
            "Convert the model again, or use the Packhorse that made it."
        )
    missing = [f.file for f in manifest.files if not (folder / f.file).is_file()]
    if missing:
        raise PackError(f"{folder} lacks {', '.join(missing)}, which its pack.json lists. Copy the whole folder.")
    return manifest
