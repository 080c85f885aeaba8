"""Sample-level objectives compared with their formulas, one sample at a time, in value and gradient."""

import math

import pytest
import torch

from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.sample_segments import SampleSegments

LENGTHS = (3, 1, 5, 2)
SPLIT = torch.tensor([True, False, True, True, False, True, False, False, True, True, False])
"""Mask of the rows that the first of two ranks holds."""


def gspo(log_ratio, advantage, clip_low, clip_high):
    ratio = log_ratio.mean().exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def gmpo(log_ratio, advantage, clip_low, clip_high):
    """Return the loss as in the paper: minus the geometric mean of |min(ρA, clip(ρ, e^−low, e^high)·A)|, with the sign
    of A."""
    ratio = log_ratio.exp()
    terms = torch.minimum(ratio * advantage, ratio.clamp(math.exp(-clip_low), math.exp(clip_high)) * advantage)
    return -terms.abs().log().mean().exp() * torch.sign(advantage)


def dro(log_ratio, advantage, tau, level):
    distance = log_ratio.sum() if level == "sequence" else log_ratio
    return ((advantage - tau * distance) ** 2 / 2).mean()


PLAIN = {"gspo": gspo, "gmpo": gmpo, "dro": dro}
CASES = [
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gmpo", {"clip_low": 0.3, "clip_high": 0.2}),
    ("dro", {"tau": 0.7, "level": "sequence"}),
    ("dro", {"tau": 0.7, "level": "token"}),
]


def data(seed: int):
    """Return log π, log π_old, each row's advantage, a mask with a hole and an empty sample, and each row's sample."""
    generator = torch.Generator().manual_seed(seed)
    row_sample = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    mask = torch.tensor([True, False, True, True, *[True] * 5, False, False])
    old = -torch.rand(11, generator=generator, dtype=torch.float64)
    now = (old + 0.3 * torch.randn(11, generator=generator, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(4, generator=generator, dtype=torch.float64)
    return now, old, advantage[row_sample], mask, row_sample


def weights(mask: torch.Tensor, row_sample: torch.Tensor) -> torch.Tensor:
    """Return token weights 1/(S·n), as in sequence_mean_of_token_means."""
    count = torch.zeros(4, dtype=torch.float64).index_add(0, row_sample, mask.double())
    return torch.where(mask, 1 / (4 * count.clamp(min=1))[row_sample], 0.0)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_match_sample_formula(name, options, seed):
    now, old, advantage, mask, row_sample = data(seed)
    samples = SampleSegments(mask, row_sample, 4)
    loss = (weights(mask, row_sample) * OBJECTIVES[name].loss(now, old, advantage, samples, **options).loss).sum()
    [gradient] = torch.autograd.grad(loss, now)
    terms = []
    for i in range(3):
        own = mask & (row_sample == i)
        terms.append(PLAIN[name]((now - old)[own], advantage[own][0], **options))
    plain = torch.stack(terms).sum() / 4  # the sample without trained tokens counts with loss 0
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, now)[0])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_update_loss_passes_gradcheck(name, options):
    """Differentiates the loss of the whole update, because a row's loss is only its share of its sample's loss."""
    now, old, advantage, mask, row_sample = data(1)
    samples, w = SampleSegments(mask, row_sample, 4), weights(mask, row_sample)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (w * OBJECTIVES[name].loss(x, old, advantage, samples, **options).loss).sum()

    assert torch.autograd.gradcheck(loss, now)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("hidden", [0.0, 50.0, -50.0])
def test_loss_ignores_untrained_tokens(name, options, hidden):
    """Tool tokens inside a sample have no effect, whatever their log-probs."""
    now, old, advantage, mask, row_sample = data(2)
    samples = SampleSegments(mask, row_sample, 4)
    plain = OBJECTIVES[name].loss(now, old, advantage, samples, **options).loss[mask]
    other = torch.where(mask, now, hidden)
    torch.testing.assert_close(OBJECTIVES[name].loss(other, old, advantage, samples, **options).loss[mask], plain)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradient_is_the_same_if_rows_are_split_over_ranks(name, options):
    now, old, advantage, mask, row_sample = data(0)
    w = weights(mask, row_sample)
    whole = SampleSegments(mask, row_sample, 4)
    loss = (w * OBJECTIVES[name].loss(now, old, advantage, whole, **options).loss).sum()
    [gradient] = torch.autograd.grad(loss, now)
    parts = (SPLIT, ~SPLIT)
    for rows in parts:
        contributions = []  # contributions of the other rank, in the order of its calls

        def record(values, contributions=contributions):
            contributions.append(values)
            return values

        other = ~rows
        OBJECTIVES[name].loss(
            now[other],
            old[other],
            advantage[other],
            SampleSegments(mask[other], row_sample[other], 4, record),
            **options,
        )
        replies = iter(contributions)
        own = SampleSegments(mask[rows], row_sample[rows], 4, lambda values, replies=replies: values + next(replies))
        part = (w[rows] * OBJECTIVES[name].loss(now[rows], old[rows], advantage[rows], own, **options).loss).sum()
        torch.testing.assert_close(torch.autograd.grad(part, now)[0][rows], gradient[rows])


@pytest.mark.parametrize("name", PLAIN)
def test_sample_of_one_token_equals_token_objective(name):
    """For n = 1 the geometric mean of the ratios is the ratio itself, and the sum is the log-ratio."""
    now, old = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True), torch.tensor([-0.6], dtype=torch.float64)
    samples = SampleSegments(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    options = OBJECTIVES[name].arguments
    out = OBJECTIVES[name].loss(now, old, torch.ones(1, dtype=torch.float64), samples, **options)
    assert torch.isfinite(out.loss).all()
    if name != "dro":
        bound = 1.0004 if name == "gspo" else math.exp(0.4)
        assert out.loss.item() == pytest.approx(-min(math.exp(0.1), bound))


def test_gspo_marks_all_tokens_of_clipped_samples():
    now = torch.tensor([0.1, 0.1, -0.1])
    samples = SampleSegments(torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1]), 2)
    out = OBJECTIVES["gspo"].loss(now, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), samples, 3e-4, 4e-4)
    assert out.clipped_high.tolist() == [True, True, False] and out.clipped_low.tolist() == [False, False, True]
    torch.testing.assert_close(out.ratio, torch.tensor([0.1, 0.1, -0.1]).exp())
