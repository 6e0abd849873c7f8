from __future__ import annotations

from typing import Any

import pytest

from packhorse.errors import InvalidRequest, PackError
from packhorse.text.chat_template import ChatTemplate

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_messages_special_tokens_and_the_generation_prompt_are_visible() -> None:
    source = "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s>Hello</s>>"
    assert render(source, add_generation_prompt=False) == "<s>Hello</s>"


def test_tools_are_none_unless_given() -> None:
    source = "{% if tools is not none %}{{ tools | length }}{% else %}none{% endif %}"
    assert render(source) == "none"
    assert render(source, tools=[{"name": "a"}, {"name": "b"}]) == "2"


def test_blocks_leave_no_white_space() -> None:
    assert render("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n") == "x\n"


def test_loops_can_be_left_and_continued() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
    )
    assert render(source + "{% endfor %}") == "02"


def test_a_generation_block_is_its_content() -> None:
    source = "a{% generation %}{% set x = 'b' %}{{ x }}{{ messages[0].content }}{% endgeneration %}c"
    assert render(source) == "abHelloc"


def test_a_template_can_refuse_messages_in_its_own_words() -> None:
    source = "{{ raise_exception('Roles must alternate: ' ~ messages[0].role) }}"
    with pytest.raises(InvalidRequest, match="Roles must alternate: user") as refusal:
        render(source)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize(
    "expression",
    [
        "messages[0].content.text.deeper",
        "messages[0]['content'] + 1",
        "messages | no_such_variable",
        "1 // (messages | length - 1)",
        "1 % 0",
        "range(10 ** 9) | list",
        "messages | map(attribute='a.b') | join | int(base=99)",
        "messages | tojson(indent='x', sort_keys=nonsense) | tojson(separators=1)",
        "missing | tojson",
        "'a' * -1 + none",
        "undefined_function()",
        "messages.index(5)",
        "'%d' | format('x')",
        "messages[0].content.encode('ascii').decode('no-such-codec')",
        "'é'.encode('ascii')",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_an_invalid_request(expression: str) -> None:
    try:
        template = ChatTemplate("{{ " + expression + " }}", {})
    except PackError:
        return  # refused even earlier
    with pytest.raises(InvalidRequest, match="cannot render these messages") as refusal:
        template.render(HELLO)
    assert refusal.value.param == "messages"


def test_a_template_that_calls_itself_for_ever_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        render("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__base__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': messages}) }}",
        "{{ messages | attr('__class__') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['datetime'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append({'role': 'system'}) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].clear() }}",
        "{% set x = messages.pop() %}",
    ],
)
def test_the_sandbox_lets_no_template_out_and_messages_unchanged(attack: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    try:
        shown = render(attack, messages)
    except InvalidRequest:
        shown = ""
    assert "class" not in shown
    assert "globals" not in shown
    assert "uid=" not in shown
    assert messages == [{"role": "user", "content": "Hello"}]


def test_a_template_cannot_read_files() -> None:
    with pytest.raises(InvalidRequest):
        render("{% include 'tokenizer.json' %}")


def test_tojson_is_json_and_not_escaped_for_html() -> None:
    value = [{"role": "user", "content": "<b> & 'x' \"y\" 你好 🎉"}]
    assert render("{{ messages | tojson }}", value) == ('[{"role": "user", "content": "<b> & \'x\' \\"y\\" 你好 🎉"}]')
    assert render("{{ messages[0].content | tojson(ensure_ascii=true) }}", [{"content": "é"}]) == '"\\u00e9"'
    assert render("{{ messages[0] | tojson(indent=2) }}", [{"a": 1}]) == '{\n  "a": 1\n}'
    assert render("{{ messages[0] | tojson(sort_keys=true) }}", [{"b": 1, "a": 2}]) == '{"a": 2, "b": 1}'


def test_text_in_messages_is_not_a_template_and_not_escaped() -> None:
    content = "{{ bos_token }} {% raw %} <b>&amp;</b> \u2028 \u0085"
    assert render("{{ messages[0].content }}", [{"content": content}]) == content


def test_the_date_can_be_asked_for() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == len("2024-01-01")


def test_a_fault_in_the_template_names_its_line() -> None:
    with pytest.raises(PackError, match="line 3"):
        ChatTemplate("a\nb\n{% if %}", {})
    with pytest.raises(PackError, match="fault"):
        ChatTemplate("{% generation %}x", {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{% macro twice(n) %}{% if n %}{{ twice(n - 1) }}{{ twice(n - 1) }}{% endif %}{% endmacro %}{{ twice(60) }}",
        "{% for a in [1] recursive %}{{ loop([a, a]) }}{% endfor %}",
    ],
)
def test_a_template_without_an_end_is_stopped(source: str) -> None:
    template = ChatTemplate(source, {}, seconds=0.05)
    with pytest.raises(InvalidRequest, match=r"cannot render these messages: (it takes too long|maximum recursion)"):
        template.render([{"role": "user", "content": "a"}])


def test_a_loop_knows_where_it_is() -> None:
    source = "{% for m in messages if m.role %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    messages = [{"role": "user", "content": c} for c in "ab"]
    assert ChatTemplate(source, {}).render(messages) == "1/2False 2/2True "
