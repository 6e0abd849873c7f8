"""The engine's settings as options of a verb: names, types and help come from EngineConfig and nowhere else."""

from __future__ import annotations

import inspect
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from packhorse.config import EngineConfig

_PANEL = "Engine: also settings of packhorse.toml, with _ for -"


class EngineCommand(TyperCommand):
    """A verb with an option for each setting; what was given is in the context's `obj`, None where nothing was.

    The options are made when the verb is asked for, so that the program's own help needs no EngineConfig.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), *_options()]

    def invoke(self, ctx: Any) -> Any:
        ctx.obj = {option.name: ctx.params.pop(option.name) for option in _options()}
        return super().invoke(ctx)


def model_named(config: EngineConfig) -> str:
    """The model of the settings. Raises ConfigError when there is none."""
    from packhorse.errors import ConfigError

    if config.model_path is None:
        raise ConfigError("Which model? Give --model, or set model_path in packhorse.toml.", param="model_path")
    return config.model_path


@cache
def _options() -> list[Any]:
    """Typer's own options, made from a function that has a parameter for each setting but the model."""
    from packhorse.config import EngineConfig

    def verb() -> None: ...

    fields = {name: field for name, field in EngineConfig.model_fields.items() if name != "model_path"}
    annotations = {name: _annotation(name, field) for name, field in fields.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=None, annotation=a) for name, a in annotations.items()]
    verb.__annotations__ = annotations
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(verb)
    return list(typer.main.get_command(app).params)


def _annotation(name: str, field: FieldInfo) -> Any:
    kind = _kind(field.annotation)
    option = name.replace("_", "-")
    flag = [f"--{option}/--no-{option}"] if kind is bool else [f"--{option}"]
    info = typer.Option(*flag, help=_help(field), metavar=_metavar(kind), rich_help_panel=_PANEL)
    # Numbers and flags are read by typer; EngineConfig reads the rest itself, and says what is wrong with it.
    return Annotated[(kind if kind in (bool, int, float) else str) | None, info]


def _kind(annotation: Any) -> Any:
    """The type but for None."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return next(kind for kind in kinds if kind is not NoneType)


def _metavar(kind: Any) -> str | None:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return "N,N,…" if get_origin(kind) is tuple else None


def _help(field: FieldInfo) -> str:
    default = default_text(field.default)
    return f"{field.description}" + (f" Default: {default}." if default else "")


def default_text(default: Any) -> str:
    """A default as people write it; nothing for None, which the description explains."""
    if default is None:
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)
