"""A teacher's most probable tokens, and the probability of all other tokens, computed from hidden states and a
vocabulary-sharded output weight. As in linear_head.py, logits are computed in tiles and never stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.ops.head_tile import NEVER, add_at
from megarl.ops.linear_head import new_sums, reduce_sums, tile_functions
from megarl.ops.output_layer import OutputLayer, held_tokens, is_sharded, scale_of, tile

SMALLEST_REST = 2**-23
"""Lower bound for a rest that is computed as 1 − Σ p in float32: the spacing of float32 numbers at 1."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """A model's most probable tokens at N positions, and the rest of its distribution.

    Attributes:
        ids: int64 [N, k].
        log_probs: float32 [N, k], normalized over the full vocabulary.
        rest: float32 [N], the logarithm of the total probability of all other tokens; NEVER or less if there are none.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, log_probs: torch.Tensor) -> TopTokens:
        """Return the tokens of a model that reports no other probabilities. The rest is 1 − Σ p, whose error is about
        1e-7, so smaller values become SMALLEST_REST."""
        total = log_probs.double().exp().sum(-1)
        return cls(ids, log_probs, (1 - total).clamp(min=SMALLEST_REST).log().float())

    @property
    def packed(self) -> torch.Tensor:
        """The ids, the log-probs and the rest as columns of one tensor, float32 [N, 2k + 1]. float32 represents all
        integers up to 2²⁴, which exceeds every vocabulary."""
        return torch.cat((self.ids.float(), self.log_probs, self.rest[:, None]), -1)

    @classmethod
    def unpacked(cls, packed: torch.Tensor) -> TopTokens:
        k = packed.shape[1] // 2
        return cls(packed[:, :k].long(), packed[:, k : 2 * k], packed[:, 2 * k])

    def within(self, vocab_size: int) -> TopTokens:
        """Restrict the tokens to a smaller vocabulary. All other tokens count as part of the rest: their ids become −1,
        and their log-probs NEVER."""
        is_known = self.ids < vocab_size
        others = self.log_probs.where(~is_known, NEVER)
        rest = torch.cat((others, self.rest[:, None]), -1).logsumexp(-1)
        return TopTokens(self.ids.where(is_known, -1), self.log_probs.where(is_known, NEVER), rest)


@torch.no_grad()
def top_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    k: int,
    temperature: float | torch.Tensor,
    vocab_size: int,
    process_group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
    logits_dtype: torch.dtype = torch.float32,
) -> TopTokens:
    """Return the min(k, vocab_size) most probable tokens at each position in descending order, without gradients.

    The rest is a sum over the other tokens instead of 1 − Σ p, which would lose precision for a confident model. The
    other arguments are as in `log_prob_and_entropy`.
    """
    k = min(k, vocab_size)
    first_row, num_rows = held_tokens(weight, vocab_size, process_group)
    layer, scale = OutputLayer(hidden, weight, bias, logits_dtype), scale_of(temperature, hidden)
    sums = new_sums(hidden)
    top = sums.new_full((len(hidden), k), NEVER)
    ids = torch.full_like(top, -1, dtype=torch.int64)
    num_tokens, num_columns = tile()
    for first in range(0, len(hidden), num_tokens):
        span = slice(first, first + num_tokens)
        part_scale = None if scale is None else scale[span]
        for start, z in layer.part(span, num_rows).tiles(num_columns):
            values, columns = z.topk(min(k, z.shape[1]))
            add_at(z, columns, torch.full_like(values, NEVER))
            _fold(z, part_scale, sums[:, span])
            candidates = torch.cat((top[span], values), 1), torch.cat((ids[span], columns + (first_row + start)), 1)
            top[span], ids[span], others = _split(*candidates, k)
            _fold(others, part_scale, sums[:, span])
    if is_sharded(process_group):
        reduce_sums(sums, process_group)
        top, ids, others = _split(_gathered(top, process_group), _gathered(ids, process_group), k)
        _fold(others, scale, sums)
    maximum, total, *_ = sums
    top, rest = top if scale is None else top * scale[:, None], maximum + total.log()
    log_sum_exp = torch.logaddexp(top.logsumexp(-1), rest)
    return TopTokens(ids, top - log_sum_exp[:, None], rest - log_sum_exp)


def _fold(logits: torch.Tensor, scale: torch.Tensor | None, sums: torch.Tensor) -> None:
    """Accumulate logits into the running sums of `head_tile.fold` without targets. Overwrites the logits."""
    no_targets = torch.full((len(logits),), -1, device=logits.device)
    tile_functions().fold(logits, no_targets, scale, None, sums)


def _split(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the k largest logits of each row, [n, k], their ids, and the other logits."""
    ordered, places = logits.sort(-1, descending=True)
    return ordered[:, :k], ids.gather(1, places[:, :k]), ordered[:, k:].contiguous()


def _gathered(values: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the columns of all ranks side by side."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(parts, values, group=process_group)
    return torch.cat(parts, 1)
