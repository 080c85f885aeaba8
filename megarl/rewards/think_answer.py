"""Checks that a response has its reasoning and its answer in the requested tags."""

from __future__ import annotations

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def think_answer_format(prompt: str, response: str, answer: Any, right: float = 1.0, wrong: float = 0.0) -> float:
    """Return `right` if the response has the form `<think>…</think><answer>…</answer>`, else `wrong`.

    Each tag must occur once, with only whitespace before, between and after the two blocks. Their contents are not
    judged. If the prompt ends with `<think>`, as with some chat templates, the response continues from there.

    DeepSeek-R1's format reward (https://arxiv.org/abs/2501.12948, §2.2.2) as checked by Logic-RL
    (https://arxiv.org/abs/2502.14768, §2.2), which uses right=1, wrong=-1.
    """
    return right if tagged_answer(prompt, response) is not None else wrong


def tagged_answer(prompt: str, response: str) -> str | None:
    """Return the text between the answer tags, or None if the response does not have the format."""
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


def last_answer(text: str) -> str | None:
    """Return the content of the last `<answer>…</answer>`, or None if there is none. Takes linear time. A regular
    expression would search for a closing tag after each of many repeated opening tags."""
    (opening, closing), answer = TAGS[2:], None
    start = text.find(opening)
    while start >= 0 and (stop := text.find(closing, start)) >= 0:
        answer = text[start + len(opening) : stop]
        start = text.find(opening, stop)
    return answer
