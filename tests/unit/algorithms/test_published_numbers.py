"""Results of public libraries on one small batch with ragged samples, tool tokens and a group of one.

Recorded by tools/references/record.py. Where conventions differ, the test names the option that selects the library's
convention.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from megarl.algorithms import kl
from megarl.algorithms.advantages.gae import gae
from megarl.algorithms.advantages.gpg import amplification
from megarl.algorithms.aggregation import sample_weights
from megarl.algorithms.baselines import Member
from megarl.algorithms.corrections import factors
from megarl.algorithms.kl import kl_reward
from megarl.algorithms.objectives.clip_cov import random_between_bounds
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.relative import covariance, mean_and_std, sample_advantages, whiten
from megarl.algorithms.returns import at_last_token, reward_to_go
from megarl.algorithms.rewards import margins as margins_of
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.value_loss import squared_error
from megarl.core.score import Baseline, RewardPart
from megarl.ops.divergence import divergence, plain_divergence
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from megarl.ops.output_layer import OutputLayer
from tests.closeness import assert_close, expected, relative_error
from tests.paths import ROOT

LONGEST, GAMMA, LAMBDA = 12, 0.9, 0.8
TOLERANCE = 1e-6
"""Other libraries add up to 1e-6 to denominators, to which megarl adds nothing, and compute partly in float32."""


@cache
def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "published_numbers" / f"{name}.json").read_text())


def published(library: str, name: str) -> Any:
    return recorded(library)["numbers"][name]


BATCH = recorded("batch")
PROMPTS, REWARDS = BATCH["prompts"], BATCH["rewards"]
ROW_SAMPLE = torch.tensor([i for i, sample in enumerate(BATCH["mask"]) for _ in sample])
MASK = torch.tensor([bool(flag) for sample in BATCH["mask"] for flag in sample])
NUM_TOKENS = [sum(sample) for sample in BATCH["mask"]]
SAMPLES = SampleSegments(MASK, ROW_SAMPLE, len(PROMPTS))


def rows(name: str) -> torch.Tensor:
    return torch.tensor([value for sample in BATCH[name] for value in sample], dtype=torch.float64)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(actual: torch.Tensor, numbers: Any) -> None:
    expected = torch.tensor(numbers, dtype=actual.dtype)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) <= TOLERANCE


def relative_to(rewards: list[float], baselines: list[Baseline]) -> torch.Tensor:
    """Return each row's advantage relative to the baselines, float32 [N]."""
    center, scale = float64([b.center for b in baselines]), float64([b.scale for b in baselines])
    return sample_advantages(float64(rewards), center, scale)[ROW_SAMPLE]


def group_baselines(rewards: list[float], estimator: str, **options: object) -> list[Baseline]:
    baselines, spec = [], ESTIMATORS[estimator]
    assert options.keys() <= spec.options.keys()
    for prompt in sorted(set(PROMPTS)):
        members = [Member(r, n) for r, n, p in zip(rewards, NUM_TOKENS, PROMPTS, strict=True) if p == prompt]
        baselines += spec.baselines(members, dict(spec.options) | options)
    return baselines


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", dict(estimator="grpo", group_of_one="reward")),
        ("dr_grpo", dict(estimator="grpo", std="none", group_of_one="reward")),
        ("rloo", dict(estimator="rloo", group_of_one="reward")),
        ("rloo_vectorized", dict(estimator="rloo", group_of_one="zero")),
        ("opo", dict(estimator="opo", group_of_one="reward")),
    ],
)
def test_group_baselines_match_verl(name, options):
    assert_equal(
        relative_to(REWARDS, group_baselines(REWARDS, **options))[MASK], published("verl", f"advantage/{name}")
    )


def test_gpg_matches_verl():
    """verl's factor counts nonzero rewards; the paper's and ours count groups with unequal rewards. Here both are
    equal."""
    rewards = [reward + 1 for reward in REWARDS]
    rewards[PROMPTS.index("b")] = 0.0
    by_prompt = [[r for r, p in zip(rewards, PROMPTS, strict=True) if p == prompt] for prompt in sorted(set(PROMPTS))]
    groups = [[Member(reward, 1) for reward in group] for group in by_prompt]
    advantage = relative_to(rewards, group_baselines(rewards, estimator="gpg")) * amplification(groups)
    assert_equal(advantage[MASK], published("verl", "advantage/gpg"))


