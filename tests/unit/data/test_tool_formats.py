"""Parsers of tool calls, against the chat templates of model families and vLLM's parsers."""

from __future__ import annotations

import json
import time
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import call_json, tool_formats
from megarl.data.tool_calls import MalformedCall, Piece, ToolCall
from megarl.data.tool_formats import FORMATS, CallReader, format_of
from megarl.data.turns import ChatTokens
from tests.chat_templates import FAMILIES
from tests.timing import SCAN_CPU_S

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


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "tagged" and not FORMATS[name].has_text_values])
@given(drawn=calls)
@settings(max_examples=15, deadline=None)
def test_calls_rendered_by_a_template_are_parsed(name, drawn):
    drawn = drawn[:1] if name in ("llama3", "harmony") else drawn[:3]  # these templates render only one call
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
    if name == "llama3":  # remove the header, which is not part of the turn
        content = tokenizer.decode(ids[len(start) :]).partition("<|end_header_id|>\n\n")[2]
        parsed = [(call.name, call.arguments) for call in read(name, content)]
    assert parsed == drawn


@pytest.mark.parametrize("name", FORMATS)
def test_example_of_a_format_is_a_valid_call(name):
    example = FORMATS[name].example
    [call] = read(name, example)
    assert (call.name.replace("_", " "), call.arguments) == ("the name", {"an argument": "its value"})


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
        ("qwen3_coder", "<tool_call><function=a></function><tool_call>\n<function=b>\n</function>\n</tool_call>", "ab"),
        (
            "qwen3_coder",
            "<tool_call><function=a><parameter=b>\n\n <i>\n\n</parameter><parameter=c>1</parameter></function>",
            [ToolCall("a", {"b": "\n <i>\n", "c": "1"})],
        ),
        ("qwen3_coder", "<function=a></function>", []),
        ("glm", "<think></think>\n<tool_call>a</tool_call>\n<tool_call>b\n</tool_call><|observation|>", "ab"),
        (
            "glm",
            "<tool_call>a<arg_key> b </arg_key><arg_value>\n1 </arg_value>"
            "<arg_key>c</arg_key><arg_value></arg_value></tool_call>",
            [ToolCall("a", {"b": "\n1 ", "c": ""})],
        ),
        ("glm", "<arg_key>b</arg_key><arg_value>1</arg_value></tool_call>", []),
    ],
)
def test_calls_are_parsed_as_models_write_them(name, content, expected):
    if isinstance(expected, str):
        expected = [ToolCall(tool, {}) for tool in expected]
    assert read(name, content) == expected


WITH_TEXT_VALUES = [name for name, tool_format in FORMATS.items() if tool_format.has_text_values]
TYPES = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object", type(None): "null"}


def tool(name: str, properties: dict, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties, **more}}}


