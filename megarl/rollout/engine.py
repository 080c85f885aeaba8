"""The interface by which a run uses an engine, whichever generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.core.types import Completion, Prompt, Sample
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan

if TYPE_CHECKING:
    from megarl.resharding.transports.transport import Channel
    from megarl.resharding.verification import Checksum, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are sampled: the same seed, weights and tokens before them give the same ones, in any batch.

    greedy      whether the most likely token is taken each time, whatever the temperature
    purpose     what they are sampled for: requests for one purpose share keys and values of what they begin with, and
                for another none, so that what is sampled for training does not depend on what else is
    stop        texts that end them where they come up, beside rollout.stop; they stay part of them

    The others are rollout's where they are None. top_k: 0 for all tokens; with one of its own, the sample does not say
    which tokens the engine kept.
    """

    seed: int
    greedy: bool = False
    purpose: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0


@dataclass(frozen=True, slots=True)
class SamplingRequest(Sampling):
    """One completion to sample, or one rollout, all of whose turns are sampled so.

    group_seed  the same for all completions of a prompt in a step, for what its environment draws
    """

    sample_id: str
    prompt: Prompt
    group_seed: int = field(default=0, kw_only=True)

    def turn(self, token_ids: Sequence[int], max_new_tokens: int, seed: int, stop: Sequence[str] = ()) -> TurnRequest:
        """Returns the request of a turn of this rollout after these tokens, with what each turn has of its own."""
        whole = {item.name: getattr(self, item.name) for item in fields(Sampling)}
        own = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": (*self.stop, *stop)}
        return TurnRequest(np.asarray(token_ids, np.int32), **whole | own)


@dataclass(frozen=True, slots=True)
class TurnRequest(Sampling):
    """One turn of a rollout to sample, after tokens of which the engine has seen a part.

    token_ids   int32 [C]
    """

    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SyncStats:
    """The report of an engine's worker on a refit.

    num_bytes      bytes written into its parameters
    staging_bytes  bytes allocated on their way
    """

    num_bytes: int
    staging_bytes: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself, to be compared with the trainer.

    head_dtype   the dtype that its logits are computed in
    token_ids    of each text that it was asked for, by its own tokenizer
    description  its kernels and settings
    """

    head_dtype: str
    token_ids: tuple[tuple[int, ...], ...]
    description: str


class Engine(Protocol):
    version: int | None
    """The weight version that the engine holds; None before the first refit and after a failed one."""

    async def generate(
        self, requests: Sequence[SamplingRequest], finished: Callable[[list[Sample]], object]
    ) -> list[Sample]:
        """Returns samples in the order of the requests, and calls `finished` with those that have come since the
        last call. Raises RuntimeError if version is None.

        Other calls are done while it waits for its samples. After a refit the samples go on with the new weights, and
        with the keys and values that rollout.kv_cache_on_update says: those of the older weights, or others that the new ones
        compute of the same tokens. After a failed refit they go on when another has succeeded. Their versions tell
        which weights made which tokens. Who cancels it ends the work on them.
        """

    def num_unfinished_tokens(self, sample_ids: Collection[str]) -> int:
        """Returns how many tokens there are so far of those of these samples that `finished` has not been told of."""

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        """Begins a turn, whose tokens come under the same rules. Who cancels it ends the work on it."""

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a process of its own has died, after which it can do nothing."""

    def pause(self) -> None:
        """Ends the steps that it is in, and makes none until `resume`. What is under way stays, and what is begun
        waits. It may be put to sleep, and takes weights, meanwhile."""

    def resume(self) -> None:
        """Goes on after a pause, if there is one, with what is under way."""

    def sleep(self, keeps_weights: bool) -> None:
        """Gives its device's memory back: that of the weights until the next refit or `generate`, that of the KV cache
        until the next `generate`. An engine with samples under way has to be paused before: it wakes with `resume`, and
        computes their keys and values anew.

        keeps_weights: whether they move to host memory; else they are lost, and version is None.
        """

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Returns for each worker what a refit writes: name -> shape and dtype."""

    def repacking(self) -> list[str]:
        """Returns why parameters cannot be written in place although their shapes and dtypes are right: kernels that
        read them packed in a way of their own."""

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        """Makes every later refit follow this plan, by this channel, into these holders: the engine's workers.

        by_loader: whether the plan is of whole tensors of the checkpoint, which the engine's own loader puts in their
        places.
        """

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[SyncStats]:
        """Writes new weights into the live engine and sets its version last. Returns what each worker says.

        expected: the checksums that are to be found afterwards (None: not verified). Raises RuntimeError where it is
        not.
        """

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None:
        """Returns a line for each region of the live weights that is not what is expected; None where weights are not
        kept as they arrive, and cannot be compared."""

    def facts(self, texts: Sequence[str]) -> EngineInfo:
        """Returns what it computes with. texts: to be tokenised, special tokens as they stand."""
