"""The protocol of environments: a prompt, then turns of the policy, each with an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import FinishReason, Prompt, Sample
from megarl.rewards.result import Result


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy.

    token_ids   int32 [R], as they were sampled
    text        what they decode to, special tokens left out
    """

    token_ids: NDArray[np.int32]
    text: str
    finish_reason: FinishReason

    @classmethod
    def whole_response(cls, sample: Sample) -> Turn:
        return cls(sample.response_ids, sample.text, sample.finish_reason)


@dataclass(frozen=True, slots=True)
class Step:
    """The answer of an environment to a turn.

    rewards    what each reward function says of it, by name
    messages   what the conversation goes on with before the policy's next turn; None where the rollout ends
    """

    rewards: Mapping[str, Result]
    messages: Sequence[Mapping[str, str]] | None = None


class Environment(Protocol):
    """The surroundings of one rollout: an object of its own for each."""

    async def reset(self, prompt: Prompt) -> Prompt:
        """Begins the rollout. Returns what the policy answers first."""

    async def step(self, turn: Turn) -> Step:
        """Answers a turn of the policy."""
