"""The outcome of a rollout and the samples created from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample
from megarl.environments.protocol import StopReason
from megarl.environments.transcript import Part
from megarl.usercode.feedback import MAX_FEEDBACK, join_feedback


@dataclass(slots=True)
class Outcome:
    """The outcome of a rollout.

    Attributes:
        turn_rewards: one entry per turn: rewards keyed by name ("" if unnamed), or None for a turn without a reward.
        rewards: rewards for the whole rollout, keyed by name.
        feedback: the texts of all turns, or one text from an agent; "" if there is none. If it exceeds MAX_FEEDBACK
            characters, only its end is kept, because the last turn usually contains the test results.
        tool_calls: number of tool calls per status.
        failure: one-line reason for the failure, or None. A failed rollout has no reward.
        stack: stack trace of the environment's exception, or "".
        num_restarts: number of earlier attempts at this rollout, which produced no samples.
    """

    stop_reason: StopReason = StopReason.DONE
    turn_rewards: list[Mapping[str, float] | None] = field(default_factory=list)
    rewards: Mapping[str, float] = field(default_factory=dict)
    feedback: str = ""
    tool_calls: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    stack: str = ""
    num_restarts: int = 0

    def fail(self, reason: str, stack: str = "", stop_reason: StopReason = StopReason.FAILED) -> None:
        """Mark the rollout as failed. Only the first failure is kept."""
        if self.failure is None:
            self.failure, self.stack, self.stop_reason = " ".join(reason.split()), stack, stop_reason

    def add_feedback(self, text: str) -> None:
        """Append the feedback of a turn, or of an agent."""
        self.feedback = join_feedback([self.feedback, text])[-MAX_FEEDBACK:]

    def samples(
        self, name: str, prompt: Prompt, parts: Sequence[Part], decode: Callable[[Sequence[int]], str]
    ) -> list[Sample]:
        """Return one sample per part that has a turn, or one empty sample if no part has one. Reward functions score
        the sample with the last turn. A sample's prompt text is the text of the tokens before its first turn,
        with one placeholder per image.

        Args:
            name: the id of the rollout and of its first sample.
            decode: function that returns the text of token ids, including special tokens.
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
            num_restarts=self.num_restarts,
        )
        if not parts:
            empty = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_)
            return [Sample(name, prompt, *empty, (), "stop", "", episode=self._episode(info, None, is_last=True))]
        scored = max(parts, key=lambda part: part.last_turn)
        return [
            part.transcript.sample(
                name if number == 0 else f"{name}/{number}",
                replace(prompt, text=decode(part.transcript.prompt.short_ids)),
                part.text,
                name,
                self._episode(info, part, is_last=part is scored),
            )
            for number, part in enumerate(parts)
        ]

    def _episode(self, info: RolloutInfo, part: Part | None, is_last: bool) -> Episode:
        totals: defaultdict[str, float] = defaultdict(float)
        for rewards in (*self.turn_rewards, self.rewards):
            for name, value in (rewards or {}).items():
                totals[name] += value
        totals.pop("", None)
        return Episode(
            info=info,
            rewards=tuple(None if rewards is None else sum(rewards.values()) for rewards in self.turn_rewards),
            outcome=sum(self.rewards.values()),
            parts=dict(totals),
            failure=self.failure,
            stack=self.stack,
            messages=() if part is None else tuple(part.messages),
            turns=() if part is None else tuple(part.turns),
            first_turn=0 if part is None else part.first_turn,
            is_last=is_last,
            feedback=self.feedback,
            message_end=None if part is None else part.message_end,
        )
