"""A sequence under way: the tokens that the policy was given, and those that it sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import NO_ROUTE, CandidateIds, Completion, Episode, FinishReason, Prompt, Sample, VersionRun


class Transcript:
    """A prompt, then turns of the policy as they were sampled, with context between them that it did not sample and is
    not trained on. Nothing in it ever changes."""

    def __init__(self, prompt_ids: Sequence[int]):
        self.ids: list[int] = list(prompt_ids)
        """All tokens so far."""
        self.num_turns = 0
        self.finish_reason: FinishReason = "stop"
        """The finish reason of the last turn."""
        self._num_prompt_tokens = len(self.ids)
        self._turns: list[tuple[int, Completion]] = []
        """The turns, each with its place in `ids`."""

    @property
    def num_response_tokens(self) -> int:
        return len(self.ids) - self._num_prompt_tokens

    @property
    def last_turn(self) -> Completion:
        return self._turns[-1][1]

    def add_turn(self, completion: Completion) -> None:
        """Append tokens that were sampled after all that is there."""
        self._turns.append((len(self.ids), completion))
        self.ids += completion.token_ids.tolist()
        self.num_turns += 1
        self.finish_reason = completion.finish_reason

    @property
    def num_context_tokens(self) -> int:
        """The tokens before turns after the first, summed over these."""
        return sum(place for place, _ in self._turns[1:])

    @property
    def num_cached_tokens(self) -> int:
        """Those of them whose keys and values the engine had already."""
        return sum(turn.num_cached_tokens for _, turn in self._turns[1:])

    def add_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.ids += token_ids

    def sample(self, name: str, prompt: Prompt, text: str, rollout_id: str, episode: Episode | None) -> Sample:
        """Return the sample: all up to the end of the last turn, of which only the turns are trained on.

        prompt   that of the data, whose tokens are replaced with those of this transcript
        """
        start = self._num_prompt_tokens
        end = self._turns[-1][0] + len(self._turns[-1][1].token_ids)
        logprobs, mask = np.zeros(end - start, np.float32), np.zeros(end - start, np.bool_)
        candidates = [np.empty(0, np.int32)] * (end - start)
        versions: list[VersionRun] = []
        done = start
        for place, turn in self._turns:
            own = slice(place - start, place - start + len(turn.token_ids))
            logprobs[own], mask[own] = turn.logprobs, True
            if turn.candidate_ids is not None:
                candidates[own] = list(turn.candidate_ids)
            if place > done:  # context counts as of the weights that answer it
                versions.append(VersionRun(turn.versions[0].version, place - done))
            versions += turn.versions
            done = place + len(turn.token_ids)
        truncates = any(turn.candidate_ids is not None for _, turn in self._turns)
        return Sample(
            id=name,
            prompt=Prompt(prompt.id, prompt.text, self.ids[:start], prompt.answer, prompt.messages, prompt.columns),
            response_ids=self.ids[start:end],
            response_logprobs=logprobs,
            response_mask=mask,
            versions=_merged(versions),
            finish_reason=self.finish_reason,
            text=text,
            candidate_ids=CandidateIds.of(candidates) if truncates else None,
            rollout_id=rollout_id,
            episode=episode,
            routes=self._routes(end),
        )

    def _routes(self, end: int) -> NDArray[np.signedinteger] | None:
        """Return the routes of the tokens before `end`. A token has those of the first turn that knows some: the
        experts by which what came after it was sampled. A later turn's may be of newer weights."""
        turns = [turn.routes for _, turn in self._turns if turn.routes is not None]
        if not turns:
            return None
        routes = np.full((end, *turns[0].shape[1:]), NO_ROUTE, turns[0].dtype)
        for known in turns:
            is_missing = (routes[: len(known)] == NO_ROUTE).all(axis=(1, 2))
            routes[: len(known)][is_missing] = known[is_missing]
        return routes


def _merged(runs: Sequence[VersionRun]) -> tuple[VersionRun, ...]:
    """Return the runs, those that follow each other with one version as one."""
    merged: list[VersionRun] = []
    for run in runs:
        if merged and merged[-1].version == run.version:
            merged[-1] = VersionRun(run.version, merged[-1].count + run.count)
        else:
            merged.append(run)
    return tuple(merged)
