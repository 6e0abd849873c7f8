"""The official client against the real server with the real model: what its users do, and what they get."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from packhorse import LLM, SamplingParams
from packhorse.loading import pack_folder
from tests.support.servers import ServerProcess

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
USAGE: Any = {"include_usage": True}


@asynccontextmanager
async def asynchronous(server: ServerProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": PARIS, "temperature": 0} | options)


def complete(client: openai.OpenAI, prompt: Any = "The sky is", **options: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "temperature": 0} | options)


# Chats


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = chat(client)
    [choice] = answer.choices
    assert choice.message.content == ANSWER
    assert (choice.message.role, choice.finish_reason, answer.object) == ("assistant", "stop", "chat.completion")
    assert answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_chat_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    chunks = list(chat(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert len(chunks) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper_accumulates_the_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=PARIS, temperature=0) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER
    assert events.count("content.delta") > 3


def test_an_asynchronous_client_gets_the_same(server: ServerProcess) -> None:
    async def main() -> None:
        async with asynchronous(server) as client:
            answer = await client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0)
            assert answer.choices[0].message.content == ANSWER

    asyncio.run(main())


def test_an_asynchronous_stream_gets_the_same(server: ServerProcess) -> None:
    async def main() -> None:
        async with asynchronous(server) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=PARIS, temperature=0, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == ANSWER

    asyncio.run(main())


def test_sixteen_chats_at_once_are_each_answered_as_alone(server: ServerProcess, client: openai.OpenAI) -> None:
    questions = [f"Name {n} animals." for n in range(2, 18)]

    async def main() -> list[str]:
        async with asynchronous(server) as several:

            async def ask(question: str) -> str:
                messages: Any = [{"role": "user", "content": question}]
                stream = await several.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, max_tokens=12, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*map(ask, questions)))

    together = asyncio.run(main())
    for question, found in zip(questions[:3], together[:3], strict=True):
        messages = [{"role": "user", "content": question}]
        assert chat(client, messages=messages, max_tokens=12).choices[0].message.content == found


def test_the_answer_is_that_of_the_python_api(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about mules."}]
    offline = LLM(pack_folder(MODEL), num_blocks=64).generate([messages], SamplingParams(temperature=0, max_tokens=24))
    assert chat(client, messages=messages, max_tokens=24).choices[0].message.content == offline[0].outputs[0].text


def test_a_conversation_remembers_its_turns(client: openai.OpenAI) -> None:
    messages = [*PARIS, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "Which city was it?"}]
    assert "Paris" in chat(client, messages=messages, max_tokens=30).choices[0].message.content


def test_a_system_message_is_part_of_the_prompt(client: openai.OpenAI) -> None:
    plain = chat(client).usage.prompt_tokens
    told = chat(client, messages=[{"role": "system", "content": "Be brief. " * 20}, *PARIS], max_tokens=5)
    assert told.usage.prompt_tokens > plain + 20


def test_content_may_come_in_text_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]
    assert chat(client, messages=[{"role": "user", "content": parts}], max_tokens=10).choices[0].message.content


def test_max_completion_tokens_is_max_tokens(client: openai.OpenAI) -> None:
    answer = chat(client, max_completion_tokens=3)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "length")


def test_usage_of_a_stream_comes_last_and_only_when_asked(client: openai.OpenAI) -> None:
    whole = chat(client)
    assert all(chunk.usage is None for chunk in chat(client, stream=True))
    *chunks, last = chat(client, stream=True, stream_options=USAGE)
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage) == ([], whole.usage)


def test_chat_logprobs_are_whole_and_the_same_in_a_stream(client: openai.OpenAI) -> None:
    whole = chat(client, logprobs=True, top_logprobs=3).choices[0]
    entries = whole.logprobs.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries)
    assert "".join(entry.token for entry in entries).startswith(ANSWER)
    assert bytes(byte for entry in entries for byte in entry.bytes).decode().startswith(ANSWER)
    chunks = list(chat(client, logprobs=True, top_logprobs=3, stream=True))
    assert [entry for c in chunks for entry in c.choices[0].logprobs.content] == entries


# Completions


def test_a_completion_goes_on_where_the_prompt_ends(client: openai.OpenAI) -> None:
    answer = complete(client, "The capital of France is", max_tokens=3)
    assert answer.object == "text_completion"
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"


def test_completions_have_sixteen_tokens_unless_told_otherwise(client: openai.OpenAI) -> None:
    assert complete(client).usage.completion_tokens == 16


def test_a_streamed_completion_says_what_the_whole_one_says(client: openai.OpenAI) -> None:
    assert "".join(c.choices[0].text for c in complete(client, stream=True)) == complete(client).choices[0].text


def test_several_prompts_are_numbered_in_order(client: openai.OpenAI) -> None:
    prompts = ["The sky is", "Water is", "Snow is"]
    alone = [complete(client, prompt, max_tokens=4).choices[0].text for prompt in prompts]
    together = complete(client, prompts, max_tokens=4)
    assert [choice.text for choice in together.choices] == alone
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in complete(client, prompts, max_tokens=4, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == alone


def test_token_ids_are_a_prompt_too(client: openai.OpenAI) -> None:
    first = complete(client, "The sky is", max_tokens=4)
    ids = client.post("/../tokenize", body={"prompt": "The sky is"}, cast_to=dict[str, Any])["tokens"]
    assert complete(client, ids, max_tokens=4).choices[0].text == first.choices[0].text
    assert complete(client, [ids, ids], max_tokens=4).choices[1].text == first.choices[0].text


def test_echo_and_logprobs_score_a_prompt(client: openai.OpenAI) -> None:
    answer = complete(client, "The capital of France is Paris", echo=True, logprobs=1, max_tokens=0)
    [choice] = answer.choices
    assert choice.text == "The capital of France is Paris"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert math.exp(choice.logprobs.token_logprobs[-1]) > 0.1
    assert answer.usage.completion_tokens == 0


def test_completion_logprobs_are_the_same_in_a_stream(client: openai.OpenAI) -> None:
    options = {"logprobs": 2, "echo": True, "max_tokens": 6}
    whole = complete(client, "né 你好", **options).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in complete(client, "né 你好", stream=True, **options)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)


# Sampling


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1.0, seed=seed, max_tokens=12).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_choices_differ_and_each_ends_by_itself(client: openai.OpenAI) -> None:
    answer = complete(client, n=4, temperature=1.0, seed=1, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 32


def test_greedy_choices_are_identical(client: openai.OpenAI) -> None:
    assert len({choice.text for choice in complete(client, n=3, max_tokens=5).choices}) == 1


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = chat(client, stop=["Paris", "zzz"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The capital of France is ", "stop")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, stop="Paris", stream=True))
    assert text == "The capital of France is "


def test_a_bias_forbids_a_token(client: openai.OpenAI) -> None:
    [space] = client.post("/../tokenize", body={"prompt": " Paris"}, cast_to=dict[str, Any])["tokens"]
    assert " Paris" not in complete(client, "The capital of France is", logit_bias={str(space): -100}).choices[0].text


def test_penalties_change_a_text_that_repeats_itself(client: openai.OpenAI) -> None:
    plain = complete(client, "la la la la la la", max_tokens=16).choices[0].text
    penalized = complete(client, "la la la la la la", max_tokens=16, frequency_penalty=2, presence_penalty=2)
    assert penalized.choices[0].text != plain


def test_fields_beyond_openais_go_in_the_extra_body(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "min_tokens": 8, "ignore_eos": True, "priority": 1, "timeout": 60}
    assert chat(client, temperature=1.0, max_tokens=8, extra_body=extra).usage.completion_tokens == 8


# Models, errors, connections


def test_the_models_are_listed_and_each_can_be_had(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).to_dict()["max_model_len"] == 8192


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="loaded is smollm2"):
        chat(client, model="gpt-9")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": USAGE}, "stream_options"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_by_its_field(
    client: openai.OpenAI, options: dict[str, Any], param: str, stream: bool
) -> None:
    if param == "stream_options" and stream:
        options = {"stream_options": {"include_usage": "yes"}}
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, stream=stream, **options)
    assert refusal.value.param == param
    assert refusal.value.type == "invalid_request_error"


def test_a_prompt_beyond_the_context_is_refused_by_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        complete(client, [5] * 8193)
    assert refusal.value.code == "context_length_exceeded"


def test_what_is_not_known_is_named_in_a_header(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=PARIS, max_tokens=1, extra_body={"max_completion_token": 5}
    )
    assert raw.headers["x-packhorse-ignored-fields"] == "max_completion_token"


def test_a_stream_that_is_left_frees_its_place(server: ServerProcess, client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, extra_body={"ignore_eos": True}, max_tokens=4000)
    next(iter(stream))
    stream.close()
    chat(client, max_tokens=1)  # a step or two later
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0


def test_the_timeout_of_a_request_ends_it(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as late:
        chat(client, max_tokens=4000, extra_body={"ignore_eos": True, "timeout": 0.3})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


def test_an_error_in_mid_stream_is_raised_and_not_a_plausible_end(client: openai.OpenAI) -> None:
    stream = chat(client, max_tokens=4000, stream=True, extra_body={"ignore_eos": True, "timeout": 0.8})
    seen = []
    with pytest.raises(openai.APIError, match=r"ran out of its 0\.8 s"):
        seen.extend(stream)
    assert len(seen) > 1
    assert all(chunk.choices[0].finish_reason is None for chunk in seen)


# Batch-mates


def texts_at_once(server: ServerProcess, requests: list[dict[str, Any]]) -> list[str]:
    async def main() -> list[str]:
        async with asynchronous(server) as several:

            async def ask(options: dict[str, Any]) -> str:
                answer = await several.completions.create(**{"model": MODEL, "temperature": 0} | options)
                return answer.choices[0].text

            return list(await asyncio.gather(*map(ask, requests)))

    return asyncio.run(main())


def test_a04_greedy_texts_do_not_depend_on_how_many_ask_at_once(server: ServerProcess) -> None:
    prompts = [" ".join(f"word{i}" for i in range(n)) for n in (2, 3, 5, 8, 9, 12, 14, 20)]
    requests = [{"prompt": prompt, "max_tokens": 24} for prompt in prompts]
    alone = [texts_at_once(server, [request])[0] for request in requests]
    assert texts_at_once(server, requests[:4]) == alone[:4]
    assert texts_at_once(server, requests) == alone


def test_a05_a_seed_holds_beside_unseeded_neighbours(server: ServerProcess) -> None:
    seeded = {"prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 16}
    found = {texts_at_once(server, [seeded | {"seed": 42}, seeded, seeded])[0] for _ in range(3)}
    assert len(found) == 1


def test_a01_a_chat_with_end_tokens_inside_is_the_same_beside_a_long_prompt(server: ServerProcess) -> None:
    chat_text = (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    short = {"prompt": chat_text + "<|im_start|>assistant\n", "max_tokens": 16}
    long = {"prompt": "A long story about a mule. " * 40, "max_tokens": 16}
    assert texts_at_once(server, [short, long])[0] == texts_at_once(server, [short])[0]
