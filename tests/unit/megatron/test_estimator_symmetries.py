"""What advantages may not depend on, and how they follow what they do depend on: laws that every estimator keeps, from
the driver's baselines to the tokens of the ranks."""

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
from megarl.core.types import Prompt, Sample, VersionRun
from megarl.data.collate import collate
from megarl.megatron import parallel
from megarl.megatron.advantages import with_advantages
from tests.packing import packing
from tests.parity import Group, local_batch, rank_batches
from tests.paths import BASE

KEYS = ("model.path=m", "data.source=arithmetic", "rollout.max_new_tokens=16", "rollout.context_length=64")
NEUTRAL = {"whiten_epsilon": 0, "whiten_std": "population", "std_epsilon": 0, "k": 2}
"""Options under which a law is exact: nothing is added to a deviation, and of twice as many numbers it is the same."""

COMPARING = [name for name, spec in ESTIMATORS.items() if spec.comparison == "group"]
LINEAR = [name for name in ESTIMATORS if name != "pass_at_k"]
every = pytest.mark.parametrize("name", ESTIMATORS)


@dataclass(frozen=True)
class Update:
    """Samples with their rewards, and what these are compared with: the reward of each prompt's greedy response, the
    mean reward of earlier steps, and a critic's values, by sample."""

    groups: list[Group]
    greedy: Mapping[str, float]
    average: float
    values: Mapping[str, torch.Tensor]

    def samples(self) -> Iterator[Sample]:
        return (sample for group in self.groups for sample, _ in group)

    def rewarded(self, change: Callable[[float], float], values: Callable[[torch.Tensor], torch.Tensor]) -> Update:
        """Return the update with every reward changed, and with it what rewards are compared with."""
        return Update(
            [[(sample, change(reward)) for sample, reward in group] for group in self.groups],
            {prompt: change(reward) for prompt, reward in self.greedy.items()},
            change(self.average),
            {i: values(own) for i, own in self.values.items()},
        )

    def kept(self, groups: list[Group]) -> Update:
        return replace(self, groups=groups)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with parallel.pretended(config("grpo").actor.layout, 0):
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
    values = {s.id: torch.randn(len(s.response_ids), generator=generator) for group in groups for s, _ in group}
    return Update(groups, {"0": 0.3, "1": -0.2, "2": 1.0}, 0.4, values)


def sample_of(name: str, prompt: Prompt, mask: list[bool]) -> Sample:
    n = len(mask)
    return Sample(name, prompt, (9,) * n, (-1.0,) * n, mask, (VersionRun(0, n),), "stop", "")


@cache
def config(name: str, *more: str) -> Config:
    options = [f"algorithm.advantage.{o}={v}" for o, v in NEUTRAL.items() if o in ESTIMATORS[name].options]
    return load(BASE, [*KEYS, f"algorithm.advantage.estimator={name}", *options, *more])


