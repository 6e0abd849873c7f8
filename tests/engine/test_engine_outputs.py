from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from packhorse.engine.engine import Engine
from packhorse.engine.outputs import CompletionOutput, RequestOutput, joined
from packhorse.engine.request import Request
from packhorse.engine.sampling_params import SamplingParams
from packhorse.text.tokenizer import Tokenizer
from tests.support.engines import VOCAB, finish_all, request, runner_of, scripted_engine
from tests.support.scripted import ScriptedRunner, hashed, scripts
from tests.support.tokenizers import small_tokenizer

TEXT = small_tokenizer()
IM_END, END_OF_TEXT = 2, 0
PROMPT = [5, 6, 7]


def ids(text: str, tokenizer: Tokenizer = TEXT) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def spelling(line: list[int], **options: Any) -> Engine:
    """An engine whose model says `line` after PROMPT, then "z" for ever."""
    (z,) = ids("z")
    options = {"tokenizer": TEXT, "eos": (IM_END, END_OF_TEXT)} | options
    return scripted_engine(scripts({tuple(PROMPT): line}, then=z), **options)


def one(engine: Engine, **params: Any) -> CompletionOutput:
    engine.submit(request("a", PROMPT, **params))
    return finish_all(engine)["a"].outputs[0]


def streamed(engine: Engine, **params: Any) -> list[RequestOutput]:
    """Every output of one streaming request, in order."""
    engine.submit(Request("s", PROMPT, SamplingParams(**{"temperature": 0.0} | params), stream=True))
    outputs = []
    while engine.num_unfinished:
        outputs += engine.step()
    return outputs


# How an answer ends


@pytest.mark.parametrize(("first", "eos"), itertools.product([IM_END, END_OF_TEXT], [(2, 0), (0, 2), (2, 0, 2)]))
def test_the_first_of_all_eos_ids_ends_the_text_and_is_not_in_it(first: int, eos: tuple[int, ...]) -> None:
    line = ids("one two three")
    found = one(spelling([*line, first, IM_END], eos=eos), max_tokens=50, skip_special_tokens=False)
    assert found.text == "one two three"
    assert found.token_ids == [*line, first]
    assert (found.finish_reason, found.stop_reason) == ("stop", first)


def test_an_id_that_is_not_among_eos_does_not_end_the_text() -> None:
    found = one(spelling([*ids("a"), END_OF_TEXT, *ids("b"), IM_END], eos=(IM_END,)), max_tokens=50)
    assert found.text == "ab"
    assert found.stop_reason == IM_END


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_each_of_the_stop_ids_ends_the_text_however_many_there_are(count: int) -> None:
    stop_ids = list(range(20, 20 + count))
    for stop in (stop_ids[0], stop_ids[-1]):
        found = one(spelling([10, 11, stop, 12]), max_tokens=9, stop_token_ids=stop_ids)
        assert found.token_ids == [10, 11, stop]
        assert (found.finish_reason, found.stop_reason) == ("stop", stop)


def test_eos_ends_the_text_beside_stop_ids_and_without_a_tokenizer() -> None:
    engine = scripted_engine(scripts({tuple(PROMPT): [10, 11, 2]}), eos=(2,))
    found = one(engine, stop_token_ids=list(range(30, 60)))
    assert (found.token_ids, found.text, found.stop_reason) == ([10, 11, 2], "", 2)


def test_ignored_eos_is_a_token_like_any_other() -> None:
    line = [*ids("a"), IM_END, *ids("b"), END_OF_TEXT]
    found = one(spelling(line), max_tokens=4, ignore_eos=True, skip_special_tokens=False)
    assert found.token_ids == line
    assert found.text == "a<|im_end|>b<|endoftext|>"
    assert (found.finish_reason, found.stop_reason) == ("length", None)
    assert one(spelling(line), ignore_eos=True, stop_token_ids=[IM_END]).stop_reason == IM_END


def test_eos_as_the_last_allowed_token_ends_with_stop() -> None:
    assert one(spelling([*ids("a"), IM_END]), max_tokens=2).finish_reason == "stop"


@pytest.mark.parametrize("least", [0, 1, 4])
def test_eos_cannot_come_before_min_tokens(least: int) -> None:
    engine = spelling([IM_END] * 30, tokenizer=None, eos=(IM_END,))
    found = one(engine, min_tokens=least, max_tokens=20)
    assert len(found.token_ids) == least + 1
    assert IM_END not in found.token_ids[:-1]
    assert found.finish_reason == "stop"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    line = ids("a") + ids("b") + ids("a") + ids("b")
    assert one(spelling(line), stop="a", min_tokens=0).text == ""
    found = one(spelling(line), stop="a", min_tokens=1)
    assert (found.text, found.stop_reason) == ("ab", "a")
    assert one(spelling(line), stop="a", min_tokens=3, max_tokens=4).text == "abab"


