"""The fields of a microbatch that objectives and advantage estimators read, for tokens and for denoising steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    import torch


TEACHER = "teacher/"
"""Prefix of a teacher's name among the scores of samples, as in teacher/NAME."""

PARTIAL_SCORES = (TEACHER, "process_reward")
"""Prefixes of token scores that samples may lack: a teacher does not score all samples, and a sample may consist of
turns without rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """N rows of S samples. A row is an action of the policy: a token of a response, or a denoising step of an image.

    row_sample        int64 [N]      index of the row's sample within the microbatch
    rollout_logprobs  float32 [N]    log-prob under the rollout policy
    mask              bool [N]       False for rows that are not trained on
    weight            float32 [N]    share of the update's loss; 0 where the mask is False
    reward            float64 [S]    reward of each sample
    baseline          float64 [S]    advantage = (reward − baseline) / scale; float64, because float32 would lose the
                                     small differences between large rewards
    scale             float64 [S]
    token_baseline    float32 [S]    baseline for per-token rewards
    token_scale       float32 [S]    scale for per-token rewards
    turn_advantage    float32 [N]    advantage of each row's turn, in addition to its sample's; None: turns are not
                                     compared
    stale             bool [S]       whether the oldest token was sampled with earlier weights; None: no sample is stale
    given             bool [S]       whether the response is from the data instead of an engine; None: no response is
    old               float32 [N]    log-prob under the policy at the start of the step; None: the current policy
    reference         float32 [N]    log-prob under the reference policy; None: not needed
    values            float32 [N]    critic's value, at the start of the step, of the state in which each target was
                                     sampled; None: no critic
    implicit_reward   float32 [N]    per-token reward from an implicit reward model, in addition to the sample's
                                     reward; None: no such model
    process_reward    float32 [N]    per-token reward from a process reward model or from turns, not included in
                                     `reward`; None: no such rewards
    kl_reward         float32 [N]    −coefficient · KL of each token to the reference; None: not part of the reward
    teachers          float32 [N, K] log-prob under each teacher, in the order of teachers.models, or kl.UNSCORED; None:
                                     no teacher, or a divergence between distributions
    advantage         float32 [N]    None: not estimated yet
    returns           float32 [N]    critic's targets; None: not estimated yet, or no critic
    selected          bool [N]       tokens that the objective treats separately; None: it treats all tokens alike
    imitation_weight  float32 [N]    share of the update's loss on positive examples; None: not used
    """

    row_sample: torch.Tensor
    rollout_logprobs: torch.Tensor
    mask: torch.Tensor
    weight: torch.Tensor
    reward: torch.Tensor
    baseline: torch.Tensor
    scale: torch.Tensor
    token_baseline: torch.Tensor
    token_scale: torch.Tensor
    turn_advantage: torch.Tensor | None = None
    stale: torch.Tensor | None = None
    given: torch.Tensor | None = None
    old: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None
    implicit_reward: torch.Tensor | None = None
    process_reward: torch.Tensor | None = None
    kl_reward: torch.Tensor | None = None
    teachers: torch.Tensor | None = None
    advantage: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    selected: torch.Tensor | None = None
    imitation_weight: torch.Tensor | None = None

    row_fields: ClassVar[tuple[str, ...]] = (
        *("row_sample", "rollout_logprobs", "mask", "weight", "imitation_weight", "old", "reference", "values"),
        *("turn_advantage", "implicit_reward", "process_reward", "kl_reward", "teachers", "advantage", "returns"),
        "selected",
    )
    """Fields whose first axis is rows."""
    host_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that `to` leaves on the host."""

    def to(self, device: torch.device) -> Self:
        """Copy the batch to a device, except `host_fields`."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.host_fields}
        return replace(self, **{name: _move(value, device) for name, value in values.items()})

    @property
    def in_loss(self) -> torch.Tensor:
        """Whether each row is in the loss, bool [N]. False for untrained rows and for excluded samples."""
        return self.weight > 0

    @property
    def only_sampled(self) -> Self:
        """The batch with given responses excluded from its mask and weights."""
        if self.given is None:
            return self
        is_given = self.given[self.row_sample]
        imitation = None if self.imitation_weight is None else self.imitation_weight.masked_fill(is_given, 0.0)
        weight = self.weight.masked_fill(is_given, 0.0)
        return replace(self, mask=self.mask & ~is_given, weight=weight, imitation_weight=imitation)

    def take_rows(self, numbers: torch.Tensor) -> Self:
        """Return the batch with its row fields restricted to these rows (int64 [n])."""
        values = {name: getattr(self, name) for name in self.row_fields}
        return replace(self, **{name: value[numbers] for name, value in values.items() if value is not None})

    def validate(self) -> None:
        """Check the fields' shapes."""
        num_rows, num_samples = len(self.row_sample), len(self.reward)
        for name in self.row_fields:
            values = getattr(self, name)
            assert values is None or len(values) == num_rows, f"{name} has shape {tuple(values.shape)}"
        for name in ("baseline", "scale", "token_baseline", "token_scale"):
            shape = tuple(getattr(self, name).shape)
            assert shape == (num_samples,), f"{name} has shape {shape}, expected ({num_samples},)"
        assert num_rows == 0 or int(self.row_sample.max()) < num_samples, "a row has no sample"


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_move(item, device) for item in value)
    return None if value is None else value.to(device)
