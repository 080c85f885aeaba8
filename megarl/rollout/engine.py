"""Define the interface of rollout engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from megarl.core.completion import Completion
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan

if TYPE_CHECKING:
    from megarl.resharding.transports.transport import Channel
    from megarl.resharding.verification import Checksum, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Equal seeds, weights and contexts give equal tokens, regardless of the batch.

    Attributes:
        greedy: whether to sample the most likely token, regardless of the temperature.
        purpose: label for prefix caching. Only requests with equal purposes share cache entries, so training samples do
            not depend on unrelated requests.
        stop: stop strings in addition to rollout.stop; they remain part of the response.
        top_k: number of most likely tokens to sample from; 0 for all tokens. If it is set here, samples do not contain
            candidate tokens.

    Fields that are None default to the values in the rollout section.
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
    """A request for one completion, or for one rollout whose turns all use these parameters.

    Attributes:
        group_seed: seed for the environment's random draws; it is equal for all rollouts of a prompt in a step.
        prefix: token ids at the start of the response, which are not sampled.
    """

    sample_id: str
    prompt: Prompt
    group_seed: int = field(default=0, kw_only=True)
    prefix: tuple[int, ...] = field(default=(), kw_only=True)

    def turn(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        seed: int,
        stop: Sequence[str] = (),
        images: Sequence[PromptImage] = (),
    ) -> TurnRequest:
        """Return the request for the rollout's next turn after these tokens and the images among them, with additional
        stop strings."""
        common = {item.name: getattr(self, item.name) for item in fields(Sampling)}
        overrides = {"max_new_tokens": max_new_tokens, "seed": seed, "stop": (*self.stop, *stop)}
        ids, images = np.asarray(token_ids, np.int32), tuple(images)
        return TurnRequest(ids, images=images, sample_id=self.sample_id, **common | overrides)


@dataclass(frozen=True, slots=True)
class TurnRequest(Sampling):
    """A request for one turn of a rollout: its context, int32 [C], the images in the context, and the sample_id of the
    SamplingRequest."""

    token_ids: NDArray[np.int32]
    images: tuple[PromptImage, ...] = field(default=(), kw_only=True)
    sample_id: str = field(default="", kw_only=True)


@dataclass(frozen=True, slots=True)
class SyncStats:
    """Statistics of a refit in one engine worker: number of bytes written, peak size of transfer buffers in bytes, and
    checksums of the worker's weights, keyed by the region's position in `expected`."""

    num_bytes: int
    staging_bytes: int
    checksums: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine to compare with the trainer's: the dtype of its logits, the token ids of each requested
    text, and a description of its kernels and settings."""

    head_dtype: str
    token_ids: tuple[tuple[int, ...], ...]
    description: str


class SyncedEngine(Protocol):
    """An engine of any kind that receives the trainer's weights."""

    version: int | None
    """Weight version in the engine; None before the first refit and after a failed refit."""

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether one of the engine's processes has died. The engine is then unusable."""
        ...

    def pause(self) -> None:
        """Finish the current steps and stop stepping until `resume`. Unfinished requests are kept and new requests are
        queued. A paused engine may be put to sleep and refitted."""

    def resume(self) -> None:
        """Resume stepping. Has no effect unless the engine is paused."""

    def sleep(self, keeps_weights: bool) -> None:
        """Release device memory: weights until the next refit or `generate`, the KV cache until the next `generate`.

        An engine with unfinished samples must be paused first. `resume` wakes the engine and recomputes the KV cache of
        these samples.

        Args:
            keeps_weights: whether to move weights to host memory; otherwise, they are discarded and `version` becomes
                None.
        """

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Return the parameters that a refit writes, as one mapping per worker: name -> (shape, dtype)."""
        ...

    def repacking(self) -> list[str]:
        """Return the names of kernels that prevent in-place writes because they read weights in a packed layout. The
        shapes and dtypes of the parameters do not reveal the packing."""
        ...

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        """Set the plan and the channel for all later refits, and one holder per worker. `by_loader`: whether the plan
        delivers whole checkpoint tensors to the engine's own weight loader."""

    def disconnect(self) -> None:
        """Release the plan, the channel and all mapped memory of the trainers, after their processes have died."""

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[SyncStats]:
        """Write new weights into the running engine, then set its version. Return statistics for each worker. Raise a
        RuntimeError if the weights do not match the `expected` checksums (None: not verified)."""
        ...

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None:
        """Return one message per region whose live weights do not match the expected checksum. Return None if the
        weights cannot be compared because the engine transforms them after receiving them."""

    def num_unfinished(self, sample_ids: Collection[str]) -> int:
        """Return the number of tokens or denoising steps sampled so far for the given samples, excluding finished
        samples and turns."""
        ...

    def info(self, texts: Sequence[str]) -> EngineInfo:
        """Return the engine's properties. `texts` are tokenized without adding special tokens."""
        ...


class Engine(SyncedEngine, Protocol):
    """An engine that samples tokens."""

    async def generate(
        self, requests: Sequence[SamplingRequest], finished: Callable[[list[Sample]], object]
    ) -> list[Sample]:
        """Return samples in the order of the requests, and pass newly finished samples to `finished` as they arrive.

        The engine executes other calls while it samples. After a refit, unfinished samples continue with the new
        weights; rollout.kv_cache_on_update decides whether their KV cache is kept or recomputed. After a failed refit,
        they wait for a successful one. Sample.versions records the weight version of each token. Canceling the call
        aborts its requests. Raise a RuntimeError if `version` is None.
        """
        ...

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        """Start sampling a turn, under the same rules as `generate`. Canceling the returned future aborts the
        request."""
        ...
