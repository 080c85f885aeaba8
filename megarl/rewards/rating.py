"""What a language model that judges a response is asked, and the rating in what it says."""

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
    """Returns the template with {prompt}, {response} and {answer} filled in. What is filled in is not looked at."""
    fields = {"prompt": prompt, "response": response, "answer": str(answer)}
    return _FIELD.sub(lambda field: fields[field[1]], template)


def rating(said: str, scale: Sequence[float]) -> float:
    """Returns (rating − lowest) / (highest − lowest), from 0 to 1, of the last [[number]] of what the judge says.

    scale: the lowest and the highest rating. Raises ValueError where there is no rating between them.
    """
    lowest, highest = scale
    numbers = _RATING.findall(said)
    found = float(numbers[-1]) if numbers else None
    if found is None or not lowest <= found <= highest:
        raise ValueError(f"no rating [[{lowest:g} to {highest:g}]] in what the judge says: …{said[-200:]!r}")
    return (found - lowest) / (highest - lowest)
