"""Tokens sampled by an engine, with their weight versions, candidates, routes and drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.core.arrays import HoldsArrays

FinishReason = Literal["stop", "length"]

NO_ROUTE = -1
"""Expert index of a token without a route."""


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`count` consecutive response tokens sampled under weight version `version`."""

    version: int
    count: int


def oldest(versions: Sequence[VersionRun]) -> int:
    return min((run.version for run in versions), default=0)


def newest(versions: Sequence[VersionRun]) -> int:
    return max((run.version for run in versions), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class CandidateIds(HoldsArrays):
    """The candidates for each of R response tokens: the tokens left after the engine truncated its distribution.

    A token has no candidates if the engine kept the whole vocabulary.

    Attributes:
        ids: int32, the candidates of all tokens, concatenated.
        offsets: int32 [R + 1]; the candidates of token t are ids[offsets[t] : offsets[t + 1]].
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def __post_init__(self) -> None:
        self._freeze("ids", np.int32)
        self._freeze("offsets", np.int32)
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.ids), "offsets do not span ids"

    @classmethod
    def of(cls, ids_by_token: Sequence[ArrayLike]) -> CandidateIds:
        ids = [np.asarray(ids, np.int32) for ids in ids_by_token]
        return cls(np.concatenate([np.empty(0, np.int32), *ids]), np.cumsum([0, *map(len, ids)]))

    @classmethod
    def none(cls, num_tokens: int) -> CandidateIds:
        """Return the value for a response whose tokens were all sampled from the whole vocabulary."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens + 1, np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return iter(np.split(self.ids, self.offsets[1:-1])) if len(self) else iter(())


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Numbers of draft tokens that an engine verified and of the forward passes that verified them.

    Attributes:
        num_accepted: draft tokens that became part of the response. Each pass also adds one sampled token.
    """

    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_passes + other.num_passes,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
        )

    def metrics(self, fraction: str, length: str) -> dict[str, float]:
        """Return the accepted fraction of the draft tokens and the mean number of tokens that a pass added to the
        response, under these names, or an empty dict if no draft token was verified."""
        if not self.num_passes:
            return {}
        return {fraction: self.num_accepted / self.num_drafted, length: 1 + self.num_accepted / self.num_passes}


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True, eq=False)
class Completion(HoldsArrays):
    """R tokens sampled by an engine in one request, including the end-of-sequence token if it was sampled.

    Fields not listed here are as in `Sample`.

    Attributes:
        stop: the stop string that ended the completion and is part of it; None if a token or a limit ended it.
        num_cached_tokens: number of preceding tokens that were in the engine's KV cache.
        routes: routes of the preceding tokens and of the completion.
        drafts: draft tokens that the engine verified.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    candidate_ids: CandidateIds | None = None
    stop: str | None = None
    num_cached_tokens: int = 0
    routes: NDArray[np.signedinteger] | None = None
    drafts: DraftCounts = NO_DRAFTS

    def __post_init__(self) -> None:
        self._freeze("token_ids", np.int32)
        self._freeze("logprobs", np.float32)
        if self.routes is not None:
            self._freeze("routes", self.routes.dtype, axes=3)

    @property
    def text_ids(self) -> NDArray[np.int32]:
        """The token ids without the stop token, which need not be a special token."""
        is_ended_by_token = self.finish_reason == "stop" and self.stop is None
        return self.token_ids[:-1] if is_ended_by_token else self.token_ids
