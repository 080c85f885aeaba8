"""Sums over whole samples, as each of their tokens sees them, where the tokens may be on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megarl.algorithms.shapes import require_one_shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SampleSegments:
    """The rows that a rank has of some samples.

    mask         bool [N], the trained tokens: only they are summed
    row_sample   int64 [N], each row's sample, below num_samples
    reduce       adds up a tensor over the ranks that have rows of these samples; may change it in place
    """

    mask: torch.Tensor
    row_sample: torch.Tensor
    num_samples: int
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda values: values

    def __post_init__(self) -> None:
        require_one_shape(mask=self.mask, row_sample=self.row_sample)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Σ over the trained tokens of each sample, without gradient. values: float32 [N]; returns float32 [S]."""
        require_one_shape(values=values, mask=self.mask)
        return self.reduce(self._sums(values.detach()))

    def of_each(self, values: torch.Tensor) -> torch.Tensor:
        """`total` with a gradient: float32 [S], differentiable in this rank's values only. A loss that every rank
        computes of it has its whole gradient as the sum of the ranks'."""
        sums = self._sums(values)
        return self.total(values) + (sums - sums.detach())

    @cached_property
    def count(self) -> torch.Tensor:
        """float32 [S]: trained tokens of each sample."""
        return self.total(self.mask.new_ones(self.mask.shape).float())

    def at_level(self, level: str, values: torch.Tensor) -> torch.Tensor:
        """values themselves ("token"), their sum over each row's sample ("sequence"), or their mean ("geometric": that
        of what they are the logarithms of)."""
        require_one_shape(values=values, mask=self.mask)
        if level == "token":
            return values
        return self.sum(values) if level == "sequence" else self.mean(values)

    def share_at_level(self, level: str) -> torch.Tensor:
        """What each row counts in a mean of what `at_level` makes of values: as a trained token (bool [N]), or of a
        sample's n tokens each 1/n (float32 [N]), so that the mean is over samples."""
        if level == "token":
            return self.mask
        return self.mask / self.count.clamp(min=1)[self.row_sample]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Each row's mean over its sample, x̄ + x_t − sg(x_t): float32 [N].

        A function f of the mean of n tokens has the gradient f'(x̄)/n in each of them. The mean over the rows of
        f(x̄ + x_t − sg(x_t)) has the same value and, in every x_t, the same gradient: no gradient crosses ranks.
        """
        mean = (self.total(values) / self.count.clamp(min=1))[self.row_sample]
        return mean + (values - values.detach())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Each row's sum over its sample, n·mean: the mean over rows of f(sum) has the gradient f'(Σx) in each x_t."""
        return self.count[self.row_sample] * self.mean(values)

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """float32 [S]: the sums over this rank's rows."""
        trained = values.where(self.mask, 0.0)
        return trained.new_zeros(self.num_samples).index_add(0, self.row_sample, trained)
