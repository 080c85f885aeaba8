"""Harmony, the format in which gpt-oss writes messages and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from megarl.data.call_json import named_call
from megarl.data.tool_calls import Call, MalformedCall, Piece
from megarl.models.tokenizer import UNDECODED

TAGS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
EXAMPLE = '<|channel|>commentary to=functions.the_name <|constrain|>json<|message|>{"an argument": "its value"}<|call|>'


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of a turn in gpt-oss's format. `text` is None if its header is cut off by the end of the turn or by
    another message. Several recipients are joined by spaces."""

    role: str
    channel: str
    recipient: str
    text: str | None


def _messages(turn: Sequence[Piece]) -> Iterator[_Message]:
    """Yield the messages of a turn. The prompt ends with <|start|>assistant, so the turn starts in a header."""
    header: list[Piece] = []
    for piece in (Piece("<|start|>", f"assistant{turn[0].text}"), *turn[1:], Piece("<|end|>", "")):
        if piece.tag in ("<|channel|>", "<|constrain|>"):
            header.append(piece)
            continue
        if piece.tag == "<|message|>" or header:
            yield _message(header, piece.text if piece.tag == "<|message|>" else None)
        header = [piece] if piece.tag == "<|start|>" else []


def _message(header: Sequence[Piece], text: str | None) -> _Message:
    role, channel = (
        next((word for piece in header if piece.tag == tag for word in piece.text.split()[:1]), "")
        for tag in ("<|start|>", "<|channel|>")
    )
    words = [word for piece in header for word in piece.text.split()]
    recipient = " ".join(word.removeprefix("to=") for word in words if word.startswith("to="))
    return _Message(role, channel, recipient, text)


def read_calls(turn: Sequence[Piece]) -> Iterator[Call]:
    """Parse gpt-oss's calls, which are messages to a recipient: `<|channel|>commentary to=functions.NAME
    <|constrain|>json<|message|>{…}<|call|>`. A call may also follow `<|start|>assistant`. A turn has at most one call,
    since <|call|> ends it and chat templates do not support several."""
    calls = (
        message
        for message in _messages(turn)
        if message.recipient not in ("", "assistant") and (message.role == "assistant" or message.text is not None)
    )
    for call in islice(calls, 1):
        if call.role != "assistant":
            yield MalformedCall(call.text or "", "a call must be a message that starts with <|start|>assistant")
        elif call.text is None:
            yield MalformedCall("", "missing <|message|> between the recipient and the arguments")
        else:
            yield named_call(call.recipient.removeprefix("functions."), call.text)
    if any(True for _ in calls):
        yield MalformedCall("", "a turn may contain only one tool call; further calls were not run")


def answer(turn: Sequence[Piece]) -> str:
    """Return the assistant's text for the user: the messages without a recipient in the channels `commentary` and
    `final`. The channel `analysis` contains the reasoning."""
    texts = [
        message.text
        for message in _messages(turn)
        if message.text
        and (message.role, message.recipient) == ("assistant", "")
        and message.channel in ("commentary", "final")
    ]
    return "\n".join(texts).rstrip(UNDECODED)
