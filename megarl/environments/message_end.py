"""The end of the last message in a prompt, where feedback for teachers is inserted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any


def message_end(
    begin: Callable[[Sequence[Mapping[str, Any]]], Sequence[int]],
    messages: Sequence[Mapping[str, Any]],
    token_ids: Sequence[int],
) -> int | None:
    """Return the number of prompt tokens up to the end of the last message's text, or None if the end cannot be
    located: the message has no text, or its text affects the tokens after it.

    Args:
        begin: function that returns the token ids of a conversation, as the prompt renders it.
        messages: the conversation that the prompt ends with.
        token_ids: the prompt's token ids.
    """
    if not messages or not isinstance(messages[-1].get("content"), str):
        return None
    *others, last = messages
    try:
        # The two texts end differently, so the renderings share only the tokens after the text.
        first, second = (list(begin([*others, {**last, "content": f"{last['content']}\n\n{end}"}])) for end in "ab")
    except Exception:  # a chat template is a program, which may fail on other texts
        return None
    if first == second:  # the template drops the message
        return None
    pairs = zip(reversed(first), reversed(second), strict=False)
    num_after = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    end = len(token_ids) - num_after
    return end if end > 0 and list(token_ids[end:]) == first[len(first) - num_after :] else None
