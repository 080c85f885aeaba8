"""Collects per-token details for the rollouts page: advantages and log-prob differences.

For most samples, only mean values are reported. For a few groups per step, the values of every token are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megarl.core.token_batch import TokenBatch
from megarl.data.local_batch import LocalBatch
from megarl.megatron.losses import Loss, PolicyTerms, advantage_of
from megarl.megatron.metric_sums import Sums
from megarl.rewards.rollout_file import LOGPROB_DIFFERENCES, TOKEN_ADVANTAGES, has_token_details


class TokenDetails:
    """Collects token details for trained samples until `take` is called."""

    def __init__(self, num_groups: int):
        """`num_groups` is the number of groups per step with token details."""
        self._num_groups = num_groups
        self._details: dict[str, dict[str, torch.Tensor]] = {}
        self._members: list[list[str]] = []
        """Sample ids in each microbatch of the current update."""

    def begin_update(self, batches: Sequence[TokenBatch], batch: LocalBatch) -> None:
        """Record the update's advantages and, if a pass computed the old log-probs, the log-prob differences."""
        self._members = [[item.sample.id for item in members] for members in batch.members]
        if not self._num_groups:
            return
        for number, token_batch in enumerate(batches):
            self._record(number, token_batch, TOKEN_ADVANTAGES, advantage_of(token_batch))
            if token_batch.old is not None:
                self._record(number, token_batch, LOGPROB_DIFFERENCES, token_batch.old - token_batch.rollout_logprobs)

    def watch(self, loss: Loss) -> Loss:
        """Wrap the loss so that computing its metrics records the log-prob differences. Used for a step's first update
        if no pass computed the old log-probs. Microbatches arrive in order. Rows split over context-parallel ranks are
        not supported."""
        if not self._num_groups:
            return loss
        numbers = iter(range(len(self._members)))

        def metrics(batch: TokenBatch, terms: PolicyTerms) -> Sums:
            if batch.old is None:
                self._record(
                    next(numbers), batch, LOGPROB_DIFFERENCES, terms.scored[:, 0].detach() - batch.rollout_logprobs
                )
            return loss.metrics(batch, terms)

        return replace(loss, metrics=metrics)

    def take(self) -> dict[str, dict[str, list[float]]]:
        """Return sample id -> detail name -> value for each response token, for all updates since the last call."""
        details, self._details = self._details, {}
        return {name: {key: values.tolist() for key, values in rows.items()} for name, rows in details.items()}

    def _record(self, microbatch: int, batch: TokenBatch, key: str, values: torch.Tensor) -> None:
        for number, name in enumerate(self._members[microbatch]):
            if has_token_details(name, self._num_groups):
                rows: Mapping[str, torch.Tensor] = {key: values[batch.row_sample == number]}
                self._details.setdefault(name, {}).update(rows)
