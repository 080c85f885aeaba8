"""The learning rate of every update: a pure function of the number of updates done, so that a resumed run goes on with
the same one."""

from __future__ import annotations

import math

from megarl.config.model_schema import Optimizer, Schedule


def learning_rate(optimizer: Optimizer, done: int, total: int) -> float:
    """Returns the learning rate of the update after `done` others, in a run of `total`.

    Update n = 1 … W of the warm-up has n/W of the peak, so that none is done at rate 0. After it, with p the share done
    of the decay (0 at its first update, 1 after its last):

        linear  min + (lr − min) · (1 − p)
        cosine  min + (lr − min) · (1 + cos πp) / 2      (Loshchilov and Hutter, arXiv:1608.03983)
        wsd     min + (lr − min) · (1 − √p)              (warm-up, stable, decay; Hägele et al., arXiv:2405.18392)

    The first two decay from the end of the warm-up on, wsd over its last `decay` updates. Beyond the last: min.
    """
    schedule, peak = optimizer.schedule, optimizer.lr
    warmup = num_updates(schedule.warmup, total)
    if done < warmup:
        return peak * (done + 1) / warmup
    if schedule.name == "constant":
        return peak
    share = _decay_done(schedule, done, warmup, total)
    falling = {"linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2, "wsd": 1 - math.sqrt(share)}
    return schedule.min_lr + (peak - schedule.min_lr) * falling[schedule.name]


def num_updates(length: float, total: int) -> int:
    """Returns the number of updates of a length that is a share of the run's updates (below 1) or a number of
    updates."""
    return round(length * total) if length < 1 else int(length)


def _decay_done(schedule: Schedule, done: int, warmup: int, total: int) -> float:
    start = warmup if schedule.decay is None else total - num_updates(schedule.decay, total)
    return min(max(done - start, 0) / max(total - start, 1), 1.0)
