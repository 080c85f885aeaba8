"""Invariances of losses, weights and corrections, checked for every objective and aggregation on random multi-turn
samples, some without a trained token."""

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

POLICY = [name for name, spec in OBJECTIVES.items() if spec.is_policy_objective and "tokens" in spec.actions]
WITH_PENALTY = ("kl_penalty", "kl_cov", "dro")
"""Objectives with a term that is not multiplied by the advantage."""
READS_PROBABILITIES = ("dppo_tv", "dppo_kl", "cispo")
"""Objectives that depend on more than the ratio of the policies."""
LEVELS = ("token", "sequence", "geometric")

Columns = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """Rows of several samples. Each column (current and old log-probs, advantages, trained and selected masks) has one
    tensor per sample."""

    columns: Mapping[str, Sequence[torch.Tensor]]

    @classmethod
    def make(cls, seed: int) -> Samples:
        source = random.Random(seed)
        lengths = [5, 1, 8, 3, 4]
        generator = torch.Generator().manual_seed(seed)
        draw = [torch.randn(3, n, generator=generator, dtype=torch.float64) for n in lengths]
        masks = [torch.tensor([source.random() < 0.7 for _ in range(n)]) for n in lengths]
        masks[3] = torch.zeros(3, dtype=torch.bool)  # a sample without trained tokens
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
        """Return the samples with a tool token before each token and two after the last one, which adds an empty
        turn."""

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
        """Return the rows of each sample's trained tokens."""
        parts = rows.split([len(mask) for mask in self.columns["mask"]])
        return [part[mask] for part, mask in zip(parts, self.columns["mask"], strict=True)]


def losses(name: str, samples: Samples) -> list[torch.Tensor]:
    """Return the loss and its slope for each trained token, [n, 2] per sample."""
    spec, columns = OBJECTIVES[name], samples.whole()
    now = columns["now"].clone().requires_grad_()
    inputs = {"samples": samples.segments, "selected": columns["selected"]}
    old = torch.where(columns["mask"], columns["old"], now.detach())
    out = spec.loss(now, old, columns["advantage"], *(inputs[key] for key in spec.inputs), **spec.arguments)
    [slope] = torch.autograd.grad(out.loss.where(columns["mask"], 0.0).sum(), now)
    return samples.split(torch.stack((out.loss.detach(), slope), dim=1))


def correction(level: str, samples: Samples) -> list[torch.Tensor]:
    columns = samples.whole()
    log_ratio = (columns["now"] - columns["old"]).where(columns["mask"], 0.0)
    return samples.split(factors(log_ratio, samples.segments, level, 1.5, level, 0.6, 2.0, 0.8).factor)


def assert_same(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-12)


@pytest.fixture(params=range(3), ids=lambda seed: f"seed {seed}")
def samples(request) -> Samples:
    return Samples.make(request.param)


every = pytest.mark.parametrize("name", POLICY)
ORDER = (3, 0, 4, 2, 1)


@every
def test_losses_ignore_sample_order(name, samples):
    expected = losses(name, samples)
    assert_same(losses(name, samples.chosen(ORDER)), [expected[i] for i in ORDER])


@every
def test_duplicate_samples_have_equal_losses(name, samples):
    expected = losses(name, samples)
    twice = [i for i in range(5) for _ in range(2)]
    assert_same(losses(name, samples.chosen(twice)), [expected[i] for i in twice])


@every
def test_losses_ignore_other_samples(name, samples):
    expected = losses(name, samples)
    for i in range(5):
        assert_same(losses(name, samples.chosen([i])), [expected[i]])


@every
def test_losses_ignore_tool_tokens_and_empty_turns(name, samples):
    assert_same(losses(name, samples.spread()), losses(name, samples))


@pytest.mark.parametrize("name", [name for name in POLICY if name not in WITH_PENALTY])
def test_scaling_advantages_scales_the_loss(name, samples):
    expected = [3 * x for x in losses(name, samples)]
    assert_same(losses(name, samples.changed(advantage=lambda a: 3 * a)), expected)


@pytest.mark.parametrize("name", [name for name in POLICY if name not in WITH_PENALTY])
def test_zero_advantage_has_zero_loss(name, samples):
    assert not any(x.any() for x in losses(name, samples.changed(advantage=torch.zeros_like)))


@pytest.mark.parametrize("name", [name for name in POLICY if name not in READS_PROBABILITIES])
def test_losses_depend_on_the_ratio_only(name, samples):
    moved = samples.changed(now=lambda x: x - 0.7, old=lambda x: x - 0.7)
    assert_same(losses(name, moved), losses(name, samples))


@pytest.mark.parametrize("level", LEVELS)
def test_corrections_ignore_sample_order(level, samples):
    expected = correction(level, samples)
    assert_same(correction(level, samples.chosen(ORDER)), [expected[i] for i in ORDER])


@pytest.mark.parametrize("level", LEVELS)
def test_corrections_ignore_other_samples(level, samples):
    expected = correction(level, samples)
    for i in range(5):
        assert_same(correction(level, samples.chosen([i])), [expected[i]])


@pytest.mark.parametrize("level", LEVELS)
def test_corrections_ignore_tool_tokens(level, samples):
    assert_same(correction(level, samples.spread()), correction(level, samples))


NUM_TOKENS, PROMPTS = [4, 1, 0, 3, 2, 6], ["a", "a", "b", "b", "c", "c"]
modes = pytest.mark.parametrize("mode", AGGREGATIONS)


@modes
def test_weights_follow_sample_order(mode):
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10)
    order = (5, 2, 0, 3, 1, 4)
    actual = sample_weights(mode, [NUM_TOKENS[i] for i in order], [PROMPTS[i] for i in order], 10)
    assert actual == pytest.approx([expected[i] for i in order])


@modes
def test_duplicating_all_groups_halves_mean_weights(mode):
    """The update has twice as many samples, so the weights of a mean are halved."""
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10)
    actual = sample_weights(mode, NUM_TOKENS * 2, [*PROMPTS, *(f"{prompt}'" for prompt in PROMPTS)], 10)
    factor = 1.0 if mode == "token_sum" else 0.5
    assert actual == pytest.approx([factor * w for w in expected] * 2)


@modes
def test_removing_a_group_scales_weights_uniformly(mode):
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10)[:4]
    actual = sample_weights(mode, NUM_TOKENS[:4], PROMPTS[:4], 10)
    ratios = {round(w / e, 12) for w, e in zip(actual, expected, strict=True) if e}
    assert len(ratios) == 1
    assert ratios == {1.0} if mode == "token_sum" else min(ratios) > 1
    assert [bool(w) for w in actual] == [bool(e) for e in expected]


@modes
def test_weights_ignore_prompt_names(mode):
    renamed = [{"a": "z", "b": "y", "c": "x"}[prompt] for prompt in PROMPTS]
    assert sample_weights(mode, NUM_TOKENS, renamed, 10) == sample_weights(mode, NUM_TOKENS, PROMPTS, 10)


@modes
def test_excluded_samples_do_not_affect_weights(mode):
    expected = sample_weights(mode, NUM_TOKENS, PROMPTS, 10, "exclude")
    actual = sample_weights(mode, [*NUM_TOKENS, 0, 0], [*PROMPTS, "a", "d"], 10, "exclude")
    assert actual == pytest.approx([*expected, 0, 0])
