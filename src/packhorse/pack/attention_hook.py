"""The one place where a model's attention is intercepted: first to look, then to leave an opaque node in the graph.

Transformers lets an attention function and a mask function be registered by name. Two pairs are registered here:

    observe   runs the model on two tokens and notes, for each attention call, which keys its mask lets a query see
    opaque    emits one `packhorse::PagedAttention` node in place of the call; the mask is None

A model that calls `torch.nn.functional.scaled_dot_product_attention` by itself (falcon) is caught there instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from packhorse.errors import UnsupportedModel
from packhorse.pack.registry import registered

DOMAIN = "packhorse"
OPERATOR = "PagedAttention"

_IMPLEMENTATION = "packhorse"
_SDPA = "sdpa"
# A mask is examined at this query position, which is past every window that a model of today has.
_FAR = 1 << 21

AttentionFunction = Callable[..., tuple[Any, None]]
MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """What one attention call may see. `window`: keys at p - window + 1 … p only; 0 when all up to p."""

    window: int


@dataclass(slots=True)
class Observation:
    """The attention calls of a model in order, and how they were caught."""

    implementation: str
    calls: list[ObservedCall] = field(default_factory=list)


def observe(model: Any, context_length: int) -> Observation:
    """Run the model on two tokens and note each attention call.

    Raises UnsupportedModel when no call can be caught, or when one sees anything but the keys up to its own position
    (chunked or bidirectional masks, position biases such as ALiBi).
    """
    for implementation in (_IMPLEMENTATION, _SDPA):
        found = _observe_through(model, implementation, context_length)
        if found.calls:
            return found
    raise UnsupportedModel(
        f"{_name(model)} cannot be cut: its attention is called neither through transformers.AttentionInterface nor "
        "through torch.nn.functional.scaled_dot_product_attention."
    )


@contextmanager
def opaque(model: Any, observation: Observation) -> Iterator[Callable[[], None]]:
    """While inside, attention calls of `model` trace to PagedAttention nodes. Yields a function that must be called
    at the start of every forward pass, because calls are matched with `observation` by their order.
    """
    order = 0

    def restart() -> None:
        nonlocal order
        order = 0

    def emit(
        _module: Any, q: Any, k: Any, v: Any, _mask: Any = None, scaling: float | None = None, **options: Any
    ) -> tuple[Any, None]:
        nonlocal order
        index, order = order, order + 1
        return _symbolic_attention(q, k, v, index, observation.calls[index].window, scaling, options), None

    with _caught(model, observation.implementation, emit, _no_mask):
        yield restart


def _symbolic_attention(
    q: Any, k: Any, v: Any, layer: int, window: int, scaling: float | None, options: dict[str, Any]
) -> Any:
    """q: [1, heads, T, head_size], k and v: [1, kv_heads, T, size] -> [1, T, heads, v_head_size].

    The node itself has two-dimensional inputs and output, as AttentionSpec says.
    """
    num_heads, num_kv_heads, head_size, v_head_size = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    tokens = q.shape[2]
    flat = [x[0].transpose(0, 1).reshape(tokens, x.shape[1] * x.shape[3]) for x in (q, k, v)]
    sinks = options.get("s_aux")
    output = torch.onnx.ops.symbolic(
        f"{DOMAIN}::{OPERATOR}",
        flat if sinks is None else [*flat, sinks],
        {
            "layer": layer,
            "scale": float(scaling if scaling is not None else head_size**-0.5),
            "window": window,
            "softcap": float(options.get("softcap") or 0.0),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_size": head_size,
            "v_head_size": v_head_size,
        },
        dtype=q.dtype,
        shape=(tokens, num_heads * v_head_size),
        version=1,
    )
    return output.reshape(1, tokens, num_heads, v_head_size)


def _observe_through(model: Any, implementation: str, context_length: int) -> Observation:
    found = Observation(implementation)
    # A mask is represented by a small tensor of our own. Whatever reaches the attention call under another identity
    # was changed on the way, by a position bias for example.
    markers: dict[int, tuple[Any, ObservedCall]] = {}

    def make_mask(*, mask_function: Any, **_: Any) -> Any:
        marker = torch.zeros(1, 1, 1, 1)
        markers[id(marker)] = (marker, ObservedCall(_window_of(model, mask_function, context_length)))
        return marker

    def note(_module: Any, q: Any, _k: Any, v: Any, mask: Any = None, **_: Any) -> tuple[Any, None]:
        if id(mask) not in markers:
            raise UnsupportedModel(
                f"{_name(model)} cannot be cut: it adds a bias of its own to the attention scores (such as ALiBi), "
                "which paged attention does not have."
            )
        found.calls.append(markers[id(mask)][1])
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3]), None

    with _caught(model, implementation, note, make_mask), torch.no_grad():
        ids = torch.tensor([[0, 1]])
        try:
            model(input_ids=ids, position_ids=torch.tensor([[0, 1]]), use_cache=False)
        except UnsupportedModel:
            raise
        except Exception as error:
            if not found.calls:  # this way of catching does not suit the model; the other may
                return found
            raise UnsupportedModel(f"{_name(model)} cannot be run token by token: {error}") from error
    return found


def _window_of(model: Any, mask_function: Any, context_length: int) -> int:
    """The window of a mask function, by asking it which keys two far queries see. 0: all of them up to their own."""
    distance = torch.arange(min(context_length, _FAR) + 1)
    windows = []
    for query in (_FAR, _FAR + 1):
        position = torch.tensor(query)
        zero = torch.tensor(0)
        seen = torch.as_tensor(mask_function(zero, zero, position, position - distance)).expand(len(distance))
        future = torch.as_tensor(mask_function(zero, zero, position, position + 1 + distance)).expand(len(distance))
        window = int(seen.sum())
        if bool(future.any()) or window == 0 or not bool(seen[:window].all()):
            windows.append(-1)
        else:
            windows.append(0 if window == len(distance) else window)
    if windows[0] != windows[1] or windows[0] < 0:
        raise UnsupportedModel(
            f"{_name(model)} cannot be cut: its attention mask is neither causal nor a sliding window "
            "(chunked or bidirectional attention)."
        )
    return windows[0]


@contextmanager
def _caught(model: Any, implementation: str, attention: AttentionFunction, mask: MaskFunction) -> Iterator[None]:
    """Route the model's attention calls and masks to the two functions, and put everything back afterwards."""
    # Set on the configurations themselves: set_attn_implementation refuses models that dispatch in their own way.
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [config._attn_implementation for config in configs]

    def sdpa(q: Any, k: Any, v: Any, attn_mask: Any = None, *_: Any, scale: float | None = None, **__: Any) -> Any:
        return attention(None, q, k, v, attn_mask, scaling=scale)[0].transpose(1, 2)

    with ExitStack() as stack:
        stack.enter_context(registered(AttentionInterface._global_mapping, implementation, attention))
        stack.enter_context(registered(AttentionMaskInterface._global_mapping, implementation, mask))
        if implementation == _SDPA:
            stack.enter_context(registered(vars(torch.nn.functional), "scaled_dot_product_attention", sdpa))
        try:
            for config in configs:
                config._attn_implementation = implementation
            yield
        finally:
            for config, implementation_before in zip(configs, before, strict=True):
                config._attn_implementation = implementation_before


def _no_mask(**_: Any) -> None:
    """The opaque node needs no mask: the runner knows where each sequence begins."""


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({model.config.model_type})"
