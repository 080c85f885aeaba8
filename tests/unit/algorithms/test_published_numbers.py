"""Numbers that public libraries compute of one small batch, with ragged samples, tool tokens and a group of one.

tools/references/record.py has recorded it. Where conventions differ, the option is named that makes megarl's theirs.
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
from megarl.algorithms.covariance import covariance
from megarl.algorithms.kl_reward import kl_reward
from megarl.algorithms.objectives.clip_cov import random_between_bounds
from megarl.algorithms.pairs import margins as margins_of
from megarl.algorithms.policy_loss import PolicyLoss
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.algorithms.relative import sample_advantages
from megarl.algorithms.returns import at_last_token, reward_to_go
from megarl.algorithms.sample_segments import SampleSegments
from megarl.algorithms.value_loss import squared_error
from megarl.algorithms.whitening import mean_and_std, whiten
from megarl.core.types import Baseline
from megarl.ops.linear_head import log_prob_and_entropy, plain_log_prob_and_entropy
from tests.closeness import relative_error
from tests.paths import ROOT

LONGEST, GAMMA, LAMBDA = 12, 0.9, 0.8
TOLERANCE = 1e-6
"""They add up to 1e-6 to denominators where megarl adds nothing, and compute some of it in float32."""


@cache
def recorded(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "published_numbers" / f"{name}.json").read_text())


def theirs(library: str, name: str) -> Any:
    return recorded(library)["numbers"][name]


BATCH = recorded("batch")
PROMPTS, REWARDS = BATCH["prompts"], BATCH["rewards"]
ROW_SAMPLE = torch.tensor([i for i, own in enumerate(BATCH["mask"]) for _ in own])
MASK = torch.tensor([bool(flag) for own in BATCH["mask"] for flag in own])
NUM_TOKENS = [sum(own) for own in BATCH["mask"]]
SAMPLES = SampleSegments(MASK, ROW_SAMPLE, len(PROMPTS))


def rows(name: str) -> torch.Tensor:
    return torch.tensor([value for own in BATCH[name] for value in own], dtype=torch.float64)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_equal(ours: torch.Tensor, numbers: Any) -> None:
    expected = torch.tensor(numbers, dtype=ours.dtype)
    assert ours.shape == expected.shape
    assert relative_error(ours, expected) <= TOLERANCE


def against(rewards: list[float], baselines: list[Baseline]) -> torch.Tensor:
    """float64 [N]."""
    center, scale = float64([b.center for b in baselines]), float64([b.scale for b in baselines])
    return sample_advantages(float64(rewards), center, scale)[ROW_SAMPLE]


def in_groups(rewards: list[float], estimator: str, **options: object) -> list[Baseline]:
    found, spec = [], ESTIMATORS[estimator]
    assert options.keys() <= spec.options.keys()
    for prompt in sorted(set(PROMPTS)):
        members = [Member(r, n) for r, n, p in zip(rewards, NUM_TOKENS, PROMPTS, strict=True) if p == prompt]
        found += spec.baselines(members, dict(spec.options) | options)
    return found


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
def test_verls_group_baselines(name, options):
    assert_equal(against(REWARDS, in_groups(REWARDS, **options))[MASK], theirs("verl", f"advantage/{name}"))


def test_verls_gpg():
    """Its factor counts rewards that are not 0, the paper's and ours those of groups with unequal ones: here these are
    the same."""
    rewards = [reward + 1 for reward in REWARDS]
    rewards[PROMPTS.index("b")] = 0.0
    own = [[r for r, p in zip(rewards, PROMPTS, strict=True) if p == prompt] for prompt in sorted(set(PROMPTS))]
    groups = [[Member(reward, 1) for reward in group] for group in own]
    advantage = against(rewards, in_groups(rewards, estimator="gpg")) * amplification(groups)
    assert_equal(advantage[MASK], theirs("verl", "advantage/gpg"))


def test_verls_pass_at_k():
    """The k of https://arxiv.org/abs/2503.19595 is the size of the group: the best reward less the second best."""
    options = dict(estimator="pass_at_k", k=3, pass_at_k_baseline="without")
    in_pairs = torch.tensor([PROMPTS.count(prompt) > 1 for prompt in PROMPTS])[ROW_SAMPLE]
    advantage = against(REWARDS, in_groups(REWARDS, **options))
    assert_equal(advantage[MASK & in_pairs], theirs("verl", "advantage/pass_at_k"))


def test_verls_remax():
    advantage = against(REWARDS, [Baseline(greedy) for greedy in BATCH["greedy"]])
    assert_equal(advantage[MASK], theirs("verl", "advantage/remax"))


def whitened(advantage: torch.Tensor) -> torch.Tensor:
    """Return the advantages whitened with the sample deviation, to whose square verl adds 1e-8."""
    trained = advantage[MASK]
    moments = mean_and_std(len(trained), trained.sum().item(), trained.square().sum().item(), "sample")
    return whiten(advantage, MASK, *moments, std_epsilon=0.0)


