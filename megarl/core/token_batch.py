"""A microbatch: samples packed one after the other, as the ranks compute with them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


ROW_FIELDS = (
    *(
        "rows",
        "targets",
        "row_sample",
        "rollout_logprobs",
        "mask",
        "weight",
        "imitation_weight",
        "old",
        "reference",
        "values",
    ),
    *("implicit_reward", "process_reward", "kl_reward", "advantage", "returns", "selected", "candidate_ids", "labels"),
)
"""The fields of a TokenBatch with one element per row, or K."""


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One microbatch: D documents (a prompt and one response each), packed without padding between them.

    Documents of the same prompt may share tokens that they begin with: these stand in the pack once, and each document
    lists where its own tokens are. The pack is then depth first: what goes on from a token follows it before anything
    else. T = tokens in the pack, padding at its end included. N = rows whose log-prob is wanted, ordered by
    document, then by position. The row of a response token is the token before it, whose hidden state predicts it.

    tokens            int64 [T]
    positions         int64 [T]      position within the document
    document_tokens   int64 [Σ len]  positions in the pack of each document's tokens, document after document
    boundaries        int32 [D + 1]  where each document begins in document_tokens; padding, if any, is the last one
    rows              int64 [N]      positions in the pack whose hidden state goes through the head
    targets           int64 [N]      the sampled token of each row
    row_sample        int64 [N]      index of the row's sample within the microbatch
    rollout_logprobs         float32 [N]    log-prob under the rollout_logprobs policy
    mask              bool [N]       False for response tokens that are not trained on
    weight            float32 [N]    share of the update's loss, 0 where the mask is False
    reward            float64 [S]    reward of each sample
    baseline          float64 [S]    advantage = (reward − baseline) / scale; float64, because where large rewards
                                     differ little few digits would be left in float32
    scale             float64 [S]
    token_baseline    float32 [S]    the same for rewards of single tokens
    token_scale       float32 [S]
    old               float32 [N]    log-prob under the policy at the start of the step; None: it is the current one
    reference         float32 [N]    log-prob under the reference; None: no term reads it
    values            float32 [N]    the critic's value of the state in which each target was sampled, from the start of
                                     the step; None: there is no critic
    implicit_reward   float32 [N]    an implicit reward model's reward of each token, beside the sample's; None: there
                                     is none
    process_reward    float32 [N]    a reward model's reward of each token, and the rewards of turns, which `reward`
                                     then does not contain; None: there are none
    kl_reward         float32 [N]    −coefficient · KL of each token to the reference; None: it is no reward
    advantage         float32 [N]    None: not estimated yet
    returns           float32 [N]    the critic's targets; None: not estimated yet, or there is no critic
    selected          bool [N]       tokens that the objective treats apart; None: it does not
    imitation_weight  float32 [N]    share of the update's loss of positive examples; None: nobody reads it
    candidate_ids     int64 [N, K]   the tokens that the engine sampled from, padded with −1; a row of −1 alone stands
                                     for the whole vocabulary; None: every row does
    labels            float32 [N]    the label of each row's token, NaN for one without; None: samples have none
    routes            int8 or int16 [T, layers, experts per token]: as in Sample; None: no sample has any
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
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return TokenBatch(**{name: None if value is None else value.to(device) for name, value in moved.items()})

    @property
    def in_loss(self) -> torch.Tensor:
        """Whether each row is in the loss, bool [N]: False for tokens that are not trained on, and for those of samples
        that the loss leaves out."""
        return self.weight > 0

    def take_rows(self, numbers: torch.Tensor) -> TokenBatch:
        """Returns the batch with the fields of these rows (int64 [n]) only."""
        kept = {name: getattr(self, name) for name in ROW_FIELDS}
        return replace(self, **{name: None if value is None else value[numbers] for name, value in kept.items()})

    def validate(self) -> None:
        num_tokens, num_rows, num_samples = len(self.tokens), len(self.rows), len(self.reward)
        for name in ROW_FIELDS:
            values = getattr(self, name)
            shape = (num_rows,) if name != "candidate_ids" or values is None else (num_rows, values.shape[-1])
            assert values is None or tuple(values.shape) == shape, f"{name} has shape {tuple(values.shape)}"
        for name in ("baseline", "scale", "token_baseline", "token_scale"):
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_samples,), f"{name} has shape {shape}, expected ({num_samples},)"
        assert tuple(self.positions.shape) == (num_tokens,), "one position per token"
        assert self.routes is None or len(self.routes) == num_tokens, "routes of each token"
        assert int(self.boundaries[0]) == 0 and int(self.boundaries[-1]) == len(self.document_tokens), "documents"
        stands = self.tokens.new_zeros(num_tokens, dtype=bool)
        stands[self.document_tokens] = True
        assert bool(stands.all()), "every token of the pack is part of a document"
        assert num_rows == 0 or int(self.rows.max()) < num_tokens, "a row outside the pack"
        assert num_rows == 0 or int(self.row_sample.max()) < num_samples, "a row of no sample"
