"""Reward for multiple-choice questions with lettered options."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.options import checks_rows

# Characters that may surround a letter: brackets, emphasis, LaTeX's \text{}. Repetitions are bounded, so that
# matching takes linear time.
_BEFORE, _AFTER = r"(?:\\text\{|[\s*_(\[]){0,8}", r"[\s*_)\]}.$]{0,8}"
_LEAD = r"\\boxed\{|<answer>|\banswer[\s*_]{0,4}(?:is|[:=])[\s*_]{0,4}:?"
# Do not read the pronoun as a choice: "the answer is I think B".
_STATED = re.compile(rf"(?:(?i:{_LEAD})){_BEFORE}(?P<letter>[A-HJ-Z]|I(?! [a-z]))(?![\w'])")
_ALONE = re.compile(rf"{_BEFORE}(?P<letter>[A-Z]){_AFTER}")
_ANSWER = re.compile(r"\(?(?P<letter>[A-Za-z])\)?")


def _expected_letter(answer: Any) -> str:
    expected = _ANSWER.fullmatch(str(answer).strip())
    if expected is None:
        raise ValueError(f"choice_match: the answer {answer!r} is not an option's letter. Fix: use a letter such as B")
    return expected["letter"].upper()


@checks_rows(_expected_letter)
def choice_match(prompt: str, response: str, answer: Any) -> bool:
    """Return whether the response selects the option named by the answer.

    A response selects the letter that makes up its last line, or else the last letter that it states as its answer:
    `\\boxed{B}`, `<answer>B</answer>`, "answer is B", "Answer: (B)". Only capital letters count, since "a" is a word.
    Letters elsewhere are ignored, and a response that states no letter counts as wrong.

    Raises:
        ValueError: the answer is not a single letter, such as "B" or "(b)".
    """
    expected = _expected_letter(answer)
    stated = [match["letter"] for match in _STATED.finditer(response)]
    alone = _ALONE.fullmatch(response.rstrip().rpartition("\n")[2].strip())
    if alone is not None:
        stated.append(alone["letter"])
    return bool(stated) and stated[-1] == expected
