"""A Transformers decoder becomes one ONNX graph in which every attention call is a single opaque node."""

from __future__ import annotations

import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import onnx_ir as ir
import torch

from packhorse.errors import UnsupportedModel
from packhorse.pack import attention_hook, experts
from packhorse.pack.load import GROWING_ROPE

OPSET = 23  # the first with RMSNormalization and RotaryEmbedding as single operators
_LARGEST_STEP = 1 << 20
_TOKEN_WISE_LAYERS = {"full_attention", "sliding_attention", "attention"}


def export(model: Any, context_length: int) -> ir.Model:
    """Graph of `ids: int64[T], positions: int64[T] -> logits: float32[T, V]`, with PagedAttention nodes in it.

    The whole causal-LM forward pass is traced, so what a model does to its logits (soft-cap, scale) is in the graph.
    Raises UnsupportedModel, naming the architecture and, where one is at fault, the operator.
    """
    _refuse_what_mixes_tokens(model)
    with torch.no_grad(), experts.dense(model):
        observation = attention_hook.observe(model, context_length)
        with attention_hook.opaque(model, observation) as restart:
            program = _trace(model, restart)
    program.model.graph.name = "step"
    return program.model


def _trace(model: Any, restart: Any) -> Any:
    class RaggedStep(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, positions: Any) -> Any:
            restart()
            return self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]

    # Sizes 0 and 1 would be taken as constants by the tracer, hence the minimum of 2 and an example of 7.
    tokens = torch.export.Dim("T", min=2, max=_LARGEST_STEP)
    example = (torch.arange(7) + 3, torch.arange(7))
    try:
        with _quiet(), _fixed_frequencies(model):
            return torch.onnx.export(
                RaggedStep(),
                example,
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=({0: tokens}, {0: tokens}),
                input_names=["ids", "positions"],
                output_names=["logits"],
                verbose=False,
            )
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(_explain(model, error)) from error


def _refuse_what_mixes_tokens(model: Any) -> None:
    name = f"{type(model).__name__} ({model.config.model_type})"
    others = sorted(set(getattr(model.config, "layer_types", None) or ()) - _TOKEN_WISE_LAYERS)
    if others:
        raise UnsupportedModel(
            f"{name} cannot be cut: it has layers of kind {', '.join(others)}, which carry a state from token to token."
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{name} cannot be cut: its forward pass does not take position_ids.")


def _explain(model: Any, error: Exception) -> str:
    """Name the architecture and the operator. The exporter wraps its causes, so the whole chain is searched."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(chain)
    operator = re.search(r"No (?:decompositions|ONNX function) .*?(?:for|of) '?(?:<OpOverload\(op=)?'?([\w.:]+)", text)
    operator = operator or re.search(r"\b((?:aten|transformers|prims|higher_order)[.:]+\w+)", text)
    at_fault = f"the operator {operator.group(1)} has no ONNX form" if operator else _first_line(chain[-1])
    return f"{type(model).__name__} ({model.config.model_type}) cannot be exported: {at_fault}."


def _first_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), "the exporter gave no reason")


@contextmanager
def _fixed_frequencies(model: Any) -> Iterator[None]:
    """Rotary embeddings that grow with the longest sequence of a batch keep their first frequencies while inside.

    One step serves sequences of many lengths, so it cannot follow them; up to the original length, which is the context
    length of such a model's pack (see load.context_length), nothing grows.
    """
    growing = [m for m in model.modules() if getattr(m, "rope_type", None) in GROWING_ROPE]
    types = [module.rope_type for module in growing]
    for module in growing:
        module.rope_type = "default"
    try:
        yield
    finally:
        for module, rope_type in zip(growing, types, strict=True):
            module.rope_type = rope_type


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks about its own business, and prints whole graphs when it fails; not while inside."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
