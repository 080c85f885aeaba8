"""Logic-RL's rewards for Knights and Knaves puzzles."""

from __future__ import annotations

import pytest

from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.registry import resolve

ANSWER = "Zoey is a knave, and Oliver is a knight."


def tagged(text: str) -> str:
    return f"<think>Zoey is a knight, so she lies.</think>\n<answer>{text}</answer>"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (tagged("(1) Zoey is a knave\n(2) Oliver is a knight"), 2.0),
        (tagged("Oliver is a knight, and ZOEY is a Knave."), 2.0),
        (tagged("- **Zoey** is a **knave**\n- **Oliver** is a **knight**"), 2.0),
        (tagged("Zoey is a knave, and Oliver is a knave."), -1.5),
        (tagged("Zoey is a hero, and Oliver is a knight."), -1.5),
        (tagged("Zoey is a knave."), -2.0),
        (tagged("Zoey is a knave, and Olive is a knight."), -2.0),
        (tagged("Zoey is a knave, Zoey is a knight, and Oliver is a knight."), -2.0),
        (tagged("Zoey is a knave, Oliver is a knight or a knave."), -2.0),
        (tagged(""), -2.0),
        ("Zoey is a knave, and Oliver is a knight.", -2.0),
        ("<answer>Zoey is a knave, and Oliver is a knight.</answer>", -2.0),
    ],
)
def test_roles_are_correct_wrong_or_unparseable(response, reward):
    assert knights_knaves("", response, ANSWER) == reward


def test_other_role_names_and_rewards_are_supported():
    response = tagged("Ella is an egoist, and Aria is an altruist.")
    assert resolve("knights_knaves", {"right": 1})("", response, "Aria is an altruist, and Ella is an egoist.") == 1


def test_invalid_answer_raises():
    with pytest.raises(ValueError, match="the answer None does not state who is a knight"):
        knights_knaves("", tagged(ANSWER), None)
