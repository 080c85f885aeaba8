"""A microbatch: samples packed back to back, in the form that ranks compute with."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


ROW_FIELDS = (
    *("rows", "targets", "row_sample", "rollout_logprobs", "mask", "weight", "imitation_weight", "old", "reference"),
    *("values", "implicit_reward", "process_reward", "kl_reward", "advantage", "returns", "selected"),
    *("candidate_ids", "labels"),
)
"""Fields of a TokenBatch whose first axis is rows; candidate_ids has a second axis for K candidates."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch: D documents (one prompt and one response each), packed without padding between them.

    Documents of the same prompt may share a prefix. Shared tokens appear once in the pack, and each document lists the
    positions of its tokens. The pack is in depth-first order: all continuations of a token follow it directly.

    T = tokens in the pack, including padding at the end. N = rows that need a log-prob, ordered by document, then by
    position. The row of a response token is the preceding token, whose hidden state predicts it. S = samples.

    tokens            int64 [T]
    positions         int64 [T]      position within the document
    document_tokens   int64 [Σ len]  positions in the pack of each document's tokens, document after document
    boundaries        int32 [D + 1]  offset of each document in document_tokens; padding, if any, is the last document
    rows              int64 [N]      positions in the pack whose hidden states go through the head
    targets           int64 [N]      sampled token of each row
    row_sample        int64 [N]      index of the row's sample within the microbatch
    rollout_logprobs  float32 [N]    log-prob under the rollout policy
    mask              bool [N]       False for response tokens that are not trained on
    weight            float32 [N]    share of the update's loss; 0 where the mask is False
    reward            float64 [S]    reward of each sample
    baseline          float64 [S]    advantage = (reward − baseline) / scale; float64, because float32 would lose the
                                     small differences between large rewards
    scale             float64 [S]
    token_baseline    float32 [S]    baseline for per-token rewards
    token_scale       float32 [S]    scale for per-token rewards
    stale             bool [S]       whether the oldest token was sampled with earlier weights; None: no sample is stale
    old               float32 [N]    log-prob under the policy at the start of the step; None: the current policy
    reference         float32 [N]    log-prob under the reference policy; None: not needed
    values            float32 [N]    critic's value, at the start of the step, of the state in which each target was
                                     sampled; None: no critic
    implicit_reward   float32 [N]    per-token reward from an implicit reward model, in addition to the sample's
                                     reward; None: no such model
    process_reward    float32 [N]    per-token reward from a process reward model or from turns, not included in
                                     `reward`; None: no such rewards
    kl_reward         float32 [N]    −coefficient · KL of each token to the reference; None: not part of the reward
    advantage         float32 [N]    None: not estimated yet
    returns           float32 [N]    critic's targets; None: not estimated yet, or no critic
    selected          bool [N]       tokens that the objective treats separately; None: it treats all tokens alike
    imitation_weight  float32 [N]    share of the update's loss on positive examples; None: not used
    candidate_ids     int64 [N, K]   tokens that the engine sampled from, padded with −1; a row of only −1 stands for
                                     the whole vocabulary; None: every row does
    labels            float32 [N]    label of each row's token, NaN if it has none; None: samples have no labels
    routes            int8 or int16 [T, layers, experts per token], as in Sample; None: no sample has routes
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    document_tokens: torch.Tensor
    boundaries: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    row_sample: torch.Tensor
    rollout_logprobs: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    reward: torch.Tensor
    baseline: torch.Tensor
    scale: torch.Tensor
    token_baseline: torch.Tensor
    token_scale: torch.Tensor
    stale: torch.Tensor | None = None
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    implicit_reward: torch.Tensor | None = None
    process_reward: torch.Tensor | None = None
    kl_reward: torch.Tensor | None = None
    advantage: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    imitation_weight: torch.Tensor | None = None
    candidate_ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    routes: torch.Tensor | None = None

    def to(self, device: torch.device) -> TokenBatch:
        """Copy the batch to a device, except document_tokens and boundaries, which are read on the host."""
        names = [f.name for f in fields(self) if f.name not in ("document_tokens", "boundaries")]
        values = {name: getattr(self, name) for name in names}
        return replace(self, **{name: value.to(device) for name, value in values.items() if value is not None})

    @property
    def in_loss(self) -> torch.Tensor:
        """Whether each row is in the loss, bool [N]. False for untrained tokens and for excluded samples."""
        return self.weight > 0

    def take_rows(self, numbers: torch.Tensor) -> TokenBatch:
        """Return the batch with its row fields restricted to these rows (int64 [n])."""
        values = {name: getattr(self, name) for name in ROW_FIELDS}
        return replace(self, **{name: value[numbers] for name, value in values.items() if value is not None})

    def validate(self) -> None:
        num_tokens, num_rows, num_samples = len(self.tokens), len(self.rows), len(self.reward)
        for name in ROW_FIELDS:
            values = getattr(self, name)
            shape = (num_rows,) if name != "candidate_ids" or values is None else (num_rows, values.shape[-1])
            assert values is None or tuple(values.shape) == shape, f"{name} has shape {tuple(values.shape)}"
        for name in ("baseline", "scale", "token_baseline", "token_scale"):
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_samples,), f"{name} has shape {shape}, expected ({num_samples},)"
        assert tuple(self.positions.shape) == (num_tokens,), "positions and tokens differ in length"
        assert self.routes is None or len(self.routes) == num_tokens, "routes and tokens differ in length"
        assert int(self.boundaries[0]) == 0 and int(self.boundaries[-1]) == len(self.document_tokens), (
            "boundaries do not span document_tokens"
        )
        is_covered = self.tokens.new_zeros(num_tokens)
        is_covered[self.document_tokens] = 1
        assert bool(is_covered.all()), "some tokens in the pack have no document"
        assert num_rows == 0 or int(self.rows.max()) < num_tokens, "a row index is outside the pack"
        assert num_rows == 0 or int(self.row_sample.max()) < num_samples, "a row has no sample"