def test_pass_at_k_matches_verl():
    """In https://arxiv.org/abs/2503.19595 k is the group size: the advantage is the best reward minus the second
    best."""
    options = dict(estimator="pass_at_k", k=3, pass_at_k_baseline="without")
    in_pairs = torch.tensor([PROMPTS.count(prompt) > 1 for prompt in PROMPTS])[ROW_SAMPLE]
    advantage = relative_to(REWARDS, group_baselines(REWARDS, **options))
    assert_equal(advantage[MASK & in_pairs], published("verl", "advantage/pass_at_k"))


def test_remax_matches_verl():
    advantage = relative_to(REWARDS, [Baseline(greedy) for greedy in BATCH["greedy"]])
    assert_equal(advantage[MASK], published("verl", "advantage/remax"))


def whitened(advantage: torch.Tensor) -> torch.Tensor:
    """Return the advantages whitened with the sample deviation. verl adds 1e-8 to the variance."""
    trained = advantage[MASK]
    moments = mean_and_std(len(trained), trained.sum().item(), trained.square().sum().item(), "sample")
    return whiten(advantage, MASK, *moments, std_epsilon=0.0)


def test_reinforce_plus_plus_baseline_matches_verl():
    options = dict(estimator="reinforce_plus_plus_baseline", group_of_one="reward")
    advantage = whitened(relative_to(REWARDS, group_baselines(REWARDS, **options)))
    assert_equal(advantage[MASK], published("verl", "advantage/reinforce_plus_plus_baseline"))


def test_gdpo_matches_verl():
    """verl whitens over tokens instead of normalizing over samples. The second reward has weight 0.5."""
    groups: dict[str, list[Member]] = {}
    for prompt, first, second in zip(PROMPTS, REWARDS, BATCH["advantages"], strict=True):
        parts = {"first": RewardPart(first), "second": RewardPart(second, 0.5)}
        groups.setdefault(prompt, []).append(Member(first + 0.5 * second, 1, parts=parts))
    options = ESTIMATORS["gdpo"].options | {"step_std": "none", "group_of_one": "reward"}
    baselines = [b for group in groups.values() for b in ESTIMATORS["gdpo"].baselines(group, options)]
    rewards = [member.reward for group in groups.values() for member in group]
    assert_equal(whitened(relative_to(rewards, baselines))[MASK], published("verl", "advantage/gdpo"))


def token_rewards() -> torch.Tensor:
    """Return each token's reward, with the sample's reward added to that of the last trained token."""
    return at_last_token(float64(REWARDS), MASK, ROW_SAMPLE) + rows("token_rewards")


def test_discounted_returns_match_torchrl_and_verl():
    returns = reward_to_go(token_rewards(), MASK, ROW_SAMPLE, GAMMA)
    assert_equal(returns[MASK], published("torchrl", "to_go"))
    assert_equal(whitened(returns)[MASK], published("verl", "advantage/reinforce_plus_plus"))


def test_gae_matches_torchrl_and_verl():
    advantage, returns = gae(token_rewards(), MASK, ROW_SAMPLE, rows("values"), GAMMA, LAMBDA)
    assert_equal(advantage[MASK], published("torchrl", "gae"))
    assert_equal(returns[MASK], published("torchrl", "gae_returns"))
    assert_equal(whitened(advantage)[MASK], published("verl", "advantage/gae"))
    assert_equal(returns[MASK], published("verl", "advantage/gae_returns"))


def assert_loss(library: str, name: str, loss: Callable[[torch.Tensor], torch.Tensor], variable: str = "now") -> None:
    """Assert that the library has the same gradient for each token and, unless listed in OTHER_VALUES, the same
    value."""
    now = rows(variable).requires_grad_()
    value = loss(now)
    [gradient] = torch.autograd.grad(value, now)
    assert_equal(gradient[MASK], published(library, name)["gradient"])
    assert not gradient[~MASK].any()
    if (library, name) not in OTHER_VALUES:
        assert_equal(value.detach(), published(library, name)["value"])


