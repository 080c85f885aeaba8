"""Corrections for samples from another policy than the old one of the objective's ratio: π_old is the trainer's policy
at the start of a step, μ the one that sampled, as the engine computed it and, in asynchronous runs, older."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megarl.algorithms.ratio import ratio_of
from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.sample_segments import SampleSegments


class Factors(NamedTuple):
    """Corrections of each token, [N], without gradient.

    factor    float32, what the token's loss is multiplied with
    weight    float32, the importance weight as it is used (None: there is none)
    limited   bool, where the weight was limited, or raised (None: there is none)
    masked    bool, where the mask drops the token (None: there is none)
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
    """Return factor = max(min(w, weight_limit), weight_floor) · 1[mask_low ≤ m ≤ mask_high], w and m each the ratio
    π_old/μ at a level.

    Levels: "token", the token's ratio; "sequence", the product over the sample; "geometric", the product's n-th root.
    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl) has w; decoupled PPO
    (https://arxiv.org/abs/2110.00641, eq. 10; AReaL, https://arxiv.org/abs/2505.24298) w of tokens without a limit;
    IcePop (https://arxiv.org/abs/2510.18855) w of tokens without a limit and their mask; sequence masks drop samples.

    log_ratio    float32 [N], log π_old − log μ
    weight, mask the levels of w and m; None makes them 1
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
    """Return which tokens, bool [N], have an |log π_old − log μ| above the threshold ("token"), or are of a sample
    with a trained one that has ("sample"). One that is no number is above it.

    log_ratio   float32 [N]
    """
    beyond = ~(log_ratio.detach().abs() <= threshold)
    return beyond if level == "token" else samples.total(beyond.float())[samples.row_sample] > 0


def _ratio(level: str, log_ratio: torch.Tensor, samples: SampleSegments) -> torch.Tensor:
    return ratio_of(samples.at_level(level, log_ratio.detach()))
