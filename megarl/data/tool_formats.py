"""Formats in which models write tool calls, each with a small parser.

Parsers work on a turn's token ids. A tag that is a single token of the tokenizer is matched by its id, so text that
merely looks like the tag does not match. Any other tag is matched in the text. Malformed calls become instances of
`MalformedCall`; no sampled output raises an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from megarl.core.files import MAX_DEPTH, is_deeper
from megarl.data.tool_calls import MAX_CALLS, MalformedCall, ToolCall
from megarl.models.tokenizer import decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A tag and the text up to the next tag. The first piece of a turn has an empty tag."""

    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format in which a model family writes tool calls.

    Attributes:
        tags: strings that delimit calls.
        read: parser of the calls in a turn's pieces.
    """

    tags: tuple[str, ...]
    example: str
    read: Callable[[Sequence[Piece]], Iterator[Call]]


class CallReader:
    """Parses the tool calls of turns in one format."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_format: ToolFormat):
        self._tokenizer = tokenizer
        self._read = tool_format.read
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._by_id = {added[tag]: tag for tag in tool_format.tags if tag in added}
        in_text = [re.escape(tag) for tag in tool_format.tags if tag not in added]
        self._in_text = re.compile(f"({'|'.join(in_text)})") if in_text else None

    def read(self, token_ids: Sequence[int]) -> tuple[Call, ...]:
        """Return the calls in a turn. A single malformed call replaces all calls after the first MAX_CALLS."""
        calls = tuple(islice(self._read(self._pieces(list(token_ids))), MAX_CALLS + 1))
        if len(calls) <= MAX_CALLS:
            return calls
        return *calls[:MAX_CALLS], MalformedCall(
            "", f"a turn may have {MAX_CALLS} tool calls; further calls were not run"
        )

    def text_before(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn before its first call."""
        first = self._pieces(list(token_ids))[:1]
        return "" if any(self._read(first)) else first[0].text.strip()

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
            yield from _calls_of(piece.text, lists)


def read_llama3(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse `{"name": …, "parameters": {…}}`, or several of them separated by semicolons. They follow `<|python_tag|>`
    or start the turn."""
    for piece in turn:
        text = piece.text.strip()
        if piece.tag == "<|python_tag|>" or re.match(r'\{\s*"name"', text):
            yield from _sequence(text)


def read_mistral(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or the newer `[TOOL_CALLS]name[ARGS]{…}`."""
    for place, piece in enumerate(turn):
        if piece.tag != "[TOOL_CALLS]":
            continue
        text = piece.text.strip()
        if text.startswith(("[", "{")):
            yield from _calls_of(text, lists=True)
            continue
        fields = {}
        for follower in turn[place + 1 :]:
            if follower.tag == "[TOOL_CALLS]":
                break
            fields[follower.tag] = follower.text.strip()
        if "[ARGS]" in fields:
            yield _named(text, fields["[ARGS]"], fields.get("[CALL_ID]", ""))
        else:
            name, brace, arguments = text.partition("{")
            yield _named(name.strip(), brace + arguments)


DEEPSEEK_TAGS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)


def read_deepseek(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse DeepSeek V3 calls, with the name and a JSON block after <｜tool▁sep｜>, and V3.1 calls, with the name
    before the tag and plain JSON after it."""

    def read(name: str, text: str) -> Call:
        return _named(*(_block(text) or (name, text)))

    return _read_separated(turn, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", read)


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
        return _named(number.removeprefix("functions.").partition(":")[0], text, number)

    return _read_separated(turn, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", read)


HERMES_EXAMPLE = '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>'
DEEPSEEK_EXAMPLE = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>the name\n```json\n"
    '{"an argument": "its value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
KIMI_EXAMPLE = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.the name:0<|tool_call_argument_begin|>"
    '{"an argument": "its value"}<|tool_call_end|><|tool_calls_section_end|>'
)

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
    "tagged": ToolFormat(HERMES_TAGS, HERMES_EXAMPLE, partial(read_hermes, lists=True)),
}
"""Config name -> format. `tagged` is for models without a native format: a system message describes the tools, even if
the chat template could."""


def format_of(template: str) -> str | None:
    """Return the name of the format in which a chat template renders earlier tool calls; None if the format is
    unknown."""
    marks = (
        ("<function=", None),  # not JSON, despite the Hermes tags
        ("<arg_key>", None),
        ("<|channel|>", None),  # gpt-oss's harmony, whose calls are messages to a recipient
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("Environment: ipython", "llama3"),
        ("<tool_call>", "hermes"),
    )
    return next((name for mark, name in marks if mark in template), None)


def instructions(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    """Return a system message that describes the tools, for models whose chat template does not. It contains each
    tool's description as a line of JSON, and an example of a call."""
    descriptions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call tools. These are their descriptions, one per line:\n<tools>\n{descriptions}\n</tools>\n"
        f"To call a tool, write its name and its arguments as JSON, then end your turn:\n{FORMATS[name].example}\n"
        "The tool's response appears before your next turn."
    )


def _calls_of(text: str, lists: bool = False) -> Iterator[Call]:
    """Parse one JSON object as a call; with `lists`, also accept a list of objects."""
    try:
        value = _json(text)
    except (ValueError, RecursionError) as error:
        yield MalformedCall(text, f"invalid JSON: {_message(error)}")
        return
    if lists and isinstance(value, list):
        for item in value:
            yield _call(item, json.dumps(item, ensure_ascii=False))
    else:
        yield _call(value, text)


def _sequence(text: str) -> Iterator[Call]:
    """Parse calls separated by semicolons."""
    place = 0
    while place < len(text):
        try:
            value, end = _DECODER.raw_decode(text, place)
            _require_plain(value)
        except (ValueError, RecursionError) as error:
            yield MalformedCall(text[place:], f"invalid JSON: {_message(error)}")
            return
        yield _call(value, text[place:end], ("parameters", "arguments"))
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n\t"))


def _named(name: str, arguments: str, number: str = "") -> Call:
    """Return a call in a format that separates the name and the arguments."""
    text = f"{name} {arguments}"
    try:
        return _call({"name": name, "arguments": _json(arguments), "id": number}, text)
    except (ValueError, RecursionError) as error:
        return MalformedCall(text, f"the arguments are not valid JSON: {_message(error)}")


def _call(value: Any, text: str, keys: Sequence[str] = ("arguments",)) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(text, 'not a JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'missing "name", which must be the name of the tool as text')
    present = [key for key in keys if key in value]
    if not present:
        return MalformedCall(text, f'missing "{keys[0]}"; pass {{}} to a tool without arguments')
    arguments = value[present[0]]
    if not isinstance(arguments, dict):
        return MalformedCall(text, f'"{present[0]}" must be a JSON object with a value for each argument')
    number = value.get("id")
    return ToolCall(name, arguments, number if isinstance(number, str) else "")


def _block(text: str) -> tuple[str, str] | None:
    """Return the name on the first line and the JSON in the code block that follows, or None if there is no block."""
    before, fence, after = text.partition("```")
    name, after = before.strip(), after.removeprefix("json")
    indent = after[: len(after) - len(after.lstrip())]
    if not fence or "\n" in name or "\n" not in indent:
        return None
    return name, after.strip().removesuffix("```")


def _json(text: str) -> Any:
    value = _DECODER.decode(text.strip())
    _require_plain(value)
    return value


def _require_plain(value: Any) -> None:
    """Raise a ValueError for lone surrogates, which tokenizers reject, for numbers such as 1e999, which parse as
    infinity, and for values that are nested too deeply."""
    if is_deeper(value, MAX_DEPTH):
        raise ValueError("it is nested too deeply")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _message(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
