"""The formats in which models write calls of tools: one small function for each, which reads a turn's calls.

A turn is read from its ids. A tag that the tokenizer has as one token is found by its id alone, so that text which
looks like the tag does not match; a tag that the tokenizer does not have is found in the text. What begins as a call
and is none becomes a `MalformedCall`: nothing that a model samples raises an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.data.tool_calls import MalformedCall, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class Piece:
    """A tag, and the text that follows it up to the next one. The first piece of a turn has no tag."""

    tag: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    tags     the texts that a call is found by
    example  a call as it is written
    read     reads the calls of a turn's pieces
    """

    tags: tuple[str, ...]
    example: str
    read: Callable[[Sequence[Piece]], Iterator[Call]]


class CallReader:
    """Reads the calls of turns in one format."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tool_format: ToolFormat):
        self._tokenizer = tokenizer
        self._read = tool_format.read
        added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
        self._by_id = {added[tag]: tag for tag in tool_format.tags if tag in added}
        in_text = [re.escape(tag) for tag in tool_format.tags if tag not in added]
        self._in_text = re.compile(f"({'|'.join(in_text)})") if in_text else None

    def read(self, token_ids: Sequence[int]) -> tuple[Call, ...]:
        """Returns the calls of a turn."""
        return tuple(self._read(self._pieces(list(token_ids))))

    def text_before(self, token_ids: Sequence[int]) -> str:
        """Returns what a turn says before its first call."""
        first = self._pieces(list(token_ids))[:1]
        return "" if any(self._read(first)) else first[0].text.strip()

    def _pieces(self, token_ids: list[int]) -> list[Piece]:
        """Returns the turn cut at the tags. Text is without special tokens."""
        found: list[Piece] = []
        start, tag = 0, ""
        for end in [i for i, token in enumerate(token_ids) if token in self._by_id] + [len(token_ids)]:
            text = self._tokenizer.decode(
                token_ids[start:end], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            first, *others = self._in_text.split(text) if self._in_text else [text]
            found.append(Piece(tag, first))
            found += [Piece(*pair) for pair in zip(others[::2], others[1::2], strict=True)]
            if end < len(token_ids):
                start, tag = end + 1, self._by_id[token_ids[end]]
        return found


HERMES_TAGS = ("<tool_call>", "</tool_call>")


def read_hermes(turn: Sequence[Piece]) -> Iterator[Call]:
    """Reads `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, as models of Qwen and Hermes write them. The
    closing tag may lack, as a turn may end with the call."""
    for piece in turn:
        if piece.tag == "<tool_call>":
            yield from _calls_of(piece.text)


def read_tagged(turn: Sequence[Piece]) -> Iterator[Call]:
    """Reads the same, or a list of such objects between the tags."""
    for piece in turn:
        if piece.tag == "<tool_call>":
            yield from _calls_of(piece.text, lists=True)


def read_llama3(turn: Sequence[Piece]) -> Iterator[Call]:
    """Reads `{"name": …, "parameters": {…}}`, also several with semicolons between them, after `<|python_tag|>` or as a
    turn that begins so."""
    for piece in turn:
        text = piece.text.strip()
        if piece.tag == "<|python_tag|>" or re.match(r'\{\s*"name"', text):
            yield from _sequence(text)


def read_mistral(turn: Sequence[Piece]) -> Iterator[Call]:
    """Reads `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, and the newer `[TOOL_CALLS]name[ARGS]{…}`."""
    for place, piece in enumerate(turn):
        if piece.tag != "[TOOL_CALLS]":
            continue
        text = piece.text.strip()
        if text.startswith(("[", "{")):
            yield from _calls_of(text, lists=True)
            continue
        rest = {}
        for follower in turn[place + 1 :]:
            if follower.tag == "[TOOL_CALLS]":
                break
            rest[follower.tag] = follower.text.strip()
        if "[ARGS]" in rest:
            yield _named(text, rest["[ARGS]"], rest.get("[CALL_ID]", ""))
        else:
            name, brace, arguments = text.partition("{")
            yield _named(name.strip(), brace + arguments)


DEEPSEEK_TAGS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)


def read_deepseek(turn: Sequence[Piece]) -> Iterator[Call]:
    """Reads the name and a block of JSON after <｜tool▁sep｜>, as V3 writes a call, or the name before it and plain
    JSON after it, as V3.1 does."""
    for place, piece in enumerate(turn):
        if piece.tag != "<｜tool▁call▁begin｜>":
            continue
        following = turn[place + 1] if place + 1 < len(turn) else None
        if following is None or following.tag != "<｜tool▁sep｜>":
            yield MalformedCall(piece.text, "it has no <｜tool▁sep｜> between its name and its arguments")
            continue
        block = _BLOCK.fullmatch(following.text)
        if block is not None:
            yield _named(block["name"], block["arguments"])
        else:
            yield _named(piece.text.strip(), following.text)


HERMES_EXAMPLE = '<tool_call>\n{"name": "the name", "arguments": {"an argument": "its value"}}\n</tool_call>'
DEEPSEEK_EXAMPLE = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>the name\n```json\n"
    '{"an argument": "its value"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
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
    "tagged": ToolFormat(HERMES_TAGS, HERMES_EXAMPLE, read_tagged),
}
"""The formats by the name that a recipe gives. `tagged` is that of models which have none of their own: a system
message describes the tools, also where the chat template could."""


def format_of(template: str) -> str | None:
    """Returns the name of the format that a chat template writes earlier calls in; None: it is none of these."""
    marks = (
        ("<function=", None),  # between the tags of hermes, but no JSON
        ("<arg_key>", None),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("Environment: ipython", "llama3"),
        ("<tool_call>", "hermes"),
    )
    return next((name for mark, name in marks if mark in template), None)


def instructions(tools: Sequence[Mapping[str, Any]], name: str) -> str:
    """Returns the text that tells a model of its tools where the chat template does not: a line of JSON with the
    description of each, and how a call is written."""
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call tools. These are their descriptions, one a line:\n<tools>\n{described}\n</tools>\n"
        f"To call a tool, write its name and its arguments as JSON, then end your turn:\n{FORMATS[name].example}\n"
        "What the tool answers comes before your next turn."
    )


def _calls_of(text: str, lists: bool = False) -> Iterator[Call]:
    """Reads one object that is a call, and with `lists` also a list of them."""
    try:
        value = _json(text)
    except (ValueError, RecursionError) as error:
        yield MalformedCall(text, f"it is no JSON: {_message(error)}")
        return
    if lists and isinstance(value, list):
        for item in value:
            yield _call(item, json.dumps(item, ensure_ascii=False))
    else:
        yield _call(value, text)


def _sequence(text: str) -> Iterator[Call]:
    """Reads objects that are calls, with semicolons between them."""
    place = 0
    while place < len(text):
        try:
            value, end = _DECODER.raw_decode(text, place)
            _require_characters(value)
        except (ValueError, RecursionError) as error:
            yield MalformedCall(text[place:], f"it is no JSON: {_message(error)}")
            return
        yield _call(value, text[place:end], ("parameters", "arguments"))
        place = end + len(text[end:]) - len(text[end:].lstrip("; \n\t"))


def _named(name: str, arguments: str, number: str = "") -> Call:
    """Returns the call of a format that has name and arguments apart."""
    text = f"{name} {arguments}"
    try:
        return _call({"name": name, "arguments": _json(arguments), "id": number}, text)
    except (ValueError, RecursionError) as error:
        return MalformedCall(text, f"its arguments are no JSON: {_message(error)}")


def _call(value: Any, text: str, keys: Sequence[str] = ("arguments",)) -> Call:
    if not isinstance(value, dict):
        return MalformedCall(text, 'it is no JSON object with "name" and "arguments"')
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall(text, 'it has no "name", which is the name of the tool as text')
    given = [key for key in keys if key in value]
    if not given:
        return MalformedCall(text, f'it has no "{keys[0]}"; give {{}} to a tool without arguments')
    arguments = value[given[0]]
    if not isinstance(arguments, dict):
        return MalformedCall(text, f'its "{given[0]}" are no JSON object with a value for each argument')
    number = value.get("id")
    return ToolCall(name, arguments, number if isinstance(number, str) else "")


def _json(text: str) -> Any:
    value = _DECODER.decode(text.strip())
    _require_characters(value)
    return value


def _require_characters(value: Any) -> None:
    """Raises ValueError where an escape stands for half a character, which no tokenizer takes."""
    json.dumps(value, ensure_ascii=False).encode()


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _message(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


_BLOCK = re.compile(r"\s*(?P<name>[^\n]*?)\s*```(?:json)?\s*\n(?P<arguments>.*?)(```)?\s*", re.DOTALL)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
