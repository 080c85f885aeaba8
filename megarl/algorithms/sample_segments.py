"""Per-sample reductions for samples whose tokens may be split across ranks."""

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
    """One rank's rows of a set of samples.

    Attributes:
        mask: bool [N], true for trained tokens; only these are summed.
        row_sample: int64 [N], index of each row's sample, below num_samples.
        reduce: sums a tensor over the ranks that hold rows of these samples; may work in place.
    """

    mask: torch.Tensor
    row_sample: torch.Tensor
    num_samples: int
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda values: values

    def __post_init__(self) -> None:
        require_one_shape(mask=self.mask, row_sample=self.row_sample)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the trained tokens of each sample, float32 [S], detached. `values` is float32 [N]."""
        require_one_shape(values=values, mask=self.mask)
        return self.reduce(self._sums(values.detach()))

    def differentiable_total(self, values: torch.Tensor) -> torch.Tensor:
        """Return `total` with a gradient, float32 [S], differentiable in this rank's values only. If every rank
        computes a loss from it, the gradients summed over the ranks are the full gradient."""
        sums = self._sums(values)
        return self.total(values) + (sums - sums.detach())

    @cached_property
    def count(self) -> torch.Tensor:
        """The number of trained tokens of each sample, float32 [S]."""
        return self.total(self.mask.new_ones(self.mask.shape).float())

    def at_level(self, level: str, values: torch.Tensor) -> torch.Tensor:
        """Return the values themselves ("token"), their sum over each row's sample ("sequence"), or their mean
        ("geometric": the log of the geometric mean, if the values are logarithms)."""
        require_one_shape(values=values, mask=self.mask)
        if level == "token":
            return values
        return self.sum(values) if level == "sequence" else self.mean(values)

    def share_at_level(self, level: str) -> torch.Tensor:
        """Return each row's weight in a mean over `at_level` values. Level "token": the mask, bool [N]. Other levels:
        1/n for each of a sample's n trained tokens, float32 [N], so that the mean is over samples."""
        if level == "token":
            return self.mask
        return self.mask / self.count.clamp(min=1)[self.row_sample]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return each row's mean over its sample, x̄ + x_t − sg(x_t), float32 [N].

        A function f of the mean of n tokens has the gradient f'(x̄)/n with respect to each of them. The mean over rows
        of f(x̄ + x_t − sg(x_t)) has the same value and the same gradient with respect to every x_t, without gradient
        communication between ranks.
        """
        mean = (self.total(values) / self.count.clamp(min=1))[self.row_sample]
        return mean + (values - values.detach())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return each row's sum over its sample, n·mean, float32 [N]. The mean over rows of f(sum) has the gradient
        f'(Σx) with respect to x_t."""
        return self.count[self.row_sample] * self.mean(values)

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over this rank's rows of each sample, float32 [S]."""
        trained = values.where(self.mask, 0.0)
        return trained.new_zeros(self.num_samples).index_add(0, self.row_sample, trained)
