"""The Python API for offline use: a list of prompts in, a list of results out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packhorse.config import load_config
from packhorse.engine.engine import Engine
from packhorse.engine.outputs import RequestOutput
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.errors import ConfigError, InvalidRequest, PackhorseError
from packhorse.loading import LoadedModel, Progress, load_model
from packhorse.text.chat_template import Messages
from packhorse.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Messages | dict[str, Any]
"""Text, token ids, messages, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}."""


class LLM:
    """One model, ready to generate.

    model: a pack's folder, or a source (Hugging Face folder or hub id, .gguf file, alias), which is converted once
    into the cache directory; default the setting model_path. settings: those of EngineConfig, such as
    max_num_seqs=32; they override packhorse.toml. Raises ConfigError for settings, and what `load_model` raises.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        config = load_config(settings)
        named = model if model is not None else config.model_path
        if named is None:
            raise ConfigError("No model is named: give one, or set model_path in packhorse.toml.", param="model_path")
        self._loaded: LoadedModel = load_model(named, config, progress)
        self._numbers = itertools.count()
        self._busy = False

    @property
    def engine(self) -> Engine:
        return self._loaded.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._loaded.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Results in the order of the prompts.

        prompts: one or a list of: text, token ids, a list of messages, or vLLM's {"prompt": …} and
        {"prompt_token_ids": …}. sampling_params: one for all, or one each. A request that fails has its `error` set;
        its neighbours are served. Raises ConfigError when the numbers of prompts and parameters differ.
        """
        outputs = {int(output.request_id): output for output in self.stream(prompts, sampling_params)}
        return [outputs[number] for number in sorted(outputs)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """The same results, each as it finishes; request ids count up in the order of the prompts."""
        items = _as_list(prompts)
        params = _one_each(sampling_params, len(items))
        ids = [str(next(self._numbers)) for _ in items]
        self._take()
        try:
            yield from self._submit_all(ids, items, params)
            while self.engine.num_unfinished:
                yield from self.engine.step()
        finally:  # if the caller left early, what nobody waits for gives its cache back
            for request_id in ids:
                self.engine.abort(request_id)
            while self.engine.num_unfinished:
                self.engine.step()
            self._busy = False

    def _take(self) -> None:
        if self._busy:
            raise ConfigError("This LLM is in the middle of another stream(): exhaust or close that one first.")
        self._busy = True

    def _submit_all(
        self, ids: list[str], prompts: list[Prompt], params: list[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """Queue the requests; those refused on arrival come back at once."""
        for request_id, prompt, settings in zip(ids, prompts, params, strict=True):
            try:
                text, tokens = self._tokens(prompt)
            except PackhorseError as error:
                yield _failed(request_id, prompt if isinstance(prompt, str) else None, [], error)
                continue
            try:
                self.engine.submit(Request(request_id, tokens, settings, prompt=text))
            except PackhorseError as error:
                yield _failed(request_id, text, tokens, error)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (if there is one) and ids of a prompt."""
        given: Any = prompt
        if isinstance(given, dict):
            given = given["prompt_token_ids"] if "prompt_token_ids" in given else given.get("prompt", "")
        if isinstance(given, str):
            return given, self._need_tokenizer().encode(given)
        items = list(given)
        if items and all(isinstance(item, dict) for item in items):
            return None, self._need_tokenizer().encode_chat(items)
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise InvalidRequest("A prompt is text, a list of token ids, or a list of messages.", param="prompt")
        return None, items

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("This pack has no tokenizer: give prompts as lists of token ids.", param="prompt")
        return self.tokenizer


def _failed(request_id: str, text: str | None, tokens: list[int], error: PackhorseError) -> RequestOutput:
    return RequestOutput(request_id, text, tokens, outputs=[], finished=True, error=error)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single prompt is a list of one. A list of ids or of messages is one prompt, a list of such lists many."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    items: list[Any] = list(prompts)
    is_ids = all(isinstance(item, int) for item in items)
    is_chat = all(isinstance(item, dict) and "role" in item for item in items)
    return [items] if items and (is_ids or is_chat) else items


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"There are {count} prompts and {len(params)} sampling parameters: give one, or one each.")
    return list(params)
