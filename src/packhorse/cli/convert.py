"""`packhorse convert SOURCE OUT`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from packhorse.pack.manifest import Manifest

_STAGES = {
    "find": "Finding the model",
    "load": "Loading the weights",
    "export": "Exporting the graph",
    "rewrite": "Rewriting the graph",
    "write": "Writing the pack",
    "check": "Comparing with transformers",
    "done": "Done",
}


def convert(
    source: Annotated[str, typer.Argument(help="A Hugging Face folder, a hub id, a .gguf file or an alias.")],
    out: Annotated[Path, typer.Argument(help="The folder of the new pack.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a pack that is there.")] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pickled weights, with the weights-only unpickler.")
    ] = False,
) -> None:
    """Convert a model into a pack, and check it against transformers."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from packhorse.pack.convert import convert as convert_model

    started = time.monotonic()
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(_STAGES["find"], total=1.0)

        def report(stage: str, fraction: float) -> None:
            bar.update(task, description=_STAGES.get(stage, stage), completed=fraction)

        manifest = convert_model(source, out, force=force, allow_pickle=allow_pickle, progress=report)
    for line in summary(manifest, out, time.monotonic() - started):
        typer.echo(line)


def summary(manifest: Manifest, out: Path, seconds: float) -> list[str]:
    """What was made, in lines: sizes, the parity that was measured, the time it took."""
    size = sum(record.bytes for record in manifest.files)
    parity = manifest.parity
    return [
        f"{manifest.name} -> {out} ({manifest.architecture}, {manifest.num_layers} layers, {size / 1e6:,.0f} MB, "
        f"context {manifest.context_length:,}) in {seconds:.0f} s",
        f"Same logits as transformers: largest difference {parity.max_abs_difference:.2g} "
        f"where the largest logit is {parity.max_logit:.1f} ({parity.checks} checks)",
    ]
