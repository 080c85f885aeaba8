"""The reward of the recipe beside this file. An exception in it is a failure that the run reports, never a 0.

A function reward(prompts, responses, answers) would get lists, of all samples of a step, and return one for each.
"""


def reward(prompt: str, response: str, answer: str) -> float:
    """Returns 1 for the answer in at most five words, 0.5 for the answer among more, and 0 without it."""
    words = [word.strip(".,!?").lower() for word in response.split()]
    if answer.lower() not in words:
        return 0.0
    return 1.0 if len(words) <= 5 else 0.5