def test_verls_reinforce_plus_plus_with_a_group_baseline():
    options = dict(estimator="reinforce_plus_plus_baseline", group_of_one="reward")
    advantage = whitened(against(REWARDS, in_groups(REWARDS, **options)))
    assert_equal(advantage[MASK], theirs("verl", "advantage/reinforce_plus_plus_baseline"))


def token_rewards() -> torch.Tensor:
    """Each token's own reward, and the sample's on its last trained one."""
    return at_last_token(float64(REWARDS), MASK, ROW_SAMPLE) + rows("token_rewards")


def test_discounted_returns():
    returns = reward_to_go(token_rewards(), MASK, ROW_SAMPLE, GAMMA)
    assert_equal(returns[MASK], theirs("torchrl", "to_go"))
    assert_equal(whitened(returns)[MASK], theirs("verl", "advantage/reinforce_plus_plus"))


def test_generalised_advantages():
    advantage, returns = gae(token_rewards(), MASK, ROW_SAMPLE, rows("values"), GAMMA, LAMBDA)
    assert_equal(advantage[MASK], theirs("torchrl", "gae"))
    assert_equal(returns[MASK], theirs("torchrl", "gae_returns"))
    assert_equal(whitened(advantage)[MASK], theirs("verl", "advantage/gae"))
    assert_equal(returns[MASK], theirs("verl", "advantage/gae_returns"))


def assert_loss(library: str, name: str, loss: Callable[[torch.Tensor], torch.Tensor], variable: str = "now") -> None:
    """Assert that the library has the same value, where it is of the same loss, and the same gradient for each
    token."""
    now = rows(variable).requires_grad_()
    value = loss(now)
    [gradient] = torch.autograd.grad(value, now)
    assert_equal(gradient[MASK], theirs(library, name)["gradient"])
    assert not gradient[~MASK].any()
    if (library, name) not in OTHER_VALUES:
        assert_equal(value.detach(), theirs(library, name)["value"])


OTHER_VALUES = {
    ("verl", "loss/gpg"),  # −A·log π
    ("verl", "loss/dppo_tv"),  # −sg(ρ)·A·log π
    ("verl", "loss/dppo_kl"),
    ("verl", "loss/dro"),  # without what has no gradient in ½·(A − τ·log ρ)²
    ("verl", "loss/clip_cov"),  # a chosen token that the clip holds loses a constant
    ("trl", "loss/gmpo"),  # a sample without a trained token loses −A
}
"""The losses of which only the gradient is the same."""


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("plus", ["", "+"])
def test_verls_kl(estimator, plus):
    def total(now: torch.Tensor) -> torch.Tensor:
        return kl.estimate(estimator, now - rows("reference"), straight_through=bool(plus))[MASK].sum()

    assert_loss("verl", f"kl/{estimator}{plus}", total)


def test_verls_kl_as_a_reward():
    of_each = [
        kl_reward(rows("old")[own], rows("reference")[own], MASK[own], coefficient=0.3, estimator="k1", level="token")
        for own in (sample == ROW_SAMPLE for sample in range(len(PROMPTS)))
    ]
    assert_equal(torch.cat(of_each)[MASK], theirs("verl", "kl/reward"))


def test_verls_adaptive_coefficient():
    """The coefficient is adapted in four steps of 256 samples, with a target of 0.1."""
    coefficients = [0.3]
    for divergence in (0.05, 0.3, 0.105, 0.1):
        coefficients.append(kl.adapted(coefficients[-1], divergence, target=0.1, num_samples=256, horizon=1000))
    assert_equal(torch.tensor(coefficients[1:], dtype=torch.float64), theirs("verl", "kl/adaptive"))


def weights(mode: str) -> torch.Tensor:
    """float64 [N], 0 for tokens that are not trained on."""
    of_each = sample_weights(mode, NUM_TOKENS, PROMPTS, LONGEST)
    return torch.where(MASK, float64(of_each)[ROW_SAMPLE], 0.0)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("token-mean", "token_mean"),
        ("seq-mean-token-sum", "sequence_mean_of_token_sums"),
        ("seq-mean-token-mean", "sequence_mean_of_token_means"),
        ("seq-mean-token-sum-norm", "sequence_mean_over_max_tokens"),
    ],
)
def test_verls_aggregations(name, mode):
    assert_equal((weights(mode) * -rows("now")).sum(), theirs("verl", f"aggregation/{name}"))


SEQUENCE_MEAN, TOKEN_MEAN = "sequence_mean_of_token_means", "token_mean"
CLIP = dict(clip_low=0.2, clip_high=0.2)
ADVANTAGE = float64(BATCH["advantages"])[ROW_SAMPLE]


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PolicyLoss]


