"""The policy objectives by their name in algorithm.objective."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.algorithms import covariance_loss, policy_loss, sequence_loss
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.sample_segments import SampleSegments
from megarl.config.objectives import Option

OF_TOKENS = {
    "clip": policy_loss.clip,
    "unclipped": policy_loss.unclipped,
    "kl_penalty": policy_loss.kl_penalty,
    "cispo": policy_loss.cispo,
    "sapo": policy_loss.sapo,
    "dppo_tv": policy_loss.dppo_tv,
    "dppo_kl": policy_loss.dppo_kl,
}

OF_SELECTED = ("clip_cov", "kl_cov")

OF_SAMPLES = {"gspo": sequence_loss.gspo, "gmpo": sequence_loss.gmpo, "dro": sequence_loss.dro}


def loss_of_policy(
    name: str,
    options: Mapping[str, Option],
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    samples: SampleSegments,
    selected: torch.Tensor | None,
) -> PolicyLoss:
    """options: of megarl.config.objectives. The others are as in policy_loss, sequence_loss and covariance_loss."""
    assert selected is not None or name not in OF_SELECTED, f"{name}: the tokens that it treats apart are not selected"
    if name == "clip_cov":
        return covariance_loss.clip_cov(log_prob, old, advantage, selected, options["clip_low"], options["clip_high"])
    if name == "kl_cov":
        return covariance_loss.kl_cov(log_prob, old, advantage, selected, options["penalty"])
    if name in OF_SAMPLES:
        return OF_SAMPLES[name](log_prob, old, advantage, samples, **options)
    return OF_TOKENS[name](log_prob, old, advantage, **options)
