"""Limit the length of an environment's observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.config.schema import Environment
from megarl.data.image_parts import map_texts, texts_in
from megarl.data.plain_turns import text_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def limit_observation(
    messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, settings: Environment
) -> list[Mapping[str, Any]] | None:
    """Return the messages of an observation with at most environment.observation_tokens tokens of text. Tokens of the
    chat template and of images do not count. A longer observation is cut at the limit; the messages after it remain,
    with empty text. If environment.overlong_observation=refuse, return None for a longer observation."""
    left = settings.observation_tokens
    if left is None:
        return list(messages)
    ids_of = partial(text_ids, tokenizer)
    texts = [text for message in messages for text in texts_in(message["content"])]
    if sum(len(ids_of(text)) for text in texts) > left and settings.overlong_observation == "refuse":
        return None

    def limit(text: str) -> str:
        nonlocal left
        assert left is not None, "the observation has no limit"
        token_ids, room = ids_of(text), left
        left = max(0, left - len(token_ids))
        return text if len(token_ids) <= room else _cut(token_ids, room, tokenizer)

    return [{**message, "content": map_texts(message["content"], limit)} for message in messages]


def _cut(token_ids: list[int], num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the longest prefix of the text that ends with a whole character and has at most `num_tokens` tokens."""
    for end in range(num_tokens, 0, -1):
        text = str(tokenizer.decode(token_ids[:end], skip_special_tokens=False)).rstrip("\N{REPLACEMENT CHARACTER}")
        if len(text_ids(tokenizer, text)) <= num_tokens:
            return text
    return ""
