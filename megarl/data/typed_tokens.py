"""Special tokens that are typed as text, for example by the policy. They must not end a message or begin another one.

Before the chat template renders a text, its special tokens are marked. The rendered text is then tokenized in pieces:
marked tokens as ordinary text, everything else as usual. Texts without special tokens are tokenized as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "\ue001", "\ue002"
"""Private-use characters around a marked token."""


class TypedTokens:
    """Marks the special tokens in texts, and tokenizes marked texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)"
        self._tokenizer = tokenizer
        self._typed, self._marked = re.compile(pattern), re.compile(f"{OPEN}({pattern}){CLOSE}")

    def mark(self, value: Any) -> Any:
        """Return a JSON value in which the special tokens in all strings are marked."""
        if isinstance(value, str):
            return self._typed.sub(lambda token: f"{OPEN}{token[0]}{CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def text(self, marked: str) -> str:
        """Return a marked text without its marks."""
        return self._marked.sub(lambda token: token[1], marked)

    def ids(self, marked: str) -> list[int]:
        """Return the token ids of a marked text, without adding special tokens."""
        return [token for token, _ in self._tokens(marked, with_spans=False)]

    def ids_and_spans(self, marked: str, add_special_tokens: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a marked text, and their start and end offsets in the text without its marks."""
        tokens = self._tokens(marked, with_spans=True)
        if add_special_tokens:
            text = self.text(marked)
            inner, outer = (self._tokenizer(text, add_special_tokens=added)["input_ids"] for added in (False, True))
            start = next(i for i in range(len(outer)) if outer[i : i + len(inner)] == inner) if inner else len(outer)
            before, after = outer[:start], outer[start + len(inner) :]
            tokens = [*((token, (0, 0)) for token in before), *tokens, *((token, (0, 0)) for token in after)]
        return [token for token, _ in tokens], [span for _, span in tokens]

    def _tokens(self, marked: str, with_spans: bool) -> list[tuple[int, tuple[int, int]]]:
        tokens, start = [], 0
        for number, piece in enumerate(self._marked.split(marked)):
            options = {"split_special_tokens": True} if number % 2 else {}
            encoded = self._tokenizer(
                piece, add_special_tokens=False, return_offsets_mapping=with_spans, verbose=False, **options
            )
            spans = encoded["offset_mapping"] if with_spans else [(0, 0)] * len(encoded["input_ids"])
            tokens += [(i, (start + a, start + b)) for i, (a, b) in zip(encoded["input_ids"], spans, strict=True)]
            start += len(piece)
        return tokens
