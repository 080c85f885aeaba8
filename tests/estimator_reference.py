"""Advantage estimators in plain Hugging Face and torch, one sample and one token at a time. Written from the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

import torch

from megarl.core.types import Sample
from tests.grpo_reference import GrpoReference
from tests.objective_reference import ESTIMATES
from tests.ppo_reference import discounted

Groups = Sequence[Sequence[tuple[Sample, float]]]
"""Samples of each prompt with their rewards."""

Ratios = Mapping[str, list[float]]
"""Sample id -> log π − log π_ref of each response token."""

Tokens = Mapping[str, list[float]]
"""Sample id -> a number for each response token."""

Estimate = Callable[[Groups, Ratios], dict[str, list[float]]]
"""(samples, log-ratios to the reference) -> advantage of each response token, by sample."""

Compare = Callable[[list[float], list[int], str], list[tuple[float, float]]]
"""(rewards of a prompt's samples, their trained tokens, the prompt) -> each one's baseline, and what to divide by."""


class EstimatorReference(GrpoReference):
    """A policy gradient with the advantages of any estimator: mean over samples of the mean over trained tokens."""

    estimate: Estimate

    def loss(self, groups, kl_coefficient, old):
        members = [sample for group in groups for sample, _ in group]
        with torch.no_grad():
            ratios = {
                sample.id: (self.log_probs(self.model, sample) - self.log_probs(self.start, sample)).tolist()
                for sample in members
            }
        advantages = self.estimate(groups, ratios)
        terms = []
        for sample in members:
            log_prob = self.log_probs(self.model, sample)
            token = -torch.tensor(advantages[sample.id]) * (log_prob - log_prob.detach()).exp()
            mask = torch.tensor(sample.response_mask)
            terms.append(token[mask].mean() if mask.any() else token.sum() * 0)
        return torch.stack(terms).mean()


@dataclass(frozen=True)
class Divergence:
    """The KL as a reward: −coefficient · K of each token's log-ratio, or of their sum, which the last one has. credit:
    whether all tokens of a sample are credited with all of it ("whole"), or with what comes after them ("reward_to_go")."""

    coefficient: float = 0.0
    estimator: str = "k1"
    level: str = "token"
    credit: str = "whole"

    def rewards(self, sample: Sample, ratios: Ratios) -> dict[int, float]:
        """Returns the KL reward of each trained token that has one, by its position in the response."""
        own = {t: ratios[sample.id][t] for t in trained(sample)}
        if self.level == "sequence" and own:
            own = {max(own): sum(own.values())}
        k = ESTIMATES[self.estimator]
        return {t: -self.coefficient * float(k(torch.tensor(d, dtype=torch.float64))) for t, d in own.items()}


def sample_estimate(compare: Compare, kl: Divergence = Divergence(), learned: Tokens | None = None) -> Estimate:
    """(R_i − b_i) / c_i with R_i = r_i and all of the KL.

    learned: PRIME's rewards of tokens: to it comes Σ_{s≥t} (d_s − mean of the others' mean d)
    """

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for group in groups:
            of_kl = [kl.rewards(sample, ratios) for sample, _ in group]
            totals = [reward + sum(own.values()) for (_, reward), own in zip(group, of_kl, strict=True)]
            lengths = [len(trained(sample)) for sample, _ in group]
            compared = compare(totals, lengths, group[0][0].prompt.id)
            for (sample, _), own, total, (value, scale) in zip(group, of_kl, totals, compared, strict=True):
                advantages[sample.id] = [
                    (total - value - sum(x for s, x in own.items() if s < t and kl.credit == "reward_to_go")) / scale
                    for t in range(len(sample.response_ids))
                ]
            if learned is not None:
                credit_to_go(advantages, [sample for sample, _ in group], learned)
        return advantages

    return estimate


def credit_to_go(advantages: dict[str, list[float]], group: Sequence[Sample], learned: Tokens) -> None:
    means = [fmean([learned[sample.id][t] for t in trained(sample)] or [0.0]) for sample in group]
    for i, sample in enumerate(group):
        others = fmean(mean for j, mean in enumerate(means) if j != i)
        for t in range(len(sample.response_ids)):
            advantages[sample.id][t] += sum(learned[sample.id][s] - others for s in trained(sample) if s >= t)


def nothing(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    return [(0.0, 1.0)] * len(rewards)


def constant(value: float) -> Compare:
    return lambda rewards, lengths, prompt: [(value, 1.0)] * len(rewards)


def by_prompt(values: Mapping[str, float]) -> Compare:
    return lambda rewards, lengths, prompt: [(values[prompt], 1.0)] * len(rewards)


def group_mean(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    return [(fmean(rewards), 1.0)] * len(rewards)


def standardised(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    return [(fmean(rewards), stdev(rewards) + 1e-6)] * len(rewards)


def mean_of_others(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    return [(fmean(rewards[:i] + rewards[i + 1 :]), 1.0) for i in range(len(rewards))]


def weighted_by_length(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    mean = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [(mean, 1.0)] * len(rewards)


def best_of(k: int) -> Compare:
    """Every set of k: the mean of the best with sample i in it, less that of all."""

    def compare(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
        sets = list(combinations(range(len(rewards)), k))
        best = [max(rewards[i] for i in members) for members in sets]
        with_own = [
            fmean(value for value, members in zip(best, sets, strict=True) if i in members) for i in range(len(rewards))
        ]
        scale = pstdev(best) + 1e-6
        return [(r - (own - fmean(best)), scale) for r, own in zip(rewards, with_own, strict=True)]

    return compare


def amplified(kl: Divergence = Divergence()) -> Estimate:
    """GPG's: against the group's mean, times samples / samples of groups whose rewards, without the KL, differ."""

    def larger(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        factor = sum(map(len, groups)) / sum(len(group) for group in groups if len({r for _, r in group}) > 1)
        return {
            name: [factor * a for a in own] for name, own in sample_estimate(group_mean, kl)(groups, ratios).items()
        }

    return larger


def token_estimate(gamma: float, kl: Divergence = Divergence()) -> Estimate:
    """Σ_{s≥t} γ^(s−t)·r_s over the trained tokens, the last of which is rewarded with r_i, too."""
    return temporal_differences(gamma, 1.0, None, kl)


def temporal_differences(
    gamma: float, lambda_: float, values: Tokens | None, kl: Divergence = Divergence()
) -> Estimate:
    """Generalised advantages, from the last trained token to the first; without values these are 0."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for sample, reward in (item for group in groups for item in group):
            tokens, of_kl = trained(sample), kl.rewards(sample, ratios)
            own = [0.0 if values is None else values[sample.id][t] for t in tokens]
            rewards = [of_kl.get(t, 0.0) + (reward if t == tokens[-1] else 0.0) for t in tokens]
            following = [*own[1:], 0.0]
            deltas = [r + gamma * after - now for r, after, now in zip(rewards, following, own, strict=bool(own))]
            known = dict(zip(tokens, discounted(deltas, gamma * lambda_), strict=True))
            advantages[sample.id] = [known.get(t, 0.0) for t in range(len(sample.response_ids))]
        return advantages

    return estimate


