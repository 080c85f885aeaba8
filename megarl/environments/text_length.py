"""Measure untrusted text before it is rendered and tokenized, which takes seconds for several megabytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.data.image_parts import images_in, texts_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOM = 4
"""Messages with more tokens than this multiple of the context length are rejected before they are rendered. Below it,
messages longer than the context may still fit, because templates may drop parts of them."""

PART = 2**16
"""Number of characters to tokenize at a time when a long text is measured."""


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """Return a message's texts, and its other fields except the role as JSON. Content that is not text and has no
    images is also returned as JSON."""
    content = message["content"]
    if images_in(content):
        content = "".join(texts_in(content))
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    return [content if isinstance(content, str) else json.dumps(content), *([json.dumps(others)] if others else [])]


async def is_longer(texts: Sequence[str], limit: int, count: Callable[[str], int]) -> bool:
    """Return whether the texts have more than `limit` tokens in total. `count` returns the number of tokens in a
    text. It runs in a thread, because the event loop serves all rollouts."""
    if sum(map(len, texts)) <= limit:  # a token has at least one character
        return False
    for text in texts:
        for start in range(0, len(text), PART):
            if limit < 0:
                return True
            limit -= await asyncio.to_thread(count, text[start : start + PART])
    return limit < 0


def num_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the number of tokens in a text."""
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
