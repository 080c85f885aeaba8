"""Denoising steps as Gaussian policies: closed forms, properties, and independence of the batch."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal, kl_divergence

from megarl.algorithms import transition as policy
from megarl.algorithms.transition import Transition, noised_steps, sde_window, sigma_schedule, step_weights, transition
from tests.closeness import TOLERANCE, relative_error

KINDS = [("flow", 0.7), ("dance", 0.3), ("cps", 0.7)]
SIGMA, SIGMA_NEXT, SECOND = torch.tensor([[1.0, 0.8, 0.3], [0.9, 0.7, 0.1], [0.9, 0.9, 0.95]], dtype=torch.float64)
SHAPE = (3, 2, 4, 5)


def steps(kind: str, noise_level: float, rows: slice = slice(None)) -> Transition:
    """Return transitions for three samples with different σ, or for some of these samples."""
    return transition(kind, noise_level, SIGMA[rows], SIGMA_NEXT[rows], SECOND[rows])


def latents(num: int, dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = SHAPE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(num)]


MEANS, SPREAD, SHARES = torch.tensor([-1.0, 2.0]), 0.3, torch.tensor([0.7, 0.3])
EXACT_STD = math.sqrt(SPREAD**2 + 0.7 * 0.3 * 3**2)
"""Standard deviation of a mixture of two Gaussians, 1.407."""


def mixture_velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """Return E[ε − x0 | x_σ = x] for x0 from the mixture, [B, 1]."""
    variance = ((1 - sigma) * SPREAD) ** 2 + sigma**2
    distance = x - (1 - sigma) * MEANS
    share = (SHARES.log() - distance**2 / (2 * variance)).softmax(-1)
    x0 = MEANS + (1 - sigma) * SPREAD**2 / variance * distance
    return (share * (sigma / variance * distance - x0)).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("kind", "noise_level", "expected"),
    [
        pytest.param("flow", 0.0, EXACT_STD, id="ode", marks=pytest.mark.exhaustive),
        pytest.param("flow", 0.7, EXACT_STD, id="flow"),
        pytest.param("dance", 0.3, EXACT_STD, id="dance", marks=pytest.mark.exhaustive),
        pytest.param("cps", 0.7, 1.332, id="cps"),
    ],
)
def test_sampling_keeps_the_distribution_except_for_cps(kind, noise_level, expected):
    """Take 200 steps with the exact velocity. The sampling error of the standard deviation is 0.006."""
    assert pytest.approx(1.407, abs=1e-3) == EXACT_STD
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30_000, 1, generator=generator)
    sigmas = torch.tensor(sigma_schedule(200, shift=1.0))
    for i in range(200):
        now, after, second = (sigma.expand(len(x)) for sigma in (sigmas[i], sigmas[i + 1], sigmas[1]))
        step, v = transition(kind, noise_level, now, after, second), mixture_velocity(x, float(sigmas[i]))
        x = policy.sample(step, x, v, torch.randn(x.shape, generator=generator))
    assert float(x.std()) == pytest.approx(expected, abs=0.02)
    if kind != "cps":
        assert float((x > 0.5).float().mean()) == pytest.approx(0.3, abs=0.012)


def variance_error(kind: str, noise_level: float, num_steps: int) -> float:
    """Return the relative error of the variance after sampling Gaussian data with variance 1/4, in closed form."""
    sigmas, data, variance = sigma_schedule(num_steps, shift=3.0), 0.25, 1.0
    for now, after in pairwise(sigmas):
        slope = (now - (1 - now) * data) / ((1 - now) ** 2 * data + now**2)  # the exact velocity is slope·x
        one = [torch.tensor([sigma], dtype=torch.float64) for sigma in (now, after, sigmas[1])]
        from_x, from_v, std = (float(value) for value in transition(kind, noise_level, *one))
        variance = (from_x + from_v * slope) ** 2 * variance + std**2
    return abs(variance / data - 1)


@pytest.mark.parametrize(
    ("kind", "noise_level"),
    [
        ("flow", 0.7),
        pytest.param("flow", 0.0, marks=pytest.mark.exhaustive),
        pytest.param("dance", 0.3, marks=pytest.mark.exhaustive),
    ],
)
def test_more_steps_reduce_the_variance_error(kind, noise_level):
    """The Euler step is of first order: half the interval, half the error."""
    coarse, fine = variance_error(kind, noise_level, 400), variance_error(kind, noise_level, 800)
    assert fine < 0.01 and coarse / fine > 1.9


def test_more_steps_do_not_correct_cps():
    coarse, fine = variance_error("cps", 0.7, 400), variance_error("cps", 0.7, 800)
    assert fine > 0.05 and coarse / fine < 1.1


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_zero_noise_level_is_the_euler_step(kind):
    x, v, noise = latents(3)
    interval = (SIGMA - SIGMA_NEXT).view(3, 1, 1, 1)
    step = steps(kind, 0.0)
    torch.testing.assert_close(policy.mean(step, x, v), x - interval * v)
    assert torch.equal(policy.sample(step, x, v, noise), policy.mean(step, x, v))


@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_mean_is_exact_for_a_known_image(kind, noise_level):
    """With v = ε − x0, cps scales ε in the ODE's mean; the SDEs add Δ·g²/2 times the score −ε/σ."""
    x0, noise = latents(2)
    x, sigma, after = policy.interpolate(x0, noise, SIGMA), SIGMA.view(3, 1, 1, 1), SIGMA_NEXT.view(3, 1, 1, 1)
    step = steps(kind, noise_level)
    std = step.std.view(3, 1, 1, 1)
    if kind == "cps":
        expected = (1 - after) * x0 + (after**2 - std**2).sqrt() * noise
    else:
        expected = (1 - after) * x0 + after * noise - std**2 / 2 * noise / sigma
    torch.testing.assert_close(policy.mean(step, x, noise - x0), expected)


