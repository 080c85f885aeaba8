"""KL estimators: what they are the mean of, exactly, over all tokens of a small vocabulary."""

import math
from itertools import product

import pytest
import torch

from megarl.algorithms import kl
from megarl.config.load import load
from tests.paths import BASE


def two_policies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits that have a gradient, their log-softmax, and the log-probs of a reference: float64 [20]."""
    torch.manual_seed(0)
    reference = torch.randn(20, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(20, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(-1), reference


@pytest.mark.parametrize(
    ("estimator", "expected"),
    # log-ratio ln 2: the policy's probability is twice the reference's.
    [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.5 - 1 + 0.693147), ("abs", 0.693147)],
)
def test_estimators_by_hand(estimator, expected):
    assert float(kl.estimate(estimator, torch.tensor([2.0]).log())) == pytest.approx(expected, rel=1e-5)
    assert kl.estimate("abs", torch.tensor([-0.3])).tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_have_the_exact_divergence_as_their_mean(estimator, straight_through):
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
def test_which_gradient_is_that_of_the_divergence(estimator, straight_through, exact):
    logits, policy, reference = two_policies()
    divergence = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    sampled = (policy.exp().detach() * kl.estimate(estimator, policy - reference, straight_through)).sum()
    gradient = torch.autograd.grad(sampled, logits)[0]
    assert torch.allclose(gradient, divergence) is exact


@pytest.mark.parametrize("estimator", kl.KL_ESTIMATORS)
def test_gradients(estimator):
    log_ratio = torch.tensor([-1.5, -0.2, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kl.estimate(estimator, x), log_ratio)


def test_straight_through_keeps_the_value():
    _, policy, reference = two_policies()
    for estimator in kl.KL_ESTIMATORS:
        ratio = policy - reference
        torch.testing.assert_close(kl.estimate(estimator, ratio, True), kl.estimate(estimator, ratio))
    far = torch.tensor([1000.3])  # k2, which the gradient is of, is larger by far
    assert kl.estimate("k1", far, True) == far


def test_a_limit_cuts_estimates_down_and_their_gradient_off():
    """verl's low_var_kl, clamp(k3, −10, 10): of a policy that is e⁵ times less likely than the reference k3 is 142."""
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
def test_an_estimator_that_is_not_given_is_that_of_the_papers(form, expected):
    algorithm = load(BASE, ["model.path=m", "data.source=arithmetic", f"algorithm.kl={{{form}}}"]).algorithm
    assert algorithm.kl_metric == f"kl/{expected}"


def test_of_a_long_response_only_k3_explodes():
    """Its policy is 2 % less likely in each of 1,000 tokens than the reference: k3 is e²⁰, and k2 200."""
    log_ratio = torch.full((1000,), -0.02)
    assert kl.estimate("k3", log_ratio).sum() == pytest.approx(1000 * (math.exp(0.02) - 1.02), rel=1e-3)
    assert kl.estimate("k3", log_ratio.sum()) > 4e8
    assert kl.estimate(kl.usual_estimator("loss", "sequence"), log_ratio.sum()) == pytest.approx(200, rel=1e-5)


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.05, 1.0), (0.055, 1.01), (5.0, 1.02), (0.0, 0.98), (-1.0, 0.98)]
)
def test_the_coefficient_moves_by_at_most_a_fifth_of_the_horizons_share(divergence, expected):
    """A step of 100 samples with a horizon of 1000: a tenth of the clipped error, here of a target of 0.05."""
    assert kl.adapted(1.0, divergence, 0.05, 100, 1000) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("divergence", "expected"), [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1), (0.0149, 1), (0.0151, 2), (9.0, 2)]
)
def test_ppos_penalty_is_halved_or_doubled(divergence, expected):
    assert kl.adapted_penalty(1.0, divergence, 0.01) == expected


@pytest.mark.parametrize("adaptive_target", ["null", "0.1"])
def test_all_forms_combine_and_each_has_a_metric_of_its_own(adaptive_target):
    """A form says where the KL is taken off or added, of what, how it is estimated, and its gradient."""
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
        of_tokens = f"algorithm.advantage={{estimator: rloo, credit: {credit}}}"
        algorithm = load(BASE, ["model.path=m", "data.source=arithmetic", of_tokens, form]).algorithm
        assert algorithm.kl_metric == f"kl/{where}_{level}_{estimator}{gradient}"
        names.add(algorithm.kl_metric)
    assert len(names) == 3 * 2 * 4 * 2


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
def test_estimators_of_tokens_credit_them_with_the_kl_to_come(estimator):
    keys = (f"algorithm.advantage.estimator={estimator}", "algorithm.kl={placement: reward, coefficient: 0.1}")
    algorithm = load(BASE, ["model.path=m", "data.source=arithmetic", *keys]).algorithm
    assert algorithm.kl_metric == "kl/reward_to_go_token_k1"
