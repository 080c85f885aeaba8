"""What losses, weights and corrections may not depend on: laws that every objective and aggregation keeps, on random
samples of several turns, some without a trained token."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch

from megarl.algorithms.aggregation import AGGREGATIONS, sample_weights
from megarl.algorithms.corrections import factors
from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.sample_segments import SampleSegments

POLICY = [name for name, spec in OBJECTIVES.items() if spec.is_policy_objective]
WITH_PENALTY = ("kl_penalty", "kl_cov", "dro")
"""Those whose loss has a part that the advantage does not multiply."""
READS_PROBABILITIES = ("dppo_tv", "dppo_kl", "cispo")
"""Those that read more than the ratio of two policies."""
LEVELS = ("token", "sequence", "geometric")

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """Rows of some samples: log-probs of the policy and the old one, advantages, and which tokens are trained on and
    selected, each a list of tensors, one for each sample."""

    columns: Mapping[str, Sequence[torch.Tensor]]

    @classmethod
    def make(cls, seed: int) -> Samples:
        source = random.Random(seed)
        lengths = [5, 1, 8, 3, 4]
        generator = torch.Generator().manual_seed(seed)
        draw = [torch.randn(3, n, generator=generator, dtype=torch.float64) for n in lengths]
        masks = [torch.tensor([source.random() < 0.7 for _ in range(n)]) for n in lengths]
        masks[3] = torch.zeros(3, dtype=torch.bool)  # no turn of its has a trained token
        return cls(
            {
                "old": [-1.5 + 0.3 * x[0] for x in draw],
                "now": [-1.5 + 0.3 * x[0] + 0.4 * x[1] for x in draw],
                "advantage": [x[2, 0].expand(n).clone() for x, n in zip(draw, lengths, strict=True)],
                "mask": masks,
                "selected": [mask & (x[1] > 0) for mask, x in zip(masks, draw, strict=True)],
            }
        )

    def chosen(self, order: Sequence[int]) -> Samples:
        return Samples({name: [parts[i] for i in order] for name, parts in self.columns.items()})

    def changed(self, **functions) -> Samples:
        return Samples(
            {name: [functions.get(name, lambda x: x)(x) for x in parts] for name, parts in self.columns.items()}
        )

    def spread(self) -> Samples:
        """Return the samples with a token of a tool before each of theirs, and two of them in a row after the last:
        between these is a turn without a token."""

        def longer(parts: Sequence[torch.Tensor], fill: float | bool) -> list[torch.Tensor]:
            return [
                torch.cat(
                    (torch.stack((torch.full_like(x, fill), x), 1).flatten(), torch.full((2,), fill, dtype=x.dtype))
                )
                for x in parts
            ]

        fills = {"old": -2.0, "now": -2.0, "advantage": 0.0, "mask": False, "selected": False}
        return Samples({name: longer(parts, fills[name]) for name, parts in self.columns.items()})

    @property
    def segments(self) -> SampleSegments:
        rows = [torch.full((len(mask),), i) for i, mask in enumerate(self.columns["mask"])]
        return SampleSegments(torch.cat(list(self.columns["mask"])), torch.cat(rows), len(rows))

    def whole(self) -> Columns:
        return {name: torch.cat(list(parts)) for name, parts in self.columns.items()}

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return what rows have at the trained tokens of each sample."""
        parts = rows.split([len(mask) for mask in self.columns["mask"]])
        return [part[mask] for part, mask in zip(parts, self.columns["mask"], strict=True)]


def losses(name: str, samples: Samples) -> list[torch.Tensor]:
    """Return loss and slope of each trained token, [n, 2] of each sample."""
    spec, columns = OBJECTIVES[name], samples.whole()
    now = columns["now"].clone().requires_grad_()
    given = {"samples": samples.segments, "selected": columns["selected"]}
    old = torch.where(columns["mask"], columns["old"], now.detach())
    out = spec.loss(now, old, columns["advantage"], *(given[key] for key in spec.inputs), **spec.arguments)
    [slope] = torch.autograd.grad(out.loss.where(columns["mask"], 0.0).sum(), now)
    return samples.split(torch.stack((out.loss.detach(), slope), dim=1))


def correction(level: str, samples: Samples) -> list[torch.Tensor]:
    columns = samples.whole()
    log_ratio = (columns["now"] - columns["old"]).where(columns["mask"], 0.0)
    return samples.split(factors(log_ratio, samples.segments, level, 1.5, level, 0.6, 2.0, 0.8).factor)


def assert_same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


@pytest.fixture(params=range(3), ids=lambda seed: f"seed {seed}")
def samples(request) -> Samples:
    return Samples.make(request.param)


