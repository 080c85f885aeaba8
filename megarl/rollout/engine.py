"""What the run asks of an engine, whichever generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.batch import Prompt, Sample
from megarl.resharding.plan import Plan
from megarl.resharding.transports.transport import Transport


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """One completion to sample: the same seed, weights and prompt give the same tokens, in any batch."""

    sample_id: str
    prompt: Prompt
    seed: int


class Engine(Protocol):
    version: int | None
    """Weight version that the engine holds; None before the first refit and after a failed one."""

    def generate(self, requests: Sequence[SamplingRequest]) -> list[Sample]:
        """Samples in the order of the requests. Raises RuntimeError while version is None."""

    def refit(self, plan: Plan, transport: Transport, version: int) -> int:
        """Writes new weights into the live engine and sets its version last. Returns the bytes written."""
