"""Special tokens that are typed as text, for example by the policy. They must not end a message or begin a new one.

This applies to messages, tool results, observations and judged responses. Two kinds of text may contain special tokens:
text without a chat template, which is already rendered (plain prompts and responses in the data, observations with
`as_is`), and the assistant's messages in the data, which have the model's own format, such as [TOOL_CALLS].

Before the chat template renders a text, a mark is inserted into its special tokens. The rendered text is then split at
the marks and tokenized piece by piece, so that no piece contains a complete special token. Texts without marks are
tokenized as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ue001"
"""A private-use character, inserted after the first character of a token."""


class TypedTokens:
    """Marks the special tokens in texts, and tokenizes marked texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        ends = [(re.escape(token[:1]), re.escape(token[1:])) for token in special if len(token) > 1]
        self._tokenizer = tokenizer
        self._typed, self._marked = (
            # Only the first mark is removed, so that marks in the original text are preserved.
            re.compile("|".join(f"(?<={first}){mark}(?={MARK}*{rest})" for first, rest in ends) or "(?!)")
            for mark in ("", MARK)
        )

    def mark(self, value: Any) -> Any:
        """Return a JSON value with the special tokens in all its strings marked."""
        if isinstance(value, str):
            return self._typed.sub(MARK, value)
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def mark_others(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Mark the special tokens in messages from the data, except in the assistant's messages."""
        return [message if message["role"] == "assistant" else self.mark(message) for message in messages]

    def text(self, marked: str) -> str:
        """Return a marked text without its marks."""
        return self._marked.sub("", marked)

    def ids(self, marked: str) -> list[int]:
        """Return the token ids of a marked text, without adding special tokens."""
        pieces = self._marked.split(marked)
        return [
            i for text in pieces for i in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ]

    def ids_and_spans(self, marked: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a marked text, and their start and end offsets in the text without its marks."""
        ids, spans, start = [], [], 0
        for piece in self._marked.split(marked):
            encoded = self._tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids += encoded["input_ids"]
            spans += [(start + first, start + last) for first, last in encoded["offset_mapping"]]
            start += len(piece)
        if not add_special_tokens:
            return ids, spans
        before, after = self._added()
        return [*before, *ids, *after], [*[(0, 0)] * len(before), *spans, *[(0, 0)] * len(after)]

    def _added(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before and after a text."""
        inner, outer = (self._tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
        start = next(i for i in range(len(outer)) if outer[i : i + len(inner)] == inner)
        return outer[:start], outer[start + len(inner) :]


@lru_cache(maxsize=8)
def typed_tokens(tokenizer: PreTrainedTokenizerBase) -> TypedTokens:
    """Return the TypedTokens of a tokenizer. They are cached because they take time to create."""
    return TypedTokens(tokenizer)
