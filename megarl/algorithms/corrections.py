"""Off-policy corrections for samples whose behavior policy μ differs from π_old.

π_old is the trainer's policy at the start of a step. μ is the policy that sampled the responses, with log-probs
computed by the engine. In asynchronous runs, μ may also have older weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.policy_loss import ratio_of
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.sample_segments import SampleSegments


class Factors(NamedTuple):
    """Per-token corrections, [N], detached.

    Attributes:
        factor: float32, multiplies the token's loss.
        weight: float32, the importance weight after truncation; None if unused.
        limited: bool, true where the weight was truncated or raised to the floor; None if unused.
        masked: bool, true where the mask drops the token; None if unused.
    """

    factor: torch.Tensor
    weight: torch.Tensor | None
    limited: torch.Tensor | None
    masked: torch.Tensor | None


def factors(
    log_ratio: torch.Tensor,
    samples: SampleSegments,
    weight: str | None,
    weight_limit: float | None,
    mask: str | None,
    mask_low: float,
    mask_high: float,
    weight_floor: float | None = None,
) -> Factors:
    """Return factor = max(min(w, weight_limit), weight_floor) · 1[mask_low ≤ m ≤ mask_high], where w and m are the
    ratio π_old/μ, each at its own level: `weight` for w (None sets w = 1), `mask` for m (None disables the mask).
    log_ratio is float32 [N], log π_old − log μ.

    Levels: "token" is the token's ratio, "sequence" the product over the sample, "geometric" the n-th root of that
    product. Truncated importance sampling (https://fengyao.notion.site/off-policy-rl) uses w. Decoupled PPO
    (https://arxiv.org/abs/2110.00641, eq. 10; AReaL, https://arxiv.org/abs/2505.24298) uses an unlimited token-level w.
    IcePop (https://arxiv.org/abs/2510.18855) uses an unlimited token-level w and a token-level mask. Sequence-level
    masks drop whole samples.
    """
    require_one_shape(log_ratio=log_ratio, mask=samples.mask)
    factor, used, limited, masked = log_ratio.new_ones(log_ratio.shape), None, None, None
    if weight is not None:
        full = _ratio(weight, log_ratio, samples)
        used = full if weight_limit is None and weight_floor is None else full.clamp(weight_floor, weight_limit)
        limited = used != full
        factor = factor * used
    if mask is not None:
        ratio = _ratio(mask, log_ratio, samples)
        masked = (ratio < mask_low) | (ratio > mask_high)
        factor = factor.masked_fill(masked, 0.0)
    return Factors(factor, used, limited, masked)


def disagreeing(log_ratio: torch.Tensor, samples: SampleSegments, threshold: float, level: str) -> torch.Tensor:
    """Return a mask, bool [N]. At level "token", it selects the tokens with |log π_old − log μ| above the threshold. At
    level "sample", it selects all tokens in samples that contain such a trained token. NaN counts as above the
    threshold."""
    beyond = ~(log_ratio.detach().abs() <= threshold)
    return beyond if level == "token" else samples.total(beyond.float())[samples.row_sample] > 0


def _ratio(level: str, log_ratio: torch.Tensor, samples: SampleSegments) -> torch.Tensor:
    return ratio_of(samples.at_level(level, log_ratio.detach()))
