"""A growing token sequence: context that the policy received and turns that it sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.completion import NO_DRAFTS, NO_ROUTE, CandidateIds, Completion, FinishReason, VersionRun
from megarl.core.episode import Episode
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample


@dataclass(frozen=True, slots=True)
class Context:
    """Token ids that the policy receives, and the images among them. Image starts are relative to `ids`."""

    ids: Sequence[int]
    images: tuple[PromptImage, ...] = ()

    def __add__(self, other: Context) -> Context:
        return Context([*self.ids, *other.ids], (*self.images, *other.shifted_images(len(self.ids))))

    def shifted_images(self, num_tokens: int) -> tuple[PromptImage, ...]:
        """Return the images with their starts shifted by `num_tokens`."""
        return tuple(replace(image, start=image.start + num_tokens) for image in self.images)

    def before(self, end: int) -> Context:
        """Return the context up to index `end`. `end` must not be inside an image."""
        return Context(self.ids[:end], tuple(image for image in self.images if image.stop <= end))

    @property
    def short_ids(self) -> list[int]:
        """The ids with one placeholder per image."""
        ids, start = [], 0
        for image in self.images:
            ids += self.ids[start : image.start + 1]
            start = image.stop
        return [*ids, *self.ids[start:]]


class Transcript:
    """A prompt, and sampled turns with context between them. Only turns are trained on. Tokens are only appended."""

    def __init__(self, prompt_ids: Sequence[int], images: Sequence[PromptImage] = ()):
        """images: the images in the prompt."""
        self.ids: list[int] = list(prompt_ids)
        """All tokens so far."""
        self.images: list[PromptImage] = list(images)
        """The images among them."""
        self.num_turns = 0
        self.finish_reason: FinishReason = "stop"
        """Finish reason of the last turn."""
        self._num_prompt_tokens = len(self.ids)
        self._turns: list[tuple[int, Completion]] = []
        """The turns, each with its start index in `ids`."""

    @property
    def prompt(self) -> Context:
        return Context(self.ids, tuple(self.images)).before(self._num_prompt_tokens)

    @property
    def num_response_tokens(self) -> int:
        return len(self.ids) - self._num_prompt_tokens

    @property
    def last_turn(self) -> Completion:
        return self._turns[-1][1]

    def add_turn(self, completion: Completion) -> None:
        """Append a turn that was sampled with all previous tokens as its context."""
        self._turns.append((len(self.ids), completion))
        self.ids += completion.token_ids.tolist()
        self.num_turns += 1
        self.finish_reason = completion.finish_reason

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens before each turn, summed over all turns but the first."""
        return sum(start for start, _ in self._turns[1:])

    @property
    def num_cached_tokens(self) -> int:
        """Number of context tokens that the engine found in its KV cache, summed over the same turns."""
        return sum(turn.num_cached_tokens for _, turn in self._turns[1:])

    def add_context(self, context: Context) -> None:
        """Append tokens that the policy did not sample."""
        self.images += context.shifted_images(len(self.ids))
        self.ids += context.ids

    def sample(self, name: str, prompt: Prompt, text: str, rollout_id: str, episode: Episode | None) -> Sample:
        """Return the sample with this id: all tokens up to the end of the last turn, with a mask that selects the
        turns. `text` is the text of the last turn. The transcript's tokens and images replace those of the data row's
        prompt."""
        ids, start = np.array(self.ids, np.int32), self._num_prompt_tokens
        end = self._turns[-1][0] + len(self._turns[-1][1].token_ids)
        logprobs, mask = np.zeros(end - start, np.float32), np.zeros(end - start, np.bool_)
        candidates = [np.empty(0, np.int32)] * (end - start)
        versions: list[VersionRun] = []
        done = start
        for turn_start, turn in self._turns:
            span = slice(turn_start - start, turn_start - start + len(turn.token_ids))
            logprobs[span], mask[span] = turn.logprobs, True
            if turn.candidate_ids is not None:
                candidates[span] = list(turn.candidate_ids)
            if turn_start > done:  # tokens that were not sampled get the weight version of the next turn
                versions.append(VersionRun(turn.versions[0].version, turn_start - done))
            versions += turn.versions
            done = turn_start + len(turn.token_ids)
        has_candidates = any(turn.candidate_ids is not None for _, turn in self._turns)
        return Sample(
            id=name,
            prompt=replace(prompt, token_ids=ids[:start], images=self.prompt.images),
            response_ids=ids[start:end],
            response_logprobs=logprobs,
            response_mask=mask,
            versions=_merge_runs(versions),
            finish_reason=self.finish_reason,
            text=text,
            candidate_ids=CandidateIds.of(candidates) if has_candidates else None,
            rollout_id=rollout_id,
            episode=episode,
            routes=self._routes(end),
            drafts=sum((turn.drafts for _, turn in self._turns), NO_DRAFTS),
            response_images=tuple(image for image in self.images if start <= image.start < end),
        )

    def _routes(self, end: int) -> NDArray[np.signedinteger] | None:
        """Return the expert routes of the tokens before `end`. Each token gets the routes of the first turn that
        reports them, because those experts computed the hidden states that the turn was sampled from. Routes of later
        turns may come from newer weights."""
        turns = [turn.routes for _, turn in self._turns if turn.routes is not None]
        if not turns:
            return None
        routes = np.full((end, *turns[0].shape[1:]), NO_ROUTE, turns[0].dtype)
        for turn_routes in turns:
            is_missing = (routes[: len(turn_routes)] == NO_ROUTE).all(axis=(1, 2))
            routes[: len(turn_routes)][is_missing] = turn_routes[is_missing]
        return routes


def _merge_runs(runs: Sequence[VersionRun]) -> tuple[VersionRun, ...]:
    """Merge adjacent runs with the same version."""
    groups = groupby(runs, key=lambda run: run.version)
    return tuple(VersionRun(version, sum(run.count for run in group)) for version, group in groups)


@dataclass(slots=True)
class Part:
    """One token sequence of a rollout, which becomes a sample.

    Attributes:
        text: text of the last turn, including tool calls.
        messages: the conversation for display.
        turns: (index within the rollout, hash of its state) of each turn.
        find_message_end: computes `message_end` by rendering the prompt again; None if it cannot be found.
        message_end: as in Episode.
    """

    transcript: Transcript
    text: str
    messages: Sequence[Mapping[str, Any]]
    turns: list[tuple[int, int]] = field(default_factory=list)
    find_message_end: Callable[[], int | None] | None = None
    message_end: int | None = None

    @property
    def first_turn(self) -> int:
        return self.turns[0][0]

    @property
    def last_turn(self) -> int:
        return self.turns[-1][0]
