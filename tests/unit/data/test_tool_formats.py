"""Parsers of tool calls, against the chat templates of model families and vLLM's parsers."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import tool_formats
from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.data.tool_formats import FORMATS
from megarl.data.turns import ChatTokens
from tests.chat_templates import FAMILIES
from tests.timing import SHORT_S

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


def encode(name: str, content: str) -> list[int]:
    return TOKENIZERS[FAMILY_OF[name]](content, add_special_tokens=False)["input_ids"]


def read(name: str, content: str) -> list[ToolCall | MalformedCall]:
    return list(CHATS[name].read(encode(name, content))[1])


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tagged"])
@given(drawn=calls)
@settings(max_examples=15, deadline=None)
def test_calls_rendered_by_a_template_are_parsed(name, drawn):
    drawn = drawn[:1] if name == "llama3" else drawn[:3]  # llama3's template rejects several calls
    as_text = json.dumps if name == "deepseek" else dict
    tool_calls = [
        {"id": f"abcdefg{i:02}", "type": "function", "function": {"name": tool, "arguments": as_text(arguments)}}
        for i, (tool, arguments) in enumerate(drawn)
    ]
    user, turn = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": tool_calls}
    tokenizer = TOKENIZERS[FAMILY_OF[name]]
    start, ids = (tokenizer.apply_chat_template(m, return_dict=False) for m in ([user], [user, turn]))
    _, parsed = CHATS[name].read(ids[len(start) :])
    parsed = [(call.name, call.arguments) for call in parsed] if name != "llama3" else parsed
    if name == "llama3":  # the ids include the turn's header, which is not part of the turn
        content = tokenizer.decode(ids[len(start) :]).partition("<|end_header_id|>\n\n")[2]
        parsed = [(call.name, call.arguments) for call in read(name, content)]
    assert parsed == drawn


@pytest.mark.parametrize("name", FORMATS)
def test_example_of_a_format_is_a_valid_call(name):
    example = FORMATS[name].example
    assert [(c.name, c.arguments) for c in read(name, example)] == [("the name", {"an argument": "its value"})]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
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
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|> functions.a:3 <|tool_call_argument_begin|> {}",
            [ToolCall("a", {}, "functions.a:3")],
        ),
    ],
)
def test_calls_are_parsed_as_models_write_them(name, content, expected):
    if isinstance(expected, str):
        expected = [ToolCall(tool, {}) for tool in expected]
    assert read(name, content) == expected


CALLS = {
    "hermes": ("", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', ""),
    "llama3": ("<|python_tag|>", '{"name": "add", "parameters": {}}; ', ""),
    "mistral": ("", '[TOOL_CALLS]add[ARGS]{"a": 3}', ""),
    "deepseek": ("", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>", ""),
    "kimi": ("", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>", ""),
    "tagged": ("<tool_call>[", '{"name": "add", "arguments": {}}, ', "3]</tool_call>"),
}


@pytest.mark.parametrize("filler", [" ", "\n", "```", "x", "json\n"])
def test_deepseek_code_block_is_found_in_linear_time(filler):
    """A backtracking search would hold the GIL for minutes and block all other rollouts of the engine."""
    begin = time.perf_counter()
    for text in (filler * 200_000, f"```json\n{filler * 200_000}", f"a{filler * 200_000}b```"):
        tool_formats._block(text)
    assert time.perf_counter() - begin < SHORT_S
    assert tool_formats._block(' look \n```json\n{"a": 1}\n``` \n') == ("look", '{"a": 1}\n')
    assert tool_formats._block('look\n```\n{"a": "```"}') == ("look", '{"a": "```"}')
    assert [tool_formats._block(text) for text in ("look {}", "a\nb```json\n{}", "look```json {}")] == [None] * 3


@pytest.mark.parametrize("name", CALLS)
def test_number_of_calls_is_limited(name, monkeypatch):
    """The first 64 calls are parsed, and one error replaces the others."""
    begin, call, end = CALLS[name]
    parsed, parse = [], tool_formats._call
    monkeypatch.setattr(tool_formats, "_call", lambda *arguments: parsed.append(1) or parse(*arguments))
    assert [type(each) for each in read(name, begin + call * 64 + end)][:64] == [ToolCall] * 64
    parsed.clear()
    *calls, rest = read(name, begin + call * 3000 + end)
    assert [type(each) for each in calls] == [ToolCall] * 64 and len(parsed) == 65
    assert (
        isinstance(rest, MalformedCall) and rest.reason == "a turn may have 64 tool calls; further calls were not run"
    )


DEEP = "[" * 100_000
NESTED = '{"a": ' * 400 + "0" + "}" * 400


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("hermes", "<tool_call>add(3)</tool_call>", "invalid JSON: "),
        ("hermes", '<tool_call>{"name": "add", "argu', "invalid JSON: "),
        ("hermes", "<tool_call></tool_call>", "invalid JSON: "),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [-1e999]}}</tool_call>', "not JSON compliant"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {DEEP}</tool_call>', "nested too deeply"),
        ("hermes", f'<tool_call>{{"name": "add", "arguments": {NESTED}}}</tool_call>', "nested too deeply"),
        ("llama3", f'{{"name": "add", "parameters": {NESTED}}}', "nested too deeply"),
        ("hermes", "<tool_call>3</tool_call>", "not a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'missing "name"'),
        ("hermes", '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', 'missing "name"'),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', 'missing "arguments"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [3]}</tool_call>', "must be a JSON object with a value"),
        ("llama3", '<|python_tag|>add.call(a="3")', "invalid JSON: "),
        ("llama3", '{"name": "add"}', 'missing "parameters"'),
        ("llama3", '{"name": "add", "param', "invalid JSON: "),
        ("mistral", "[TOOL_CALLS]", "the arguments are not valid JSON: "),
        ("mistral", '[TOOL_CALLS] [{"name": "add"}]', 'missing "arguments"'),
        ("deepseek", "<｜tool▁call▁begin｜>function", "missing <｜tool▁sep｜>"),
        ("kimi", "<|tool_call_begin|>functions.add:0{}", "missing <|tool_call_argument_begin|>"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{", "the arguments are not valid JSON"),
        (
            "deepseek",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\n```",
            "the arguments are not valid JSON: ",
        ),
    ],
)
def test_malformed_call_has_a_reason(name, content, reason):
    [call] = read(name, content)
    assert isinstance(call, MalformedCall) and reason in call.reason


@pytest.mark.parametrize(("name", "tag"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")])
def test_text_that_looks_like_a_tag_is_not_a_call(name, tag):
    """The tokens of the tag's two halves decode to the tag without being the tag's token."""
    call = '{"name": "add", "arguments": {}}'
    ids = [*encode(name, tag[:4]), *encode(name, tag[4:]), *encode(name, call)]
    assert TOKENIZERS[FAMILY_OF[name]].decode(ids) == tag + call
    assert CHATS[name].read(ids) == (tag + call, ())
    assert CHATS[name].read(encode(name, tag + call))[1] == (ToolCall("add", {}),)


PARSERS = {
    "hermes": ("hermes_tool_parser", "Hermes2ProToolParser"),
    "llama3": ("llama_tool_parser", "Llama3JsonToolParser"),
    "deepseek": ("deepseekv3_tool_parser", "DeepSeekV3ToolParser"),
    "kimi": ("kimi_k2_tool_parser", "KimiK2ToolParser"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_parser_finds_the_same_calls_as_vllm(name):
    from importlib import import_module

    module, kind = PARSERS[name]
    parser = getattr(import_module(f"vllm.tool_parsers.{module}"), kind)(TOKENIZERS[FAMILY_OF[name]])

    @given(drawn=calls.map(lambda drawn: drawn[:3]))
    @settings(max_examples=30, deadline=None)
    def check(drawn):
        objects = [json.dumps({"name": tool, "arguments": arguments}) for tool, arguments in drawn]
        if name == "hermes":
            content = "Well. " + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        elif name == "llama3":
            content = "<|python_tag|>" + "; ".join(objects)
        elif name == "kimi":
            names = [f"<|tool_call_begin|>functions.{tool}:{i}" for i, (tool, _) in enumerate(drawn)]
            parts = [
                f"{one}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
                for one, (_, a) in zip(names, drawn, strict=True)
            ]
            content = f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"
        else:
            header = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            parts = [f"{header}{tool}\n```json\n{json.dumps(a)}\n```<｜tool▁call▁end｜>" for tool, a in drawn]
            content = f"<｜tool▁calls▁begin｜>{chr(10).join(parts)}<｜tool▁calls▁end｜>"
        parsed = parser.extract_tool_calls(content, None).tool_calls
        expected = [(call.function.name, json.loads(call.function.arguments)) for call in parsed]
        assert [(call.name, call.arguments) for call in read(name, content)] == expected == drawn

    check()


def test_harmony_is_not_mistaken_for_another_format():
    """gpt-oss writes a call as a message to a recipient, which no parser reads."""
    call = "<|start|>assistant<|channel|>commentary to=functions.add<|message|>{{ arguments }}<|call|>"
    assert tool_formats.format_of(call + "{# <tool_call> #}") is None