@pytest.mark.parametrize("name", WITH_TEXT_VALUES)
@given(drawn=st.lists(st.dictionaries(st.sampled_from(["a", "b c", "é"]), values, max_size=3), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
def test_text_values_get_the_types_of_the_schema(name, drawn):
    """The schema of each tool declares the types of the arguments that the template renders."""
    tools = [
        tool(f"tool{i}", {key: {"type": TYPES[type(value)]} for key, value in arguments.items()})
        for i, arguments in enumerate(drawn)
    ]
    functions = [{"name": f"tool{i}", "arguments": arguments} for i, arguments in enumerate(drawn)]
    tokenizer = TOKENIZERS[FAMILY_OF[name]]
    user, turn = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}
    turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    start, ids = (tokenizer.apply_chat_template(m, tools=tools, return_dict=False) for m in ([user], [user, turn]))
    chat = ChatTokens(tokenizer, tools)
    _, parsed = chat.read(ids[len(start) :])
    assert [{"name": call.name, "arguments": call.arguments} for call in parsed] == functions


SCHEMAS = {
    "number": ({"type": "number"}, {"5": 5, "1.5": 1.5, "x": "x", "1e999": "1e999", "NaN": "NaN"}),
    "integer": ({"type": "integer"}, {"5": 5, " 5\n": 5, "5.5": 5.5, '"5"': "5"}),
    "boolean": ({"type": "boolean"}, {"true": True, "False": False, "yes": "yes"}),
    "text": ({"type": "string"}, {"5": "5", "null": "null", '"a"': '"a"', "{}": "{}"}),
    "untyped": ({}, {"5": "5"}),
    "optional text": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"5": "5", "null": None, '"a"': '"a"'}),
    "optional number": ({"type": ["integer", "null"]}, {"5": 5, "None": None}),
    "enumeration": ({"enum": ["a", 5, None]}, {"a": "a", "5": 5, "null": None, "true": "true"}),
    "constant": ({"const": 5}, {"5": 5}),
    "reference": ({"$ref": "#/$defs/Item"}, {'{"a": [1]}': {"a": [1]}, "{": "{"}),
    "circular": ({"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "array"}]}, {"[5]": [5]}),
    "deep": ({"type": "array"}, {"[" * 400 + "]" * 400: "[" * 400 + "]" * 400}),
    "invalid": ({"type": 5, "enum": 3, "anyOf": {"a": 1}, "$ref": ["a"]}, {"5": "5"}),
}
DEFINITIONS = {"Item": {"type": "object"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 2}}


@pytest.mark.parametrize("name", WITH_TEXT_VALUES)
@pytest.mark.parametrize("case", SCHEMAS)
def test_schema_determines_which_values_are_json(name, case):
    schema, expected = SCHEMAS[case]
    reader = CallReader(
        TOKENIZERS[FAMILY_OF[name]], FORMATS[name], [tool("add", {"a": schema}, **{"$defs": DEFINITIONS})]
    )
    parsed = {}
    for value in expected:
        [call] = reader.read(encode(name, rendered_call(name, value)))
        parsed[value] = call.arguments["a"]
    assert parsed == expected and list(map(type, parsed.values())) == list(map(type, expected.values()))


def rendered_call(name: str, value: str) -> str:
    """Return a call of the tool `add` with one argument."""
    if name == "glm":
        return f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    return f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("parameters", [None, 3, [], {}, {"properties": [1]}, {"properties": {"a": 3}}])
def test_invalid_schema_leaves_values_as_text(parameters):
    described = {"type": "function", "function": {"name": "add", "parameters": parameters}}
    reader = CallReader(TOKENIZERS["glm"], FORMATS["glm"], [described])
    assert reader.read(encode("glm", rendered_call("glm", "5"))) == (ToolCall("add", {"a": "5"}),)


COMMENTARY = "<|channel|>commentary to=functions."
THOUGHT = "<|channel|>analysis<|message|>I must add.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (f"{THOUGHT}{COMMENTARY}add <|constrain|>json<|message|>{{}}<|call|>", [ToolCall("add", {})]),
        (f"{COMMENTARY}add<|constrain|>json<|message|>{{}}", [ToolCall("add", {})]),
        (" to=functions.add<|channel|>commentary json<|message|>{}<|call|>", [ToolCall("add", {})]),
        (f"{THOUGHT} to=add<|channel|>analysis code<|message|>{{}}<|call|>", [ToolCall("add", {})]),
        ("<|channel|>final<|message|>to=functions.add {}<|return|>", []),
        ("<|start|>functions.add to=assistant<|channel|>commentary<|message|>3<|end|>", []),
        (f"{COMMENTARY}add<|message|>{{}}<|call|> to=functions.add", [ToolCall("add", {})]),
        ("", []),
    ],
)
def test_harmony_calls_are_messages_to_a_tool(content, expected):
    assert read("harmony", content) == expected


