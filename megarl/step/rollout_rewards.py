"""Rewards, KL and returns of rollouts, and the weight of a rollout in statistics and losses.

A rollout has several samples if its context was restarted or sub-agents took part. The samples share its reward.
Statistics count a rollout once. Losses count each of its samples.

For sample s of a rollout, x_t are the turn or process rewards of its tokens, which are part of the outcome, d_t the
implicit reward model's rewards, and k_t the KL rewards; token u precedes token t in s. The outcome is the combined
value of the reward functions and the environment. Length rewards and the KL of a rollout are sums over its samples.

Reward R of a rollout, used for its baseline and scale (Σ_s over all of its samples):

    credit=whole           R = outcome + Σ_s length_s + Σ_s Σ_t (k_t + d_t)
    credit=reward_to_go    R = outcome + Σ_s length_s + Σ_s Σ_t (k_t − x_t); x and d are compared token by token

Advantage of trained token t of sample s:

    credit=whole           (R − baseline) / scale
    credit=reward_to_go    (R − Σ_{u<t} k_u − baseline) / scale + Σ_{u≥t} (x_u + d_u − token_baseline) / token_scale
    reinforce_plus_plus,   outcome + Σ_s length_s − Σ_s Σ_t x_t is the reward of the last trained token of every sample;
    gae                    x_t, d_t and k_t are rewards of their tokens

gdpo compares the rewards that make up R one by one: each reward function, the environment's reward and the length
reward. The rest of R, which is Σ_s Σ_t k_t and with credit=whole also d_t, is compared as an additional reward, without
a scale.

gigpo adds an advantage for the token's turn. The turns of a rollout are those of all its samples, in the order in which
they were sampled. Each has its turn rewards; the last one also receives outcome + Σ_s length_s − Σ_s Σ_t x_t.

In rewards to go, a token's reward counts only for the tokens of its own sample, because the turns of other samples do
not continue the sample's tokens. A reward for the rollout as a whole belongs in the outcome.

Weight of a rollout with n samples:

    group baselines and scales, pass@k, GPG's factor, GDPO's moments,      1
    moving average, greedy baseline, solve rates, reward metrics,
    limits on failures
    OPO's baseline                                                         its trained tokens
    baselines and scales of GiGPO's turns                                  its turns in the state
    baseline and scale of token rewards                                    its rewarded tokens (RLOO: 1)
    whitening, token_mean, token_sum, prompt_mean_of_token_means,          its trained tokens
    imitation loss
    sequence_mean_of_token_means, sequence_mean_of_token_sums,             n: each sample is a sequence
    sequence_mean_over_max_tokens, implicit reward model's loss,
    kl.adaptive_horizon
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.algorithms.baselines import Member, Turn
from megarl.algorithms.specs import SampleEstimator
from megarl.config.algorithm_schema import Advantage
from megarl.config.schema import Config
from megarl.core.sample import SampleRef
from megarl.core.score import NO_TOTALS, RewardPart, TokenTotals
from megarl.rewards.length import overlong_penalty

Totals = Mapping[str, TokenTotals]
"""Sums over one model's per-token rewards: sample id -> TokenTotals."""

LENGTH = "rewards.overlong_buffer"
"""Name of the length reward among a rollout's rewards."""


def rollouts_of(group: Sequence[SampleRef]) -> list[list[SampleRef]]:
    """Return the samples in each rollout of a group."""
    rollouts: dict[str, list[SampleRef]] = {}
    for item in group:
        rollouts.setdefault(item.rollout_id, []).append(item)
    return list(rollouts.values())


def length_rewards(config: Config, samples: Sequence[SampleRef]) -> dict[str, float]:
    """Return the sum of the length rewards of each rollout's samples, by rollout id."""
    buffer, longest = config.rewards.overlong_buffer, config.rollout.max_new_tokens
    rewards = dict.fromkeys((item.rollout_id for item in samples), 0.0)
    if buffer is not None:
        for item in samples:
            rewards[item.rollout_id] += overlong_penalty(item.num_response_tokens, longest, buffer)
    return rewards


def member_of(
    advantage: Advantage,
    rollout: Sequence[SampleRef],
    token_reward_totals: Totals,
    kl_reward_totals: Totals,
    earlier: float = 0.0,
) -> Member:
    """Return the Member for a rollout, given its samples. It contains the reward R, and the token rewards if they are
    compared separately. The totals come from the implicit reward model and from the KL rewards."""
    item = rollout[0]
    parts = item.reward_parts and {**item.reward_parts, LENGTH: RewardPart(item.length_reward)}
    num_tokens = sum(item.num_trained_tokens for item in rollout)
    learned = total_of(rollout, token_reward_totals)
    reward = item.reward + total_of(rollout, kl_reward_totals).total
    if advantage.credits_to_go:
        token_totals = sum((item.token_reward_totals for item in rollout), NO_TOTALS)
        return Member(reward - token_totals.total, num_tokens, token_totals + learned, item.greedy, earlier, parts)
    return Member(reward + learned.total, num_tokens, NO_TOTALS, item.greedy, earlier, parts)


def turns_of_rollout(rollout: Sequence[SampleRef]) -> dict[tuple[str, int], Turn]:
    """Return the turns of a rollout in order, keyed by their sample's id and their index in the sample. The last one
    also receives the part of the rollout's reward that is not a turn's, without the KL and learned token rewards."""
    found = sorted(
        (number, item.id, index, state, reward)
        for item in rollout
        for index, ((number, state), reward) in enumerate(zip(item.turns, item.turn_rewards, strict=True))
    )
    turns = {(sample, index): Turn(state, reward) for _, sample, index, state, reward in found}
    if turns:
        *_, last = turns
        others = rollout[0].reward - math.fsum(turn.reward for turn in turns.values())
        turns[last] = replace(turns[last], reward=turns[last].reward + others)
    return turns


def reward_from_others(
    advantage: Advantage,
    rollout: Sequence[SampleRef],
    item: SampleRef,
    token_reward_totals: Totals,
    kl_reward_totals: Totals,
) -> float:
    """Return the contribution of the rollout's other samples to the item's scalar reward, R. The item's rank adds the
    item's own part, computed from its tokens."""
    others = [other for other in rollout if other.id != item.id]
    kl = total_of(others, kl_reward_totals).total
    if not advantage.credits_to_go:
        return kl + total_of(others, token_reward_totals).total
    token_total = sum((other.token_reward_totals for other in others), NO_TOTALS).total
    return (kl if isinstance(advantage.spec, SampleEstimator) else 0.0) - token_total


def total_of(samples: Sequence[SampleRef], totals: Totals) -> TokenTotals:
    return sum((totals.get(item.id, NO_TOTALS) for item in samples), NO_TOTALS)
