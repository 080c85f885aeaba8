"""The default question for a judge model, and the parser for its rating."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megarl.rewards.result import UNRATED, WORST_RATING, Rating

TEMPLATE = """\
Judge the answer of an assistant to a question.

[Question]
{prompt}

[Reference]
{answer}

[Answer of the assistant]
{response}

Compare it with the reference, briefly. Then end with your rating from 1 (wrong) to 10 (right), as [[rating]], such as \
[[5]]."""

_FIELD = re.compile(r"\{(prompt|response|answer)\}")
_RATING = re.compile(r"\[\[\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*\]\]")


_THINKING = "<think>", "</think>"


def question(template: str, prompt: str, response: str, answer: Any) -> str:
    """Fill {prompt}, {response} and {answer} into the template. Braces in the inserted text stay unchanged. A space is
    inserted into each rating in this text, so that a rating that the judge quotes is not mistaken for its own."""
    fields = {"prompt": prompt, "response": response, "answer": str(answer)}
    return _FIELD.sub(lambda field: _RATING.sub(lambda rating: f"[ {rating[0][1:]}", fields[field[1]]), template)


def require_answer(template: str, answer: Any) -> None:
    """Raise ValueError if the template contains {answer} but the prompt has no answer."""
    if answer is None and "{answer}" in template:
        raise ValueError(
            "the judge's template contains {answer}, but the prompt has no answer (null). Fix: add an answer to the "
            "row, or use a template without {answer}"
        )


def rating(text: str, scale: Sequence[float]) -> Rating:
    """Return (rating − lowest) / (highest − lowest), from 0 to 1, for the last [[number]] in the judge's text after its
    reasoning. `scale` contains the lowest and the highest rating. If the text has no rating in this range, return the
    worst one, because a response may persuade a judge not to rate it."""
    lowest, highest = scale
    begin, end = _THINKING
    numbers = _RATING.findall(text.rpartition(end)[2].partition(begin)[0])
    value = float(numbers[-1]) if numbers else None
    if value is None or not lowest <= value <= highest:
        reason = f"the judge's answer has no rating [[{lowest:g} to {highest:g}]]: …{text[-200:]!r}"
        return Rating(WORST_RATING, {UNRATED: reason})
    return Rating((value - lowest) / (highest - lowest), {UNRATED: None})