def advantages(name: str, update: Update, *more: str, budget: int = 4096) -> dict[str, torch.Tensor]:
    """Return the advantage of each token, by sample. budget: the tokens of a microbatch."""
    chosen = config(name, *more)
    scores = {"values": update.values} if ESTIMATORS[name].comparison == "values" else {}
    packed = packing(token_budget=budget)
    [batch] = rank_batches(chosen, packed, update.groups, "actor", scores, update.greedy, update.average)
    members = local_batch(batch).members
    batches = [collate(m, packed, **{n: {x.sample.id: x.scores[n] for x in m} for n in scores}) for m in members]
    found = {}
    for one, own in zip(with_advantages(chosen.algorithm, batches), members, strict=True):
        parts = one.advantage.split([len(item.sample.response_ids) for item in own])
        found |= {item.sample.id: part for item, part in zip(own, parts, strict=True)}
    return found


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, own in found.items():
        torch.testing.assert_close(own, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def normalises(name: str) -> bool:
    """Return whether advantages are in units of a deviation."""
    options = config(name).algorithm.advantage.options()
    return bool(options["whiten"]) or options.get("std", "none") != "none"


def is_by_group(name: str) -> bool:
    """Return whether a group's advantages do not depend on other groups."""
    return not config(name).algorithm.advantage.option("whiten") and getattr(ESTIMATORS[name], "amplify", None) is None


def totals(update: Update, found: Mapping[str, torch.Tensor], weighted: bool) -> list[float]:
    """Return the sum over each group of one advantage of each sample, by its trained tokens or not. A sample that has
    none is left out."""
    sums = []
    for group in update.groups:
        masks = [torch.tensor(sample.response_mask) for sample, _ in group]
        own = [(found[sample.id][mask], mask.sum()) for (sample, _), mask in zip(group, masks, strict=True)]
        sums.append(sum(float(a[0] * (n if weighted else 1)) for a, n in own if n))
    return sums


def whole(update: Update) -> Update:
    """Return the update without the group in which a sample has no trained token."""
    return update.kept(update.groups[:2])


@every
def test_tokens_that_are_not_trained_on_have_none(name, update):
    for sample in update.samples():
        assert not advantages(name, update)[sample.id][~torch.tensor(sample.response_mask)].any()


@every
def test_the_order_of_samples_does_not_matter(name, update):
    turned = update.kept([[group[i] for i in (2, 0, 3, 1)] for group in update.groups])
    assert_same(advantages(name, turned), advantages(name, update))


@every
def test_the_order_of_groups_does_not_matter(name, update):
    assert_same(advantages(name, update.kept(update.groups[::-1])), advantages(name, update))


@every
def test_the_cut_into_microbatches_does_not_matter(name, update):
    assert_same(advantages(name, update, budget=20), advantages(name, update))


@every
def test_tokens_between_turns_do_not_matter(name, update):
    """Tokens of tools, put into a sample before each of its tokens, change no advantage of the others."""

    def longer(sample: Sample) -> Sample:
        return sample_of(sample.id, sample.prompt, [x for trained in sample.response_mask for x in (False, trained)])

    groups = [[(longer(sample), reward) for sample, reward in group] for group in update.groups]
    values = {i: torch.stack((torch.full_like(own, 9.0), own), dim=1).flatten() for i, own in update.values.items()}
    found = advantages(name, replace(update, groups=groups, values=values))
    assert_same({i: own[1::2] for i, own in found.items()}, advantages(name, update))


@every
def test_names_and_ids_of_tokens_do_not_matter(name, update):
    def renamed(sample: Sample) -> Sample:
        prompt = replace(sample.prompt, id=f"{sample.prompt.id} again", token_ids=sample.prompt.token_ids[::-1])
        return replace(sample, id=f"{sample.id} again", prompt=prompt, response_ids=[3] * len(sample.response_ids))

    groups = [[(renamed(sample), reward) for sample, reward in group] for group in update.groups]
    greedy = {f"{prompt} again": reward for prompt, reward in update.greedy.items()}
    values = {f"{i} again": own for i, own in update.values.items()}
    found = advantages(name, Update(groups, greedy, update.average, values))
    assert_same({i.removesuffix(" again"): own for i, own in found.items()}, advantages(name, update))


@every
def test_an_update_twice_over_has_the_same_advantages(name, update):
    again = [
        [(replace(s, id=f"{s.id}b", prompt=replace(s.prompt, id=f"{s.prompt.id}b")), r) for s, r in group]
        for group in update.groups
    ]
    twice = Update(
        [*update.groups, *again],
        {**update.greedy, **{f"{prompt}b": reward for prompt, reward in update.greedy.items()}},
        update.average,
        {**update.values, **{f"{i}b": own for i, own in update.values.items()}},
    )
    found, expected = advantages(name, twice), advantages(name, update)
    assert_same({i: found[i] for i in expected}, expected)
    assert_same({i: found[f"{i}b"] for i in expected}, expected)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if is_by_group(name)])
def test_other_groups_do_not_matter(name, update):
    found = advantages(name, update.kept(update.groups[1:]))
    assert_same(found, advantages(name, update))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if not is_by_group(name)])
