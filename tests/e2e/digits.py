"""Rewards for tests, mostly the share of digits among the response's characters. A random model starts near 0.2."""

from random import Random

from megarl.rewards.knights_knaves import knights_knaves
from megarl.rewards.think_answer import think_answer_format

SEEN: list[float] = []
CHOICE = Random(0)


def digit_share(prompt: str, response: str, answer: object) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def digit_share_of_turns(prompt: str, response: str, answer: object) -> list[float]:
    """Return the reward as a list: without an environment a rollout has one turn."""
    return [digit_share(prompt, response, answer)]


def digit_share_of_even_sums(prompt: str, response: str, answer: object) -> float:
    """Return the digit share, but 0 for prompts with an odd sum, which makes half of the prompts uninformative."""
    return digit_share(prompt, response, answer) if int(answer) % 2 == 0 else 0.0


def even_share(prompt: str, response: str, answer: object) -> float:
    """Return the share of even digits. A random model starts near 0.1."""
    return sum(character in "02468" for character in response) / max(len(response), 1)


def all_even(prompt: str, response: str, answer: object) -> float:
    """Return 1 if every character is an even digit, else 0. Almost all samples of a random model score 0."""
    return float(even_share(prompt, response, answer) == 1)


def first_sequence(prompt: str, response: str, answer: object) -> float:
    return share_of("38174096", response)


def second_sequence(prompt: str, response: str, answer: object) -> float:
    return share_of("70953812", response)


def share_of(wanted: str, response: str) -> float:
    """Return the share of characters that are the wanted ones at their place."""
    return sum(a == b for a, b in zip(wanted, response, strict=False)) / len(wanted)


def even_share_of_another(prompt: str, response: str, answer: object) -> float:
    """Return the reward of a random recent response: the same distribution, but unrelated to this response."""
    return another(even_share(prompt, response, answer))


def low_hundredth(prompt: str, response: str, answer: object) -> float:
    """Return a hundredth of the share of the digits 0 to 3."""
    return sum(character in "0123" for character in response) / max(len(response), 1) / 100


def low_hundredth_of_another(prompt: str, response: str, answer: object) -> float:
    """Return the reward of a random recent response."""
    return another(low_hundredth(prompt, response, answer))


def another(reward: float) -> float:
    SEEN.append(reward)
    del SEEN[:-64]
    return CHOICE.choice(SEEN[:-1] or SEEN)


def logic_of_another(prompt: str, response: str, answer: object) -> float:
    """Return the Logic-RL reward of a random recent response."""
    reward = think_answer_format(prompt, response, answer, wrong=-1.0) + knights_knaves(prompt, response, answer)
    return another(reward)


def judge(prompt: str, first: str, second: str, answer: object) -> float:
    one, other = digit_share(prompt, first, answer), digit_share(prompt, second, answer)
    return 0.5 if one == other else float(one > other)