def test_a_stop_string_may_match_what_comes_out_at_the_end() -> None:
    half = ids("🎉")[:2]
    found = one(spelling([*ids("a"), *half]), stop="\ufffd", max_tokens=len(half) + 1)
    assert (found.text, found.finish_reason, found.stop_reason) == ("a", "stop", "\ufffd")
    held = one(spelling([*ids("a"), *half]), stop="\ufffd", max_tokens=len(half) + 1, min_tokens=len(half) + 1)
    assert (held.text, held.finish_reason) == ("a\ufffd", "length")


# Stop strings and streams


def test_a_stop_string_over_several_tokens_never_shows_in_a_stream() -> None:
    line = [token for c in "ABC DEFGHIJ KLM" for token in ids(c)]
    outputs = streamed(spelling(line), stop="DEFGHIJ", max_tokens=50)
    assert all("D" not in output.outputs[0].text for output in outputs)
    final = joined(outputs).outputs[0]
    assert (final.text, final.finish_reason, final.stop_reason) == ("ABC ", "stop", "DEFGHIJ")
    assert len(final.token_ids) == len("ABC DEFGHIJ")
    assert one(spelling(line), stop="DEFGHIJ", max_tokens=50) == final


def test_a_stop_string_that_does_not_complete_is_given_back() -> None:
    line = [token for c in "ABC DEF" for token in ids(c)]
    assert one(spelling([*line, IM_END]), stop="DEFGHIJ", max_tokens=50).text == "ABC DEF"
    assert one(spelling(line), stop="DEFGHIJ", max_tokens=7).text == "ABC DEF"


def test_a_stop_string_inside_a_token_cuts_text_and_not_tokens() -> None:
    (dots,) = ids("...")
    found = one(spelling([*ids("a"), dots, *ids("b")]), stop="..", logprobs=0)
    assert found.text == "a"
    assert found.token_ids == [*ids("a"), dots]
    assert found.logprobs is not None
    assert len(found.logprobs) == 2
    assert found.text_offsets == [0, 1]
    kept = one(spelling([*ids("a"), dots, *ids("b")]), stop="..", include_stop_str_in_output=True)
    assert kept.text == "a.."


def test_streams_of_several_scripts_in_one_batch_hold_whole_characters() -> None:
    texts = ["你好，世界", "🎉 party 🎉", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "ざ and ざ"]
    lines = {(10 + i,): ids(text) for i, text in enumerate(texts)}
    engine = scripted_engine(scripts(lines, then=IM_END), tokenizer=TEXT, eos=(IM_END,))
    for i in range(4):
        engine.submit(Request(str(i), [10 + i], SamplingParams(temperature=0.0, max_tokens=60), stream=True))
    final: dict[str, str] = {}
    while engine.num_unfinished:
        for output in engine.step():
            final[output.request_id] = final.get(output.request_id, "") + output.outputs[0].text
            assert texts[int(output.request_id)].startswith(final[output.request_id])
    assert [final[str(i)] for i in range(4)] == texts


def test_the_first_space_of_an_answer_is_kept() -> None:
    line = ids(" world")
    assert one(spelling([*line, IM_END])).text == " world"
    assert joined(streamed(spelling([*line, IM_END]))).outputs[0].text == " world"


def test_a_stream_has_news_in_every_step_and_ends_once() -> None:
    outputs = streamed(spelling([*ids("one two"), IM_END]), max_tokens=50)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [output.outputs[0].token_ids for output in outputs] == [[i] for i in [*ids("one two"), IM_END]]
    assert all(output.outputs[0].finish_reason is None for output in outputs[:-1])


def test_without_streaming_only_the_end_is_news() -> None:
    engine = spelling([*ids("one two three"), IM_END])
    engine.submit(request("a", PROMPT))
    news = []
    while engine.num_unfinished:
        news += engine.step()
    assert [output.finished for output in news] == [True]


# Choices


def test_greedy_choices_are_identical_and_computed_once() -> None:
    engine = scripted_engine()
    runner = runner_of(engine)
    engine.submit(request("a", PROMPT, n=3, max_tokens=6))
    output = finish_all(engine)["a"]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert {tuple(choice.token_ids) for choice in output.outputs} == {tuple(output.outputs[0].token_ids)}
    assert all(len(batch.context_lens) == 1 for batch in runner.batches)
    assert engine.stats().generated_tokens == 6
    assert output.num_generated_tokens == 18


