"""Formats in which models write tool calls, each with a small parser.

Parsers work on a turn's token ids. A tag that is a single token of the tokenizer is matched by its id, so text that
merely looks like the tag does not match. Any other tag is matched in the text. Malformed calls become instances of
`MalformedCall`; no sampled output raises an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from megarl.data import harmony
from megarl.data.call_json import call_of, json_calls, json_sequence, json_value, named_call
from megarl.data.tool_calls import MAX_CALLS, Call, MalformedCall, Piece
from megarl.data.tool_schema import argument_types
from megarl.models.tokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a model family writes tool calls.

    Attributes:
        tags: strings that delimit calls.
        example: a call, for instructions in a system message.
        read: parser of the calls in a turn's pieces.
        has_text_values: whether arguments are written as text. `read` returns them as text, and the types in the tool's
            schema determine which of them are JSON.
        answer: function that returns the text for the user; None if that is all text of a turn.
    """

    tags: tuple[str, ...]
    example: str
    read: Callable[[Sequence[Piece]], Iterator[Call]]
    has_text_values: bool = False
    answer: Callable[[Sequence[Piece]], str] | None = None


class CallReader:
    """Parses the tool calls of turns in one format."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]] = ()
    ):
        """`tools`: descriptions of the tools. Their schemas determine the types of arguments."""
        self._tokenizer, self._format = tokenizer, tool_format
        functions = [tool["function"] for tool in tools]
        self._types = {function["name"]: argument_types(function.get("parameters")) for function in functions}
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._by_id = {added[tag]: tag for tag in tool_format.tags if tag in added}
        in_text = [re.escape(tag) for tag in tool_format.tags if tag not in added]
        self._in_text = re.compile(f"({'|'.join(in_text)})") if in_text else None

    def read(self, token_ids: Sequence[int]) -> tuple[Call, ...]:
        """Return the calls in a turn. A single malformed call replaces all calls after the first MAX_CALLS."""
        found = self._format.read(self._pieces(list(token_ids)))
        calls = tuple(map(self._typed, islice(found, MAX_CALLS + 1)))
        if len(calls) <= MAX_CALLS:
            return calls
        return *calls[:MAX_CALLS], MalformedCall(
            "", f"a turn may have at most {MAX_CALLS} tool calls; further calls were not run"
        )

    def text_before(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn before its first call or, in formats that mark the text for the user, the marked
        text."""
        answer = self.answer(token_ids)
        if answer is not None:
            return answer.strip()
        first = self._pieces(list(token_ids))[:1]
        return "" if any(self._format.read(first)) else first[0].text.strip()

    def answer(self, token_ids: Sequence[int]) -> str | None:
        """Return the turn's text for the user, without reasoning or calls; None if the format does not mark it."""
        answer = self._format.answer
        return None if answer is None else answer(self._pieces(list(token_ids)))

    def _typed(self, call: Call) -> Call:
        """Convert arguments that are written as text to the types in the tool's schema."""
        if isinstance(call, MalformedCall) or not self._format.has_text_values:
            return call
        types = self._types.get(call.name, {})
        return replace(
            call, arguments={key: json_value(v, types.get(key, frozenset())) for key, v in call.arguments.items()}
        )

    def _pieces(self, token_ids: list[int]) -> list[Piece]:
        """Split a turn at its tags. Text is decoded without special tokens."""
        pieces: list[Piece] = []
        start, tag = 0, ""
        for end in [i for i, token in enumerate(token_ids) if token in self._by_id] + [len(token_ids)]:
            text = decode(self._tokenizer, token_ids[start:end], skip_special_tokens=True) if start < end else ""
            first, *others = self._in_text.split(text) if self._in_text else [text]
            pieces.append(Piece(tag, first))
            pieces += [Piece(*pair) for pair in zip(others[::2], others[1::2], strict=True)]
            if end < len(token_ids):
                start, tag = end + 1, self._by_id[token_ids[end]]
        return pieces


HERMES_TAGS = ("<tool_call>", "</tool_call>")


def read_hermes(turn: Sequence[Piece], lists: bool = False) -> Iterator[Call]:
    """Parse `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as written by Qwen and Hermes models. The closing
    tag is optional, since a turn may end with the call. With `lists`, also accept a list of calls between the tags."""
    for piece in turn:
        if piece.tag == "<tool_call>":
            yield from json_calls(piece.text, lists)


