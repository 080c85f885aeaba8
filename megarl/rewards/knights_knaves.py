"""Reward for Knights and Knaves puzzles: find out who always tells the truth and who always lies."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.options import checks_rows
from megarl.rewards.think_answer import tagged_answer

# reasoning-gym's names for truth-tellers and liars, in pairs.
ROLES = "knight|knave|pioneer|laggard|saint|sinner|hero|villain|angel|devil|altruist|egoist|sage|fool"
_ROLE = re.compile(rf"\b(?:{ROLES})\b", re.IGNORECASE)
# Matches "Zoey is a knave" in a list, in a sentence, or with emphasis. Repetitions are bounded, so that matching takes
# linear time.
_STATEMENT = re.compile(
    rf"\b(?P<name>[A-Za-z]{{1,64}})\W{{1,8}}is\W{{1,8}}(?:an?\W{{1,8}})?(?P<role>{ROLES})\b", re.IGNORECASE
)


def _expected_roles(answer: Any) -> dict[str, str]:
    expected = _roles(str(answer))
    if not expected:
        raise ValueError(
            f"knights_knaves: the answer {answer!r} does not state who is a knight or a knave. Fix: state each "
            "person's role, as in 'Zoey is a knave'"
        )
    return expected


@checks_rows(_expected_roles)
def knights_knaves(
    prompt: str, response: str, answer: Any, right: float = 2.0, wrong: float = -1.5, unparseable: float = -2.0
) -> float:
    """Score the roles that the response assigns to the people in the puzzle.

    Logic-RL's answer reward (https://arxiv.org/abs/2502.14768, §2.2). The answer and the text between the answer tags
    have a form such as "(1) Zoey is a knave (2) Oliver is a knight" or "Zoey is a knave, and Oliver is a knight." Raise
    ValueError if the answer does not have this form.

    Returns:
        `right` if all roles are correct, `wrong` if one is not, and `unparseable` if the response does not have the
        form `<think>…</think><answer>…</answer>` or does not assign exactly one role to each person.
    """
    expected = _expected_roles(answer)
    text = tagged_answer(prompt, response)
    roles = None if text is None else _roles(text)
    if roles is None or roles.keys() != expected.keys():
        return unparseable
    return right if roles == expected else wrong


def _roles(text: str) -> dict[str, str] | None:
    """Map names to roles, both in lowercase. Return None if the text is ambiguous: it mentions a role without a name,
    or names a person more than once."""
    statements = [(match["name"].lower(), match["role"].lower()) for match in _STATEMENT.finditer(text)]
    roles = dict(statements)
    return roles if len(_ROLE.findall(text)) == len(roles) == len(statements) else None