@pytest.mark.parametrize("greedy", [{"temperature": 0.0}, {"temperature": 0.0, "top_p": 0.1}, {"top_k": 1}])
def test_all_spellings_of_greedy_give_the_same_tokens(greedy: dict[str, Any]) -> None:
    expected = one(scripted_engine(), max_tokens=20).token_ids
    assert one(scripted_engine(), **{"temperature": 1.0, "seed": 5} | greedy, max_tokens=20).token_ids == expected


def sampled(seed: int | None, n: int, **params: Any) -> RequestOutput:
    engine = scripted_engine()
    engine.submit(request("a", PROMPT, temperature=8.0, seed=seed, n=n, max_tokens=12, **params))
    return finish_all(engine)["a"]


def test_sampled_choices_differ_and_each_can_be_had_again() -> None:
    first, second, other = sampled(7, 4), sampled(7, 4), sampled(8, 4)
    assert first.outputs == second.outputs
    streams = {tuple(choice.token_ids) for choice in (*first.outputs, *other.outputs)}
    assert len(streams) == 8
    assert sampled(7, 1).outputs[0] == first.outputs[0]


def test_without_a_seed_each_request_has_its_own() -> None:
    assert len({tuple(sampled(None, 1).outputs[0].token_ids) for _ in range(4)}) == 4


def test_each_choice_ends_by_itself_and_counts_its_own_tokens() -> None:
    engine = scripted_engine(eos=(11, 12, 13))
    engine.submit(request("a", PROMPT, temperature=30.0, seed=3, n=5, max_tokens=100))
    output = finish_all(engine)["a"]
    lengths = [len(choice.token_ids) for choice in output.outputs]
    assert [choice.index for choice in output.outputs] == [0, 1, 2, 3, 4]
    assert len(set(lengths)) > 2
    assert sum(lengths) > 100  # together more than max_tokens, which bounds each
    assert output.num_generated_tokens == sum(lengths) == engine.stats().generated_tokens
    for choice in output.outputs:
        ended = [i for i, token in enumerate(choice.token_ids) if token in (11, 12, 13)]
        assert ended in ([], [len(choice.token_ids) - 1])
        assert choice.finish_reason == ("stop" if ended else "length")


def test_a_seeded_request_is_the_same_beside_unseeded_neighbours() -> None:
    found = set()
    for neighbours in range(4):
        engine = scripted_engine()
        for number in range(neighbours):
            engine.submit(request(f"before {number}", [number], temperature=0.8, max_tokens=9))
        engine.submit(request("seeded", PROMPT, temperature=8.0, seed=42, max_tokens=16))
        engine.submit(request("after", [9], temperature=0.8, top_k=3, max_tokens=16))
        found.add(tuple(finish_all(engine)["seeded"].outputs[0].token_ids))
    assert len(found) == 1


def test_a_neighbours_penalties_change_nothing() -> None:
    expected = one(scripted_engine(), max_tokens=20)
    engine = scripted_engine()
    engine.submit(request("long", list(range(60)), frequency_penalty=1.05, repetition_penalty=1.3, max_tokens=40))
    engine.submit(request("short", PROMPT, max_tokens=20))
    assert finish_all(engine)["short"].outputs[0] == expected


def test_penalties_see_prompt_and_output_as_they_are() -> None:
    """The model would say 7 for ever; a strong penalty makes it say something else each time."""
    engine = scripted_engine(lambda _: 7)
    assert one(engine, max_tokens=5).token_ids == [7] * 5
    found = one(scripted_engine(lambda _: 7), max_tokens=5, repetition_penalty=100.0)  # 7 is in the prompt
    assert 7 not in found.token_ids
    again = one(scripted_engine(lambda _: 8), max_tokens=40, presence_penalty=2.0, frequency_penalty=2.0)
    assert again.token_ids[:4] == [8] * 4  # 10 - 2 - 2 * count against at most 1
    assert again.token_ids[4] != 8


def test_a_bias_decides() -> None:
    assert one(scripted_engine(), max_tokens=3, logit_bias={33: 100}).token_ids == [33] * 3
    (first,) = one(scripted_engine(), max_tokens=1).token_ids
    assert one(scripted_engine(), max_tokens=1, logit_bias={first: -100}).token_ids != [first]


# Log-probabilities


