"""The default question for a judge model, and the parser for its rating."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

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


def question(template: str, prompt: str, response: str, answer: Any) -> str:
    """Fill {prompt}, {response} and {answer} into the template. Braces in the inserted text stay unchanged."""
    fields = {"prompt": prompt, "response": response, "answer": str(answer)}
    return _FIELD.sub(lambda field: fields[field[1]], template)


def require_answer(template: str, answer: Any) -> None:
    """Raise ValueError if the template contains {answer} but the prompt has no answer."""
    if answer is None and "{answer}" in template:
        raise ValueError(
            "the judge's template contains {answer}, but the prompt has no answer (null). Fix: add an answer to the "
            "row, or use a template without {answer}"
        )


def rating(text: str, scale: Sequence[float]) -> float:
    """Return (rating − lowest) / (highest − lowest), from 0 to 1, for the last [[number]] in the judge's text. `scale`
    contains the lowest and the highest rating. Raise ValueError if the text has no rating in this range."""
    lowest, highest = scale
    numbers = _RATING.findall(text)
    value = float(numbers[-1]) if numbers else None
    if value is None or not lowest <= value <= highest:
        raise ValueError(f"the judge's answer has no rating [[{lowest:g} to {highest:g}]]: …{text[-200:]!r}")
    return (value - lowest) / (highest - lowest)
