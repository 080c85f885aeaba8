"""Invariances and scaling laws of advantages, checked for every estimator from the driver's baselines to the ranks'
tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from megarl.algorithms.registry import ESTIMATORS
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.data.collate import collate
from megarl.megatron import parallel
from megarl.megatron.advantages import with_advantages
from tests.closeness import TOLERANCES, float64, relative_error
from tests.packing import packing
from tests.parity import Group, local_batch, rank_batches
from tests.paths import BASE

KEYS = ("model.path=m", "data.source=arithmetic", "rollout.max_new_tokens=16", "rollout.context_length=64")
NEUTRAL = {"whiten_epsilon": 0, "whiten_std": "population", "step_std": "population", "std_epsilon": 0, "k": 2}
"""Options with which the laws hold exactly: no epsilon, and a standard deviation that is invariant to duplication."""

COMPARING = [name for name, spec in ESTIMATORS.items() if spec.comparison == "group"]
LINEAR = [name for name in ESTIMATORS if name != "pass_at_k"]
ROUNDING = TOLERANCES[torch.float64]
every = pytest.mark.parametrize("name", ESTIMATORS)


@dataclass(frozen=True)
class Update:
    """Samples with their rewards and reference values: each prompt's greedy reward, the mean reward of earlier steps,
    and critic values by sample."""

    groups: list[Group]
    greedy: Mapping[str, float]
    average: float
    values: Mapping[str, torch.Tensor]

    def samples(self) -> Iterator[Sample]:
        return (sample for group in self.groups for sample, _ in group)

    def rewarded(self, change: Callable[[float], float], values: Callable[[torch.Tensor], torch.Tensor]) -> Update:
        """Return the update with all rewards and their reference values changed."""
        return Update(
            [[(sample, change(reward)) for sample, reward in group] for group in self.groups],
            {prompt: change(reward) for prompt, reward in self.greedy.items()},
            change(self.average),
            {i: values(numbers) for i, numbers in self.values.items()},
        )

    def kept(self, groups: list[Group]) -> Update:
        return replace(self, groups=groups)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with parallel.simulated_rank(config("grpo").actor.layout, 0):
        yield


@pytest.fixture
def update() -> Update:
    source, generator = random.Random(2), torch.Generator().manual_seed(2)
    groups = []
    for i in range(3):
        prompt = Prompt(f"{i}", "", (7,) * (i + 1))
        group = []
        for k in range(4):
            mask = [source.random() < 0.7 for _ in range(source.randrange(2, 9))]
            mask = [False] * len(mask) if (i, k) == (2, 1) else [*mask, True]
            group.append((sample_of(f"{i}.{k}", prompt, mask), source.uniform(-1, 2)))
        groups.append(group)
    values = {
        s.id: torch.randn(len(s.response_ids), generator=generator, dtype=torch.float64)
        for group in groups
        for s, _ in group
    }
    return Update(groups, {"0": 0.3, "1": -0.2, "2": 1.0}, 0.4, values)


def sample_of(name: str, prompt: Prompt, mask: list[bool]) -> Sample:
    n = len(mask)
    return Sample(name, prompt, (9,) * n, (-1.0,) * n, mask, (VersionRun(0, n),), "stop", "")


@cache
def config(name: str, *more: str) -> Config:
    options = [f"algorithm.advantage.{o}={v}" for o, v in NEUTRAL.items() if o in ESTIMATORS[name].options]
    return load(BASE, [*KEYS, f"algorithm.advantage.estimator={name}", *options, *more])


def advantages(name: str, update: Update, *more: str, budget: int = 4096) -> dict[str, torch.Tensor]:
    """Return the advantage of each token, by sample, in float64. `budget` is the token budget of a microbatch."""
    settings = config(name, *more)
    scores = {"values": update.values} if ESTIMATORS[name].comparison == "values" else {}
    packed = packing(token_budget=budget)
    [batch] = rank_batches(settings, packed, update.groups, "actor", scores, update.greedy, update.average)
    members = local_batch(batch).members
    by_sample = {}
    with float64():
        batches = [collate(m, packed, **{n: {x.sample.id: x.scores[n] for x in m} for n in scores}) for m in members]
        batches = with_advantages(settings.algorithm, batches)
    for microbatch, items in zip(batches, members, strict=True):
        parts = microbatch.advantage.split([len(item.sample.response_ids) for item in items])
        by_sample |= {item.sample.id: part for item, part in zip(items, parts, strict=True)}
    return by_sample


def assert_same(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert_equal(torch.cat([*actual.values()]), torch.cat([expected[name] for name in actual]))


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype is torch.float64 and relative_error(actual, expected) <= ROUNDING


def normalizes(name: str) -> bool:
    """Return whether advantages are divided by a standard deviation."""
    options = config(name).algorithm.advantage.options()
    return bool(options["whiten"]) or options.get("std", "none") != "none"


def unnormalized(name: str) -> list[str]:
    """Return the overrides without which advantages depend on other groups."""
    step = ["algorithm.advantage.step_std=none"] if "step_std" in ESTIMATORS[name].options else []
    return ["algorithm.advantage.whiten=false", *step]


def is_by_group(name: str) -> bool:
    """Return whether a group's advantages are independent of other groups."""
    spec = ESTIMATORS[name]
    return not spec.whitens and not any(getattr(spec, hook, None) for hook in ("amplify", "step_moments"))