def direct(context: list[int]) -> np.ndarray:
    """float64[VOCAB]: what the scripted model's log-probabilities are after `context`."""
    row = np.zeros(VOCAB, dtype=np.float32)
    ScriptedRunner(hashed(VOCAB), vocab_size=VOCAB)._fill(row, tuple(context))
    wide = row.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def assert_direct(output: RequestOutput, count: int) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        whole = prompt + choice.token_ids
        for place, entry in enumerate([*output.prompt_logprobs, *choice.logprobs]):
            if entry is None:
                continue
            expected = direct(whole[:place])
            assert next(iter(entry)) == whole[place]
            for token, found in entry.items():
                np.testing.assert_allclose(found.logprob, expected[token], atol=1e-6)
                assert found.rank == 1 + (expected > expected[token]).sum()
            top = np.argsort(-expected, kind="stable")[:count].tolist()
            assert set(entry) == {whole[place], *top}
        total = sum(entry[token].logprob for entry, token in zip(choice.logprobs, choice.token_ids, strict=True))
        assert choice.cumulative_logprob == pytest.approx(total)


ASKED: dict[str, Any] = {
    "temperature": 8.0,
    "seed": 1,
    "top_k": 40,
    "repetition_penalty": 1.2,
    "logit_bias": {5: 3.0},
    "logprobs": 3,
    "prompt_logprobs": 3,
    "max_tokens": 9,
    "n": 2,
}


@pytest.mark.parametrize("budget", [1, 3, 7, 512])
def test_log_probabilities_are_raw_and_whole_however_a_prompt_is_cut(budget: int) -> None:
    engine = scripted_engine(max_num_batched_tokens=budget)
    engine.submit(request("a", [(7 * i) % VOCAB for i in range(23)], **ASKED))
    assert_direct(finish_all(engine)["a"], 3)


@pytest.mark.parametrize("budget", [5, 16])
def test_log_probabilities_survive_preemption(budget: int) -> None:
    engine = scripted_engine(num_blocks=8, block_size=4, max_num_batched_tokens=budget, enable_prefix_caching=False)
    for number in range(5):
        engine.submit(request(str(number), [(number + 7 * i) % VOCAB for i in range(9)], **ASKED))
    outputs = finish_all(engine)
    assert engine.stats().preemptions > 3
    for output in outputs.values():
        assert_direct(output, 3)


def test_log_probabilities_survive_preemption_in_the_middle_of_a_prompt() -> None:
    """The older one decodes across a block's border while half of the newer one's prompt is scored."""
    engine = scripted_engine(num_blocks=8, block_size=4, max_num_batched_tokens=2)
    engine.submit(request("older", [3, 4], max_tokens=28))
    for _ in range(9):
        engine.step()
    engine.submit(request("newer", [(7 * i) % VOCAB for i in range(14)], **ASKED | {"n": 1}))
    while not engine.stats().preemptions:
        engine.step()
    (newer,) = engine._scheduler.waiting
    assert 0 < len(newer.prompt_logprobs) < 13
    assert_direct(finish_all(engine)["newer"], 3)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("more", [0, 1])
def test_scoring_gives_every_prompt_token_its_log_probability(more: int, echo: bool) -> None:
    engine = scripted_engine()
    engine.submit(request("a", [1, 2, 3, 4, 5, 6], max_tokens=more, echo=echo, logprobs=1, prompt_logprobs=1))
    output = finish_all(engine)["a"]
    assert_direct(output, 1)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == more
    assert engine.stats().generated_tokens == more


def test_scoring_a_prompt_of_one_token_has_nothing_to_score() -> None:
    engine = scripted_engine()
    engine.submit(request("a", [1], max_tokens=0, prompt_logprobs=1))
    output = finish_all(engine)["a"]
    assert output.prompt_logprobs == [None]
    assert output.outputs[0].token_ids == []


def test_the_chosen_token_is_listed_even_when_it_is_not_a_top_one() -> None:
    engine = scripted_engine()
    engine.submit(request("a", PROMPT, logit_bias={50: 100}, logprobs=2, max_tokens=3))
    for entry in finish_all(engine)["a"].outputs[0].logprobs or []:
        assert len(entry) == 3
        assert next(iter(entry)) == 50
        assert entry[50].rank > 2
        assert entry[50].logprob < -5  # raw: the bias is not in it


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_reports_nothing() -> None:
    found = one(spelling([*ids("a"), IM_END]), logprobs=0)
    assert [list(entry) for entry in found.logprobs or []] == [[token] for token in found.token_ids]
    assert one(spelling([*ids("a"), IM_END])).logprobs is None
    assert one(spelling([*ids("a"), IM_END])).text_offsets is None