def read_llama3(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse `{"name": …, "parameters": {…}}`, or several of them separated by semicolons. They follow `<|python_tag|>`
    or start the turn."""
    for piece in turn:
        text = piece.text.strip()
        if piece.tag == "<|python_tag|>" or re.match(r'\{\s*"name"', text):
            yield from json_sequence(text)


def read_mistral(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or the newer `[TOOL_CALLS]name[ARGS]{…}`."""
    for place, piece in enumerate(turn):
        if piece.tag != "[TOOL_CALLS]":
            continue
        text = piece.text.strip()
        if text.startswith(("[", "{")):
            yield from json_calls(text, lists=True)
            continue
        fields = {}
        for follower in turn[place + 1 :]:
            if follower.tag == "[TOOL_CALLS]":
                break
            fields[follower.tag] = follower.text.strip()
        if "[ARGS]" in fields:
            yield named_call(text, fields["[ARGS]"], fields.get("[CALL_ID]", ""))
        else:
            name, brace, arguments = text.partition("{")
            yield named_call(name.strip(), brace + arguments)


DEEPSEEK_TAGS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)


def read_deepseek(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse DeepSeek V3 calls, with the name and a JSON block after <｜tool▁sep｜>, and V3.1 calls, with the name
    before the tag and plain JSON after it."""

    def read(name: str, text: str) -> Call:
        return named_call(*(_block(text) or (name, text)))

    return _read_separated(turn, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", read)


def _block(text: str) -> tuple[str, str] | None:
    """Return the name on the first line and the JSON in the code block that follows, or None if there is no block."""
    before, fence, after = text.partition("```")
    name, after = before.strip(), after.removeprefix("json")
    indent = after[: len(after) - len(after.lstrip())]
    if not fence or "\n" in name or "\n" not in indent:
        return None
    return name, after.strip().removesuffix("```")


def _read_separated(
    turn: Sequence[Piece], begin: str, separator: str, read: Callable[[str, str], Call]
) -> Iterator[Call]:
    """Yield the calls of a format with one tag before a call and one between its name and its arguments. `read` parses
    the texts after the two tags."""
    for place, piece in enumerate(turn):
        if piece.tag != begin:
            continue
        following = turn[place + 1] if place + 1 < len(turn) else None
        if following is None or following.tag != separator:
            yield MalformedCall(piece.text, f"missing {separator} between name and arguments")
        else:
            yield read(piece.text.strip(), following.text)


KIMI_TAGS = (
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)


def read_kimi(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse Kimi K2's `<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}`. Tool results repeat
    the text before the arguments."""

    def read(number: str, text: str) -> Call:
        return named_call(number.removeprefix("functions.").partition(":")[0], text, number)

    return _read_separated(turn, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", read)


_FUNCTION = re.compile(r"\s*<function=([^<>]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>]+)>")


def read_qwen3_coder(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, as written by
    Qwen3-Coder and Qwen3.5. One line break is removed from each end of a value."""
    for piece in turn:
        if piece.tag == "<tool_call>":
            yield _function(piece.text)


def _function(text: str) -> Call:
    """Parse a <function=…> block, in linear time."""
    opening = _FUNCTION.match(text)
    if opening is None:
        return MalformedCall(text, "missing <function=NAME> after <tool_call>")
    arguments, place = {}, opening.end()
    while parameter := _PARAMETER.match(text, place):
        end = text.find("</parameter>", parameter.end())
        if end < 0:
            return MalformedCall(text, f"missing </parameter> after the value of {parameter[1]}")
        arguments[parameter[1].strip()] = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        place = end + len("</parameter>")
    if text[place:].strip() != "</function>":
        return MalformedCall(
            text,
            "<function=NAME> must be followed by <parameter=KEY>VALUE</parameter> for each argument and </function>",
        )
    return call_of({"name": opening[1].strip(), "arguments": arguments}, text)


GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def read_glm(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, as written by GLM-4.5 to
    4.7. There may be line breaks between the tags."""
    for place, piece in enumerate(turn):
        if piece.tag == "<tool_call>":
            following = (turn[i] for i in range(place + 1, len(turn)))
            parts = list(takewhile(lambda part: part.tag in GLM_TAGS[2:], following))
            end = place + 1 + len(parts)
            yield _keys_and_values(piece.text, parts, end < len(turn) and turn[end].tag == "</tool_call>")


def _keys_and_values(name: str, parts: Sequence[Piece], is_closed: bool) -> Call:
    """Return a call from the pieces between its name and its closing tag."""
    text = "".join([name, *(part.tag + part.text for part in parts)])
    is_paired = [part.tag for part in parts] == [*GLM_TAGS[2:]] * (len(parts) // 4)
    if not is_paired or any(part.text.strip() for part in parts[1::2]):
        return MalformedCall(
            text, "the name must be followed by <arg_key>KEY</arg_key><arg_value>VALUE</arg_value> for each argument"
        )
    if not is_closed:
        return MalformedCall(text, "missing </tool_call>")
    arguments = {key.text.strip(): value.text for key, value in zip(parts[::4], parts[2::4], strict=True)}
    return call_of({"name": name.strip(), "arguments": arguments}, text)


HERMES_EXAMPLE = '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>'
DEEPSEEK_EXAMPLE = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>the name\n```json\n"
    '{"an argument": "its value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
KIMI_EXAMPLE = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.the name:0<|tool_call_argument_begin|>"
    '{"an argument": "its value"}<|tool_call_end|><|tool_calls_section_end|>'
)

QWEN3_CODER_EXAMPLE = (
    "<tool_call>\n<function=the name>\n<parameter=an argument>\nits value\n</parameter>\n</function>\n</tool_call>"
)
GLM_EXAMPLE = "<tool_call>the name\n<arg_key>an argument</arg_key>\n<arg_value>its value</arg_value>\n</tool_call>"

FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(HERMES_TAGS, HERMES_EXAMPLE, read_hermes),
    "llama3": ToolFormat(
        ("<|python_tag|>",), '{"name": "the name", "parameters": {"an argument": "its value"}}', read_llama3
    ),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        '[TOOL_CALLS] [{"name": "the name", "arguments": {"an argument": "its value"}}]',
        read_mistral,
    ),
    "deepseek": ToolFormat(DEEPSEEK_TAGS, DEEPSEEK_EXAMPLE, read_deepseek),
    "kimi": ToolFormat(KIMI_TAGS, KIMI_EXAMPLE, read_kimi),
    "qwen3_coder": ToolFormat(HERMES_TAGS, QWEN3_CODER_EXAMPLE, read_qwen3_coder, has_text_values=True),
    "glm": ToolFormat(GLM_TAGS, GLM_EXAMPLE, read_glm, has_text_values=True),
    "harmony": ToolFormat(harmony.TAGS, harmony.EXAMPLE, harmony.read_calls, answer=harmony.answer),
    "tagged": ToolFormat(HERMES_TAGS, HERMES_EXAMPLE, partial(read_hermes, lists=True)),
}
"""Config name -> format. `tagged` is for models without a native format. It always describes the tools in a system
message, even if the chat template supports tools."""


def format_of(template: str) -> str | None:
    """Return the name of the format in which a chat template renders earlier tool calls; None if the format is
    unknown."""
    marks = (
        (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
        (("<tool_call>", "<arg_key>", "<arg_value>"), "glm"),
        (("<|channel|>", "<|call|>"), "harmony"),
        # Templates with only some of the tags above use a format that megarl does not support.
        (("<function=",), None),
        (("<arg_key>",), None),
        (("<|channel|>",), None),
        (("<｜tool▁calls▁begin｜>",), "deepseek"),
        (("<|tool_calls_section_begin|>",), "kimi"),
        (("[TOOL_CALLS]",), "mistral"),
        (("<|python_tag|>",), "llama3"),
        (("Environment: ipython",), "llama3"),
        (("<tool_call>",), "hermes"),
    )
    return next((name for tags, name in marks if all(tag in template for tag in tags)), None)


def instructions(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return a system message that describes the tools, for models whose chat template does not. It contains each
    tool's description as a line of JSON, and an example of a call."""
    descriptions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    arguments = "arguments" if FORMATS[name].has_text_values else "arguments as JSON"
    return (
        f"You can call tools. These are their descriptions, one per line:\n<tools>\n{descriptions}\n</tools>\n"
        f"To call a tool, write its name and its {arguments}, then end your turn:\n{FORMATS[name].example}\n"
        "The tool's response appears before your next turn."
    )
