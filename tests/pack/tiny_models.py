"""A tiny random model of each supported architecture, from its configuration class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VOCAB = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name -> configuration class and what differs from the common settings
_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 12}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    ),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 8}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "falcon": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "falcon_multi_query": ("FalconConfig", {"multi_query": True, "alibi": False, "parallel_attn": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}

ARCHITECTURES = tuple(_SETTINGS)


def tiny_model(name: str, **changes: Any) -> Any:
    """A model of `name` in float32 with weights large enough that attention, windows and caps matter."""
    import torch
    import transformers

    config_name, settings = _SETTINGS[name]
    config = getattr(transformers, config_name)(**{**_COMMON, **settings, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # The initial scale of 0.02 would make every attention uniform and hide a wrong mask.
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return model


Builder = Callable[..., Any]
