"""The agreement of trainer and engine on the log-probs of what was sampled."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from megarl.config.schema import Dtype
from megarl.core.metrics import Metric

LIMITS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.15}
"""The mean difference of a token's log-prob, in nats, above which more than rounding is at work. Measured with
SmolLM2-135M: 1e-5 in float32 and 0.03 in bfloat16, as far as two orders of the same sums are apart (see
tools/benchmarks/rounding.py)."""


def warn_of_disagreement(dtype: Dtype, metrics: Mapping[str, Metric], logs: Path) -> None:
    """Prints a warning where trainer and engine differ by more than the dtype's rounding. logs: the folder in which
    each engine has written what it runs on."""
    mismatch = metrics.get("mismatch/logprob_abs_mean")
    if mismatch is not None and mismatch.value > LIMITS[dtype]:
        print(
            f"megarl: warning: the engines' log-probs differ from the trainer's by {mismatch.value:.1e} a token, and "
            f"rounding of {dtype} explains {LIMITS[dtype]:g}; compare the lines `engine:` in {logs}/engine-*.log with "
            "those of a run that agrees, and set rollout.verify_refit=always",
            file=sys.stderr,
            flush=True,
        )
