"""The agreement of trainer and engine on the log-probs of what was sampled."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from megarl.config.schema import Config
from megarl.core.metrics import Metric

LIMITS = {"float32": 1e-4, "bfloat16": 0.15, "fp8_block": 0.6}
"""The mean difference of a token's log-prob, in nats, above which more than rounding is at work: by the dtype of the
model, or by the format of engines that hold it quantised. Measured with SmolLM2-135M: 1e-5 in float32, 0.03 in
bfloat16, as far as two orders of the same sums are apart, and 0.16 to 0.17 with linear layers in fp8 (see
tools/benchmarks/rounding.py)."""


def warn_of_disagreement(config: Config, metrics: Mapping[str, Metric], logs: Path) -> None:
    """Prints a warning where trainer and engine differ by more than rounding. Where samples may be of earlier weights
    they do, and it prints none. logs: the folder in which each engine has written what it runs on."""
    if config.rollout.max_staleness:
        return
    precision = config.rollout.quantization or config.model.dtype
    mismatch = metrics.get("mismatch/logprob_abs_mean")
    if mismatch is not None and mismatch.value > LIMITS[precision]:
        print(
            f"megarl: warning: the engines' log-probs differ from the trainer's by {mismatch.value:.1e} a token, and "
            f"rounding of {precision} explains {LIMITS[precision]:g}; compare the lines `engine:` in "
            f"{logs}/engine-*.log with those of a run that agrees, and set rollout.verify_refit=always",
            file=sys.stderr,
            flush=True,
        )
