"""`packhorse run`: a file of requests in, a file of results out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from packhorse.cli.settings import model_named

if TYPE_CHECKING:
    from packhorse.config import EngineConfig
    from packhorse.jobs.job import JobModel

_SAMPLING = "Sampling of simple lines"
_JOB = "Job"
_CHANGE_RESULTS = ("max_model_len", "escape_control_tokens", "precision", "kv_dtype")


def run(
    ctx: typer.Context,
    input: Annotated[
        str,
        typer.Argument(
            metavar="INPUT", help="Requests: .jsonl, .txt (a prompt a line), .csv, .parquet; - is standard input."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Results, one JSON line each, in OpenAI's batch form.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--model-path",
            "-m",
            help="A pack, or what `packhorse convert` takes, converted once. Default: model_path of the settings.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(help="jsonl, txt, csv or parquet; default: by the name's ending.", rich_help_panel=_JOB),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help=".csv, .parquet: the column with the prompts.", rich_help_panel=_JOB)
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help=".txt, .csv, .parquet: each text is a user's message.", rich_help_panel=_JOB),
    ] = False,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="A name that lines may call the model; the first is reported.", rich_help_panel=_JOB),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Check every line first; run none if one is bad.", rich_help_panel=_JOB)
    ] = False,
    strict_fields: Annotated[
        bool, typer.Option("--strict-fields", help="Unknown fields fail their line.", rich_help_panel=_JOB)
    ] = False,
    no_sort: Annotated[
        bool, typer.Option("--no-sort", help="Leave results in the order of finishing.", rich_help_panel=_JOB)
    ] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Throw away what an earlier start left.", rich_help_panel=_JOB)
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Run lines again that failed before.", rich_help_panel=_JOB)
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write the summary to this file, as JSON.", rich_help_panel=_JOB)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Engine settings. Default: packhorse.toml, if there.", rich_help_panel=_JOB)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most probable token.", rich_help_panel=_SAMPLING)
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Default: 16 for a prompt, all the context leaves for a chat.", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=_SAMPLING)] = None,
    top_k: Annotated[int | None, typer.Option(help="The k most probable tokens.", rich_help_panel=_SAMPLING)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Least share of the most probable token.", rich_help_panel=_SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: repeat less.", rich_help_panel=_SAMPLING)
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2 to 2.", rich_help_panel=_SAMPLING)] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2.", rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Changes what is sampled in lines without a seed of their own; the same job gives the same file.",
            rich_help_panel=_JOB,
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Ends the text; may be given several times.", rich_help_panel=_SAMPLING)
    ] = None,
) -> None:
    """Run a file of requests and write a result for each.

    Lines are OpenAI batch lines, or simple: {"messages": […]} or {"prompt": "…"} with sampling fields and an id.
    Stopped or killed, the same command goes on where it was. Exit code 0: every line succeeded; 1: some failed;
    2: the job could not run; 130, 143: stopped by Ctrl-C, SIGTERM.
    """
    from packhorse.cli.progress import progress_display
    from packhorse.config import load_config
    from packhorse.jobs.job import JobSpec, run_job
    from packhorse.jobs.loop import window_for
    from packhorse.jobs.signals import StopSignals

    _check_report(report)
    engine = load_config(ctx.obj | {"model_path": model}, config)
    name = model_named(engine)
    defaults = {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": stop or None,
    }
    spec = JobSpec(
        input=None if input == "-" else Path(input),
        output=output,
        format=checked_format(format),
        column=column,
        chat=chat,
        defaults=_checked({name: value for name, value in defaults.items() if value is not None}),
        result_settings=_result_settings(engine) | {"seed": seed},
        window=window_for(engine),
        strict=strict,
        strict_fields=strict_fields,
        sort=not no_sort,
        restart=restart,
        retry_errors=retry_errors,
    )
    with progress_display() as display:
        done = run_job(
            spec,
            lambda: _find_model(name, engine, served_model_name or [], display.on_conversion),
            on_progress=display.on_progress,
            signals=StopSignals(),
        )
    display.show_report(done)
    if report is not None:
        _write_report(report, done.to_dict())
    raise typer.Exit(done.exit_code)


def _check_report(path: Path | None) -> None:
    """Better now than after an hour's work."""
    from packhorse.errors import ConfigError

    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path.parent} does not exist: make the folder for the report first.", param="report")


def checked_format(name: str | None) -> Any:
    """The name of an input format. Raises ConfigError for any other."""
    from packhorse.errors import ConfigError

    if name not in (None, "jsonl", "txt", "csv", "parquet"):
        raise ConfigError(f"format is {name!r}: it must be jsonl, txt, csv or parquet.", param="format")
    return name


def _checked(defaults: dict[str, Any]) -> dict[str, Any]:
    """A wrong default is a wrong command, not an error on every line."""
    from packhorse.engine.sampling_params import SamplingParams

    SamplingParams(**defaults)
    return defaults


def _result_settings(engine: EngineConfig) -> dict[str, Any]:
    """Of the engine's settings those that change what comes out; the others change only how fast."""
    return {name: getattr(engine, name) for name in _CHANGE_RESULTS}


def _find_model(model: str, config: EngineConfig, served_names: list[str], on_conversion: Any) -> JobModel:
    """The pack of `model`, converted now if need be; loading waits until the job is known to need it."""
    from packhorse.jobs.job import JobModel
    from packhorse.loading import load_model, pack_folder
    from packhorse.pack.manifest import load_manifest

    folder = pack_folder(model, on_conversion)
    manifest = load_manifest(folder)

    def load() -> Any:
        from packhorse.errors import PackError

        loaded = load_model(folder, config)
        if loaded.tokenizer is None:
            raise PackError(f"{folder} has no tokenizer, and a batch job needs one. Convert the model with it.")
        return loaded.engine, loaded.tokenizer

    names = served_names or [manifest.name, manifest.source.name]
    return JobModel(name=names[0], identity=manifest.identity, names=frozenset(names), load=load)


def _write_report(path: Path, report: dict[str, Any]) -> None:
    import orjson

    from packhorse.errors import JobError

    try:
        path.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error.strerror}. The results themselves are complete.") from error
