"""Limit the length of an environment's observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.schema import Environment
from megarl.data.plain_turns import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def limit_observation(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, settings: Environment
) -> list[Mapping[str, Any]] | None:
    """Return the messages of an observation with at most environment.observation_tokens tokens of text. Tokens of the
    chat template do not count. A longer observation is cut at the limit; the messages after it remain, with empty text.
    If environment.overlong_observation=refuse, return None for a longer observation."""
    left = settings.observation_tokens
    if left is None:
        return list(messages)
    contents = [message["content"] for message in messages]
    texts = [text_ids(tokenizer, content) if isinstance(content, str) else [] for content in contents]
    if sum(map(len, texts)) > left and settings.overlong_observation == "refuse":
        return None
    limited = []
    for message, token_ids in zip(messages, texts, strict=True):
        limited.append(message if len(token_ids) <= left else {**message, "content": _cut(token_ids, left, tokenizer)})
        left = max(0, left - len(token_ids))
    return limited


def _cut(token_ids: list[int], num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the longest prefix of the text that ends with a whole character and has at most `num_tokens` tokens."""
    for end in range(num_tokens, 0, -1):
        text = str(tokenizer.decode(token_ids[:end], skip_special_tokens=False)).rstrip("\N{REPLACEMENT CHARACTER}")
        if len(text_ids(tokenizer, text)) <= num_tokens:
            return text
    return ""
