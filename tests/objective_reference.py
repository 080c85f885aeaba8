"""Reference policy objectives, aggregations, corrections and KL terms, written from the papers for single samples."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True)
class Response:
    """The trained tokens of one sample; all tensors are [n]. Only `now` and `entropy` carry gradients.

    Attributes:
        now, old, rollout_logprobs, reference: log-probs under four policies.
        selected: tokens that the objective treats specially (bool).
        unequal: whether advantages or correction weights differ between the tokens. A sequence-level loss then applies
            to each token with its own advantage and weight, and differentiates only that token's log-prob.
        longest: the maximum response length.
    """

    prompt: str
    advantage: Tensor
    now: Tensor
    entropy: Tensor
    old: Tensor
    rollout_logprobs: Tensor
    reference: Tensor
    selected: Tensor
    unequal: bool
    longest: int

    @property
    def ratio(self) -> Tensor:
        return (self.now - self.old).exp()


Loss = Callable[[Response], Tensor]
"""Computes the loss of each token of a response [n]."""


def clip(dual: float) -> Loss:
    def loss(r: Response) -> Tensor:
        gain = torch.minimum(r.ratio * r.advantage, r.ratio.clamp(0.8, 1.2) * r.advantage)
        return -torch.where(r.advantage < 0, torch.maximum(gain, dual * r.advantage), gain)

    return loss


def unclipped(r: Response) -> Tensor:
    return -r.ratio * r.advantage


def kl_penalty(r: Response) -> Tensor:
    return -r.ratio * r.advantage + 0.7 * (r.ratio - 1 - r.ratio.log())


def gspo(r: Response) -> Tensor:
    """Return the GSPO loss, or the GSPO-token loss if advantages or weights differ between tokens
    (https://arxiv.org/abs/2507.18071, eq. 13 and 14)."""
    s = (r.ratio.prod() ** (1 / len(r.now))).expand(len(r.now))
    if r.unequal:
        s = s.detach() * (r.now - r.now.detach()).exp()
    return -torch.minimum(s * r.advantage, s.clamp(0.95, 1.05) * r.advantage)


def gmpo(r: Response) -> Tensor:
    low, high = math.exp(-0.2), math.exp(0.2)
    clipped = torch.where(r.advantage > 0, r.ratio.clamp(max=high), r.ratio.clamp(min=low))
    mean = (clipped.prod() ** (1 / len(r.now))).expand(len(r.now))
    if r.unequal:
        mean = mean.detach() * clipped / clipped.detach()
    return -r.advantage * mean


def cispo(r: Response) -> Tensor:
    return -r.ratio.detach().clamp(max=1.2) * r.advantage * r.now


def sapo(r: Response) -> Tensor:
    tau = torch.where(r.advantage > 0, 1.0, 1.05)
    return -4 / tau / (1 + (-tau * (r.ratio - 1)).exp()) * r.advantage


def dppo(divergence: Callable[[Tensor, Tensor], Tensor], limit: float, negative: float | None = None) -> Loss:
    def loss(r: Response) -> Tensor:
        outwards = torch.where(r.advantage > 0, r.ratio > 1, r.ratio < 1)
        limits = torch.where(r.advantage < 0, limit if negative is None else negative, limit)
        far = divergence(r.old.exp(), r.now.detach().exp()) > limits
        return torch.where(outwards & far, 0.0, unclipped(r))

    return loss


def tv(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).abs()


def binary_kl(p: Tensor, q: Tensor) -> Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def clip_cov(r: Response) -> Tensor:
    return torch.where(r.selected, 0.0, clip(math.inf)(r))


def kl_cov(r: Response) -> Tensor:
    return unclipped(r) + 0.5 * r.selected * (r.now - r.old).abs()


def select(samples: Sequence[tuple[str, Tensor, Tensor, Tensor]], share: float, bounds: tuple | None) -> list[Tensor]:
    """Select the `share` of all trained tokens with the largest covariance of old log-prob and advantage.

    Args:
        samples: id, and per response token [R] the advantage, mask and old log-prob.
        share: fraction of the trained tokens to select.
        bounds: if given, draw at random among the tokens whose covariance lies between the bounds instead.

    Returns:
        A mask over the trained tokens of each sample.
    """
    tokens = [
        (old, advantage, float(draw), i)
        for i, (name, *columns) in enumerate(samples)
        for draw, advantage, flag, old in zip(draws(name, len(columns[0])), *map(Tensor.tolist, columns), strict=True)
        if flag
    ]
    mean_old, mean_advantage = (sum(token[k] for token in tokens) / len(tokens) for k in (0, 1))
    covariances = [(old - mean_old) * (advantage - mean_advantage) for old, advantage, _, _ in tokens]
    order = covariances
    if bounds is not None:
        order = [t[2] if bounds[0] <= c <= bounds[1] else -1 for t, c in zip(tokens, covariances, strict=True)]
    best = sorted(order, reverse=True)[: int(share * len(tokens))]
    return [
        torch.tensor([o in best and o != -1 for t, o in zip(tokens, order, strict=True) if t[3] == i], dtype=torch.bool)
        for i in range(len(samples))
    ]


def draws(name: str, count: int) -> Tensor:
    """Return random numbers in [0, 1) seeded by a sample's id."""
    return torch.rand(count, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def dro(level: str) -> Loss:
    def loss(r: Response) -> Tensor:
        log_ratio = r.now - r.old
        distance = log_ratio.sum().expand(len(r.now)) if level == "sequence" else log_ratio
        if level == "sequence" and r.unequal:
            distance = distance.detach() + len(r.now) * (r.now - r.now.detach())
        return (r.advantage - 0.3 * distance) ** 2 / 2

    return loss


Factor = Callable[[Tensor], Tensor]
"""Maps the ratios π_old/μ of a response's tokens [n] to factors of their losses [n]."""


def no_factor(ratio: Tensor) -> Tensor:
    return torch.ones_like(ratio)


def truncated(level: Factor, limit: float = math.inf, floor: float = 0.0) -> Factor:
    return lambda ratio: level(ratio).clamp(floor, limit)


def masked(level: Factor, low: float, high: float) -> Factor:
    return lambda ratio: ((level(ratio) >= low) & (level(ratio) <= high)).float()


def token_level(ratio: Tensor) -> Tensor:
    return ratio


def sequence_level(ratio: Tensor) -> Tensor:
    return ratio.prod().expand(len(ratio))


def geometric(ratio: Tensor) -> Tensor:
    return (ratio.prod() ** (1 / max(len(ratio), 1))).expand(len(ratio))


def icepop(ratio: Tensor) -> Tensor:
    return torch.where((ratio >= 0.7) & (ratio <= 1.5), ratio, 0.0)


ESTIMATES: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: (-d).exp() - 1 + d,
    "abs": lambda d: d.abs(),
}


def divergence(estimator: str, level: str, straight_through: bool, limit: float = math.inf) -> Loss:
    def loss(r: Response) -> Tensor:
        d = r.now - r.reference
        d = d.sum().expand(len(d)) if level == "sequence" else d
        value = ESTIMATES[estimator](d).clamp(-limit, limit)
        return value.detach() + d.detach() * (d - d.detach()) if straight_through else value

    return loss


def aggregate(mode: str, losses: Sequence[Tensor], responses: Sequence[Response]) -> Tensor:
    """Aggregate the token losses of all responses. Samples without trained tokens count with a loss of 0."""
    if mode == "token_sum":
        return torch.cat(list(losses)).sum()
    if mode == "token_mean":
        return torch.cat(list(losses)).mean()
    if mode == "prompt_mean_of_token_means":
        prompts = sorted({r.prompt for r in responses})
        prompt_means = [
            torch.cat([x for x, r in zip(losses, responses, strict=True) if r.prompt == p]).mean() for p in prompts
        ]
        return torch.stack(prompt_means).mean()
    sample_loss = {
        "sequence_mean_of_token_means": lambda x: x.mean() if len(x) else x.sum(),
        "sequence_mean_of_token_sums": lambda x: x.sum(),
        "sequence_mean_over_max_tokens": lambda x: x.sum() / responses[0].longest,
    }[mode]
    return torch.stack([sample_loss(x) for x in losses]).mean()