OTHER_VALUES = {
    ("verl", "loss/gpg"),  # −A·log π
    ("verl", "loss/dppo_tv"),  # −sg(ρ)·A·log π
    ("verl", "loss/dppo_kl"),
    ("verl", "loss/dro"),  # ½·(A − τ·log ρ)² without the constant term
    ("verl", "loss/clip_cov"),  # a selected, clipped token contributes a constant
    ("trl", "loss/gmpo"),  # a sample without a trained token has loss −A
}
"""Losses that agree only in their gradients."""


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_kl_estimators_match_verl(estimator, plus):
    def total(now: torch.Tensor) -> torch.Tensor:
        return kl.estimate(estimator, now - rows("reference"), straight_through=bool(plus))[MASK].sum()

    assert_loss("verl", f"kl/{estimator}{plus}", total)


def test_kl_reward_matches_verl():
    per_sample = [
        kl_reward(rows("old")[at], rows("reference")[at], MASK[at], coefficient=0.3, estimator="k1", level="token")
        for at in (sample == ROW_SAMPLE for sample in range(len(PROMPTS)))
    ]
    assert_equal(torch.cat(per_sample)[MASK], published("verl", "kl/reward"))


def test_adaptive_kl_coefficient_matches_verl():
    """Four steps of 256 samples with a target of 0.1."""
    coefficients = [0.3]
    for measured in (0.05, 0.3, 0.105, 0.1):
        coefficients.append(kl.adapted(coefficients[-1], measured, target=0.1, num_samples=256, horizon=1000))
    assert_equal(torch.tensor(coefficients[1:], dtype=torch.float64), published("verl", "kl/adaptive"))


def weights(mode: str) -> torch.Tensor:
    """Return token weights, float64 [N]; 0 for untrained tokens."""
    per_sample = sample_weights(mode, NUM_TOKENS, PROMPTS, LONGEST)
    return torch.where(MASK, float64(per_sample)[ROW_SAMPLE], 0.0)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-sum", "sequence_mean_of_token_sums"),
        ("seq-mean-token-mean", "sequence_mean_of_token_means"),
        ("seq-mean-token-sum-norm", "sequence_mean_over_max_tokens"),
    ],
)
def test_aggregations_match_verl(name, mode):
    assert_equal((weights(mode) * -rows("now")).sum(), published("verl", f"aggregation/{name}"))


SEQUENCE_MEAN, TOKEN_MEAN = "sequence_mean_of_token_means", "token_mean"
CLIP = dict(clip_low=0.2, clip_high=0.2)
ADVANTAGE = float64(BATCH["advantages"])[ROW_SAMPLE]


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PolicyLoss]


def objective(name: str, **options: object) -> Loss:
    """Return the loss of an objective with all of its options; dual_clip defaults to None. Sample-level objectives use
    the whole batch."""
    spec = OBJECTIVES[name]
    assert options.keys() | {"dual_clip"} == spec.arguments.keys() | {"dual_clip"}
    inputs = [SAMPLES] * len(spec.inputs)
    return lambda now, old, advantage: spec.loss(now, old, advantage, *inputs, **options)


def covariance_of(now: torch.Tensor) -> torch.Tensor:
    """Return the covariance under the current policy, as verl does."""
    now = now.detach()
    return covariance(now, ADVANTAGE, now[MASK].mean().item(), ADVANTAGE[MASK].mean().item())


