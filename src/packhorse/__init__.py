"""Packhorse: batch inference for language models.

from packhorse import LLM, SamplingParams

llm = LLM("smollm2-135m-instruct")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from packhorse.engine.outputs import CompletionOutput as CompletionOutput
    from packhorse.engine.outputs import RequestOutput as RequestOutput
    from packhorse.engine.sampling_params import SamplingParams as SamplingParams
    from packhorse.errors import PackhorseError as PackhorseError
    from packhorse.llm import LLM as LLM
    from packhorse.pack.convert import convert as convert

_HOME = {
    "LLM": "packhorse.llm",
    "SamplingParams": "packhorse.engine.sampling_params",
    "RequestOutput": "packhorse.engine.outputs",
    "CompletionOutput": "packhorse.engine.outputs",
    "PackhorseError": "packhorse.errors",
    "convert": "packhorse.pack.convert",
}

__all__ = ["LLM", "CompletionOutput", "PackhorseError", "RequestOutput", "SamplingParams", "__version__", "convert"]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is asked for, so that `import packhorse` costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'packhorse' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
