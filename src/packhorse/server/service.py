"""What the routes share: the model that is served, and whether it may be asked now."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from packhorse.config import ServerConfig
from packhorse.engine.async_engine import AsyncEngine
from packhorse.errors import NotReady
from packhorse.pack.manifest import Manifest
from packhorse.text.tokenizer import Tokenizer

TEXT_THREADS = 2
"""Threads that parse, render and tokenize: enough to keep a long prompt from holding up the short ones."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready. names: what requests may call it, the first one is reported. max_model_len: tokens."""

    names: tuple[str, ...]
    manifest: Manifest
    tokenizer: Tokenizer
    engine: AsyncEngine
    max_model_len: int
    created: int

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(slots=True)
class Service:
    """model: None while it is loaded. draining: no new requests are taken. started: seconds since 1970."""

    settings: ServerConfig
    model: ServedModel | None = None
    draining: bool = False
    started: int = field(default_factory=lambda: int(time.time()))
    text_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="packhorse-text")
    )

    @property
    def ready(self) -> bool:
        """Whether a request that comes now would be served."""
        return self.model is not None and not self.draining and self.model.engine.healthy

    def served(self) -> ServedModel:
        """The model, for a new request. Raises NotReady while it is loaded; a draining engine refuses by itself."""
        if self.model is None:
            raise NotReady("The model is being loaded. Try again soon.")
        return self.model
