"""Learning-rate schedules: pure functions of the number of completed updates, so that resumed runs continue exactly."""

from __future__ import annotations

import math

from megarl.config.model_schema import Optimizer


def learning_rate(optimizer: Optimizer, done: int, total: int) -> float:
    """Return the learning rate for the next update after `done` of the run's `total` updates.

    Warmup update n = 1 … W uses n/W of the peak rate, so no update has rate 0. After the warmup, with p the completed
    fraction of the decay (0 at its first update, 1 after its last):

        linear  min + (lr − min) · (1 − p)
        cosine  min + (lr − min) · (1 + cos πp) / 2      (Loshchilov and Hutter, arXiv:1608.03983)
        wsd     min + (lr − min) · (1 − √p)              (warm-up, stable, decay; Hägele et al., arXiv:2405.18392)

    linear and cosine decay from the end of the warmup, wsd over the last `decay` updates. After the last update, the
    rate is min.
    """
    schedule, peak = optimizer.schedule, optimizer.lr
    warmup = num_updates(schedule.warmup, total)
    if done < warmup:
        return peak * (done + 1) / warmup
    if schedule.name == "constant":
        return peak
    start = warmup if schedule.decay is None else total - num_updates(schedule.decay, total)
    share = min(max(done - start, 0) / max(total - start, 1), 1.0)
    falling = {"linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2, "wsd": 1 - math.sqrt(share)}
    return schedule.min_lr + (peak - schedule.min_lr) * falling[schedule.name]


def num_updates(length: float, total: int) -> int:
    """Convert a length to a number of updates. A length below 1 is a fraction of the run's updates."""
    return round(length * total) if length < 1 else int(length)
