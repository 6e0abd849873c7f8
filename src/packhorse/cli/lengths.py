"""`packhorse lengths`: how long a file's requests are, and the length buckets that suit them. No weights are loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from packhorse.cli.settings import model_named

if TYPE_CHECKING:
    from packhorse.engine.lengths import LengthHistogram
    from packhorse.jobs.lengths import FileLengths
    from packhorse.text.tokenizer import Tokenizer

_BAR = 40

Row = tuple[str, int]
"""A range of lengths in words, and how many have such a length."""


def lengths(
    file: Annotated[Path, typer.Argument(help="Requests, as `packhorse run` takes them.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--model-path",
            "-m",
            help="Whose tokenizer: a pack, or what `packhorse convert` takes. Default: model_path of the settings.",
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="jsonl, txt, csv or parquet; default: by the name's ending.")
    ] = None,
    column: Annotated[str | None, typer.Option(help=".csv, .parquet: the column with the prompts.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help=".txt, .csv, .parquet: each text is a user's message.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Default of simple lines, as `packhorse run` will be told.")
    ] = None,
    buckets: Annotated[int, typer.Option(min=1, max=16, help="Groups to propose, at most.")] = 4,
    config: Annotated[Path | None, typer.Option(help="Engine settings. Default: packhorse.toml, if there.")] = None,
) -> None:
    """Show how long the requests of a file are, and propose length buckets for --policy dynamic.

    Lines that are no requests are counted and named on standard error.
    """
    from packhorse.cli.run import checked_format
    from packhorse.config import load_config
    from packhorse.errors import JobError
    from packhorse.jobs.inputs import open_input
    from packhorse.jobs.lengths import file_lengths

    engine = load_config({"model_path": model}, config)
    name = model_named(engine)
    source = open_input(file, format=checked_format(format), column=column, chat=chat)
    tokenizer, context_length = _find_tokenizer(name, engine.escape_control_tokens)
    found = file_lengths(
        source.entries(),
        tokenizer,
        defaults={} if max_tokens is None else {"max_tokens": max_tokens},
        max_len=min(context_length, engine.max_model_len or context_length),
    )
    for line in _bad_lines(found):
        typer.echo(line, err=True)
    if not found.prompts.total:
        raise JobError(f"{file} holds no requests whose length is known.")
    _show(found, buckets)


def _find_tokenizer(model: str, escape_control_tokens: bool) -> tuple[Tokenizer, int]:
    """The tokenizer of a pack or source, and the model's context length. A source is not converted for it."""
    from packhorse.pack.manifest import load_manifest
    from packhorse.text.tokenizer import Tokenizer

    folder = Path(model).expanduser()
    if not (folder / "pack.json").is_file():
        return _tokenizer_of_source(model, escape_control_tokens)
    manifest = load_manifest(folder)
    tokenizer = Tokenizer.from_pack(folder, manifest, escape_control_tokens=escape_control_tokens)
    return tokenizer, manifest.context_length


def _tokenizer_of_source(model: str, escape_control_tokens: bool) -> tuple[Tokenizer, int]:
    """Written down as in a pack, and read back from there."""
    import tempfile

    from packhorse.errors import SourceError
    from packhorse.pack import tokenizer_files
    from packhorse.pack.manifest import Manifest
    from packhorse.pack.source import resolve
    from packhorse.text.tokenizer import Tokenizer

    source = resolve(model)
    try:
        from packhorse.pack import load
    except ImportError as error:
        raise SourceError(
            f"Reading the tokenizer of {model} needs {error.name}: pip install 'packhorse[convert]', or give a pack."
        ) from error
    config = load.load_config(source)
    with tempfile.TemporaryDirectory() as scratch:
        record, template = tokenizer_files.write(load.load_tokenizer(source), Path(scratch))
        files = Manifest.model_construct(tokenizer=record, chat_template=template)
        tokenizer = Tokenizer.from_pack(Path(scratch), files, escape_control_tokens=escape_control_tokens)
    return tokenizer, load.context_length(config.get_text_config())


def _bad_lines(found: FileLengths) -> list[str]:
    if not found.bad_lines:
        return []
    what = "1 line is no request" if found.bad_lines == 1 else f"{found.bad_lines:,} lines are no requests"
    more = found.bad_lines - len(found.problems)
    named = [f"  line {line}: {message}" for line, message in found.problems]
    return [f"{what} and not counted:", *named, *([f"  … and {more:,} more"] if more else [])]


def _show(found: FileLengths, buckets: int) -> None:
    edges = found.totals.buckets(buckets)
    tables = [
        ("Tokens of a prompt", length_rows(found.prompts)),
        ("Tokens of a prompt and its max_tokens", length_rows(found.totals)),
        ("Proposed buckets", bucket_rows(found.totals, edges)),
    ]
    if sys.stdout.isatty():
        _show_tables(tables)
    else:
        _print_tables(tables)
    if found.open_ended:
        typer.echo(f"{found.open_ended:,} prompts have no max_tokens and count as long as they are.")
    for line in setting_lines(edges):
        typer.echo(line)


def length_rows(histogram: LengthHistogram) -> list[Row]:
    """Every range of lengths that any prompt has."""
    return [(_range(low, high), count) for low, high, count in histogram.rows()]


def bucket_rows(histogram: LengthHistogram, edges: Sequence[int]) -> list[Row]:
    """How many fall into each bucket; the last one is open."""
    lows = [1, *(edge + 1 for edge in edges)]
    rows = []
    for low, high in zip(lows, [*edges, None], strict=True):
        inside = (n for _, longest, n in histogram.rows() if longest >= low and (high is None or longest <= high))
        rows.append((_range(low, high), sum(inside)))
    return rows


def setting_lines(edges: Sequence[int]) -> list[str]:
    """The setting to paste, in both places."""
    if not edges:
        return ["All are of about one length: no buckets are needed."]
    return [
        "On the command line:",
        f"  --policy dynamic --length-buckets {','.join(map(str, edges))}",
        "In packhorse.toml:",
        '  policy = "dynamic"',
        f"  length_buckets = [{', '.join(map(str, edges))}]",
    ]


def _range(low: int, high: int | None) -> str:
    if high is None:
        return f"from {low:,}"
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _print_tables(tables: list[tuple[str, list[Row]]]) -> None:
    """A line each, for files and pipes."""
    for title, rows in tables:
        typer.echo(f"{title}:")
        width = max(len(name) for name, _ in rows)
        for name, count in rows:
            typer.echo(f"  {name:>{width}}  {count:,}")


def _show_tables(tables: list[tuple[str, list[Row]]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, rows in tables:
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
        table.add_column("tokens", justify="right")
        table.add_column("prompts", justify="right")
        table.add_column("")
        most = max(count for _, count in rows)
        for name, count in rows:
            table.add_row(name, f"{count:,}", Text("█" * -(-count * _BAR // most), style="cyan"))
        console.print(table)