def objective(name: str, **options: object) -> Loss:
    """Return an objective's loss with all of its options but those that are none; where it is of samples, of the whole
    batch."""
    spec = OBJECTIVES[name]
    assert options.keys() | {"dual_clip"} == spec.arguments.keys() | {"dual_clip"}
    inputs = [SAMPLES] * len(spec.inputs)
    return lambda now, old, advantage: spec.loss(now, old, advantage, *inputs, **options)


def covariance_of(now: torch.Tensor) -> torch.Tensor:
    """verl takes it of the current policy."""
    now = now.detach()
    return covariance(now, ADVANTAGE, now[MASK].mean().item(), ADVANTAGE[MASK].mean().item())


def clip_cov(now: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """All tokens between the bounds, so that none is drawn."""
    order = random_between_bounds(covariance_of(now), torch.zeros_like(now), 0.2, 0.8)
    return OBJECTIVES["clip_cov"].loss(now, old, advantage, order > -torch.inf, **CLIP)


def kl_cov(now: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> PolicyLoss:
    """A fifth of 20 tokens."""
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
        ("trl", "cispo", TOKEN_MEAN, objective("cispo", clip_low=None, clip_high=4.0)),  # its bound is of ρ: 5
        ("trl", "sapo", SEQUENCE_MEAN, objective("sapo", tau_positive=1.0, tau_negative=1.05)),
        ("trl", "gspo", SEQUENCE_MEAN, GSPO),
        ("trl", "gmpo", SEQUENCE_MEAN, GMPO),
    ],
)
def test_objectives(library, name, mode, loss):
    def total(now: torch.Tensor) -> torch.Tensor:
        return (weights(mode) * loss(now, rows("old"), ADVANTAGE).loss).sum()

    assert_loss(library, f"loss/{name}", total)


def test_trls_grpo_with_a_kl():
    def total(now: torch.Tensor) -> torch.Tensor:
        clipped = objective("clip", clip_low=0.2, clip_high=0.28)(now, rows("old"), ADVANTAGE).loss
        return (weights(SEQUENCE_MEAN) * (clipped + 0.3 * kl.estimate("k3", now - rows("reference")))).sum()

    assert_loss("trl", "loss/grpo_with_kl", total)


def test_verls_policy_gradient():
    """Its GPG, whose ratio would be 1."""

    def total(now: torch.Tensor) -> torch.Tensor:
        return (weights(TOKEN_MEAN) * objective("unclipped")(now, now.detach(), ADVANTAGE).loss).sum()

    assert_loss("verl", "loss/gpg", total)


def test_verls_dro():
    """It takes the log-ratio of each token, and its beta is tau."""

    def total(now: torch.Tensor) -> torch.Tensor:
        losses = objective("dro", tau=0.3, level="token")(now, rows("old"), ADVANTAGE).loss
        return (weights(TOKEN_MEAN) * losses).sum() / 0.3

    assert_loss("verl", "loss/dro", total)


def test_verls_value_loss():
    """It is megarl's with algorithm.value.coefficient=0.5."""

    def total(values: torch.Tensor) -> torch.Tensor:
        losses = squared_error(values, rows("values"), rows("returns"), clip=0.2).loss
        return 0.5 * (weights(TOKEN_MEAN) * losses).sum()

    assert_loss("verl", "loss/value", total, variable="values_now")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("name", "options"),
    [("1.2", dict(weight_limit=1.2, mask=None)), ("0.7_1.4", dict(weight_limit=None, mask="of the weight"))],
)
def test_verls_weights(level, name, options):
    mask = level if options["mask"] else None
    found = factors(
        rows("old") - rows("rollout_logprobs"),
        SAMPLES,
        level,
        options["weight_limit"],
        mask,
        mask_low=0.7,
        mask_high=1.4,
    )
    assert_equal(found.factor[MASK], theirs("verl", f"weight/{level}/{name}"))


@pytest.mark.parametrize(
    ("name", "level"), [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")]
)
def test_verls_masks(name, level):
    """Its bounds are of the sampling policy over the old one."""
    found = factors(
        rows("old") - rows("rollout_logprobs"), SAMPLES, None, None, level, mask_low=1 / 1.25, mask_high=1 / 0.7
    )
    assert_equal(found.factor[MASK], theirs("verl", f"mask/{name}"))


PAIRS = torch.tensor([0, 1, 4, 6])
"""The samples of two pairs, the better one first."""


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
def test_trls_losses_of_pairs(name, loss):
    assert_equal(loss().mean(), theirs("trl", f"pairs/{name}"))


def test_trls_log_probs_and_entropies():
    """The weight is a unit matrix, so that hidden states are logits."""
    logits = torch.tensor([[(i * j % 11) / 3 for j in range(13)] for i in range(5)])
    given = (logits, torch.eye(13), torch.arange(5), 1.0, 13)
    for log_prob, entropy in (plain_log_prob_and_entropy(*given), log_prob_and_entropy(*given).unbind(1)):
        assert_equal(log_prob, theirs("trl", "logits/log_prob"))
        assert_equal(entropy, theirs("trl", "logits/entropy"))
