"""The reward function of the recipe next to this file. An exception is a failure, never a score of 0.

A function reward(prompts, responses, answers) receives lists for all samples in a step and returns a list of rewards.
"""


def reward(prompt: str, response: str, answer: str) -> float:
    """Return 1 for a response of up to five words that contains the answer, 0.5 for a longer one, and 0 otherwise."""
    words = [word.strip(".,!?").lower() for word in response.split()]
    if answer.lower() not in words:
        return 0.0
    return 1.0 if len(words) <= 5 else 0.5
