"""The schema of section `logprob_check`, which compares the trainer's and the engines' log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.fields import Section
from megarl.core.ranges import PositiveFloat

ROUNDING = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02, "fp8_block": 0.6}
"""Mean log-prob difference per token, in nats, that rounding explains, by the model's dtype or the engines'
quantization. Measured with SmolLM2-135M (tools/benchmarks/rounding.py): 1e-5 in float32, 0.03 in bfloat16,
which is what another order of summation changes, and 0.16 to 0.17 with fp8 linear layers. float16 has an
eighth of bfloat16's rounding error."""

THRESHOLD = 10
"""A token is an outlier if its difference exceeds this multiple of the mean that rounding explains."""

MaskLevel = Literal["token", "sample"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The arguments of the losses.

    Args:
        threshold: the difference of a token's log-probs, in nats, above which it is an outlier.
        mask: what is masked because of an outlier: the token, its sample, or None.
    """

    threshold: float
    mask: MaskLevel | None = None


class LogprobCheck(Section):
    threshold: PositiveFloat | None
    limit: PositiveFloat | None
    action: Literal["warn", "stop", "mask"]
    mask: MaskLevel
    canaries: Literal["off", "start", "refits"]

    def tolerance(self, precision: str) -> Tolerance:
        """Return the tolerance for the losses. precision: a key of ROUNDING."""
        threshold = THRESHOLD * ROUNDING[precision] if self.threshold is None else self.threshold
        return Tolerance(threshold, self.mask if self.action == "mask" else None)

    def limit_of(self, precision: str, max_staleness: int) -> float | None:
        """Return the maximum mean difference of a step. None if samples may be stale, and so differ by more than
        rounding, and no limit is set."""
        if self.limit is not None or max_staleness:
            return self.limit
        return ROUNDING[precision]

    def canary_limit_of(self, precision: str, max_staleness: int) -> float:
        """Return the maximum mean difference on canary prompts. Their samples are never stale, so a limit that was set
        for stale samples does not apply."""
        return ROUNDING[precision] if self.limit is None or max_staleness else self.limit
