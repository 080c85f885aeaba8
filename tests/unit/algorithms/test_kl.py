"""KL estimators: exact expectations over all tokens of a small vocabulary."""

import math
from itertools import product

import pytest
import torch

from megarl.algorithms import kl
from megarl.config.load import load
from tests.closeness import TOLERANCES
from tests.paths import BASE

LOG_2 = math.log(2)


def two_policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits with a gradient, their log-softmax, and a reference's log-probs: float64 [20]."""
    torch.manual_seed(0)
    reference = torch.randn(20, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(20, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(-1), reference


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # log-ratio ln 2: the policy's probability is twice that of the reference.
    [("k1", LOG_2), ("k2", LOG_2**2 / 2), ("k3", 0.5 - 1 + LOG_2), ("abs", LOG_2)],
)
def test_estimators_match_worked_example(estimator, expected):
    log_ratio = torch.tensor([LOG_2, -0.3], dtype=torch.float64)
    assert kl.estimate(estimator, log_ratio)[0].item() == pytest.approx(expected, rel=TOLERANCES[torch.float64])
    assert kl.estimate("abs", log_ratio)[1].item() == 0.3


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator, straight_through):
    _, policy, reference = two_policies()
    exact = (policy.exp() * (policy - reference)).sum()
    estimate = kl.estimate(estimator, policy - reference, straight_through)
    torch.testing.assert_close((policy.exp() * estimate).sum(), exact)


def test_k3_is_never_negative():
    _, policy, reference = two_policies()
    assert (kl.estimate("k3", policy - reference) >= 0).all()


@pytest.mark.parametrize(
    ("estimator", "straight_through", "exact"),
    [("k2", False, True), ("k1", True, True), ("k3", True, True), ("abs", True, True), ("k1", False, False)],
)
def test_gradients_that_equal_the_divergence_gradient(estimator, straight_through, exact):
    logits, policy, reference = two_policies()
    divergence = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    sampled = (policy.exp().detach() * kl.estimate(estimator, policy - reference, straight_through)).sum()
    gradient = torch.autograd.grad(sampled, logits)[0]
    assert torch.allclose(gradient, divergence) is exact


@pytest.mark.parametrize("estimator", kl.KL_ESTIMATORS)
def test_estimators_pass_gradcheck(estimator):
    log_ratio = torch.tensor([-1.5, -0.2, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl.estimate(estimator, x), log_ratio)


def test_straight_through_keeps_the_value():
    _, policy, reference = two_policies()
    for estimator in kl.KL_ESTIMATORS:
        ratio = policy - reference
        torch.testing.assert_close(kl.estimate(estimator, ratio, True), kl.estimate(estimator, ratio))
    far = torch.tensor([1000.3])  # k2, whose gradient is used, is far larger than k1 here
    assert kl.estimate("k1", far, True) == far


def test_limit_clamps_estimates_and_stops_their_gradient():
    """verl's low_var_kl is clamp(k3, −10, 10). For a policy e⁵ times less likely than the reference, k3 is 142."""
    log_ratio = torch.tensor([-5.0, -1.0, 30.0], dtype=torch.float64, requires_grad=True)
    limited = kl.estimate("k3", log_ratio, limit=10)
    assert limited.tolist() == pytest.approx([10, math.e - 2, 10])
    assert torch.autograd.grad(limited.sum(), log_ratio)[0].tolist() == pytest.approx([0, 1 - math.e, 0])
    assert kl.estimate("k1", log_ratio.detach(), limit=2).tolist() == [-2, -1, 2]
    through = kl.estimate("k3", log_ratio, straight_through=True, limit=10)
    assert through.tolist() == pytest.approx(limited.tolist())
    assert torch.autograd.grad(through.sum(), log_ratio)[0].tolist() == log_ratio.tolist()


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("placement: loss", "loss_token_k3"),
        ("placement: loss, level: sequence", "loss_sequence_k2"),
        ("placement: reward", "reward_whole_token_k1"),
        ("placement: reward, level: sequence", "reward_whole_sequence_k1"),
        ("placement: reward, estimator: k3", "reward_whole_token_k3"),
    ],
)
def test_default_estimator_follows_the_papers(form, expected):
    algorithm = load(BASE, ["model.path=m", "data.source=arithmetic", f"algorithm.kl={{{form}}}"]).algorithm
    assert algorithm.kl_metric == f"kl/{expected}"


def test_only_k3_explodes_for_long_responses():
    """Each of 1,000 tokens is 2 % less likely under the policy than under the reference: k3 is e²⁰, k2 is 200."""
    log_ratio = torch.full((1000,), -0.02, dtype=torch.float64)
    assert kl.estimate("k3", log_ratio).sum() == pytest.approx(1000 * (math.exp(0.02) - 1.02))
    assert kl.estimate("k3", log_ratio.sum()) > 4e8
    assert kl.estimate(kl.usual_estimator("loss", "sequence"), log_ratio.sum()) == pytest.approx(200)


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.05, 1.0), (0.055, 1.01), (5.0, 1.02), (0.0, 0.98), (-1.0, 0.98)]
)
def test_adaptive_coefficient_change_is_bounded(divergence, expected):
    """100 samples and a horizon of 1000 apply a tenth of the clipped error; the target is 0.05."""
    assert kl.adapted(1.0, divergence, 0.05, 100, 1000) == pytest.approx(expected)


