"""Returns: discounted sums of rewards over the rest of a sample, and placement of sample rewards on tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_list, require_one_shape

if TYPE_CHECKING:
    import torch


def reward_to_go(reward: torch.Tensor, mask: torch.Tensor, row_sample: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return G_t = Σ_{s≥t} γ^(s−t)·r_s over the trained tokens of row t's sample, float32 [N]; 0 for other rows.

    Args:
        reward: float32 [N]. Rewards of untrained tokens are ignored.
        mask: bool [N], true for trained tokens. γ discounts per trained token.
        row_sample: int64 [N], index of each row's sample, non-decreasing.
    """
    require_one_shape(reward=reward, mask=mask, row_sample=row_sample)
    sums = discounted_sum(reward[mask], row_sample[mask], gamma)
    return reward.new_zeros(reward.shape).masked_scatter(mask, sums)


def discounted_sum(x: torch.Tensor, row_sample: torch.Tensor, discount: float | torch.Tensor) -> torch.Tensor:
    """Return Σ_l discount^l · x_{t+l} over the rest of each row's sample.

    Computed by doubling: the sum of 2n terms is the sum of the first n plus the discounted sum of the next n.

    Args:
        x: float32 [N].
        row_sample: int64 [N], index of each row's sample, non-decreasing.
        discount: a number, or float64 [N], equal for all rows in a sample.
    """
    require_one_shape(x=x, row_sample=row_sample)
    terms = 1
    while terms < len(x):
        later = (discount**terms * x.roll(-terms)).to(x)
        x = x + later.where(same_sample(row_sample, terms), 0.0)
        terms *= 2
    return x


def at_last_token(reward: torch.Tensor, mask: torch.Tensor, row_sample: torch.Tensor) -> torch.Tensor:
    """Place each sample's reward, float32 [S], on its last trained token. Return float32 [N], 0 elsewhere."""
    require_list("reward", reward)
    require_one_shape(mask=mask, row_sample=row_sample)
    rows = mask.nonzero()[:, 0]
    last = rows[~same_sample(row_sample[rows], 1)]
    placed = reward.new_zeros(len(mask))
    placed[last] = reward[row_sample[last]]
    return placed


def sum_of_sample(reward: torch.Tensor, mask: torch.Tensor, row_sample: torch.Tensor, num_samples: int) -> torch.Tensor:
    """Return Σ_t r_t over the trained tokens of each sample, float32 [S]. `reward` is float32 [N]."""
    require_one_shape(reward=reward, mask=mask, row_sample=row_sample)
    return reward.new_zeros(num_samples).index_add(0, row_sample, reward.where(mask, 0.0))


def temporal_differences(
    reward: torch.Tensor, value: torch.Tensor, continues: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Return r_t + γ·V_{t+1} − V_t, float32 [n], with V_{t+1} = 0 where `continues`, bool [n], is false."""
    require_one_shape(reward=reward, value=value, continues=continues)
    return reward + gamma * value.roll(-1).where(continues, 0.0) - value


def turns_of(mask: torch.Tensor, row_sample: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's turn, int64 [N], non-decreasing. A turn is a run of consecutive trained tokens in
    a sample. An untrained row has the index of the turn before it; rows before the first turn have −1.

    Args:
        mask: bool [N], true for trained tokens.
        row_sample: int64 [N], index of each row's sample, non-decreasing.
    """
    require_one_shape(mask=mask, row_sample=row_sample)
    begins = mask.clone()
    begins[1:] &= ~(mask[:-1] & (row_sample[1:] == row_sample[:-1]))
    return begins.long().cumsum(0) - 1


def same_sample(row_sample: torch.Tensor, distance: int) -> torch.Tensor:
    """Return bool [N]: whether the row `distance` positions later exists and belongs to the same sample."""
    same = row_sample == row_sample.roll(-distance)
    same[-distance:] = False  # roll compares these rows with the first ones
    return same
