"""The reward function of the recipe next to this file. An exception is a failure, never a score of 0.

A function reward(prompts, responses, answers) would get lists of all samples of a step and return one reward for each.
"""


def reward(prompt: str, response: str, answer: str) -> float:
    """Return 1 for the answer in at most five words, 0.5 for the answer in more words, and 0 without it."""
    words = [word.strip(".,!?").lower() for word in response.split()]
    if answer.lower() not in words:
        return 0.0
    return 1.0 if len(words) <= 5 else 0.5