@pytest.mark.parametrize(("final", "expected"), [(0.0, [0.8, 0.6, 0.4, 0.2, 0.0, 0.0]), (1.0, [0.8, 0.85, 0.9, 0.95])])
def test_annealed_coefficient_is_linear_then_constant(final, expected):
    found = [kl.annealed(0.8, final, 4, step) for step in range(1, len(expected) + 1)]
    assert found == pytest.approx(expected)
    assert kl.annealed(0.8, final, 4, 5) == kl.annealed(0.8, final, 4, 1000) == final


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1), (0.0149, 1), (0.0151, 2), (9.0, 2)]
)
def test_adaptive_penalty_is_halved_or_doubled(divergence, expected):
    assert kl.adapted_penalty(1.0, divergence, 0.01) == expected


@pytest.mark.parametrize("adaptive_target", ["null", "0.1"])
def test_every_kl_form_has_its_own_metric(adaptive_target):
    """A form consists of placement, credit, level, estimator and gradient."""
    placements = (
        ("loss", "whole", "loss"),
        ("reward", "whole", "reward_whole"),
        ("reward", "reward_to_go", "reward_to_go"),
    )
    forms = product(placements, ("token", "sequence"), kl.KL_ESTIMATORS, ("", "_straight_through"))
    names = set()
    for (placement, credit, where), level, estimator, gradient in forms:
        keys = f"placement: {placement}, level: {level}, estimator: {estimator}, coefficient: 0.1"
        form = f"algorithm.kl={{{keys}, straight_through: {bool(gradient)}, adaptive_target: {adaptive_target}}}"
        credit_key = f"algorithm.advantage={{estimator: rloo, credit: {credit}}}"
        algorithm = load(BASE, ["model.path=m", "data.source=arithmetic", credit_key, form]).algorithm
        assert algorithm.kl_metric == f"kl/{where}_{level}_{estimator}{gradient}"
        names.add(algorithm.kl_metric)
    assert len(names) == 3 * 2 * 4 * 2


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_token_estimators_use_the_kl_to_go(estimator):
    keys = (f"algorithm.advantage.estimator={estimator}", "algorithm.kl={placement: reward, coefficient: 0.1}")
    algorithm = load(BASE, ["model.path=m", "data.source=arithmetic", *keys]).algorithm
    assert algorithm.kl_metric == "kl/reward_to_go_token_k1"


@pytest.mark.parametrize("placement", ["advantage", "loss"])
def test_distillation_has_the_gradient_of_the_divergence(placement):
    """In expectation over the policy's tokens: Σ π·(−A·log π) with A = −K, and Σ π·K as a loss."""
    logits, policy, first = two_policies()
    second = torch.randn(20, dtype=torch.float64).log_softmax(-1)
    weights = [0.25, 2.0]
    divergence = sum(w * (policy.exp() * (policy - teacher)).sum() for w, teacher in ((0.25, first), (2.0, second)))
    [expected] = torch.autograd.grad(divergence, logits, retain_graph=True)
    teachers, mask = torch.stack((first, second), -1), torch.ones(20, dtype=torch.bool)
    options = dict(weights=weights, estimator=kl.distillation_estimator(placement), limit=None)
    term = kl.distillation(policy, teachers, mask, **options)
    sampled = policy.exp().detach()
    loss = (sampled * (term if placement == "loss" else term.detach() * policy)).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], expected)


def test_distillation_matches_worked_example():
    """Two teachers: 0.5·K(d₁) + 2·K(d₂) with k1 and a limit of 3. The first teacher does not score the third token. The
    last token is masked and not finite."""
    log_prob = torch.tensor([-1.0, -2.0, -1.0, -1.0])
    teachers = torch.tensor([[-2.0, -0.5], [-6.0, -2.0], [kl.UNSCORED, -1.25], [torch.nan, -torch.inf]])
    mask = torch.tensor([True, True, True, False])
    actual = kl.distillation(log_prob, teachers, mask, weights=[0.5, 2.0], estimator="k1", limit=3.0)
    assert actual.tolist() == [0.5 * 1.0 + 2 * -0.5, 0.5 * 3.0, 2 * 0.25, 0.0]


def test_nonfinite_log_probs_of_a_teacher_reach_the_loss():
    teachers = torch.tensor([[torch.nan], [-torch.inf]])
    options = dict(weights=[1.0], estimator="k1", limit=None)
    actual = kl.distillation(torch.tensor([-1.0, -1.0]), teachers, torch.tensor([True, True]), **options)
    assert not actual.isfinite().any()