def whitened(estimate: Estimate) -> Estimate:
    """Less their mean, over their deviation: of all trained tokens."""

    def over_all(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        plain = estimate(groups, ratios)
        every = [plain[sample.id][t] for group in groups for sample, _ in group for t in trained(sample)]
        mean, deviation = fmean(every), stdev(every) + 1e-6
        return {name: [(a - mean) / deviation for a in own] for name, own in plain.items()}

    return over_all


def trained(sample: Sample) -> list[int]:
    return [t for t, flag in enumerate(sample.response_mask) if flag]


AVERAGE, GREEDY = 0.4, {"0": 0.5, "1": 1.0, "2": 0.0}
"""The values that some estimators compare rewards with: the mean of earlier steps, and by prompt the reward of a greedy
response."""


class EstimatorCase(NamedTuple):
    """An estimator's name and keys; what it amounts to with a KL in the reward, given what other models say of tokens
    (World of tests/objective_cases.py); and which of these they are."""

    keys: str
    estimate: Callable[[Divergence, Any], Estimate]
    given: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.keys.partition(",")[0]


def compared(name: str, compare: Compare) -> EstimatorCase:
    return EstimatorCase(name, lambda kl, world: sample_estimate(compare, kl))


CASES: dict[str, EstimatorCase] = {
    "policy gradient": compared("policy_gradient", nothing),
    "REINFORCE": compared("reinforce", constant(AVERAGE)),
    "REINFORCE++": EstimatorCase(
        "reinforce_plus_plus, gamma: 0.9", lambda kl, world: whitened(token_estimate(0.9, kl))
    ),
    "REINFORCE++, group baseline": EstimatorCase(
        "reinforce_plus_plus_baseline",
        lambda kl, world: whitened(sample_estimate(group_mean, kl)),
    ),
    "RLOO": compared("rloo", mean_of_others),
    "PRIME": EstimatorCase(
        "rloo, credit: reward_to_go",
        lambda kl, world: sample_estimate(mean_of_others, kl, world.lists("implicit_reward")),
        ("implicit_reward",),
    ),
    "ReMax": compared("remax", by_prompt(GREEDY)),
    "GRPO": compared("grpo", standardised),
    "OPO": compared("opo", weighted_by_length),
    "GPG": EstimatorCase("gpg", lambda kl, world: amplified(kl)),
    "pass@k": compared("pass_at_k, k: 2", best_of(2)),
    "GAE": EstimatorCase(
        "gae, gamma: 0.9, gae_lambda: 0.8",
        lambda kl, world: whitened(temporal_differences(0.9, 0.8, world.lists("values"), kl)),
        ("values",),
    ),
}
"""Each estimator, in one case at least."""