@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_log_prob_matches_normal_distribution(kind, noise_level):
    x, v, x_next = latents(3)
    step = steps(kind, noise_level)
    reference = Normal(policy.mean(step, x, v), step.std.view(3, 1, 1, 1)).log_prob(x_next).flatten(1)
    torch.testing.assert_close(policy.log_prob(step, x, v, x_next), reference.mean(1))
    torch.testing.assert_close(policy.log_prob(step, x, v, x_next, "sum"), reference.sum(1))


@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_log_prob_of_a_sample_depends_only_on_its_noise(kind, noise_level):
    x, v, noise = latents(3)
    step = steps(kind, noise_level)
    expected = Normal(0.0, 1.0).log_prob(noise).flatten(1).mean(1) - step.std.log()
    torch.testing.assert_close(policy.log_prob(step, x, v, policy.sample(step, x, v, noise)), expected)


@given(
    sigma=st.floats(0.05, 0.95), share=st.floats(0.0, 0.95), noise_level=st.floats(0.05, 1.0), seed=st.integers(0, 99)
)
def test_gaussian_kl_matches_normal_and_velocity_form(sigma, share, noise_level, seed):
    """The factor is Δ/2·(g·(1 − σ)/(2σ) + 1/g)²."""
    generator = torch.Generator().manual_seed(seed)
    x, v, other = (torch.randn(1, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    one = [torch.tensor([value], dtype=torch.float64) for value in (sigma, share * sigma, 0.99)]
    for kind, g in (("flow", noise_level * math.sqrt(sigma / (1 - sigma))), ("dance", noise_level)):
        step = transition(kind, noise_level, *one)
        ours, theirs = (Normal(policy.mean(step, x, velocity), step.std) for velocity in (v, other))
        actual = policy.gaussian_kl(step, v, other)
        torch.testing.assert_close(actual, kl_divergence(ours, theirs).flatten(1).mean(1))
        factor = (sigma - share * sigma) / 2 * (g * (1 - sigma) / (2 * sigma) + 1 / g) ** 2
        torch.testing.assert_close(actual, factor * (v - other).square().flatten(1).mean(1))
        torch.testing.assert_close(actual, factor * policy.velocity_kl(v, other))
    step = transition("cps", noise_level, one[0], one[0] * (0.1 + 0.8 * share), one[2])
    ours, theirs = (Normal(policy.mean(step, x, velocity), step.std) for velocity in (v, other))
    torch.testing.assert_close(
        policy.gaussian_kl(step, v, other), kl_divergence(ours, theirs).flatten(1).mean(1), rtol=1e-6, atol=1e-9
    )


def test_float32_kl_of_close_velocities_is_accurate():
    v, difference = latents(2, torch.float32)
    close = v + 1e-4 * difference
    step = steps("dance", 0.3)
    exact = policy.gaussian_kl(step, v.double(), close.double())
    assert relative_error(policy.gaussian_kl(step, v, close), exact) <= TOLERANCE


@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_gradients_pass_gradcheck(kind, noise_level):
    x, v, other, x_next = (tensor[..., :2, :1].clone() for tensor in latents(4))
    step = steps(kind, noise_level)
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: policy.log_prob(step, x, v, x_next), v)
    assert torch.autograd.gradcheck(lambda v: policy.log_prob(step, x, v, x_next, "sum"), v)
    assert torch.autograd.gradcheck(lambda v: policy.gaussian_kl(step, v, other), v)
    assert torch.autograd.gradcheck(lambda v: policy.velocity_kl(v, other), v)


def results(kind: str, noise_level: float, rows: slice) -> list[torch.Tensor]:
    x, v, other, x_next = (tensor[rows] for tensor in latents(4, torch.float32, shape=(3, 4, 96, 96)))
    v = v.clone().requires_grad_()
    step = steps(kind, noise_level, rows)
    log_prob, kl = policy.log_prob(step, x, v, x_next), policy.gaussian_kl(step, v, other)
    total = policy.log_prob(step, x, v, x_next, "sum")
    assert log_prob.shape == kl.shape == total.shape == x.shape[:1]
    [gradient] = torch.autograd.grad((log_prob + kl).sum(), v)
    return [*step, policy.sample(step, x, v, other), log_prob, total, kl, policy.velocity_kl(v, other), gradient]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_results_do_not_depend_on_the_batch(kind, noise_level, row):
    """Bit for bit, so that the ratio is exactly 1 before the first update. Torch splits the sum of a single
    sample over threads, but not the sums of a batch."""
    together, alone = results(kind, noise_level, slice(None)), results(kind, noise_level, slice(row, row + 1))
    for batched, single in zip(together, alone, strict=True):
        assert torch.equal(batched[row : row + 1], single)


def test_other_shapes_are_rejected():
    """Values of shape [B, 1, 1, 1] would broadcast a loss [B] to [B, 1, 1, B]."""
    x, v = latents(2)
    column = SIGMA.view(3, 1, 1, 1)
    with pytest.raises(ValueError, match="same shape"):
        transition("flow", 0.7, column, column / 2, column)
    step = steps("flow", 0.7)
    with pytest.raises(ValueError, match=r"must have shape \(3,\), one value per sample; got \(3, 1, 1, 1\)"):
        policy.interpolate(x, v, column)
    with pytest.raises(ValueError, match=r"must have shape \(3,\), one value per sample; got \(1,\)"):
        policy.mean(steps("flow", 0.7, slice(1)), x, v)
    with pytest.raises(ValueError, match=r"same shape \[B, …\] and dtype, got x .* v \(3, 2, 4, 1\)"):
        policy.mean(step, x, v[..., :1])
    with pytest.raises(ValueError, match=r"same shape \[B, …\] and dtype"):
        policy.velocity_kl(x[:, 0, 0, 0], v[:, 0, 0, 0])


def test_reduced_precision_is_rejected():
    """bfloat16 latents give ratios other than 1 before any update."""
    x, v = latents(2, torch.float32)
    step = steps("flow", 0.7)
    with pytest.raises(ValueError, match=r"same shape .* and dtype, got x .*float32, v .*bfloat16"):
        policy.mean(step, x, v.bfloat16())
    with pytest.raises(ValueError, match=r"float32 or float64, got torch.bfloat16. Fix: convert"):
        policy.log_prob(step, x.bfloat16(), v.bfloat16(), x.bfloat16())


def test_flow_replaces_sigma_in_the_first_step_only():
    step = steps("flow", 0.7)
    expected = [
        0.7 * math.sqrt(1 / (1 - 0.9) * 0.1),
        0.7 * math.sqrt(0.8 / 0.2 * 0.1),
        0.7 * math.sqrt(0.3 / 0.7 * 0.2),
    ]
    assert step.std.tolist() == pytest.approx(expected)


def test_last_step_amplifies_rounding_errors_of_latents():
    """Rounding of x' by e changes the log-prob by about e/s, here 35 times more than in any other step. The schedule is
    that of diffusers' FlowMatchEulerDiscreteScheduler(shift=3), which applies the shift to the smallest t twice."""
    times = torch.linspace(1, 0.003 / 1.002, 10, dtype=torch.float64)
    sigmas = torch.cat((3 * times / (1 + 2 * times), times.new_zeros(1)))
    step = transition("flow", 0.7, sigmas[:-1], sigmas[1:], sigmas[1].expand(10))
    assert float(step.std[-1]) == pytest.approx(0.006278, rel=1e-3)
    x, v, noise = torch.randn(3, 10, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).sign()
    x_next = policy.sample(step, x, v, noise)
    change = policy.log_prob(step, x, v, x_next) - policy.log_prob(step, x, v, x_next + 1e-6 * noise)
    assert float(change[-1]) > 35 * float(change[:-1].max())
    assert policy.log_prob(step, x.float(), v.float(), x_next.float()).isfinite().all()
    cps = transition("cps", 0.7, sigmas[:-1], sigmas[1:], sigmas[1].expand(10))
    assert cps.std[-1] == 0 and (cps.std[:-1] > 0).all()


def test_interpolation_and_velocity_recover_image_and_noise():
    x0, noise = latents(2)
    x, v, sigma = policy.interpolate(x0, noise, SIGMA), noise - x0, SIGMA.view(3, 1, 1, 1)
    torch.testing.assert_close(x - sigma * v, x0)
    torch.testing.assert_close(x + (1 - sigma) * v, noise)


@pytest.mark.parametrize("num_steps", [1, 7, 10])
def test_schedule_falls_from_one_to_zero(num_steps):
    sigmas = sigma_schedule(num_steps, shift=3.0)
    assert (len(sigmas), sigmas[0], sigmas[-1]) == (num_steps + 1, 1.0, 0.0)
    assert sigmas == sorted(set(sigmas), reverse=True)
    assert sigma_schedule(num_steps, shift=1.0) == pytest.approx([1 - i / num_steps for i in range(num_steps + 1)])
    assert sigma_schedule(2, shift=3.0)[1] == pytest.approx(0.75)


def test_window_depends_only_on_seed_and_run_step():
    windows = [sde_window(2, range(1, 6), seed=4, run_step=step) for step in range(200)]
    assert windows == [sde_window(2, range(1, 6), seed=4, run_step=step) for step in range(200)]
    assert set(windows) == {range(start, start + 2) for start in (1, 2, 3, 4)}
    assert windows != [sde_window(2, range(1, 6), seed=5, run_step=step) for step in range(200)]
    assert all(windows.count(window) > 30 for window in set(windows))
    assert sde_window(5, range(1, 6), seed=4, run_step=0) == range(1, 6)


def test_noised_steps_depend_only_on_seed_and_sample():
    drawn = [noised_steps(3, range(1, 6), seed=4, sample_id=f"1.{i}.0") for i in range(200)]
    assert drawn == [noised_steps(3, range(1, 6), seed=4, sample_id=f"1.{i}.0") for i in range(200)]
    assert drawn != [noised_steps(3, range(1, 6), seed=5, sample_id=f"1.{i}.0") for i in range(200)]
    assert {tuple(steps) for steps in drawn} == set(itertools.combinations(range(1, 6), 3))
    counts = Counter(step for steps in drawn for step in steps)
    assert counts.keys() == {*range(1, 6)} and min(counts.values()) > 90  # 120 on average


@pytest.mark.parametrize(("kind", "noise_level"), KINDS)
def test_deviation_weights_have_mean_one_over_trained_steps(kind, noise_level):
    sigmas = torch.tensor(sigma_schedule(8, shift=3.0))
    weights = step_weights("deviation", kind, noise_level, sigmas, trained=range(1, 5))
    assert weights.shape == (8,) and float(weights[1:5].mean()) == pytest.approx(1)
    step = transition(kind, noise_level, sigmas[:-1], sigmas[1:], sigmas[1].expand(8))
    torch.testing.assert_close(weights / weights[2], step.std / step.std[2])


def test_step_weights_none_and_inverse_interval():
    sigmas = torch.tensor([1.0, 0.75, 0.25, 0.0])
    assert step_weights("none", "flow", 0.7, sigmas, trained=[0, 1]).tolist() == [1, 1, 1]
    assert step_weights("inverse_interval", "flow", 0.7, sigmas, trained=[0, 1]).tolist() == [4, 2, 4]


def test_guided_velocity_extrapolates_from_unconditional_to_conditional():
    conditional, unconditional = latents(2)
    assert torch.equal(policy.guided(conditional, unconditional, 0), unconditional)
    torch.testing.assert_close(policy.guided(conditional, unconditional, 1), conditional)
    torch.testing.assert_close(policy.guided(conditional, unconditional, 3), 3 * conditional - 2 * unconditional)
