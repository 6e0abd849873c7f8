"""Mixture-of-experts layers in a form that exports: every expert over every token, weighted by the routing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from packhorse.pack.registry import registered

_IMPLEMENTATION = "packhorse_dense"


@contextmanager
def dense(model: Any) -> Iterator[None]:
    """While inside, experts of `model` run densely. Models without experts are not touched."""
    before = getattr(model.config, "_experts_implementation", None)
    with registered(ExpertsInterface._global_mapping, _IMPLEMENTATION, dense_experts):
        try:
            model.config._experts_implementation = _IMPLEMENTATION
            yield
        finally:
            model.config._experts_implementation = before


def dense_experts(self: Any, hidden: Any, chosen: Any, weights: Any) -> Any:
    """hidden: float[T, H], chosen: int64[T, top_k], weights: float[T, top_k] -> float[T, H].

    An expert that a token did not choose gets weight 0 for it. Costs num_experts / top_k times the products of a
    gathered implementation at worst, but has no data-dependent shape, so one graph serves every step.
    """
    routing = torch.zeros(hidden.shape[0], self.num_experts, dtype=hidden.dtype)
    routing = routing.scatter_add(1, chosen, weights.to(hidden.dtype))
    total = None
    for expert in range(self.num_experts):
        output = _run_expert(self, hidden, expert) * routing[:, expert, None]
        total = output if total is None else total + output
    return total


def _run_expert(self: Any, hidden: Any, expert: int) -> Any:
    name = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _linear(self, hidden, name, expert)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    output = _linear(self, inner, "down_proj", expert)
    return self.post_expert_norm(output) if self.has_post_expert_norm else output


def _linear(self: Any, x: Any, name: str, expert: int) -> Any:
    weight = getattr(self, name)[expert]
    bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
    return torch.nn.functional.linear(x, weight.T if self.is_transposed else weight, bias)