def test_harmony_turn_has_at_most_one_call():
    call = f"{COMMENTARY}add<|message|>{{}}<|end|><|start|>assistant"
    for number in (2, 3000):
        first, second = read("harmony", call * number)
        assert first == ToolCall("add", {})
        assert isinstance(second, MalformedCall) and second.reason.startswith("a turn may contain only one tool call")


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>3<|return|>", "3"),
        (
            "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>3",
            "Let me see.\n3",
        ),
        (f"{THOUGHT}{COMMENTARY}add<|message|>{{}}<|call|>", ""),
        ("<|channel|>analysis<|message|>It is 3", ""),
        ("<|start|>user<|channel|>final<|message|>3<|end|>", ""),
        ("It is 3", ""),
    ],
)
def test_harmony_answer_excludes_reasoning_and_calls(content, answer):
    for tool_format in (None, "harmony", "tagged"):
        chat = ChatTokens(TOKENIZERS["gpt-oss"], tool_format=tool_format)
        assert chat.read(encode("harmony", content))[0] == answer
    assert CHATS["harmony"].before_calls(encode("harmony", content)) == answer


def test_harmony_answer_drops_an_incomplete_character():
    ids = encode("harmony", "<|channel|>final<|message|>é")
    assert CHATS["harmony"].read(ids[:-1])[0] == "" and CHATS["harmony"].read(ids)[0] == "é"


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "harmony"])
def test_adversarial_calls_are_parsed_in_linear_time(name):
    """A quadratic search would block all other rollouts of the engine."""
    parts = {
        "qwen3_coder": ["<function=a>", "<parameter=a>", "</parameter>", "<function=", "<parameter=", "\n", "<"],
        "glm": ["<tool_call>", "<arg_key>", "</arg_key><arg_value>", "a"],
        "harmony": ["<|start|>assistant", "<|channel|>", " to=a", "<|constrain|>", "<|message|>", "a"],
    }[name]
    turns = [
        [Piece("", ""), *([Piece(tag, text)] * n)]
        for text, n in [(part * 100_000, 1) for part in parts] + [(part, 50_000) for part in parts]
        for tag in FORMATS[name].tags
    ]
    if name == "qwen3_coder":
        turns += [[Piece("<tool_call>", f"<function=a>{part * 100_000}")] for part in parts]
        turns += [[Piece("<tool_call>", "<function=a>" + "<parameter=a></parameter>" * 50_000)]]
    for turn in turns:
        begin = time.process_time()
        list(islice(FORMATS[name].read(turn), 65))
        if FORMATS[name].answer is not None:
            FORMATS[name].answer(turn)
        assert time.process_time() - begin < SCAN_CPU_S


