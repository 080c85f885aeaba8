"""Untrained tokens have no effect: whatever their log-probs, entropies and values are, losses, gradients and metrics
are bit-identical, and their own gradient is exactly 0.

Every estimator, KL placement and policy objective runs from the driver's baselines to the loss, and every other loss
separately. `make test-exhaustive` combines all estimators with all KL placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from megarl.algorithms.kl import kl_reward
from megarl.algorithms.registry import ESTIMATORS, OBJECTIVES
from megarl.config.algorithm_schema import Algorithm
from megarl.config.load import load
from megarl.config.logprob_check_schema import Tolerance
from megarl.config.schema import Config
from megarl.core.sample import SampleRef
from megarl.core.score import NO_BASELINE
from megarl.core.token_batch import TokenBatch
from megarl.data.collate import TokenScores, collate
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.advantages import mean_advantages, with_advantages
from megarl.megatron.configured_losses import (
    configured_imitation_loss,
    configured_implicit_reward_loss,
    configured_policy_loss,
    configured_preference_loss,
    configured_reward_model_loss,
    configured_value_loss,
)
from megarl.megatron.losses import Loss
from megarl.megatron.metric_sums import read
from megarl.megatron.token_selection import with_selection
from tests.forked import run_ranks
from tests.packing import packing
from tests.parity import Group, local_batch, random_groups, rank_batches
from tests.paths import BASE
from tests.samples import training_ref
from tests.timing import WAIT_S

COMMON = ("model.path=m", "data.source=arithmetic", "rollout.max_new_tokens=16", "rollout.context_length=64")
PLACEMENTS = {
    "no KL": "{coefficient: 0}",
    "KL in the loss": "{coefficient: 0.3, placement: loss, estimator: k3}",
    "sequence KL in the loss": "{coefficient: 0.3, placement: loss, estimator: k2, level: sequence}",
    "KL in the reward": "{coefficient: 0.3, placement: reward, estimator: k1}",
    "sequence KL in the reward": "{coefficient: 0.3, placement: reward, estimator: k1, level: sequence}",
}
CORRECTIONS = {
    "no correction": "{}",
    "ratio to the rollout": "{old: rollout}",
    "token weights": "{weight: token, mask: token, mask_low: 0.5, mask_high: 2}",
    "sequence weights": "{weight: sequence, mask: geometric, mask_low: 0.5, mask_high: 2}",
}
TOLERANCE = Tolerance(1.0, "sample")
"""A tolerance that tokens of a few samples exceed."""

TOKEN_OBJECTIVES = [name for name, spec in OBJECTIVES.items() if "tokens" in spec.actions]
POLICY_OBJECTIVES = [name for name in TOKEN_OBJECTIVES if OBJECTIVES[name].is_policy_objective]
OTHER_LOSSES = [name for name in TOKEN_OBJECTIVES if name not in POLICY_OBJECTIVES] + ["value", "implicit_reward"]
REPRESENTATIVES = ("grpo", "gae")
"""Estimators that are tested with every KL placement and every correction."""

DISTURBANCES = ("other values", "non-finite values")

Tokens = Mapping[str, torch.Tensor]
"""Sample id -> a number for each response token."""

Estimated = tuple[Algorithm, Sequence[SampleRef], TokenBatch]

Outcome = tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, str | float]]
"""Loss, gradient of the head's output rows, the rows' mask, and metrics as text."""


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["pairs", "all"])
def leaks(request) -> dict[tuple[str, str], list[str]]:
    """Differences by (loss, disturbance)."""
    [by_case] = run_ranks(1, all_leaks, request.param)
    return by_case


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("name", [*POLICY_OBJECTIVES, *OTHER_LOSSES])
def test_masked_tokens_do_not_affect(leaks, name, disturbance):
    assert leaks[name, disturbance] == []


def all_leaks(store, rank: int, combine_all: bool) -> dict[tuple[str, str], list[str]]:
    parallel.initialize(load(BASE, COMMON).actor.layout, store, rank, seed=0, timeout_s=WAIT_S)
    plain, *disturbed = [World(disturbance, combine_all) for disturbance in (None, *DISTURBANCES)]
    worlds = dict(zip(DISTURBANCES, disturbed, strict=True))
    by_case = {}
    for name in [*POLICY_OBJECTIVES, *OTHER_LOSSES]:
        expected = dict(outcomes(plain, name))
        for disturbance, world in worlds.items():
            pairs = outcomes(world, name)
            by_case[name, disturbance] = [
                leak for case, result in pairs for leak in differences(case, expected[case], result)
            ]
    return by_case


def outcomes(world: World, name: str) -> Iterable[tuple[str, Outcome]]:
    return policy_outcomes(world, name) if name in POLICY_OBJECTIVES else [(name, other_outcome(world, name))]


class World:
    """Samples with holes in their masks, and model outputs for their tokens.

    Args:
        disturbance: replacement of the outputs for untrained tokens; None keeps them.
        combine_all: whether to combine all estimators with all KL placements. Otherwise each estimator has one
            placement, and GRPO and GAE have all of them. Corrections are combined with a sequence KL only if it is set.
    """

    def __init__(self, disturbance: str | None, combine_all: bool):
        self._generator = torch.Generator().manual_seed(5)
        self._disturbance = disturbance
        names = ("rollout_logprobs", "old", "reference", "values", "implicit_reward", "labels")
        plain = [[(sample, reward) for sample, reward in group] for group in random_groups(0)]
        samples = [sample for group in plain for sample, _ in group]
        self.masks = {sample.id: torch.tensor(sample.response_mask) for sample in samples}
        self.scores: dict[str, Tokens] = {name: self._outputs(name) for name in names}
        self.groups: list[Group] = [
            [
                (replace(s, response_logprobs=self.scores["rollout_logprobs"][s.id].numpy()), reward)
                for s, reward in group
            ]
            for group in plain
        ]
        head = [self._outputs(name) for name in ("old", "entropy", "values")]
        self.head = {i: torch.stack([column[i] for column in head], dim=1) for i in self.masks}
        self.estimated = dict(estimated_batches(self, combine_all))
        self.corrected = {
            setting
            for setting in self.estimated
            if setting.split(", ")[0] in REPRESENTATIVES and (combine_all or "sequence KL" not in setting)
        }
        """The settings that are tested with every correction."""

    def _outputs(self, name: str) -> Tokens:
        generator = torch.Generator().manual_seed(len(name))
        drawn = {i: -1 + 0.3 * torch.randn(mask.shape, generator=generator) for i, mask in self.masks.items()}
        return {i: torch.where(self.masks[i], values, self._disturbed(values)) for i, values in drawn.items()}

    def _disturbed(self, values: torch.Tensor) -> torch.Tensor:
        if self._disturbance is None:
            return values
        if self._disturbance == "other values":
            return 20 * torch.randn(values.shape, generator=self._generator)
        extreme = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30])
        return extreme[torch.randint(len(extreme), values.shape, generator=self._generator)]

    def scored(self, members: Sequence[SampleRef], columns: slice) -> torch.Tensor:
        """Return the head's output for the rows, float32 [N, columns], as a leaf."""
        parts = [self.head[item.sample.id][:, columns] for item in members]
        return torch.cat(parts).contiguous().requires_grad_()


