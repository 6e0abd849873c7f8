"""The official client against the real server with the real model."""

from __future__ import annotations

import openai
import pytest

pytestmark = pytest.mark.slow

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2-135m-instruct", messages=PARIS, temperature=0)
    [choice] = answer.choices
    assert choice.message.content == "The capital of France is Paris."
    assert (choice.message.role, choice.finish_reason, answer.object) == ("assistant", "stop", "chat.completion")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2-135m-instruct"]


def test_a_streamed_chat_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="smollm2-135m-instruct", messages=PARIS, temperature=0, stream=True)
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "The capital of France is Paris."
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
