"""`packhorse inspect`: a manifest, made readable."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from packhorse.pack.manifest import AttentionSpec, Manifest


def show_manifest(manifest: Manifest) -> None:
    """Print it to standard output."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in manifest_rows(manifest):
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def manifest_rows(manifest: Manifest) -> list[tuple[str, str]]:
    """Name and value of what there is to know, in words."""
    size = sum(record.bytes for record in manifest.files)
    parity = manifest.parity
    return [
        ("name", manifest.name),
        ("source", f"{manifest.source.kind}: {manifest.source.name}"),
        ("architecture", f"{manifest.architecture} ({manifest.model_type})"),
        ("identity", manifest.identity),
        ("precision", manifest.precision),
        ("size", f"{size / 1e6:,.1f} MB in {len(manifest.files)} files"),
        ("context", f"{manifest.context_length:,} tokens"),
        ("vocabulary", f"{manifest.vocab_size:,} ids"),
        ("layers", f"{manifest.num_layers}, hidden size {manifest.hidden_size}"),
        *(("attention", line) for line in _attention(manifest.attention)),
        ("cache", f"{manifest.kv_bytes_per_token():,} bytes a token"),
        ("eos ids", ", ".join(map(str, manifest.eos_token_ids)) or "none"),
        ("tokenizer", f"{manifest.tokenizer.vocab_size:,} ids" if manifest.tokenizer else "none: token ids only"),
        ("chat template", "yes" if manifest.chat_template else "no"),
        ("parity", f"largest difference {parity.max_abs_difference:.2e} over {parity.checks:,} checks"),
        ("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]


def _attention(specs: tuple[AttentionSpec, ...]) -> list[str]:
    """Layers of one kind on one line."""
    kinds = Counter(_kind(spec) for spec in specs)
    return [f"{layers} × {kind}" for kind, layers in kinds.items()]


def _kind(spec: AttentionSpec) -> str:
    sizes = f"{spec.head_size}" if spec.head_size == spec.v_head_size else f"{spec.head_size}/{spec.v_head_size}"
    parts = [f"{spec.num_heads} heads, {spec.num_kv_heads} of keys and values, size {sizes}"]
    if spec.window:
        parts.append(f"window {spec.window}")
    if spec.softcap:
        parts.append(f"soft-cap {spec.softcap:g}")
    if spec.sinks is not None:
        parts.append("sinks")
    return ", ".join(parts)
