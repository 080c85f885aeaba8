"""Policy objectives of whole samples, as a loss per token.

log_prob, old and advantage are float32 [N] as in policy_loss, and gradients flow into log_prob only. A sample's loss
stands at each of its tokens. With a weight of 1/(S·n) a token (sequence_mean_of_token_means) their sum over a sample
is the paper's loss, in value and gradient; with other weights a sample counts by the sum of its tokens' weights.
Where advantages differ within a sample, or a correction's weights of tokens, each token has the loss with its own, and
the gradient that it would have if all of them were so (as GSPO-token has it).
"""

from __future__ import annotations

import torch

from megarl.algorithms.policy_loss import PolicyLoss, clipped_surrogate
from megarl.algorithms.ratio import ratio_of
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.shapes import require_one_shape


def gspo(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    samples: SampleSegments,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """ℓ = −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A) with s = exp(mean over the sample of log ρ).

    GSPO (https://arxiv.org/abs/2507.18071, eq. 5 and 7).
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    return clipped_surrogate(ratio_of(samples.mean(log_prob - old)), advantage, clip_low, clip_high)


def gmpo(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    samples: SampleSegments,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """ℓ = −A·exp(mean over the sample of c): the geometric mean of token ratios that are clipped one by one.

    c = min(log ρ, clip_high) where A > 0, else max(log ρ, −clip_low): the clip is of the log-ratio.
    GMPO (https://arxiv.org/abs/2507.20673, eq. 4 and its algorithm 1).
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    log_ratio = log_prob - old
    clipped = torch.where(advantage > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = ratio_of(samples.mean(clipped))
    low = (log_ratio < -clip_low) & (advantage < 0)
    high = (log_ratio > clip_high) & (advantage > 0)
    return PolicyLoss.of(-advantage * ratio, ratio, low, high)


def dro(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    samples: SampleSegments,
    tau: float,
    level: str,
) -> PolicyLoss:
    """ℓ = ½·(A − τ·R)² with R = Σ over the sample of log ρ.

    DRO (https://arxiv.org/abs/2405.19107, eq. 4), whose A is the reward less a value, and whose π_old is a reference
    that stays. level "token" takes each token's own log ρ for R, which others call DRO too.
    """
    require_one_shape(log_prob=log_prob, old=old, advantage=advantage)
    log_ratio = log_prob - old
    return PolicyLoss.of((advantage - tau * samples.at_level(level, log_ratio)).square() / 2, ratio_of(log_ratio))
