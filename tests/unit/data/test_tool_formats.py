"""Calls of tools as turns have them, against what the families' templates write, and against vLLM's own parsers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.data.tool_formats import FORMATS
from megarl.data.turns import ChatTokens
from tests.chat_templates import FAMILIES

TOKENIZERS = {name: family.tokenizer() for name, family in FAMILIES.items()}
FAMILY_OF = {family.tool_format: name for name, family in FAMILIES.items() if family.tool_format} | {"tagged": "phi3"}
CHATS = {name: ChatTokens(TOKENIZERS[FAMILY_OF[name]], tool_format=name) for name in FORMATS}

text = st.text("ab \n{}[]\"\\'é;<>`", max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
calls = st.lists(st.tuples(st.sampled_from(["add", "look_up"]), st.dictionaries(text, values, max_size=2)), min_size=1)


def encode(name: str, said: str) -> list[int]:
    return TOKENIZERS[FAMILY_OF[name]](said, add_special_tokens=False)["input_ids"]


def read(name: str, said: str) -> list[ToolCall | MalformedCall]:
    return list(CHATS[name].read(encode(name, said))[1])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tagged"])
@given(made=calls)
@settings(max_examples=15, deadline=None)
def test_what_a_template_writes_for_calls_is_read_as_these_calls(name, made):
    made = made[:1] if name == "llama3" else made[:3]  # its template refuses several
    as_text = json.dumps if name == "deepseek" else dict
    tool_calls = [
        {"id": f"abcdefg{i:02}", "type": "function", "function": {"name": tool, "arguments": as_text(arguments)}}
        for i, (tool, arguments) in enumerate(made)
    ]
    user, turn = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": tool_calls}
    tokenizer = TOKENIZERS[FAMILY_OF[name]]
    start, ids = (tokenizer.apply_chat_template(m, return_dict=False) for m in ([user], [user, turn]))
    _, found = CHATS[name].read(ids[len(start) :])
    found = [(call.name, call.arguments) for call in found] if name != "llama3" else found
    if name == "llama3":  # after what leads to the turn, which the text is read with
        said = tokenizer.decode(ids[len(start) :]).partition("<|end_header_id|>\n\n")[2]
        found = [(call.name, call.arguments) for call in read(name, said)]
    assert found == made


@pytest.mark.parametrize("name", FORMATS)
def test_the_example_of_a_format_is_a_call(name):
    example = FORMATS[name].example
    assert [(c.name, c.arguments) for c in read(name, example)] == [("the name", {"an argument": "its value"})]


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("hermes", "No call.", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}}', [ToolCall("add", {})]),
        ("tagged", '<tool_call>[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]</tool_call>', "ab"),
        ("llama3", '{"name": "a", "parameters": {}}; {"name": "b", "arguments": {}}<|eom_id|>', "ab"),
        ("llama3", '<|python_tag|>{"name": "a", "parameters": {}}<|eom_id|>', "a"),
        ("llama3", 'The answer is {"name": "a"}', []),
        ("llama3", '{"answer": 3}', []),
        ("mistral", "[TOOL_CALLS]a{}[TOOL_CALLS]b{}</s>", "ab"),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "a", "arguments": {}, "id": "abcdefghi"}]',
            [ToolCall("a", {}, "abcdefghi")],
        ),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "a"),
    ],
)
def test_calls_as_models_write_them(name, said, expected):
    if isinstance(expected, str):
        expected = [ToolCall(tool, {}) for tool in expected]
    assert read(name, said) == expected


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("hermes", "<tool_call>add(3)</tool_call>", "it is no JSON"),
        ("hermes", '<tool_call>{"name": "add", "argu', "it is no JSON"),
        ("hermes", "<tool_call></tool_call>", "it is no JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {DEEP}</tool_call>', "nested too deeply"),
        ("hermes", "<tool_call>3</tool_call>", "no JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'no "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [3]}</tool_call>', "no JSON object with a value"),
        ("llama3", '<|python_tag|>add.call(a="3")', "it is no JSON"),
        ("llama3", '{"name": "add"}', 'no "parameters"'),
        ("llama3", '{"name": "add", "param', "it is no JSON"),
        ("mistral", "[TOOL_CALLS]", "its arguments are no JSON"),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}]', 'no "arguments"'),
        ("deepseek", "<｜tool▁call▁begin｜>function", "no <｜tool▁sep｜>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\n```", "its arguments are no JSON"),
    ],
)
def test_what_is_no_call_is_said_to_be_none(name, said, reason):
    [call] = read(name, said)
    assert isinstance(call, MalformedCall) and reason in call.reason


@pytest.mark.parametrize(("name", "tag"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")])
def test_text_that_looks_like_a_tag_is_none(name, tag):
    """The tokens of the tag's halves decode to the tag, and are not the tag."""
    call = '{"name": "add", "arguments": {}}'
    ids = [*encode(name, tag[:4]), *encode(name, tag[4:]), *encode(name, call)]
    assert TOKENIZERS[FAMILY_OF[name]].decode(ids) == tag + call
    assert CHATS[name].read(ids) == (tag + call, ())
    assert CHATS[name].read(encode(name, tag + call))[1] == (ToolCall("add", {}),)


PARSERS = {
    "hermes": ("hermes_tool_parser", "Hermes2ProToolParser"),
    "llama3": ("llama_tool_parser", "Llama3JsonToolParser"),
    "deepseek": ("deepseekv3_tool_parser", "DeepSeekV3ToolParser"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_vllms_parser_finds_the_same_calls(name):
    from importlib import import_module

    module, kind = PARSERS[name]
    parser = getattr(import_module(f"vllm.tool_parsers.{module}"), kind)(TOKENIZERS[FAMILY_OF[name]])

    @given(made=calls.map(lambda made: made[:3]))
    @settings(max_examples=30, deadline=None)
    def check(made):
        objects = [json.dumps({"name": tool, "arguments": arguments}) for tool, arguments in made]
        if name == "hermes":
            said = "Well. " + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        elif name == "llama3":
            said = "<|python_tag|>" + "; ".join(objects)
        else:
            begun = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            parts = [f"{begun}{tool}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>" for tool, a in made]
            said = f"<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"
        found = parser.extract_tool_calls(said, None).tool_calls
        theirs = [(call.function.name, json.loads(call.function.arguments)) for call in found]
        assert [(call.name, call.arguments) for call in read(name, said)] == theirs == made

    check()
