"""The end of a rollout, and the samples that it leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.core.types import Episode, Prompt, RolloutInfo, Sample
from megarl.environments.protocol import StopReason
from megarl.environments.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence of a rollout.

    text        of its last turn
    messages    its conversation, for people to read
    first_turn  the rollout's number of its first turn
    """

    transcript: Transcript
    text: str
    messages: Sequence[Mapping[str, Any]]
    first_turn: int


@dataclass(slots=True)
class Outcome:
    """How a rollout ends.

    turn_rewards   of each turn, by name ("" for one without); None for a turn without a reward
    rewards        of the rollout as a whole, likewise
    tool_calls     how many calls of tools ended in which way
    failure        why it has no reward, in one line; None if it has not failed
    stack          of what the environment raised
    """

    stop_reason: StopReason = StopReason.DONE
    turn_rewards: list[Mapping[str, float] | None] = field(default_factory=list)
    rewards: Mapping[str, float] = field(default_factory=dict)
    tool_calls: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    stack: str = ""

    def fail(self, reason: str, stack: str = "") -> None:
        """Ends the rollout as failed, unless it has failed before."""
        if self.failure is None:
            self.failure, self.stack, self.stop_reason = " ".join(reason.split()), stack, StopReason.FAILED

    def samples(self, name: str, prompt: Prompt, parts: Sequence[Part], last: int = -1) -> list[Sample]:
        """Returns a sample for each part that has a turn; of a rollout without any, an empty one.

        name   the rollout's id, and that of its first sample
        last   the place of the part that reward functions read, among those
        """
        parts = [part for part in parts if part.transcript.num_turns]
        transcripts = [part.transcript for part in parts]
        info = RolloutInfo(
            stop_reason=self.stop_reason,
            num_turns=sum(transcript.num_turns for transcript in transcripts),
            num_samples=len(parts),
            tool_calls=dict(self.tool_calls),
            num_context_tokens=sum(transcript.num_context_tokens for transcript in transcripts),
            num_cached_tokens=sum(transcript.num_cached_tokens for transcript in transcripts),
        )
        if not parts:
            return [Sample(name, prompt, [], [], [], (), "stop", "", episode=self._episode(info, None, is_last=True))]
        read = parts[last]
        return [
            part.transcript.sample(
                name if number == 0 else f"{name}/{number}",
                prompt,
                part.text,
                name,
                self._episode(info, part, is_last=part is read),
            )
            for number, part in enumerate(parts)
        ]

    def _episode(self, info: RolloutInfo, part: Part | None, is_last: bool) -> Episode:
        named: Counter[str] = Counter()
        for given in (*self.turn_rewards, self.rewards):
            for name, value in (given or {}).items():
                named[name] += value
        del named[""]
        return Episode(
            info=info,
            rewards=tuple(None if given is None else sum(given.values()) for given in self.turn_rewards),
            outcome=sum(self.rewards.values()),
            parts=dict(named),
            failure=self.failure,
            stack=self.stack,
            messages=() if part is None else tuple(part.messages),
            first_turn=0 if part is None else part.first_turn,
            is_last=is_last,
        )
