"""What the run asks of an engine, whichever generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.core.types import Prompt, Sample
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel
from megarl.resharding.verification import Checksum, Region


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One completion to sample: the same seed, weights and prompt give the same tokens, in any batch. greedy: the most
    likely token each time, whatever rollout's temperature."""

    sample_id: str
    prompt: Prompt
    seed: int
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Refitted:
    """What a worker of an engine says of a refit.

    num_bytes      written into its parameters
    staging_bytes  allocated on their way
    """

    num_bytes: int
    staging_bytes: int


class Engine(Protocol):
    version: int | None
    """Weight version that the engine holds; None before the first refit and after a failed one."""

    async def generate(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        """Samples in the order of the requests. Raises RuntimeError if version is None.

        Other calls are done while it waits for its samples. After a refit these keep the keys and values of the older
        weights and go on with the new ones, after a failed one when another has succeeded: their versions tell.
        """

    @property
    def has_lost_a_rank(self) -> bool:
        """Whether a process of its own has died, after which it can do nothing."""

    def sleep(self) -> None:
        """Gives its device's memory back: that of the weights, which move to host memory, until the next refit or
        `generate`, that of the KV cache until the next `generate`. Not while it generates."""

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """Of each worker: name -> shape and dtype, of what a refit writes."""

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        """From now on a refit is this plan, by this channel, into these holders: the engine's workers.

        by_loader: the plan is of whole tensors of the checkpoint, which the engine's own loader puts in their places.
        """

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[Refitted]:
        """Writes new weights into the live engine and sets its version last. Returns what each worker says.

        expected: what is to be found afterwards (None: not verified). Raises RuntimeError where it is not.
        """
