"""The section `agreement`: how far trainer and engines may be apart on the log-probs of what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.fields import Section
from megarl.core.ranges import PositiveFloat

ROUNDING = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02, "fp8_block": 0.6}
"""The mean difference of a token's log-prob, in nats, above which more than rounding is at work: by the dtype of the
model, or by the format of engines that hold it quantised. Measured with SmolLM2-135M: 1e-5 in float32, 0.03 in
bfloat16, as far as two orders of the same sums are apart, and 0.16 to 0.17 with linear layers in fp8 (see
tools/benchmarks/rounding.py). float16 rounds to an eighth of what bfloat16 does."""

THRESHOLD = 10
"""A token is beyond rounding where it differs by this many times the mean that rounding explains."""

MaskLevel = Literal["token", "sample"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What the losses know of the section.

    threshold   nats by which the log-probs of one token may differ
    mask        what has no loss where a token is beyond it: the token, or its sample; None: nothing
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
        """Returns the tolerance of losses. precision: a key of ROUNDING."""
        threshold = THRESHOLD * ROUNDING[precision] if self.threshold is None else self.threshold
        return Tolerance(threshold, self.mask if self.action == "mask" else None)

    def limit_of(self, precision: str, max_staleness: int) -> float | None:
        """Returns the mean difference that a step may have; None where samples of earlier weights differ by more than
        rounding, and no limit is given."""
        if self.limit is not None or max_staleness:
            return self.limit
        return ROUNDING[precision]

    def canary_limit_of(self, precision: str, max_staleness: int) -> float:
        """Returns the mean difference that canary prompts may have: no sample of them is of earlier weights, so that a
        limit for such ones is not theirs."""
        return ROUNDING[precision] if self.limit is None or max_staleness else self.limit
