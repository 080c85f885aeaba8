"""How the token losses of an update add up: a weight per token, known before the first microbatch.

The loss of an update is Σ w·ℓ over all of its trained tokens, over every microbatch and rank, and nothing is divided
later. In each of these modes all trained tokens of a sample weigh the same, so a mode maps numbers of trained tokens
to one weight per sample.
"""

from __future__ import annotations

from collections.abc import Sequence


def sequence_mean_of_token_means(num_tokens: Sequence[int]) -> list[float]:
    """w = 1 / (S · n_i): GRPO (https://arxiv.org/abs/2402.03300, eq. 3). Samples without trained tokens count in S."""
    return [1.0 / (len(num_tokens) * n) if n else 0.0 for n in num_tokens]


def sequence_mean_of_token_sums(num_tokens: Sequence[int]) -> list[float]:
    """w = 1 / S: every token weighs the same, whatever the length of its sample."""
    return [1.0 / len(num_tokens) if n else 0.0 for n in num_tokens]


def token_mean(num_tokens: Sequence[int]) -> list[float]:
    """w = 1 / Σ n_i: DAPO (https://arxiv.org/abs/2503.14476, eq. 8)."""
    total = sum(num_tokens)
    return [1.0 / total if n else 0.0 for n in num_tokens]


MODES = {
    "sequence_mean_of_token_means": sequence_mean_of_token_means,
    "sequence_mean_of_token_sums": sequence_mean_of_token_sums,
    "token_mean": token_mean,
}


def sample_weights(mode: str, num_tokens: Sequence[int]) -> list[float]:
    """num_tokens: trained tokens of every sample of one update. Returns the weight of one token of each sample."""
    return MODES[mode](num_tokens)
