"""Logic-RL's rewards of Knights and Knaves."""

from __future__ import annotations

import pytest

from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.registry import resolve

ANSWER = "Zoey is a knave, and Oliver is a knight."


def said(text: str) -> str:
    return f"<think>Zoey is a knight, so she lies.</think>\n<answer>{text}</answer>"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (said("(1) Zoey is a knave\n(2) Oliver is a knight"), 2.0),
        (said("Oliver is a knight, and ZOEY is a Knave."), 2.0),
        (said("- **Zoey** is a **knave**\n- **Oliver** is a **knight**"), 2.0),
        (said("Zoey is a knave, and Oliver is a knave."), -1.5),
        (said("Zoey is a hero, and Oliver is a knight."), -1.5),
        (said("Zoey is a knave."), -2.0),
        (said("Zoey is a knave, and Olive is a knight."), -2.0),
        (said("Zoey is a knave, Zoey is a knight, and Oliver is a knight."), -2.0),
        (said("Zoey is a knave, Oliver is a knight or a knave."), -2.0),
        (said(""), -2.0),
        ("Zoey is a knave, and Oliver is a knight.", -2.0),
        ("<answer>Zoey is a knave, and Oliver is a knight.</answer>", -2.0),
    ],
)
def test_all_right_one_wrong_or_not_to_be_read(response, reward):
    assert knights_knaves("", response, ANSWER) == reward


def test_other_names_of_the_roles_and_other_rewards():
    right = said("Ella is an egoist, and Aria is an altruist.")
    assert resolve("knights_knaves", {"right": 1})("", right, "Aria is an altruist, and Ella is an egoist.") == 1


def test_what_is_no_answer_is_an_error():
    with pytest.raises(ValueError, match="the answer None does not say who is a knight"):
        knights_knaves("", said(ANSWER), None)