def policy_outcomes(world: World, name: str) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcomes of a policy objective in each setting."""
    for correction, keys in CORRECTIONS.items():
        loaded = load(BASE, [*COMMON, f"algorithm.objective.name={name}", f"algorithm.correction={keys}"]).algorithm
        objective = loaded.objective.model_copy(update={"imitation_coefficient": 0.2, "entropy_coefficient": 0.1})
        for setting, (estimated, members, batch) in world.estimated.items():
            if correction != "no correction" and setting not in world.corrected:
                continue
            algorithm = estimated.model_copy(update={"objective": objective, "correction": loaded.correction})
            if objective.spec.selects_tokens:
                if batch.old is None and loaded.correction.old != "rollout":
                    continue
                [batch] = with_selection(algorithm, [batch], [members])
            loss = configured_policy_loss(algorithm, TOLERANCE, 0.3, has_moved=batch.old is not None)
            columns = slice(2 if batch.returns is None else 3)
            yield f"{setting}, {correction}", outcome(loss, batch, world, members, columns)


def estimated_batches(world: World, combine_all: bool) -> Iterator[tuple[str, Estimated]]:
    """Yield the batches with advantages by setting: estimator and KL placement, with and without a pass for old
    log-probs."""
    placement_of = dict(zip(ESTIMATORS, cycle(PLACEMENTS)))
    for estimator, (placement, keys) in product(ESTIMATORS, PLACEMENTS.items()):
        if not (combine_all or estimator in REPRESENTATIVES or placement == placement_of[estimator]):
            continue
        config = load(BASE, [*COMMON, f"algorithm.advantage.estimator={estimator}", f"algorithm.kl={keys}"])
        [members] = dispatched(world, config).members
        scores: TokenScores = {name: {m.sample.id: m.scores[name] for m in members} for name in members[0].scores}
        [batch] = with_advantages(config.algorithm, [collate(members, packing(), **scores)])
        yield f"{estimator}, {placement}", (config.algorithm, members, batch)
        if not config.kl_in_reward:
            yield f"{estimator}, {placement}, one update", (config.algorithm, members, replace(batch, old=None))


def dispatched(world: World, config: Config) -> LocalBatch:
    scores: dict[str, Tokens] = {"old": world.scores["old"]}
    if config.algorithm.kl.coefficient:
        scores["reference"] = world.scores["reference"]
    if config.algorithm.advantage.spec.comparison == "values":
        scores["values"] = world.scores["values"]
    if config.kl_in_reward:
        kl, old, reference = config.algorithm.kl, world.scores["old"], world.scores["reference"]
        scores["kl_reward"] = {
            i: kl_reward(old[i], reference[i], mask, kl.coefficient, kl.estimator, kl.level)
            for i, mask in world.masks.items()
        }
    greedy = {group[0][0].prompt.id: 0.4 for group in world.groups}
    [rank_batch] = rank_batches(config, packing(token_budget=4096), world.groups, "actor", scores, greedy, 0.3)
    return local_batch(rank_batch)


def other_outcome(world: World, name: str) -> Outcome:
    """Return the outcome of a loss without advantages."""
    samples = [(sample, reward) for group in world.groups for sample, reward in group]
    members = [training_ref(sample, reward, NO_BASELINE, 0.1) for sample, reward in samples]
    batch = collate(members, packing(), **{n: world.scores[n] for n in ("reference", "values", "old", "labels")})
    if name == "value":
        algorithm = load(BASE, [*COMMON, "algorithm.advantage.estimator=gae", "algorithm.value.clip=0.2"]).algorithm
        [batch] = with_advantages(algorithm, [batch])
        return outcome(configured_value_loss(algorithm.value), batch, world, members, slice(2, 3))
    if name == "implicit_reward":
        config = load(BASE, [*COMMON, "implicit_reward={}"])
        return outcome(configured_implicit_reward_loss(config.implicit_reward), batch, world, members, slice(2))
    spec = OBJECTIVES[name]
    keys = ["model.path=m", "data.source=rows.jsonl", f"data.format={spec.rows[0]}", f"algorithm.objective.name={name}"]
    objective = load(BASE, keys).algorithm.objective
    if spec.classifier is not None:
        return outcome(configured_reward_model_loss(objective), batch, world, members, slice(1))
    if not spec.is_pairwise:
        return outcome(configured_imitation_loss(objective), batch, world, members, slice(2))
    loss = configured_preference_loss(objective, TOLERANCE, has_moved=True)
    return outcome(loss, batch, world, members, slice(2))


def outcome(
    loss: Loss,
    batch: TokenBatch,
    world: World,
    members: Sequence[SampleRef],
    columns: slice,
) -> Outcome:
    scored = world.scored(members, columns)
    terms = loss.terms(batch, scored)
    terms.loss.backward()
    metrics = {name: str(metric) for name, metric in read(loss.metrics(batch, terms)).items()}
    if batch.advantage is not None:
        metrics |= mean_advantages(batch, [item.sample.id for item in members])
    return terms.loss.detach(), scored.grad, batch.mask, metrics


def differences(case: str, plain: Outcome, disturbed: Outcome) -> list[str]:
    leaks = []
    if not torch.equal(plain[0], disturbed[0]) or not plain[0].isfinite():
        leaks.append(f"{case}: loss {plain[0].item()} and {disturbed[0].item()}")
    for result in (plain, disturbed):
        if result[1][~result[2]].abs().sum() != 0:
            leaks.append(f"{case}: a masked token has a gradient")
    if not torch.equal(plain[1], disturbed[1]):
        leaks.append(f"{case}: gradients differ")
    leaks += [
        f"{case}: {name} is {plain[3][name]} and {disturbed[3][name]}"
        for name in plain[3]
        if plain[3][name] != disturbed[3][name]
    ]
    return leaks
