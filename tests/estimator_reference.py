"""Advantage estimators in plain Hugging Face and torch, one sample and one token at a time. Written from the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import torch

from megarl.batch import Sample
from tests.grpo_reference import GrpoReference

Groups = Sequence[Sequence[tuple[Sample, float]]]
"""Samples of each prompt with their rewards."""

Ratios = Mapping[str, list[float]]
"""Sample id -> log π − log π_ref of each response token."""

Tokens = Mapping[str, list[float]]
"""Sample id -> a number for each response token."""

Estimate = Callable[[Groups, Ratios], dict[str, list[float]]]
"""(samples, log-ratios to the reference) -> advantage of each response token, by sample."""


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


def grpo_with_kl_of_samples(coefficient: float) -> Estimate:
    """R_i = r_i − β·k3(Σ_t d_t), against the group's mean and sample standard deviation."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for group in groups:
            totals = [
                reward - coefficient * k3(sum(ratios[sample.id][t] for t in trained(sample)))
                for sample, reward in group
            ]
            for (sample, _), total in zip(group, totals, strict=True):
                value = (total - fmean(totals)) / (stdev(totals) + 1e-6)
                advantages[sample.id] = [value] * len(sample.response_ids)
        return advantages

    return estimate


def reinforce_plus_plus(coefficient: float, gamma: float) -> Estimate:
    """Token t is rewarded with −β·d_t, the last one with r_i, too; discounted sums over what follows, whitened."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        returns = {}
        for sample, reward in (item for group in groups for item in group):
            returns[sample.id], later = {}, reward / gamma
            for t in reversed(trained(sample)):
                later = gamma * later - coefficient * ratios[sample.id][t]
                returns[sample.id][t] = later
        values = [value for own in returns.values() for value in own.values()]
        mean, deviation = fmean(values), stdev(values) + 1e-6
        return {
            sample.id: [(returns[sample.id].get(t, mean) - mean) / deviation for t in range(len(sample.response_ids))]
            for group in groups
            for sample, _ in group
        }

    return estimate


def leave_one_out_of_tokens(of_tokens: Tokens) -> Estimate:
    """PRIME's: Σ_{s≥t} (d_s − mean of the others' mean d) + r_i − mean of the others' r."""

    def estimate(groups: Groups, ratios: Ratios) -> dict[str, list[float]]:
        advantages = {}
        for group in groups:
            means = [fmean([of_tokens[sample.id][t] for t in trained(sample)] or [0.0]) for sample, _ in group]
            for i, (sample, reward) in enumerate(group):
                others = [j for j in range(len(group)) if j != i]
                baseline = fmean(means[j] for j in others)
                outcome = reward - fmean(group[j][1] for j in others)
                advantages[sample.id] = [
                    outcome + sum(of_tokens[sample.id][s] - baseline for s in trained(sample) if s >= t)
                    for t in range(len(sample.response_ids))
                ]
        return advantages

    return estimate


def trained(sample: Sample) -> list[int]:
    return [t for t, flag in enumerate(sample.response_mask) if flag]


def k3(log_ratio: float) -> float:
    return math.exp(-log_ratio) - 1 + log_ratio