every = pytest.mark.parametrize("name", POLICY)
ORDER = (3, 0, 4, 2, 1)


@every
def test_the_order_of_samples_does_not_matter(name, samples):
    expected = losses(name, samples)
    assert_same(losses(name, samples.chosen(ORDER)), [expected[i] for i in ORDER])


@every
def test_a_sample_twice_has_the_same_loss_twice(name, samples):
    expected = losses(name, samples)
    twice = [i for i in range(5) for _ in range(2)]
    assert_same(losses(name, samples.chosen(twice)), [expected[i] for i in twice])


@every
def test_other_samples_do_not_matter(name, samples):
    expected = losses(name, samples)
    for i in range(5):
        assert_same(losses(name, samples.chosen([i])), [expected[i]])


@every
def test_tokens_between_turns_and_turns_without_tokens_do_not_matter(name, samples):
    assert_same(losses(name, samples.spread()), losses(name, samples))


@pytest.mark.parametrize("name", [name for name in POLICY if name not in WITH_PENALTY])
def test_advantages_in_another_unit_scale_the_loss(name, samples):
    expected = [3 * x for x in losses(name, samples)]
    assert_same(losses(name, samples.changed(advantage=lambda a: 3 * a)), expected)


@pytest.mark.parametrize("name", [name for name in POLICY if name not in WITH_PENALTY])
def test_no_advantage_is_no_loss(name, samples):
    assert not any(x.any() for x in losses(name, samples.changed(advantage=torch.zeros_like)))


@pytest.mark.parametrize("name", [name for name in POLICY if name not in READS_PROBABILITIES])
def test_only_the_ratio_of_the_policies_matters(name, samples):
    moved = samples.changed(now=lambda x: x - 0.7, old=lambda x: x - 0.7)
    assert_same(losses(name, moved), losses(name, samples))


@pytest.mark.parametrize("level", LEVELS)
def test_the_order_of_samples_does_not_matter_to_corrections(level, samples):
    expected = correction(level, samples)
    assert_same(correction(level, samples.chosen(ORDER)), [expected[i] for i in ORDER])


@pytest.mark.parametrize("level", LEVELS)
def test_other_samples_do_not_matter_to_corrections(level, samples):
    expected = correction(level, samples)
    for i in range(5):
        assert_same(correction(level, samples.chosen([i])), [expected[i]])


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_between_turns_do_not_matter_to_corrections(level, samples):
    assert_same(correction(level, samples.spread()), correction(level, samples))


NUM_TOKENS, PROMPTS = [4, 1, 0, 3, 2, 6], ["a", "a", "b", "b", "c", "c"]
modes = pytest.mark.parametrize("mode", AGGREGATIONS)


@modes
def test_weights_follow_the_order_of_samples(mode):
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10)
    order = (5, 2, 0, 3, 1, 4)
    found = sample_weights(mode, [NUM_TOKENS[i] for i in order], [PROMPTS[i] for i in order], 10)
    assert found == pytest.approx([expected[i] for i in order])


@modes
def test_every_group_twice_has_the_same_mean(mode):
    """The sum over an update doubles, so that each weight of a mean is half as large."""
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10)
    found = sample_weights(mode, NUM_TOKENS * 2, [*PROMPTS, *(f"{prompt}'" for prompt in PROMPTS)], 10)
    factor = 1.0 if mode == "token_sum" else 0.5
    assert found == pytest.approx([factor * w for w in expected] * 2)


@modes
def test_without_a_group_the_others_weigh_more_by_one_factor(mode):
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10)[:4]
    found = sample_weights(mode, NUM_TOKENS[:4], PROMPTS[:4], 10)
    ratios = {round(w / e, 12) for w, e in zip(found, expected, strict=True) if e}
    assert len(ratios) == 1
    assert ratios == {1.0} if mode == "token_sum" else min(ratios) > 1
    assert [bool(w) for w in found] == [bool(e) for e in expected]


@modes
def test_names_of_prompts_do_not_matter(mode):
    renamed = [{"a": "z", "b": "y", "c": "x"}[prompt] for prompt in PROMPTS]
    assert sample_weights(mode, NUM_TOKENS, renamed, 10) == sample_weights(mode, NUM_TOKENS, PROMPTS, 10)


@modes
def test_samples_without_tokens_do_not_matter_where_they_are_left_out(mode):
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10, "exclude")
    found = sample_weights(mode, [*NUM_TOKENS, 0, 0], [*PROMPTS, "a", "d"], 10, "exclude")
    assert found == pytest.approx([*expected, 0, 0])
