"""A reward for tests: the share of characters of the response that are digits. A random model starts near 0.1."""


def digit_share(prompt: str, response: str, answer: object) -> float:
    return sum(character.isdigit() for character in response) / max(len(response), 1)
