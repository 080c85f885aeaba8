"""Conversations without a chat template: the concatenated text of their messages. The messages that begin a
conversation are already rendered, so they may contain special tokens. In later messages, which may repeat text that the
policy has written, special tokens are tokenized as ordinary text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.tool_calls import MalformedCall, ToolCall
from megarl.data.typed_tokens import typed_tokens
from megarl.models.tokenizer import opening_ids, response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PlainTokens:
    """Token ids of plain-text conversations, with the methods of `ChatTokens`. Tools are not supported."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of the messages' text."""
        return opening_ids(self._tokenizer, "".join(message["content"] for message in messages))

    def shown(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the messages unchanged, since there are no tools to describe."""
        return list(messages)

    def extend(self, turn_ids: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of the messages' text, which directly follows the turn."""
        typed = typed_tokens(self._tokenizer)
        return typed.ids(typed.mark("".join(message["content"] for message in messages)))

    def read(
        self, turn_ids: Sequence[int], context_ids: Sequence[int] = ()
    ) -> tuple[str, tuple[ToolCall | MalformedCall, ...]]:
        """Return a turn's text without special tokens, and an empty tuple of calls."""
        return response_text(self._tokenizer, context_ids, turn_ids), ()

    def before_calls(self, turn_ids: Sequence[int]) -> str:
        """Return the text of the whole turn, since it contains no calls."""
        return response_text(self._tokenizer, (), turn_ids)


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that is in the middle of a sequence."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]