def test_other_groups_change_all_alike(name, update):
    """A whitened or amplified advantage is a·A + b of the same A, with another group or without."""
    first, second = advantages(name, update.kept(update.groups[:2])), advantages(name, update)
    masks = {s.id: torch.tensor(s.response_mask) for group in update.groups[:2] for s, _ in group}
    x, y = (torch.cat([found[i][mask] for i, mask in masks.items()]).double() for found in (first, second))
    fitted = torch.linalg.lstsq(torch.stack((x, torch.ones_like(x)), dim=1), y[:, None]).solution[:, 0]
    torch.testing.assert_close(fitted[0] * x + fitted[1], y, rtol=1e-4, atol=1e-5)
    assert fitted[0] > 0


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gpg"])
def test_a_group_without_trained_tokens_does_not_matter(name, update):
    """Its turns are of tools alone. GPG counts it among the groups whose rewards differ."""
    silent = [(replace(s, id=f"{s.id}s", response_mask=[False] * len(s.response_ids)), r) for s, r in update.groups[0]]
    silent = [(replace(s, prompt=replace(s.prompt, id="silent")), r) for s, r in silent]
    more = Update(
        [*update.groups, silent],
        {**update.greedy, "silent": 0.0},
        update.average,
        {**update.values, **{s.id: torch.zeros(len(s.response_ids)) for s, _ in silent}},
    )
    found, expected = advantages(name, more), advantages(name, update)
    assert_same({i: found[i] for i in expected}, expected)
    assert not any(found[s.id].any() for s, _ in silent)


@pytest.mark.parametrize("name", [name for name in COMPARING if is_by_group(name) and normalises(name)])
def test_each_group_has_a_unit_of_its_own(name, update):
    """Rewards of one group alone in another unit change nothing where each group has its deviation."""
    groups = [[(s, 7 * r if i == 1 else r) for s, r in group] for i, group in enumerate(update.groups)]
    assert_same(advantages(name, update.kept(groups)), advantages(name, update))


@every
def test_rewards_in_another_unit(name, update):
    """Three times all rewards, and all they are compared with: advantages are the same where they are in units of a
    deviation, else three times as large."""
    factor = 1 if normalises(name) else 3
    found = advantages(name, update.rewarded(lambda r: 3 * r, lambda v: 3 * v))
    assert_same(found, {i: factor * own for i, own in advantages(name, update).items()})


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_rewards_from_another_zero(name, update):
    """Advantages are the same where every reward, and all that they are compared with, is as much more; but for the one
    that compares with nothing. With a critic the last token alone would have more."""
    compares = ESTIMATORS[name].comparison != "none" or config(name).algorithm.advantage.option("whiten")
    trained = {s.id: torch.tensor(s.response_mask) for s in update.samples()}
    expected = {i: own + (0 if compares else 5) * trained[i] for i, own in advantages(name, update).items()}
    assert_same(advantages(name, update.rewarded(lambda r: r + 5, lambda v: v)), expected)


@pytest.mark.parametrize("name", LINEAR)
def test_losses_in_place_of_rewards(name, update):
    found = advantages(name, update.rewarded(lambda r: -r, lambda v: -v))
    assert_same(found, {i: -own for i, own in advantages(name, update).items()})


@pytest.mark.parametrize("name", COMPARING)
def test_equal_rewards_have_none(name, update):
    equal = update.kept([[(sample, 0.1) for sample, _ in group] for group in update.groups])
    assert all(not own.abs().gt(1e-6).any() for own in advantages(name, equal).values())


@pytest.mark.parametrize("name", COMPARING)
def test_a_groups_advantages_add_up_to_nothing(name, update):
    """Sum are over samples, or over tokens where lengths weigh and where advantages are whitened."""
    if name == "opo" or config(name).algorithm.advantage.option("whiten"):
        sums = totals(whole(update), advantages(name, whole(update)), weighted=True)
        assert sum(sums) == pytest.approx(0, abs=1e-5)
    else:
        assert totals(whole(update), advantages(name, whole(update)), weighted=False) == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize("name", COMPARING)
def test_whoever_is_alone_has_nothing_to_compare_with(name, update):
    alone = update.kept([update.groups[0], update.groups[1][:1]])
    own = advantages(name, alone, "algorithm.advantage.whiten=false")
    assert not own["1.0"].any() and own["0.0"].any()
    kept = advantages(name, alone, "algorithm.advantage.whiten=false", "algorithm.advantage.group_of_one=reward")
    factor = 5 / 4 if name == "gpg" else 1  # samples / samples of groups of unequal rewards
    trained = torch.tensor(update.groups[1][0][0].response_mask)
    torch.testing.assert_close(kept["1.0"], factor * update.groups[1][0][1] * trained.float())


@every
def test_a_better_reward_is_not_a_worse_advantage(name, update):
    better = update.kept([[(s, r + (s.id == "0.1")) for s, r in group] for group in update.groups])
    more = advantages(name, better, "algorithm.advantage.whiten=false")["0.1"]
    less = advantages(name, update, "algorithm.advantage.whiten=false")["0.1"]
    assert (more >= less - 1e-6).all() and (more > less).any()
