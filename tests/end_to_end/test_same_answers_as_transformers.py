"""Greedy output and log-probabilities equal transformers' on the same weights, however requests are batched."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packhorse import LLM, SamplingParams

pytestmark = pytest.mark.slow

TIE = 1e-4
OUTPUT = 24


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """Eight prompts of 3 to 150 tokens: ids at random, and a chat that holds several end-of-turn ids."""
    rng = random.Random(7)
    found = [[rng.randrange(100, 49_000) for _ in range(length)] for length in (3, 5, 16, 17, 33, 60, 150)]
    chat = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And another one?"},
    ]
    assert llm.tokenizer is not None
    return [*found, llm.tokenizer.encode_chat(chat)]


@pytest.fixture(scope="module")
def answers(transformers_model: Any, prompts: list[list[int]]) -> list[list[int]]:
    import torch
    from transformers import GenerationConfig

    settings = GenerationConfig(do_sample=False, max_new_tokens=OUTPUT, pad_token_id=0)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = transformers_model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        found.append(output[0, len(prompt) :].tolist())
    return found


def greedy(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    settings = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, **params)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, settings)]


def assert_same_up_to_ties(
    model: Any, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> None:
    """A first difference is allowed where the two largest logits are closer than TIE."""
    import torch

    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        assert len(mine) == len(other)
        at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if at is not None:
            with torch.inference_mode():
                top = model(torch.tensor([prompt + other[:at]])).logits[0, -1].topk(2).values
            assert float(top[0] - top[1]) < TIE, f"token {at} differs without a tie"


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_greedy_ids_equal_transformers_at_any_token_budget(
    pack: Path, transformers_model: Any, prompts: list[list[int]], answers: list[list[int]], budget: int
) -> None:
    ours = greedy(LLM(pack, num_blocks=256, max_num_batched_tokens=budget), prompts)
    assert_same_up_to_ties(transformers_model, prompts, ours, answers)


def test_greedy_ids_equal_transformers_when_sequences_are_preempted(
    pack: Path, transformers_model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    llm = LLM(pack, num_blocks=13)
    ours = greedy(llm, prompts)
    assert llm.engine.stats().preemptions > 0
    llm.engine.check_integrity()
    assert_same_up_to_ties(transformers_model, prompts, ours, answers)


MATRIX = [
    {
        "policy": policy,
        "batch_size": size,
        "micro_batch": passes,
        "enable_prefix_caching": caching,
        "num_blocks": blocks,
    }
    for policy in ("static", "dynamic", "continuous")
    for size, passes, caching, blocks in ((4, 1, True, 256), (4, 3, False, 256), (8, 2, True, 13), (8, 1, False, 13))
]


@pytest.mark.parametrize("settings", MATRIX, ids=lambda s: "-".join(map(str, s.values())))
def test_greedy_ids_are_the_same_under_every_policy_micro_batch_cache_and_preemption(
    pack: Path,
    transformers_model: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    settings: dict[str, Any],
) -> None:
    llm = LLM(pack, **settings)
    ours = greedy(llm, prompts)
    assert_same_up_to_ties(transformers_model, prompts, ours, answers)
    # A second time, with what the prefix cache knows by now.
    assert_same_up_to_ties(transformers_model, prompts, greedy(llm, prompts), answers)
    stats = llm.engine.stats()
    if settings["num_blocks"] == 13 and settings["policy"] != "dynamic":
        assert stats.preemptions > 0
    if settings["enable_prefix_caching"] and settings["num_blocks"] == 256:
        assert stats.prefix_hits > 0


@pytest.mark.parametrize("at_once", [1, 2, 4, 8])
def test_a_prompt_gives_the_same_text_at_every_batch_size(
    llm: LLM, transformers_model: Any, prompts: list[list[int]], answers: list[list[int]], at_once: int
) -> None:
    ours: list[list[int]] = []
    for first in range(0, len(prompts), at_once):
        ours += greedy(llm, prompts[first : first + at_once])
    assert_same_up_to_ties(transformers_model, prompts, ours, answers)


def test_the_order_of_requests_changes_nothing(
    llm: LLM, transformers_model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    ours = greedy(llm, prompts[::-1])[::-1]
    assert_same_up_to_ties(transformers_model, prompts, ours, answers)


def test_logprobs_of_prompt_and_output_equal_transformers(
    llm: LLM, transformers_model: Any, prompts: list[list[int]]
) -> None:
    import torch

    prompt = prompts[4]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate([prompt], params)
    ids = prompt + output.outputs[0].token_ids
    with torch.inference_mode():
        expected = transformers_model(torch.tensor([ids])).logits[0].log_softmax(-1).numpy()
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs[0] is None
    ours = [
        entry[token].logprob
        for entry, token in zip([*output.prompt_logprobs[1:], *output.outputs[0].logprobs], ids[1:], strict=True)
        if entry is not None
    ]
    assert len(ours) == len(ids) - 1
    np.testing.assert_allclose(ours, expected[np.arange(len(ids) - 1), ids[1:]], atol=1e-3)


def test_a_seeded_request_gives_the_same_tokens_whatever_runs_beside_it(llm: LLM, prompts: list[list[int]]) -> None:
    seeded = SamplingParams(temperature=0.8, max_tokens=16, seed=42, ignore_eos=True)
    (alone,) = llm.generate([prompts[2]], seeded)
    for _ in range(3):
        beside = llm.generate([prompts[2], prompts[3]], [seeded, SamplingParams(temperature=0.8, max_tokens=16)])
        assert beside[0].outputs[0].token_ids == alone.outputs[0].token_ids