def totals(update: Update, by_sample: Mapping[str, torch.Tensor], weighted: bool) -> list[float]:
    """Return, for each group, the sum of one advantage per sample, optionally weighted by its trained tokens. Samples
    without trained tokens are skipped."""
    sums = []
    for group in update.groups:
        masks = [torch.tensor(sample.response_mask) for sample, _ in group]
        trained = [(by_sample[sample.id][mask], mask.sum()) for (sample, _), mask in zip(group, masks, strict=True)]
        sums.append(sum(float(a[0] * (n if weighted else 1)) for a, n in trained if n))
    return sums


def whole(update: Update) -> Update:
    """Return the update without the group that has a sample without trained tokens."""
    return update.kept(update.groups[:2])


@every
def test_untrained_tokens_have_zero_advantage(name, update):
    for sample in update.samples():
        assert not advantages(name, update)[sample.id][~torch.tensor(sample.response_mask)].any()


@every
def test_advantages_ignore_sample_order(name, update):
    turned = update.kept([[group[i] for i in (2, 0, 3, 1)] for group in update.groups])
    assert_same(advantages(name, turned), advantages(name, update))


@every
def test_advantages_ignore_group_order(name, update):
    assert_same(advantages(name, update.kept(update.groups[::-1])), advantages(name, update))


@every
def test_advantages_ignore_microbatching(name, update):
    assert_same(advantages(name, update, budget=20), advantages(name, update))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "bi_level_gae"])
def test_advantages_ignore_tool_tokens(name, update):
    """A tool token before each token of a sample changes no advantage of the others. Bi-Level GAE is excluded because
    it discounts from turn to turn."""

    def longer(sample: Sample) -> Sample:
        return sample_of(sample.id, sample.prompt, [x for trained in sample.response_mask for x in (False, trained)])

    groups = [[(longer(sample), reward) for sample, reward in group] for group in update.groups]
    values = {
        i: torch.stack((torch.full_like(numbers, 9.0), numbers), dim=1).flatten()
        for i, numbers in update.values.items()
    }
    actual = advantages(name, replace(update, groups=groups, values=values))
    assert_same({i: numbers[1::2] for i, numbers in actual.items()}, advantages(name, update))


@every
def test_advantages_ignore_names_and_token_ids(name, update):
    def renamed(sample: Sample) -> Sample:
        prompt = replace(sample.prompt, id=f"{sample.prompt.id} again", token_ids=sample.prompt.token_ids[::-1])
        return replace(sample, id=f"{sample.id} again", prompt=prompt, response_ids=[3] * len(sample.response_ids))

    groups = [[(renamed(sample), reward) for sample, reward in group] for group in update.groups]
    greedy = {f"{prompt} again": reward for prompt, reward in update.greedy.items()}
    values = {f"{i} again": numbers for i, numbers in update.values.items()}
    actual = advantages(name, Update(groups, greedy, update.average, values))
    assert_same({i.removesuffix(" again"): numbers for i, numbers in actual.items()}, advantages(name, update))


@every
def test_duplicating_the_update_keeps_advantages(name, update):
    copies = [
        [(replace(s, id=f"{s.id}b", prompt=replace(s.prompt, id=f"{s.prompt.id}b")), r) for s, r in group]
        for group in update.groups
    ]
    twice = Update(
        [*update.groups, *copies],
        {**update.greedy, **{f"{prompt}b": reward for prompt, reward in update.greedy.items()}},
        update.average,
        {**update.values, **{f"{i}b": numbers for i, numbers in update.values.items()}},
    )
    actual, expected = advantages(name, twice), advantages(name, update)
    assert_same({i: actual[i] for i in expected}, expected)
    assert_same({i: actual[f"{i}b"] for i in expected}, expected)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if is_by_group(name)])
def test_group_advantages_ignore_other_groups(name, update):
    actual = advantages(name, update.kept(update.groups[1:]))
    assert_same(actual, advantages(name, update))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if not is_by_group(name)])
