"""Settings as options of a verb: names, types and help come from their classes in `config.py` and nowhere else."""

from __future__ import annotations

import inspect
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from packhorse.config import EngineConfig, Settings

_ENGINE_PANEL = "Engine: also settings of packhorse.toml, with _ for -"
_SERVER_PANEL = "Server: also settings of the table [server] in packhorse.toml"


class EngineCommand(TyperCommand):
    """A verb with an option for each setting; what was given is in the context's `obj`, None where nothing was.

    The options are made when the verb is asked for, so that the program's own help needs no EngineConfig.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), *self._options()]

    def invoke(self, ctx: Any) -> Any:
        values = {option.name: ctx.params.pop(option.name) for option in self._options()}
        ctx.obj = {name: None if value in ([], ()) else value for name, value in values.items()}
        return super().invoke(ctx)

    def _options(self) -> list[Any]:
        from packhorse.config import EngineConfig

        return _options_of(EngineConfig, _ENGINE_PANEL)


class ServerCommand(EngineCommand):
    """The same with the server's settings before those of the engine."""

    def _options(self) -> list[Any]:
        from packhorse.config import ServerConfig

        return [*_options_of(ServerConfig, _SERVER_PANEL), *super()._options()]


def given(settings: type[Settings], options: dict[str, Any]) -> dict[str, Any]:
    """Of a command's options those that are settings of this class."""
    return {name: value for name, value in options.items() if name in settings.model_fields}


def model_named(config: EngineConfig) -> str:
    """The model of the settings. Raises ConfigError when there is none."""
    from packhorse.errors import ConfigError

    if config.model_path is None:
        raise ConfigError("Which model? Give --model, or set model_path in packhorse.toml.", param="model_path")
    return config.model_path


@cache
def _options_of(settings: type[Settings], panel: str) -> list[Any]:
    """Typer's own options, made from a function that has a parameter for each setting but the model."""

    def verb() -> None: ...

    fields = {name: field for name, field in settings.model_fields.items() if name != "model_path"}
    annotations = {name: _annotation(name, field, panel) for name, field in fields.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=None, annotation=a) for name, a in annotations.items()]
    verb.__annotations__ = annotations
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(verb)
    return list(typer.main.get_command(app).params)


def _annotation(name: str, field: FieldInfo, panel: str) -> Any:
    kind = _kind(field.annotation)
    option = name.replace("_", "-")
    flag = [f"--{option}/--no-{option}"] if kind is bool else [f"--{option}"]
    info = typer.Option(*flag, help=_help(field), metavar=_metavar(kind), rich_help_panel=panel)
    # Numbers and flags are read by typer; the settings read the rest themselves, and say what is wrong with it.
    taken = list[str] if kind == tuple[str, ...] else kind if kind in (bool, int, float) else str
    return Annotated[taken | None, info]


def _kind(annotation: Any) -> Any:
    """The type but for None."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next(kind for kind in kinds if kind is not NoneType)


def _metavar(kind: Any) -> str | None:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return "N,N,…" if get_origin(kind) is tuple and kind != tuple[str, ...] else None


def _help(field: FieldInfo) -> str:
    default = default_text(field.default)
    return f"{field.description}" + (f" Default: {default}." if default else "")


def default_text(default: Any) -> str:
    """A default as people write it; nothing for None, which the description explains."""
    if default is None or default == ():
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)
