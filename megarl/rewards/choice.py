"""Compares the option that a response settles on with the answer, for questions with lettered options."""

from __future__ import annotations

import re
from typing import Any

# What may stand around a letter: brackets, emphasis, LaTeX's \text{}. All repetitions are bounded, so that the time
# stays linear in the response whatever it repeats.
_BEFORE, _AFTER = r"(?:\\text\{|[\s*_(\[]){0,8}", r"[\s*_)\]}.$]{0,8}"
_LEAD = r"\\boxed\{|<answer>|\banswer[\s*_]{0,4}(?:is|[:=])[\s*_]{0,4}:?"
# I is also a word: "the answer is I think B".
_STATED = re.compile(rf"(?:(?i:{_LEAD})){_BEFORE}(?P<letter>[A-HJ-Z]|I(?! [a-z]))(?![\w'])")
_ALONE = re.compile(rf"{_BEFORE}(?P<letter>[A-Z]){_AFTER}")
_ANSWER = re.compile(r"\(?(?P<letter>[A-Za-z])\)?")


def choice_match(prompt: str, response: str, answer: Any) -> bool:
    """Returns whether the response settles on the option that the answer names.

    A response settles on the letter that its last line consists of, or else on the last one that it states:
    `\\boxed{B}`, `<answer>B</answer>`, "answer is B", "Answer: (B)". Letters count as capitals only, as "a" is a word;
    a letter that stands anywhere else says nothing, and a response that states none is wrong.

    Raises ValueError if the answer is not one letter, such as "B" or "(b)".
    """
    expected = _ANSWER.fullmatch(str(answer).strip())
    if expected is None:
        raise ValueError(f"the answer {answer!r} is not the letter of an option; choice_match needs one")
    stated = [match["letter"] for match in _STATED.finditer(response)]
    alone = _ALONE.fullmatch(response.rstrip().rpartition("\n")[2].strip())
    if alone is not None:
        stated.append(alone["letter"])
    return bool(stated) and stated[-1] == expected["letter"].upper()
