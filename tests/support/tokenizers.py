"""Small tokenizers of the two kinds there are, trained on a few sentences: byte-level, and SentencePiece-like.

Both have control tokens, both know some Chinese and must spell the rest (emoji, Japanese, Arabic) byte by byte.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from packhorse.text.chat_template import ChatTemplate
from packhorse.text.tokenizer import Tokenizer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a mule.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SENTENCES = (
    "The pack horse carries a heavy load over the mountain pass, day after day, without complaint.",
    "Hello world! Hello, world... What is the capital of France? The capital of France is Paris.",
    "def add(a, b):\n    return a + b  # a comment\n\n\nprint(add(1, 22), 'text', \"quoted\")",
    "system user assistant im_start im_end 0123456789 stop STOP Stop. ABC DEF GHI JKL XYZ",
    "你好，世界！今天天气很好。我们在山上走路，马驮着东西。你好世界你好世界",
)

_SPELLED_IN_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


@cache
def _byte_level_json() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    backend.add_tokens(["<tool_call>"])  # added, but no control token
    return str(backend.to_str())


def byte_level_backend() -> tokenizers.Tokenizer:
    """Like GPT-2's: every token stands for bytes."""
    return tokenizers.Tokenizer.from_str(_byte_level_json())


@cache
def _sentencepiece_json() -> str:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    control = ["<unk>", *CONTROL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=len(control) + 256 + 200,
        special_tokens=[*control, *_SPELLED_IN_BYTES],
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    plan: dict[str, Any] = json.loads(backend.to_str())
    plan["model"]["byte_fallback"] = True
    plan["added_tokens"] = [token for token in plan["added_tokens"] if token["content"] in control]
    return json.dumps(plan)


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Like Llama 2's: `▁` for spaces, `<0xE4>` for bytes of characters that it does not know."""
    return tokenizers.Tokenizer.from_str(_sentencepiece_json())


BACKENDS = {"byte-level": byte_level_backend, "sentencepiece": sentencepiece_backend}


def small_tokenizer(kind: str = "byte-level", template: str = CHATML, **options: Any) -> Tokenizer:
    return Tokenizer(BACKENDS[kind](), ChatTemplate(template, {"eos_token": "<|im_end|>"}), **options)