def test_other_groups_transform_advantages_linearly(name, update):
    """With another group, a normalized or amplified advantage becomes a·A + b with common a > 0 and b."""
    first, second = advantages(name, update.kept(update.groups[:2])), advantages(name, update)
    masks = {s.id: torch.tensor(s.response_mask) for group in update.groups[:2] for s, _ in group}
    x, y = (torch.cat([actual[i][mask] for i, mask in masks.items()]) for actual in (first, second))
    fitted = torch.linalg.lstsq(torch.stack((x, torch.ones_like(x)), dim=1), y[:, None]).solution[:, 0]
    assert_equal(fitted[0] * x + fitted[1], y)
    assert fitted[0] > 0


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("gpg", "gdpo")])
def test_untrained_group_does_not_change_advantages(name, update):
    """The group has tool turns only. GPG and GDPO are excluded because they count the group among those with unequal
    rewards, and in the step's deviation."""
    silent = [(replace(s, id=f"{s.id}s", response_mask=[False] * len(s.response_ids)), r) for s, r in update.groups[0]]
    silent = [(replace(s, prompt=replace(s.prompt, id="silent")), r) for s, r in silent]
    more = Update(
        [*update.groups, silent],
        {**update.greedy, "silent": 0.0},
        update.average,
        {**update.values, **{s.id: torch.zeros(len(s.response_ids)) for s, _ in silent}},
    )
    actual, expected = advantages(name, more), advantages(name, update)
    assert_same({i: actual[i] for i in expected}, expected)
    assert not any(actual[s.id].any() for s, _ in silent)


@pytest.mark.parametrize("name", [name for name in COMPARING if is_by_group(name) and normalizes(name)])
def test_scaling_one_groups_rewards_changes_nothing(name, update):
    """Each group is normalized by its own deviation."""
    groups = [[(s, 7 * r if i == 1 else r) for s, r in group] for i, group in enumerate(update.groups)]
    assert_same(advantages(name, update.kept(groups)), advantages(name, update))


@every
def test_scaling_rewards_scales_unnormalized_advantages(name, update):
    """With rewards and reference values times three, advantages are unchanged if divided by a deviation, else
    tripled."""
    factor = 1 if normalizes(name) else 3
    actual = advantages(name, update.rewarded(lambda r: 3 * r, lambda v: 3 * v))
    assert_same(actual, {i: factor * numbers for i, numbers in advantages(name, update).items()})


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if ESTIMATORS[name].comparison != "values"])
def test_shifting_rewards_keeps_relative_advantages(name, update):
    """Shifting all rewards and reference values changes nothing, except for the estimator without a baseline. GAE is
    excluded because only the last token would gain."""
    compares = ESTIMATORS[name].comparison != "none" or config(name).algorithm.advantage.option("whiten")
    trained = {s.id: torch.tensor(s.response_mask) for s in update.samples()}
    expected = {i: numbers + (0 if compares else 5) * trained[i] for i, numbers in advantages(name, update).items()}
    assert_same(advantages(name, update.rewarded(lambda r: r + 5, lambda v: v)), expected)


@pytest.mark.parametrize("name", LINEAR)
def test_negating_rewards_negates_advantages(name, update):
    actual = advantages(name, update.rewarded(lambda r: -r, lambda v: -v))
    assert_same(actual, {i: -numbers for i, numbers in advantages(name, update).items()})


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_have_zero_advantage(name, update):
    equal = update.kept([[(sample, 0.1) for sample, _ in group] for group in update.groups])
    assert all(not numbers.abs().gt(ROUNDING).any() for numbers in advantages(name, equal).values())


@pytest.mark.parametrize("name", COMPARING)
def test_advantages_of_a_group_sum_to_zero(name, update):
    """The sum is over samples, or over tokens if the baseline is length-weighted or advantages are whitened."""
    if name == "opo" or config(name).algorithm.advantage.option("whiten"):
        sums = totals(whole(update), advantages(name, whole(update)), weighted=True)
        assert sum(sums) == pytest.approx(0, abs=ROUNDING)
    else:
        sums = totals(whole(update), advantages(name, whole(update)), weighted=False)
        assert sums == pytest.approx([0, 0], abs=ROUNDING)


@pytest.mark.parametrize("name", COMPARING)
def test_single_sample_has_zero_or_raw_advantage(name, update):
    alone = update.kept([update.groups[0], update.groups[1][:1]])
    default = advantages(name, alone, *unnormalized(name))
    assert not default["1.0"].any() and default["0.0"].any()
    kept = advantages(name, alone, *unnormalized(name), "algorithm.advantage.group_of_one=reward")
    factor = 5 / 4 if name == "gpg" else 1  # GPG: samples / samples in groups with unequal rewards
    trained = torch.tensor(update.groups[1][0][0].response_mask)
    assert_equal(kept["1.0"], factor * update.groups[1][0][1] * trained.double())


@every
def test_higher_reward_never_lowers_the_advantage(name, update):
    better = update.kept([[(s, r + (s.id == "0.1")) for s, r in group] for group in update.groups])
    more = advantages(name, better, *unnormalized(name))["0.1"]
    less = advantages(name, update, *unnormalized(name))["0.1"]
    assert (more >= less - ROUNDING).all() and (more > less).any()
