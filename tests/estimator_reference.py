"""Reference advantage estimators, written from the papers: plain torch, one sample and one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import Any, NamedTuple

import torch

from megarl.core.sample import Sample
from tests.grpo_reference import GrpoReference
from tests.objective_reference import ESTIMATES
from tests.ppo_reference import discounted

Groups = Sequence[Sequence[tuple[Sample, float]]]
"""Each prompt's samples with their rewards."""

Ratios = Mapping[str, list[float]]
"""Sample id -> log π − log π_ref of each response token."""

Tokens = Mapping[str, list[float]]
"""Sample id -> one number per response token."""

Estimate = Callable[[Groups, Ratios], dict[str, list[float]]]
"""(groups, log-ratios to the reference) -> sample id -> advantage of each response token."""

Compare = Callable[[list[float], list[int], str], list[tuple[float, float]]]
"""(rewards of a group, its numbers of trained tokens, prompt id) -> (baseline, divisor) of each sample."""


class EstimatorReference(GrpoReference):
    """Policy gradient with the advantages of a given estimator, averaged per sample and then over samples."""

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
    """The KL as a reward: −coefficient · K(log-ratio) per token, or of the summed log-ratio at the last token.

    Attributes:
        credit: "whole" credits every token with the sample's total KL, "reward_to_go" only with the KL from that token
            on.
    """

    coefficient: float = 0.0
    estimator: str = "k1"
    level: str = "token"
    credit: str = "whole"

    def rewards(self, sample: Sample, ratios: Ratios) -> dict[int, float]:
        """Return the KL reward of each trained token that has one, by its position in the response."""
        log_ratios = {t: ratios[sample.id][t] for t in trained(sample)}
        if self.level == "sequence" and log_ratios:
            log_ratios = {max(log_ratios): sum(log_ratios.values())}
        k = ESTIMATES[self.estimator]
        return {t: -self.coefficient * float(k(torch.tensor(d, dtype=torch.float64))) for t, d in log_ratios.items()}


