"""Every objective, aggregation, correction and KL form through Megatron: loss and gradients in any layout are those of
plain Hugging Face and torch, one sample at a time."""

from __future__ import annotations

import pytest
import torch

from tests import objective_reference as plain
from tests.objective_cases import LAYOUTS, Case, World, check, expected

MEANS, SUMS, TOKENS = "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "token_mean"
OVER_MAX, OF_PROMPTS = "sequence_mean_over_max_tokens", "prompt_mean_of_token_means"
CASES = {
    "dual clip": Case("name: clip, dual_clip: 1.3", plain.clip(1.3), TOKENS),
    "unclipped": Case(
        "name: unclipped",
        plain.unclipped,
        OF_PROMPTS,
        "weight: token, weight_limit: 1.2",
        plain.truncated(plain.of_token, 1.2),
        "estimator: k1",
        plain.divergence("k1", "token", False),
    ),
    "TRPO's penalty": Case(
        "name: kl_penalty, penalty: 0.7",
        plain.kl_penalty,
        MEANS,
        "mask: token, mask_low: 0.8, mask_high: 1.3",
        plain.masked(plain.of_token, 0.8, 1.3),
        "estimator: k2, level: sequence",
        plain.divergence("k2", "sequence", False),
    ),
    "GSPO": Case(
        "name: gspo, clip_low: 0.05, clip_high: 0.05",
        plain.gspo,
        MEANS,
        "weight: sequence, weight_limit: 1.5",
        plain.truncated(plain.of_sequence, 1.5),
        "estimator: k3, level: sequence",
        plain.divergence("k3", "sequence", False),
        reported=("kl/loss_sequence_k3", plain.divergence("k3", "sequence", False)),
    ),
    "GMPO": Case(
        "name: gmpo, clip_low: 0.2, clip_high: 0.2",
        plain.gmpo,
        TOKENS,
        "mask: geometric, mask_low: 0.97, mask_high: 1.2",
        plain.masked(plain.geometric, 0.97, 1.2),
        "estimator: abs",
        plain.divergence("abs", "token", False),
    ),
    "CISPO": Case(
        "name: cispo, clip_high: 0.2",
        plain.cispo,
        OVER_MAX,
        "weight: geometric, weight_limit: null",
        plain.truncated(plain.geometric),
        "estimator: k3, straight_through: true",
        plain.divergence("k3", "token", True),
    ),
    "SAPO": Case(
        "name: sapo",
        plain.sapo,
        SUMS,
        "weight: token, weight_limit: null, mask: token, mask_low: 0.7, mask_high: 1.5",
        plain.icepop,
        "estimator: k3",
        plain.divergence("k3", "token", False),
    ),
    "DPPO, TV": Case(
        "name: dppo_tv, divergence_limit: 0.001",
        plain.dppo(plain.tv, 0.001),
        TOKENS,
        "mask: sequence, mask_low: 0.5, mask_high: 2",
        plain.masked(plain.of_sequence, 0.5, 2),
        "estimator: k1, level: sequence, straight_through: true",
        plain.divergence("k1", "sequence", True),
    ),
    "DPPO, KL": Case(
        "name: dppo_kl, divergence_limit: 0.0003",
        plain.dppo(plain.binary_kl, 0.0003),
        OF_PROMPTS,
        kl="estimator: abs, level: sequence",
        divergence=plain.divergence("abs", "sequence", False),
    ),
    "Clip-Cov": Case(
        "name: clip_cov, covariance_low: 0.1, covariance_high: 2, covariance_share: 0.1",
        plain.clip_cov,
        TOKENS,
        share=0.1,
        bounds=(0.1, 2.0),
    ),
    "KL-Cov": Case(
        "name: kl_cov, penalty: 0.5, covariance_share: 0.2",
        plain.kl_cov,
        MEANS,
        kl="estimator: k2",
        divergence=plain.divergence("k2", "token", False),
        share=0.2,
    ),
    "VAPO's positive examples": Case(
        "name: clip, imitation_coefficient: 0.4, imitation_above: 0.7", plain.clip(torch.inf), MEANS, imitation=0.4
    ),
    "entropy bonus": Case("name: clip, entropy_coefficient: 0.4", plain.clip(torch.inf), OF_PROMPTS, entropy=0.4),
    "DRO": Case("name: dro, tau: 0.3", plain.dro("sequence"), MEANS),
    "DRO of tokens": Case("name: dro, tau: 0.3, level: token", plain.dro("token"), SUMS),
    "the rollout's ratio": Case("name: clip", plain.clip(torch.inf), MEANS, "old: rollout", old="rollout_logprobs"),
    "decoupled PPO, one update": Case(
        "name: clip",
        plain.clip(torch.inf),
        MEANS,
        "weight: token, weight_limit: null",
        plain.truncated(plain.of_token),
        old="now",
    ),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World.make(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def of_single_samples(world) -> dict[str, tuple[float, dict[str, torch.Tensor]]]:
    return expected(world, CASES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_single_samples(world, of_single_samples, layout):
    check(world, CASES, of_single_samples, layout)
