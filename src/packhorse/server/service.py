"""What the routes share: the model that is served, and whether it may be asked now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeVar, TypeVarTuple

from packhorse.config import ServerConfig
from packhorse.engine.async_engine import AsyncEngine
from packhorse.errors import NotReady
from packhorse.text.tokenizer import Tokenizer

T = TypeVar("T")
Args = TypeVarTuple("Args")

Standing = Literal["loading", "ready", "stuck", "draining"]

TEXT_THREADS = 2
"""Threads that parse, render and tokenize: enough to keep a long prompt from holding up the short ones."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready. names: what requests may call it, the first one is reported. max_model_len: tokens."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    engine: AsyncEngine
    max_model_len: int
    created: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(slots=True)
class Service:
    """model: None while it is loaded. draining: no new requests are taken."""

    settings: ServerConfig
    model: ServedModel | None = None
    draining: bool = False
    text_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="packhorse-text")
    )

    async def in_text_thread(self, work: Callable[[*Args], T], *args: *Args) -> T:
        """Run work on text beside the event loop, which answers others meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work, *args)

    @property
    def standing(self) -> Standing:
        """What would become of a request that comes now: only a ready server serves it."""
        if self.draining:
            return "draining"
        if self.model is None:
            return "loading"
        return "ready" if self.model.engine.healthy else "stuck"

    def served(self) -> ServedModel:
        """The model, for a new request. Raises NotReady while it is loaded; a draining engine refuses by itself."""
        if self.model is None:
            raise NotReady("The model is being loaded. Try again soon.")
        return self.model
