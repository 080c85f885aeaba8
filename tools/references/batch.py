"""The input batch of all libraries: ragged samples, some with tool tokens."""

from __future__ import annotations

from typing import Any

import torch

PROMPTS = ["a", "a", "a", "b", "c", "c", "c"]
"""Prompt of each sample. One of the prompts has only one sample."""

LENGTHS = [7, 4, 1, 5, 6, 4, 3]
REWARDS = [1.0, 0.0, 0.25, 0.75, 1.0, -0.5, 0.3]
ADVANTAGES = [0.9, -0.7, 0.4, -1.1, 0.6, -0.3, 0.8]
GREEDY = [0.5, 0.5, 0.5, 0.25, -0.1, -0.1, -0.1]
"""Reward of the greedy response to each sample's prompt."""

UNTRAINED = [(0, 2), (0, 3), (1, 0), (3, 4), (4, 1), (4, 3), (5, 0), (5, 1), (5, 2), (5, 3)]
"""(sample, token) pairs that are not trained on: inside, at the start and at the end of samples, and a whole sample."""

FAR = {(0, 0): 1.9, (1, 2): 1.4, (3, 1): 1.7, (4, 5): -1.5}
"""(sample, token) pairs with log-ratios beyond all bounds of the objectives."""

VOCAB = 5
"""Number of logits per token."""

SEED = 0


def make() -> dict[str, Any]:
    """Return the batch as lists with one number per sample, or per token of each sample, and the logits of each
    token."""
    random = torch.Generator().manual_seed(SEED)

    def draw(scale: float) -> list[list[float]]:
        values = [(scale * torch.randn(n, generator=random, dtype=torch.float64)).tolist() for n in LENGTHS]
        return [[round(value, 4) for value in own] for own in values]

    def draw_logits() -> list[list[list[float]]]:
        values = [(1.5 * torch.randn(n, VOCAB, generator=random, dtype=torch.float64)).tolist() for n in LENGTHS]
        return [[[round(value, 4) for value in token] for token in own] for own in values]

    def add(first: list[list[float]], second: list[list[float]], sign: int = 1) -> list[list[float]]:
        pairs = (zip(*own, strict=True) for own in zip(first, second, strict=True))
        return [[round(a + sign * b, 4) for a, b in own] for own in pairs]

    def beside(first: list[list[float]], second: list[list[float]], sign: int = 1) -> list[list[float]]:
        """Return log-probs of another policy."""
        return [[min(value, -0.02) for value in own] for own in add(first, second, sign)]

    now = [[round(-0.05 - abs(value), 4) for value in own] for own in draw(1.5)]
    moved = draw(0.3)
    for (sample, token), log_ratio in FAR.items():
        moved[sample][token] = log_ratio
    old = beside(now, moved, sign=-1)
    values = draw(0.5)
    return {
        "prompts": PROMPTS,
        "rewards": REWARDS,
        "advantages": ADVANTAGES,
        "greedy": GREEDY,
        "mask": [[int((i, t) not in UNTRAINED) for t in range(n)] for i, n in enumerate(LENGTHS)],
        "now": now,
        "old": old,
        "rollout_logprobs": beside(old, draw(0.4)),
        "reference": beside(now, draw(0.5)),
        "token_rewards": draw(0.3),
        "values": values,
        "values_now": add(values, draw(0.4)),
        "returns": draw(0.7),
        "logits": draw_logits(),
        "teacher_logits": draw_logits(),
    }


def padded(rows: list[Any]) -> torch.Tensor:
    """Return rows padded with 0, as float64 [samples, longest], or [samples, longest, vocabulary] for logits."""
    of_rows = [torch.tensor(own, dtype=torch.float64) for own in rows]
    return torch.nn.utils.rnn.pad_sequence(of_rows, batch_first=True)


def at_last_trained_token(rewards: list[float], mask: torch.Tensor) -> torch.Tensor:
    """Place each sample's reward on its last trained token, as the libraries expect: float64 [samples, longest]."""
    placed = torch.zeros_like(mask)
    for sample, (reward, own) in enumerate(zip(rewards, mask, strict=True)):
        placed[sample, own.nonzero()[-1:, 0]] = reward
    return placed
