"""The reward of Knights and Knaves puzzles: who of some people always tells the truth, and who always lies."""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.think_answer import tagged_answer

# The pairs by which reasoning-gym calls those who tell the truth and those who lie.
ROLES = "knight|knave|pioneer|laggard|saint|sinner|hero|villain|angel|devil|altruist|egoist|sage|fool"
_ROLE = re.compile(rf"\b(?:{ROLES})\b", re.IGNORECASE)
# "Zoey is a knave", in a list, a sentence or emphasis. Bounded, so that the time stays linear in the response.
_STATEMENT = re.compile(
    rf"\b(?P<name>[A-Za-z]{{1,64}})\W{{1,8}}is\W{{1,8}}(?:an?\W{{1,8}})?(?P<role>{ROLES})\b", re.IGNORECASE
)


def knights_knaves(
    prompt: str, response: str, answer: Any, right: float = 2.0, wrong: float = -1.5, unparseable: float = -2.0
) -> float:
    """Returns `right` if the response says of all people what they are, `wrong` if it gets one of them wrong, and
    `unparseable` if it is not `<think>…</think><answer>…</answer>` or does not say exactly one role of each.

    Logic-RL's answer reward (https://arxiv.org/abs/2502.14768, §2.2). The answer, and what stands between the tags,
    are text such as "(1) Zoey is a knave (2) Oliver is a knight", or "Zoey is a knave, and Oliver is a knight."

    Raises ValueError if the answer is not such text.
    """
    expected = _roles(str(answer))
    if not expected:
        raise ValueError(f"the answer {answer!r} does not say who is a knight or a knave; knights_knaves needs it")
    text = tagged_answer(prompt, response)
    said = None if text is None else _roles(text)
    if said is None or said.keys() != expected.keys():
        return unparseable
    return right if said == expected else wrong


def _roles(text: str) -> dict[str, str] | None:
    """Returns the role of each name, in lower case. None where the text speaks of more roles than that, so that it is
    not clear which count."""
    statements = [(match["name"].lower(), match["role"].lower()) for match in _STATEMENT.finditer(text)]
    roles = dict(statements)
    return roles if len(_ROLE.findall(text)) == len(roles) == len(statements) else None
