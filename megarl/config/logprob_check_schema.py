"""The schema of section `logprob_check`, which compares the trainer's and the engines' log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.fields import Section
from megarl.core.ranges import PositiveFloat

ROUNDING = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02, "fp8_block": 0.6}
"""Model dtype or engine quantization -> mean log-prob difference per token, in nats, that rounding can explain.
Differences measured with SmolLM2-135M (tools/benchmarks/rounding.py) are 1e-5 in float32, 0.03 in bfloat16 (from a
different order of summation) and 0.16 to 0.17 with fp8 linear layers. float16 has an eighth of bfloat16's rounding
error."""

THRESHOLD = 10
"""A token is an outlier if its log-prob difference exceeds this multiple of its value in ROUNDING."""

SHARE_OF_CLIP = 0.1
"""Limit on the log-prob differences of denoising steps, as a fraction of the objective's clip range."""

MaskLevel = Literal["token", "sample"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The outlier settings that are passed to the losses.

    Args:
        threshold: a token is an outlier if its log-prob difference, in nats, exceeds this.
        mask: what to mask for an outlier: the token or its sample; None masks nothing.
    """

    threshold: float
    mask: MaskLevel | None = None


class LogprobCheck(Section):
    threshold: PositiveFloat | None
    limit: PositiveFloat | None
    action: Literal["warn", "stop", "mask"]
    mask: MaskLevel
    canaries: Literal["off", "start", "refits"]