def sample_estimate(compare: Compare, kl: Divergence = Divergence(), learned: Tokens | None = None) -> Estimate:
    """Return the estimate (R_i − b_i) / c_i, where R_i is the reward plus the sample's KL rewards.

    Args:
        compare: the baselines b_i and divisors c_i of a group.
        kl: the KL reward.
        learned: PRIME's token rewards d; they add Σ_{s≥t} (d_s − mean of the other samples' mean d).
    """

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for group in groups:
            kl_rewards = [kl.rewards(sample, ratios) for sample, _ in group]
            totals = [reward + sum(kls.values()) for (_, reward), kls in zip(group, kl_rewards, strict=True)]
            lengths = [len(trained(sample)) for sample, _ in group]
            baselines = compare(totals, lengths, group[0][0].prompt.id)
            for (sample, _), kls, total, (value, scale) in zip(group, kl_rewards, totals, baselines, strict=True):
                advantages[sample.id] = [
                    (total - value - sum(x for s, x in kls.items() if s < t and kl.credit == "reward_to_go")) / scale
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


def standardized(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    return [(fmean(rewards), stdev(rewards) + 1e-6)] * len(rewards)


def mean_of_others(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    return [(fmean(rewards[:i] + rewards[i + 1 :]), 1.0) for i in range(len(rewards))]


def weighted_by_length(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
    mean = sum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [(mean, 1.0)] * len(rewards)


def best_of(k: int) -> Compare:
    """Compare with all subsets of size k: mean best reward of subsets with sample i, minus that of all subsets."""

    def compare(rewards: list[float], lengths: list[int], prompt: str) -> list[tuple[float, float]]:
        sets = list(combinations(range(len(rewards)), k))
        best = [max(rewards[i] for i in members) for members in sets]
        best_with_sample = [
            fmean(value for value, members in zip(best, sets, strict=True) if i in members) for i in range(len(rewards))
        ]
        scale = pstdev(best) + 1e-6
        return [(r - (mean - fmean(best)), scale) for r, mean in zip(rewards, best_with_sample, strict=True)]

    return compare


def amplified(kl: Divergence = Divergence()) -> Estimate:
    """Return GPG's estimate: r minus the group's mean, times samples / samples in groups with unequal rewards (without
    KL).
    """

    def larger(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        factor = sum(map(len, groups)) / sum(len(group) for group in groups if len({r for _, r in group}) > 1)
        plain = sample_estimate(group_mean, kl)(groups, ratios)
        return {name: [factor * a for a in advantages] for name, advantages in plain.items()}

    return larger


def over_rollouts(kl: Divergence = Divergence()) -> Estimate:
    """Return GDPO's estimate for one reward function, normalized over all samples."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        whole = sample_estimate(standardized, replace(kl, credit="whole"))(groups, ratios)
        normalized = [whole[sample.id][0] for group in groups for sample, _ in group]
        mean, deviation = fmean(normalized), stdev(normalized) + 1e-6
        advantages = {}
        for sample in (sample for group in groups for sample, _ in group):
            kls = kl.rewards(sample, ratios) if kl.credit == "reward_to_go" else {}
            advantages[sample.id] = [
                (whole[sample.id][0] - sum(x for s, x in kls.items() if s < t) - mean) / deviation
                for t in range(len(sample.response_ids))
            ]
        return advantages

    return estimate


def with_turns(gamma: float, weight: float, kl: Divergence = Divergence()) -> Estimate:
    """Return GiGPO's estimate: GRPO's plus, for each turn, its return compared with those of turns in equal states."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = sample_estimate(standardized, kl)(groups, ratios)
        for group in groups:
            found = []
            for sample, reward in group:
                rewards, turns = [*sample.episode.rewards], turns_of(sample)
                if turns:
                    rewards[-1] += reward - sum(rewards)
                for k, (tokens, (_, state)) in enumerate(zip(turns, sample.episode.turns, strict=True)):
                    found.append((sample, tokens, state, sum(gamma**n * r for n, r in enumerate(rewards[k:]))))
            for sample, tokens, state, value in found:
                same = [other for _, _, its_state, other in found if its_state == state]
                deviation = stdev(same) if len(same) > 1 else 0.0
                for t in tokens:
                    advantages[sample.id][t] += weight * (value - fmean(same)) / (deviation + 1e-6)
        return advantages

    return estimate


def turns_of(sample: Sample) -> list[list[int]]:
    """Return the trained tokens of each turn."""
    turns: list[list[int]] = []
    for t in trained(sample):
        if turns and turns[-1][-1] == t - 1:
            turns[-1].append(t)
        else:
            turns.append([t])
    return turns


def by_turn(gamma: float, lambda_: float, turn_gamma: float, values: Tokens, kl: Divergence = Divergence()) -> Estimate:
    """Return bi-level generalized advantage estimates, with the same λ for turns and for tokens."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for sample, reward in (item for group in groups for item in group):
            kls, state_values, turns = kl.rewards(sample, ratios), values[sample.id], turns_of(sample)
            found = [0.0] * len(sample.response_ids)
            ends = [turn[-1] for turn in turns]
            rewards = [kls.get(t, 0.0) + (reward if t == ends[-1] else 0.0) for t in ends]
            following = [*(state_values[t] for t in ends[1:]), 0.0]
            deltas = (
                [r + turn_gamma * after - state_values[t] for r, after, t in zip(rewards, following, ends, strict=True)]
                if ends
                else []
            )
            for turn, value in zip(turns, discounted(deltas, turn_gamma * lambda_), strict=True):
                found[turn[-1]] = value
                for t in turn[-2::-1]:
                    delta = kls.get(t, 0.0) + gamma * state_values[t + 1] - state_values[t]
                    found[t] = delta + gamma * lambda_ * found[t + 1]
            advantages[sample.id] = found
        return advantages

    return estimate


def token_estimate(gamma: float, kl: Divergence = Divergence()) -> Estimate:
    """Return Σ_{s≥t} γ^(s−t)·r_s over the trained tokens; the last one also receives the sample's reward."""
    return temporal_differences(gamma, 1.0, None, kl)


def temporal_differences(
    gamma: float, lambda_: float, values: Tokens | None, kl: Divergence = Divergence()
) -> Estimate:
    """Return generalized advantage estimates. Without a critic all values are 0."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for sample, reward in (item for group in groups for item in group):
            tokens, kls = trained(sample), kl.rewards(sample, ratios)
            state_values = [0.0 if values is None else values[sample.id][t] for t in tokens]
            rewards = [kls.get(t, 0.0) + (reward if t == tokens[-1] else 0.0) for t in tokens]
            following = [*state_values[1:], 0.0]
            deltas = [
                r + gamma * after - now
                for r, after, now in zip(rewards, following, state_values, strict=bool(state_values))
            ]
            by_token = dict(zip(tokens, discounted(deltas, gamma * lambda_), strict=True))
            advantages[sample.id] = [by_token.get(t, 0.0) for t in range(len(sample.response_ids))]
        return advantages

    return estimate


def whitened(estimate: Estimate) -> Estimate:
    """Whiten an estimate over all trained tokens."""

    def over_all(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        plain = estimate(groups, ratios)
        trained_advantages = [plain[sample.id][t] for group in groups for sample, _ in group for t in trained(sample)]
        mean, deviation = fmean(trained_advantages), stdev(trained_advantages) + 1e-6
        return {name: [(a - mean) / deviation for a in advantages] for name, advantages in plain.items()}

    return over_all


def trained(sample: Sample) -> list[int]:
    return [t for t, flag in enumerate(sample.response_mask) if flag]


AVERAGE, GREEDY = 0.4, {"0": 0.5, "1": 1.0, "2": 0.0}
"""Mean reward of earlier steps, and reward of the greedy response to each prompt: the baselines of some estimators."""


class EstimatorCase(NamedTuple):
    """A test case of one estimator.

    Attributes:
        keys: its name and options in the config.
        estimate: returns the reference, given the KL reward and the World of tests/objective_cases.py.
        given: names of the World's per-token scores that the estimator needs.
    """

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
    "GRPO": compared("grpo", standardized),
    "OPO": compared("opo", weighted_by_length),
    "GPG": EstimatorCase("gpg", lambda kl, world: amplified(kl)),
    "pass@k": compared("pass_at_k, k: 2", best_of(2)),
    "GDPO": EstimatorCase("gdpo", lambda kl, world: over_rollouts(kl)),
    "GiGPO": EstimatorCase("gigpo, turn_gamma: 0.8, turn_weight: 0.7", lambda kl, world: with_turns(0.8, 0.7, kl)),
    "Bi-Level GAE": EstimatorCase(
        "bi_level_gae, gamma: 0.9, gae_lambda: 0.8, turn_gamma: 0.7",
        lambda kl, world: whitened(by_turn(0.9, 0.8, 0.7, world.lists("values"), kl)),
        ("values",),
    ),
    "GAE": EstimatorCase(
        "gae, gamma: 0.9, gae_lambda: 0.8",
        lambda kl, world: whitened(temporal_differences(0.9, 0.8, world.lists("values"), kl)),
        ("values",),
    ),
}
"""At least one case per estimator."""