def clip_cov(now: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """Select all tokens within the bounds, so that the result is deterministic."""
    order = random_between_bounds(covariance_of(now), torch.zeros_like(now), 0.2, 0.8)
    return OBJECTIVES["clip_cov"].loss(now, old, advantage, order > -torch.inf, **CLIP)


def kl_cov(now: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """Select a fifth of 20 tokens."""
    least = covariance_of(now)[MASK].sort().values[-4]
    return OBJECTIVES["kl_cov"].loss(now, old, advantage, MASK & (covariance_of(now) >= least), penalty=0.5)


GSPO, GMPO = objective("gspo", clip_low=0.1, clip_high=0.15), objective("gmpo", clip_low=0.4, clip_high=0.4)


@pytest.mark.parametrize(
    ("library", "name", "mode", "loss"),
    [
        ("verl", "clip", TOKEN_MEAN, objective("clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0)),
        ("verl", "dppo_tv", TOKEN_MEAN, objective("dppo_tv", divergence_limit=0.15, divergence_limit_negative=None)),
        ("verl", "dppo_kl", TOKEN_MEAN, objective("dppo_kl", divergence_limit=0.05, divergence_limit_negative=None)),
        ("verl", "gspo", SEQUENCE_MEAN, GSPO),
        ("verl", "gmpo", SEQUENCE_MEAN, GMPO),
        ("verl", "sapo", SEQUENCE_MEAN, objective("sapo", tau_positive=1.0, tau_negative=1.05)),
        ("verl", "cispo", TOKEN_MEAN, objective("cispo", clip_low=None, clip_high=4.0)),
        ("verl", "clip_cov", TOKEN_MEAN, clip_cov),
        ("verl", "kl_cov", TOKEN_MEAN, kl_cov),
        ("trl", "grpo", SEQUENCE_MEAN, objective("clip", clip_low=0.2, clip_high=0.28, dual_clip=3.0)),
        ("trl", "bnpo", TOKEN_MEAN, objective("clip", **CLIP)),
        ("trl", "dapo", TOKEN_MEAN, objective("clip", clip_low=0.2, clip_high=0.28)),
        ("trl", "dr_grpo", "sequence_mean_over_max_tokens", objective("clip", **CLIP)),
        ("trl", "luspo", "sequence_mean_of_token_sums", objective("clip", **CLIP)),
        ("trl", "cispo", TOKEN_MEAN, objective("cispo", clip_low=None, clip_high=4.0)),  # TRL bounds ρ, not ρ − 1
        ("trl", "sapo", SEQUENCE_MEAN, objective("sapo", tau_positive=1.0, tau_negative=1.05)),
        ("trl", "gspo", SEQUENCE_MEAN, GSPO),
        ("trl", "gmpo", SEQUENCE_MEAN, GMPO),
    ],
)
def test_objectives_match_library(library, name, mode, loss):
    def total(now: torch.Tensor) -> torch.Tensor:
        return (weights(mode) * loss(now, rows("old"), ADVANTAGE).loss).sum()

    assert_loss(library, f"loss/{name}", total)


def test_grpo_with_kl_matches_trl():
    def total(now: torch.Tensor) -> torch.Tensor:
        clipped = objective("clip", clip_low=0.2, clip_high=0.28)(now, rows("old"), ADVANTAGE).loss
        return (weights(SEQUENCE_MEAN) * (clipped + 0.3 * kl.estimate("k3", now - rows("reference")))).sum()

    assert_loss("trl", "loss/grpo_with_kl", total)


def test_policy_gradient_matches_verl():
    """verl's GPG has no ratio, which equals a ratio of 1."""

    def total(now: torch.Tensor) -> torch.Tensor:
        return (weights(TOKEN_MEAN) * objective("unclipped")(now, now.detach(), ADVANTAGE).loss).sum()

    assert_loss("verl", "loss/gpg", total)


def test_dro_matches_verl():
    """verl uses each token's log-ratio, and its beta is tau."""

    def total(now: torch.Tensor) -> torch.Tensor:
        losses = objective("dro", tau=0.3, level="token")(now, rows("old"), ADVANTAGE).loss
        return (weights(TOKEN_MEAN) * losses).sum() / 0.3

    assert_loss("verl", "loss/dro", total)


def test_value_loss_matches_verl():
    """verl's loss is ours with algorithm.value.coefficient=0.5."""

    def total(values: torch.Tensor) -> torch.Tensor:
        losses = squared_error(values, rows("values"), rows("returns"), clip=0.2).loss
        return 0.5 * (weights(TOKEN_MEAN) * losses).sum()

    assert_loss("verl", "loss/value", total, variable="values_now")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("1.2", dict(weight_limit=1.2, mask=None)), ("0.7_1.4", dict(weight_limit=None, mask="of the weight"))],
)
def test_correction_weights_match_verl(level, name, options):
    mask = level if options["mask"] else None
    correction = factors(
        rows("old") - rows("rollout_logprobs"),
        SAMPLES,
        level,
        options["weight_limit"],
        mask,
        mask_low=0.7,
        mask_high=1.4,
    )
    assert_equal(correction.factor[MASK], published("verl", f"weight/{level}/{name}"))


@pytest.mark.parametrize(
    ("name", "level"), [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")]
)
def test_correction_masks_match_verl(name, level):
    """verl bounds the ratio of the sampling policy to the old one."""
    correction = factors(
        rows("old") - rows("rollout_logprobs"), SAMPLES, None, None, level, mask_low=1 / 1.25, mask_high=1 / 0.7
    )
    assert_equal(correction.factor[MASK], published("verl", f"mask/{name}"))


PAIRS = torch.tensor([0, 1, 4, 6])
"""The samples of two pairs, the better one first in each."""


def margins(length_normalised: bool) -> torch.Tensor:
    log_ratios = SAMPLES.total(rows("now") - rows("reference"))
    counts = SAMPLES.count.double() if length_normalised else torch.ones(len(PROMPTS))
    return margins_of((log_ratios / counts.clamp(min=1))[PAIRS])


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        (
            "reward_model",
            lambda: OBJECTIVES["reward_model"].loss(margins_of(float64(REWARDS)[PAIRS]), label_smoothing=0.0),
        ),
        ("dpo", lambda: OBJECTIVES["dpo"].loss(0.2 * margins(False), label_smoothing=0.0)),
        ("dpo_by_length", lambda: OBJECTIVES["dpo"].loss(0.2 * margins(True), label_smoothing=0.0)),
        ("conservative_dpo", lambda: OBJECTIVES["dpo"].loss(0.2 * margins(False), label_smoothing=0.1)),
        ("ipo_by_length", lambda: OBJECTIVES["ipo"].loss(0.2 * margins(True), beta=0.2)),
    ],
)
def test_pair_losses_match_trl(name, loss):
    assert_equal(loss().mean(), published("trl", f"pairs/{name}"))


def test_log_probs_and_entropies_match_trl():
    """The weight is an identity matrix, so hidden states are logits."""
    logits = torch.tensor([[(i * j % 11) / 3 for j in range(13)] for i in range(5)])
    arguments = (logits, torch.eye(13), torch.arange(5), 1.0, 13)
    for log_prob, entropy in (plain_log_prob_and_entropy(*arguments), log_prob_and_entropy(*arguments).unbind(1)):
        assert_equal(log_prob, published("trl", "logits/log_prob"))
        assert_equal(entropy, published("trl", "logits/entropy"))


def mean_divergence(compute: Callable[..., torch.Tensor], kind: str, beta: float) -> dict[str, torch.Tensor]:
    """Return the mean over trained tokens at temperature 0.7, and its gradient. Hidden states are logits."""
    logits, teacher_logits = (rows(name).to(torch.get_default_dtype()) for name in ("logits", "teacher_logits"))
    identity = torch.eye(logits.shape[1])
    teacher = OutputLayer(teacher_logits, identity)
    of_tokens = compute(logits.requires_grad_(), identity, teacher, kind, 0.7, len(identity), beta)
    value = (weights(TOKEN_MEAN) * of_tokens).sum()
    [gradient] = torch.autograd.grad(value, logits)
    assert not gradient[~MASK].any()
    return {"value": value.detach(), "gradient": gradient[MASK]}


@pytest.mark.parametrize(
    ("kind", "beta"),
    [("jsd", 0.0), ("forward_kl", 0.0), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 1.0), ("reverse_kl", 1.0)],
)
def test_divergences_match_trl(kind, beta):
    """TRL's β is ours: the teacher's share in the mixture, and at 0 and 1 the forward and the reverse KL. Its default
    reduction, batchmean, divides by the number of labels that are not -100, which is our token_mean. Neither multiplies
    by the square of the temperature."""
    exact, plain = expected(lambda: mean_divergence(plain_divergence, kind, beta))
    for name, numbers in published("trl", f"divergence/{beta}").items():
        assert_equal(exact[name], numbers)
    assert_close(mean_divergence(divergence, kind, beta), exact, plain, "divergence")
