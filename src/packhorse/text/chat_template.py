"""Chat templates: Jinja programs that come with a model, rendered in a sandbox with a time limit."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packhorse.errors import InvalidRequest, PackError

Messages = list[dict[str, Any]]

RENDER_SECONDS = 5.0
"""What rendering may take. A usual chat takes some tenths of a millisecond; a loop without an end takes for ever."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's part for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TimedEnvironment(ImmutableSandboxedEnvironment):
    """Looks at the clock at every turn of a loop and every call, so that no template runs for ever.

    A thread cannot be stopped from outside; a template can stop itself. deadline: of what this thread renders.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rendering = threading.local()
        self.filters["_timed"] = self._timed

    def start_clock(self, seconds: float) -> None:
        self._rendering.deadline = time.monotonic() + seconds

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._look_at_clock()
        return super().call(context, function, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_timed", [], [], None, None)
        return tree

    def _timed(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._look_at_clock()
            yield item

    def _look_at_clock(self) -> None:
        if time.monotonic() > getattr(self._rendering, "deadline", float("inf")):
            raise TimeoutError("it takes too long")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """JSON as models were trained on it: not escaped for HTML, which is what jinja2's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. `special_tokens` (bos_token, eos_token, …) are visible to it by name. seconds: its limit."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, seconds: float = RENDER_SECONDS) -> None:
        environment = self._environment = _TimedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._special_tokens = special_tokens
        self._seconds = seconds
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise PackError(f"The chat template has a fault in line {error.lineno}: {error.message}.") from error

    def render(
        self, messages: Messages, *, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text. Raises InvalidRequest with the template's own words when it refuses the messages."""
        self._environment.start_clock(self._seconds)
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequest(
                f"The model's chat template cannot render these messages: {error}.", param="messages"
            ) from error
