"""A rollout in an environment: its statistics and its rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAILED, LOST = "failed", "lost"
"""Stop reasons of a rollout without a reward: the environment failed, or the infrastructure did. See StopReason in
megarl.environments.protocol."""


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """Statistics of a rollout in an environment, shared by all of its samples.

    Attributes:
        stop_reason: reason why the rollout ended; a StopReason.
        num_samples: number of training sequences in the rollout; more than one if the context of a turn did not start
            with the tokens sampled so far.
        num_context_tokens: number of tokens preceding each turn after the first, summed over these turns.
        num_cached_tokens: number of context tokens that were in the engine's KV cache.
        num_restarts: number of times that the rollout started over, because its process was lost or a service was
            unavailable.
    """

    stop_reason: str
    num_turns: int
    num_samples: int
    tool_calls: Mapping[str, int]
    num_context_tokens: int
    num_cached_tokens: int
    num_restarts: int = 0

    @property
    def has_failed(self) -> bool:
        return self.stop_reason in (FAILED, LOST)


@dataclass(frozen=True, slots=True)
class Episode:
    """An environment's record of a rollout, for rewards and for display.

    Attributes:
        rewards: reward for each turn; None for a turn without a reward.
        parts: named components of the reward, summed over turns.
        failure: one line that explains why the rollout has no reward; None if it has one.
        stack: stack trace of the environment's error, if it raised one.
        outcome: reward for the rollout as a whole, in addition to the turn rewards.
        messages: the conversation, as text.
        turns: for each of this sample's turns, its index within the rollout and a hash of the environment's state
            before the turn.
        first_turn: index within the rollout of this sample's first trained turn.
        is_last: whether this is the rollout's last sample. Reward functions read its text.
        feedback: the environment's feedback on the rollout, for teachers.
        message_end: number of prompt tokens up to the end of the last message's text; None if the end is unknown, or
            if no teacher uses feedback on the rollout.
    """

    info: RolloutInfo
    rewards: tuple[float | None, ...]
    parts: Mapping[str, float]
    failure: str | None
    messages: tuple[Mapping[str, Any], ...]
    first_turn: int
    is_last: bool
    stack: str = ""
    outcome: float = 0.0
    turns: tuple[tuple[int, int], ...] = ()
    feedback: str = ""
    message_end: int | None = None
