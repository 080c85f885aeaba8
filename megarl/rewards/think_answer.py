"""Tells whether a response has its thoughts and its answer between the tags that it was asked for."""

from __future__ import annotations

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(prompt: str, response: str, answer: Any, right: float = 1.0, wrong: float = 0.0) -> float:
    """Returns `right` if the response is `<think>…</think>`, then `<answer>…</answer>`: each tag once, in this order,
    and only whitespace before, between and after the two; else `wrong`.

    Where the prompt ends with `<think>`, as that of some chat templates does, the response goes on from there. What
    stands inside the tags is not judged. DeepSeek-R1's format reward (https://arxiv.org/abs/2501.12948, §2.2.2), as
    Logic-RL checks it (https://arxiv.org/abs/2502.14768, §2.2), whose rewards are right=1, wrong=-1.
    """
    return right if tagged_answer(prompt, response) is not None else wrong


def tagged_answer(prompt: str, response: str) -> str | None:
    """Returns what stands between the tags of the answer, None for a response that has not the format."""
    text = response.strip()
    if prompt.rstrip().endswith("<think>"):
        text = f"<think>{text}"
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    thoughts, _, rest = text.partition("</think>")
    rest = rest.lstrip()
    if not (thoughts.startswith("<think>") and rest.startswith("<answer>") and rest.endswith("</answer>")):
        return None
    return rest.removeprefix("<answer>").removesuffix("</answer>").strip()