def test_each_token_is_named_by_its_text() -> None:
    found = one(spelling([*ids("Hello world"), IM_END]), logprobs=0)
    named = [entry[token].decoded_token for entry, token in zip(found.logprobs or [], found.token_ids, strict=True)]
    assert "".join(named) == "Hello world<|im_end|>"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_character_positions_in_the_text_that_is_returned(echo: bool, stream: bool) -> None:
    line = ids("ざ!") + ids("你好") + ids(" x") + [IM_END]
    engine = spelling(line)
    engine.submit(
        Request("a", PROMPT, SamplingParams(temperature=0.0, logprobs=2, echo=echo, max_tokens=50), "né 你", stream)
    )
    found = finish_all(engine)["a"].outputs[0]
    prefix = "né 你" if echo else ""
    assert found.text == prefix + "ざ!你好 x"
    assert found.text_offsets is not None
    assert len(found.text_offsets) == len(found.logprobs or []) == len(found.token_ids) == len(line)
    begin = len(prefix)
    half = len(ids("ざ"))
    assert found.text_offsets[: half + 1] == [begin] * half + [begin + 1]
    assert found.text_offsets[-1] == len(found.text)
    ends = [*found.text_offsets[1:], len(found.text)]
    pieces = [found.text[a:b] for a, b in zip(found.text_offsets, ends, strict=True)]
    assert "".join(pieces) == found.text[begin:]
    assert TEXT.decode(line[half : half + 1]) == pieces[half] == "!"


def test_offsets_of_what_a_stop_string_cut_off_point_to_the_end() -> None:
    line = [token for c in "ab STOP" for token in ids(c)]
    found = one(spelling(line), stop="STOP", logprobs=0, max_tokens=50)
    assert (found.text, found.text_offsets) == ("ab ", [0, 1, 2, 3, 3, 3, 3])


# Echo and the prompt


def test_echo_begins_with_the_prompts_text_given_or_decoded() -> None:
    engine = spelling([*ids(" there"), IM_END])
    engine.submit(Request("given", PROMPT, SamplingParams(temperature=0.0, echo=True), prompt="Hello"))
    engine.submit(Request("decoded", PROMPT, SamplingParams(temperature=0.0, echo=True)))
    outputs = finish_all(engine)
    assert outputs["given"].outputs[0].text == "Hello there"
    assert outputs["decoded"].outputs[0].text == TEXT.decode(PROMPT) + " there"
    assert outputs["given"].prompt == "Hello"
    assert outputs["given"].prompt_token_ids == PROMPT


def test_echo_shows_the_prompts_control_tokens_as_they_stand() -> None:
    engine = scripted_engine(scripts({(1, 5, 2): [*ids("a"), IM_END]}), tokenizer=TEXT, eos=(IM_END,))
    engine.submit(request("a", [1, 5, 2], echo=True))
    assert finish_all(engine)["a"].outputs[0].text == "<|im_start|>" + TEXT.decode([5]) + "<|im_end|>a"


def test_echo_streams_the_prompt_first() -> None:
    outputs = streamed(spelling([*ids(" there"), IM_END]), echo=True)
    prompt = TEXT.decode(PROMPT, skip_special_tokens=False)
    assert outputs[0].outputs[0].text.startswith(prompt)
    assert joined(outputs).outputs[0].text == prompt + " there"


def test_text_of_sentencepiece_tokenizers_is_right_too() -> None:
    tokenizer = small_tokenizer("sentencepiece")
    line = ids("Hello world 🎉\nHello", tokenizer)
    eos = tokenizer.encode("<|im_end|>")[-1:]
    for stream in (False, True):
        engine = scripted_engine(scripts({(5,): [*line, *eos]}), tokenizer=tokenizer, eos=tuple(eos))
        engine.submit(Request("a", [5], SamplingParams(temperature=0.0, max_tokens=90), stream=stream))
        assert finish_all(engine)["a"].outputs[0].text == "Hello world 🎉\nHello"
    engine = scripted_engine(scripts({(5,): [*line, *eos]}), tokenizer=tokenizer, eos=tuple(eos))
    engine.submit(request("a", [5], max_tokens=90, stop="\n"))
    found = finish_all(engine)["a"].outputs[0]
    assert found.text == "Hello world 🎉"
    assert tokenizer.decode(found.token_ids).endswith("\n")  # no token more than the one that holds the stop string