CALLS = {
    "hermes": ("", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', ""),
    "llama3": ("<|python_tag|>", '{"name": "add", "parameters": {}}; ', ""),
    "mistral": ("", '[TOOL_CALLS]add[ARGS]{"a": 3}', ""),
    "deepseek": ("", "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>", ""),
    "kimi": ("", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>", ""),
    "qwen3_coder": ("", "<tool_call>\n<function=add>\n</function>\n</tool_call>", ""),
    "glm": ("", "<tool_call>add\n</tool_call>", ""),
    "tagged": ("<tool_call>[", '{"name": "add", "arguments": {}}, ', "3]</tool_call>"),
}


@pytest.mark.parametrize("filler", [" ", "\n", "```", "x", "json\n"])
def test_deepseek_code_block_is_found_in_linear_time(filler):
    """A backtracking search would hold the GIL for minutes and block all other rollouts of the engine."""
    begin = time.process_time()
    for text in (filler * 200_000, f"```json\n{filler * 200_000}", f"a{filler * 200_000}b```"):
        tool_formats._block(text)
    assert time.process_time() - begin < SCAN_CPU_S
    assert tool_formats._block(' look \n```json\n{"a": 1}\n``` \n') == ("look", '{"a": 1}\n')
    assert tool_formats._block('look\n```\n{"a": "```"}') == ("look", '{"a": "```"}')
    assert [tool_formats._block(text) for text in ("look {}", "a\nb```json\n{}", "look```json {}")] == [None] * 3


@pytest.mark.parametrize("name", CALLS)
def test_number_of_calls_is_limited(name, monkeypatch):
    """The first 64 calls are parsed, and one error replaces the others."""
    begin, call, end = CALLS[name]
    parsed, parse = [], call_json.call_of
    for module in (call_json, tool_formats):
        monkeypatch.setattr(module, "call_of", lambda *arguments: parsed.append(1) or parse(*arguments))
    assert [type(each) for each in read(name, begin + call * 64 + end)][:64] == [ToolCall] * 64
    parsed.clear()
    *calls, rest = read(name, begin + call * 3000 + end)
    assert [type(each) for each in calls] == [ToolCall] * 64 and len(parsed) == 65
    assert (
        isinstance(rest, MalformedCall)
        and rest.reason == "a turn may have at most 64 tool calls; further calls were not run"
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
        ("qwen3_coder", "<tool_call>add()</tool_call>", "missing <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=>", "missing <function=NAME>"),
        ("qwen3_coder", "<tool_call><function=add", "missing <function=NAME>"),
        ("qwen3_coder", "<tool_call><function= ></function>", 'missing "name"'),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1", "missing </parameter> after the value of a"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</tool_call>", "missing </parameter>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>1</parameter>", "must be followed by"),
        ("qwen3_coder", "<tool_call><function=add>1</function></tool_call>", "must be followed by"),
        ("qwen3_coder", "<tool_call><function=add></function> 1</tool_call>", "must be followed by"),
        ("glm", "<tool_call>", "missing </tool_call>"),
        ("glm", "<tool_call></tool_call>", 'missing "name"'),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>", "missing </tool_call>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>", "must be followed by"),
        ("glm", "<tool_call>add<arg_value>1</arg_value><arg_key>a</arg_key></tool_call>", "must be followed by"),
        ("glm", "<tool_call>add<arg_key>a</arg_key>b<arg_value>1</arg_value></tool_call>", "must be followed by"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>b</tool_call>", "must be followed by"),
        ("harmony", f"{COMMENTARY}add<|message|>{{<|call|>", "the arguments are not valid JSON: "),
        ("harmony", f"{COMMENTARY}add<|message|>3<|call|>", "must be a JSON object with a value"),
        ("harmony", f"{COMMENTARY}<|message|>{{}}<|call|>", 'missing "name"'),
        ("harmony", f"{COMMENTARY}add<|call|>", "missing <|message|>"),
        ("harmony", f"{COMMENTARY}add", "missing <|message|>"),
        ("harmony", f"<|start|>user{COMMENTARY}add<|message|>{{}}<|call|>", "starts with <|start|>assistant"),
        ("harmony", f"<|end|>{COMMENTARY}add<|message|>{{}}<|call|>", "starts with <|start|>assistant"),
    ],
)
def test_malformed_call_has_a_reason(name, content, reason):
    [call] = read(name, content)
    assert isinstance(call, MalformedCall) and reason in call.reason


@pytest.mark.parametrize(
    ("name", "tag", "call"),
    [
        ("hermes", "<tool_call>", '{"name": "add", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]", '{"name": "add", "arguments": {}}'),
        ("qwen3_coder", "<tool_call>", "<function=add></function>"),
        ("glm", "<tool_call>", "add</tool_call>"),
        ("harmony", "<|channel|>", "commentary to=functions.add<|message|>{}"),
    ],
)
def test_text_that_looks_like_a_tag_is_not_a_call(name, tag, call):
    """The characters decode to the tag without being the tag's token."""
    ids = [token for character in tag + call for token in encode(name, character)]
    assert TOKENIZERS[FAMILY_OF[name]].decode(ids) == tag + call
    assert CHATS[name].read(ids) == ("" if name == "harmony" else tag + call, ())
    assert CHATS[name].read(encode(name, tag + call))[1] == (ToolCall("add", {}),)


def test_harmony_tags_typed_in_a_message_are_text():
    typed = "<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    ids = [token for character in typed for token in encode("harmony", character)]
    turn = encode("harmony", "<|channel|>final<|message|>") + ids
    assert CHATS["harmony"].read(turn) == (typed, ())


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


TEXT_PARSERS = {
    "qwen3_coder": ("qwen3_engine_tool_parser", "Qwen3EngineToolParser"),
    "glm": ("glm47_moe_tool_parser", "Glm47MoeModelToolParser"),
}
PROPERTIES = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "whole": {"type": "integer"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "object": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
}
texts = st.text("ab \n{}[]\"\\'é;<>`1null", max_size=8)
written = st.dictionaries(
    st.sampled_from([*PROPERTIES, "unknown"]), texts | st.sampled_from(["5", "1.5", "true", "[]", "{}"])
)


def vllm_calls(name: str, content: str) -> list[tuple[str, dict]]:
    from importlib import import_module

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    module, kind = TEXT_PARSERS[name]
    tools = [ChatCompletionToolsParam(**tool(each, PROPERTIES)) for each in ("add", "look_up")]
    parser = getattr(import_module(f"vllm.tool_parsers.{module}"), kind)(TOKENIZERS[FAMILY_OF[name]], tools)
    parsed = parser.extract_tool_calls(content, None).tool_calls
    return [(call.function.name, json.loads(call.function.arguments)) for call in parsed]


def written_call(name: str, function: str, arguments: dict[str, str]) -> str:
    if name == "glm":
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
        return f"<tool_call>{function}\n{''.join(pairs)}</tool_call>"
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={function}>\n{''.join(pairs)}</function>\n</tool_call>"


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT_PARSERS)
def test_text_values_equal_those_of_vllm(name):
    tools = [tool(each, PROPERTIES) for each in ("add", "look_up")]
    reader = CallReader(TOKENIZERS[FAMILY_OF[name]], FORMATS[name], tools)

    @given(drawn=st.lists(st.tuples(st.sampled_from(["add", "look_up"]), written), min_size=1, max_size=3))
    @settings(max_examples=100, deadline=None)
    def check(drawn):
        content = "\n".join(written_call(name, function, arguments) for function, arguments in drawn)
        parsed = [(call.name, call.arguments) for call in reader.read(encode(name, content))]
        assert parsed == vllm_calls(name, content)

    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("qwen3_coder", "<tool_call><function=add>"),
        ("qwen3_coder", "<tool_call><function=add><parameter=text>1"),
        ("qwen3_coder", "<tool_call><function=add><parameter=text>1</parameter>"),
        ("qwen3_coder", "<tool_call>add</tool_call>"),
        ("glm", "<tool_call>add<arg_key>text</arg_key><arg_value>1</tool_call>"),
        ("glm", "<tool_call>add<arg_key>text</arg_key></tool_call>"),
        ("glm", "<tool_call>add<arg_key>text</arg_key><arg_value>1</arg_value>"),
    ],
)
def test_calls_that_vllm_completes_are_malformed(name, content):
    """vLLM runs incomplete calls without the arguments that it cannot parse, or drops the call without a message."""
    assert vllm_calls(name, content) in ([], [("add", {})], [("add", {"text": "1"})])
    [call] = read(name, content)
    assert isinstance(call, MalformedCall)


CALL_TEMPLATES = {
    "harmony": "<|channel|>commentary to=functions.{{ name }}<|message|>{{ arguments }}<|call|>{# <tool_call> #}",
    "qwen3_coder": "<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>",
    "glm": "<tool_call>{{ name }}<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>",
}


@pytest.mark.parametrize("name", CALL_TEMPLATES)
def test_format_is_recognized_by_all_of_its_tags(name):
    assert format_of(CALL_TEMPLATES[name]) == name


@pytest.mark.parametrize(
    "text", ["<seed:tool_call><function=a><parameter=b>", "<function=a>{}<tool_call>", "<arg_key>"]
)
def test_formats_with_some_of_the_tags_are_unknown(text):
    assert format_of(text) is None
