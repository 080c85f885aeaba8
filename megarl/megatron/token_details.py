"""What the page of rollouts shows of single tokens: their advantages, and the differences of their log-probs.

Of most samples a run keeps means. Of a few of a step, whole groups, it keeps each token's values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from megarl.core.token_batch import TokenBatch
from megarl.data.local_batch import LocalBatch
from megarl.megatron.losses import Loss, PolicyTerms
from megarl.megatron.metric_sums import Sums
from megarl.rewards.rollout_file import has_token_details

ADVANTAGES, DIFFERENCES = "token_advantages", "logprob_differences"
"""The names of both in a rollout's row. A difference is the trainer's log-prob at the start of the step less the
engine's."""


class TokenDetails:
    """The details of the samples that updates learn from, until they are taken."""

    def __init__(self, num_groups: int):
        """num_groups: of a step's groups, those with details."""
        self._num_groups = num_groups
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._members: list[list[str]] = []
        """The names of the samples of each microbatch of this update."""

    def begin_update(self, batches: Sequence[TokenBatch], batch: LocalBatch) -> None:
        """Notes advantages, and the differences where a pass has made the log-probs."""
        self._members = [[item.sample.id for item in members] for members in batch.members]
        if not self._num_groups:
            return
        for number, token_batch in enumerate(batches):
            self._note(number, token_batch, ADVANTAGES, token_batch.advantage)
            if token_batch.old is not None:
                self._note(number, token_batch, DIFFERENCES, token_batch.old - token_batch.rollout_logprobs)

    def watch(self, loss: Loss) -> Loss:
        """Return a loss whose metrics also note the differences of a step's first update, for which there was no pass:
        the microbatches come one after the other. Rows shared out over context-parallel ranks are left out."""
        if not self._num_groups:
            return loss
        numbers = iter(range(len(self._members)))

        def metrics(batch: TokenBatch, terms: PolicyTerms) -> Sums:
            if batch.old is None:
                self._note(next(numbers), batch, DIFFERENCES, terms.scored[:, 0].detach() - batch.rollout_logprobs)
            return loss.metrics(batch, terms)

        return replace(loss, metrics=metrics)

    def take(self) -> dict[str, dict[str, list[float]]]:
        """Returns sample id -> name -> value of each response token, of all updates since the last call."""
        taken, self._found = self._found, {}
        return {name: {key: values.tolist() for key, values in rows.items()} for name, rows in taken.items()}

    def _note(self, microbatch: int, batch: TokenBatch, key: str, values: torch.Tensor) -> None:
        for number, name in enumerate(self._members[microbatch]):
            if has_token_details(name, self._num_groups):
                rows: Mapping[str, torch.Tensor] = {key: values[batch.row_sample == number]}
                self._found.setdefault(name, {}).update(rows)
