"""Per-token loss weights of an update, computed before its first microbatch.

The loss of an update is Σ w·ℓ over its trained tokens in all microbatches and on all ranks; nothing is divided later.
Every mode gives all trained tokens of a sample the same weight, so a mode maps the trained-token counts n_i of S
samples to one weight per sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


def sequence_mean_of_token_means(num_tokens: Sequence[int], *_: object) -> list[float]:
    """Return w = 1 / (S · n_i): GRPO (https://arxiv.org/abs/2402.03300, eq. 3). S includes samples without trained
    tokens."""
    return [1.0 / (len(num_tokens) * n) if n else 0.0 for n in num_tokens]


def sequence_mean_of_token_sums(num_tokens: Sequence[int], *_: object) -> list[float]:
    """Return w = 1 / S: every token has the same weight, regardless of its sample's length."""
    return [1.0 / len(num_tokens) if n else 0.0 for n in num_tokens]


def token_sum(num_tokens: Sequence[int], *_: object) -> list[float]:
    """Return w = 1: the loss is the sum over all tokens in the update. The gradient grows with the number of tokens, so
    choose the learning rate and gradient clipping accordingly."""
    return [1.0 if n else 0.0 for n in num_tokens]


def token_mean(num_tokens: Sequence[int], *_: object) -> list[float]:
    """Return w = 1 / Σ n_i: DAPO (https://arxiv.org/abs/2503.14476, eq. 8)."""
    total = sum(num_tokens)
    return [1.0 / total if n else 0.0 for n in num_tokens]


def sequence_mean_over_max_tokens(num_tokens: Sequence[int], max_tokens: int) -> list[float]:
    """Return w = 1 / (S · L), where the constant L is the maximum response length: Dr.GRPO
    (https://arxiv.org/abs/2503.20783, sec. 3)."""
    return [1.0 / (len(num_tokens) * max_tokens) if n else 0.0 for n in num_tokens]


def prompt_mean_of_token_means(num_tokens: Sequence[int], prompts: Sequence[str], *_: object) -> list[float]:
    """Return w = 1 / (P · Σ n_j over the samples j of the same prompt): the token mean within each prompt, averaged
    over P prompts. This is DAPO's eq. 8 applied to each prompt. P includes prompts without trained tokens. `prompts`
    contains the prompt name of each sample; a prompt that is drawn twice in an update has two names."""
    totals: Counter[str] = Counter()
    for prompt, n in zip(prompts, num_tokens, strict=True):
        totals[prompt] += n
    return [1.0 / (len(totals) * totals[prompt]) if n else 0.0 for prompt, n in zip(prompts, num_tokens, strict=True)]


class Aggregation(NamedTuple):
    """An aggregation mode. `formula` describes a token's weight in an update's loss. `weights` maps (number of trained
    tokens in each sample, prompt of each sample, maximum response length) to a token's weight in each sample."""

    formula: str
    weights: Callable[[Sequence[int], Sequence[str], int], list[float]]


AGGREGATIONS: Mapping[str, Aggregation] = {
    "sequence_mean_of_token_means": Aggregation(
        "1 / (samples · tokens of the sample): GRPO, arXiv 2402.03300", sequence_mean_of_token_means
    ),
    "sequence_mean_of_token_sums": Aggregation("1 / samples", sequence_mean_of_token_sums),
    "sequence_mean_over_max_tokens": Aggregation(
        "1 / (samples · rollout.max_new_tokens): Dr.GRPO, arXiv 2503.20783",
        lambda num_tokens, _, max_tokens: sequence_mean_over_max_tokens(num_tokens, max_tokens),
    ),
    "prompt_mean_of_token_means": Aggregation(
        "1 / (prompts · tokens of the prompt's samples)", prompt_mean_of_token_means
    ),
    "token_mean": Aggregation("1 / tokens of the update: DAPO, arXiv 2503.14476", token_mean),
    "token_sum": Aggregation("1", token_sum),
}


def imitation_weights(num_tokens: Sequence[int], outcomes: Sequence[float], above: float) -> list[float]:
    """Return the weight of one token in each sample: 1 / Σ n_j over the samples j with outcome > above, if the sample
    is one of them, else 0.

    The loss is then the mean over positive examples, as in VAPO (https://arxiv.org/abs/2504.05118, eq. 10).
    """
    positive = [n if outcome > above else 0 for n, outcome in zip(num_tokens, outcomes, strict=True)]
    total = sum(positive)
    return [1.0 / total if n else 0.0 for n in positive]


def sample_weights(
    mode: str, num_tokens: Sequence[int], prompts: Sequence[str], max_tokens: int, empty_samples: str = "include"
) -> list[float]:
    """Return the weight of one token in each sample of an update.

    Args:
        mode: a key of AGGREGATIONS.
        num_tokens: the number of trained tokens in each sample.
        prompts: the prompt of each sample.
        max_tokens: the maximum response length.
        empty_samples: "include", as in the papers, counts samples and prompts without trained tokens in the means, with
            loss 0; "exclude" leaves them out.
    """
    counted = [i for i, n in enumerate(num_tokens) if n or empty_samples == "include"]
    counted_weights = AGGREGATIONS[mode].weights(
        [num_tokens[i] for i in counted], [prompts[i] for i in counted], max_tokens
    )
    weights = dict(zip(counted, counted_weights, strict=True))
    return [weights.get(i, 0.0) for i in range(len(num_tokens))]
