"""Bi-level generalized advantage estimation from a critic's values: over turns, then over the tokens of each turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.returns import discounted_sum, same_sample, temporal_differences, turns_of
from megarl.algorithms.shapes import require_one_shape
from megarl.algorithms.specs import TokenAdvantages, TokenEstimator
from megarl.core.ranges import Share

if TYPE_CHECKING:
    import torch


def bi_level_gae(
    reward: torch.Tensor,
    mask: torch.Tensor,
    row_sample: torch.Tensor,
    value: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    turn_gamma: float,
    turn_lambda: float | None = None,
) -> TokenAdvantages:
    """Return the advantages A_t of VAGEN's Bi-Level GAE (https://arxiv.org/abs/2510.16907), and the critic's target
    A_t + V_t.

    The last token e_k of turn k receives the turn's advantage A_k = Σ_l (γ_turn·λ_turn)^l·δ_{k+l}, where
    δ_k = r_{e_k} + γ_turn·V_{e_{k+1}} − V_{e_k}. The other tokens of the turn receive A_t = δ_t + γλ·A_{t+1}, where
    δ_t = r_t + γ·V_{t+1} − V_t. Rewards of later turns therefore reach a turn only through A_k, discounted once per
    turn.

    A turn is a run of consecutive trained tokens in a sample. The value after a sample's last turn is 0.

    Args:
        reward: float32 [N]. Rewards of untrained tokens are ignored.
        mask: bool [N], true for trained tokens.
        row_sample: int64 [N], index of each row's sample, non-decreasing.
        value: float32 [N], as in `gae`.
        turn_gamma: γ_turn, the discount from one turn to the next.
        turn_lambda: λ_turn. None uses gae_lambda, as in the published code.
    """
    require_one_shape(reward=reward, value=value, mask=mask, row_sample=row_sample)
    sample, turn = row_sample[mask], turns_of(mask, row_sample)[mask]
    now, rewards = value[mask], reward[mask]
    continues = same_sample(turn, 1)
    ends = ~continues
    by_turn = temporal_differences(rewards[ends], now[ends], same_sample(sample[ends], 1), turn_gamma)
    discount = turn_gamma * (gae_lambda if turn_lambda is None else turn_lambda)
    delta = temporal_differences(rewards, now, continues, gamma)
    delta[ends] = discounted_sum(by_turn, sample[ends], discount)
    advantage = discounted_sum(delta, turn, gamma * gae_lambda)
    zeros = value.new_zeros(value.shape)
    return TokenAdvantages(zeros.masked_scatter(mask, advantage), zeros.masked_scatter(mask, advantage + now))


SPEC = TokenEstimator(
    name="bi_level_gae",
    formula="GAE over turns for a turn's last token, GAE over tokens for its other tokens; whitened over the update",
    paper="VAGEN, arXiv 2510.16907",
    comparison="values",
    estimate=bi_level_gae,
    parameters={
        "gamma": (Share, 1.0),
        "gae_lambda": (Share, 1.0),
        "turn_gamma": (Share, 0.95),
        "turn_lambda": (Share | None, None),
    },
    whitens=True,
)
