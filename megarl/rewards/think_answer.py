"""Tells whether a response has its thoughts and its answer between the tags that it was asked for."""

from __future__ import annotations

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(prompt: str, response: str, answer: Any) -> bool:
    """Returns whether the response is `<think>…</think>`, then `<answer>…</answer>`: each tag once, in this order, and
    only whitespace before, between and after the two.

    Where the prompt ends with `<think>`, as that of some chat templates does, the response goes on from there. What
    stands inside the tags is not judged. DeepSeek-R1's format reward (https://arxiv.org/abs/2501.12948, §2.2.2), as
    Logic-RL checks it (https://arxiv.org/abs/2502.14768, §2.2).
    """
    text = response.strip()
    if prompt.rstrip().endswith("<think>"):
        text = f"<think>{text}"
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    thoughts, _, rest = text.partition("</think>")
    rest = rest.lstrip()
    return thoughts.startswith("<think>") and rest.startswith("<answer>") and rest.endswith("</answer>")
