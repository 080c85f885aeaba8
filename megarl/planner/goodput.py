"""Goodput of a run whose devices fail: a closed form, and a simulation that checks its assumptions.

Failures occur at a rate L. Every s seconds of training, a copy of the state pauses training for c seconds. A failure
costs d seconds to detect, w on average to replace the node, and r to resume from the newest copy. Goodput is
s / (exp(L (s + c)) - 1) / (1 / L + d + w + r).
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass
from math import expm1

FAILURES = 20_000
"""Number of simulated failures. The standard error of the mean time between failures is then below 1 %."""


@dataclass(frozen=True, slots=True)
class FailureModel:
    """How devices fail and how a run recovers. Times are in seconds.

    Attributes:
        rate: failures per device and hour.
        detect_s: from a failure until the run notices it.
        restart_s: from detection until training resumes from the newest copy.
        interval_s: training time between two copies of the state.
        copy_s: time for which a copy pauses training.
        spares: nodes in the allocation beyond those that train.
        repair_s: mean time until a lost node is replaced in the allocation.
        requeue_s: wait for a node if no spare is left.
        node_share: fraction of failures in which a node is lost.
    """

    devices: int
    rate: float
    detect_s: float
    restart_s: float
    interval_s: float
    copy_s: float
    spares: int = 0
    repair_s: float = 24 * 3600.0
    requeue_s: float = 1800.0
    node_share: float = 0.7
    devices_per_node: int = 8

    @property
    def failures_per_s(self) -> float:
        return self.devices * self.rate / 3600

    @property
    def trains(self) -> float:
        """Fraction of the allocation's devices that train. The others are on spare nodes."""
        return self.devices / (self.devices + self.spares * self.devices_per_node)


def predict_goodput(model: FailureModel) -> dict[str, float]:
    """Return the expected share of each cause in the allocation: kept steps, checkpoint, repeated, detection, restart,
    queue (the wait for a node) and spare. Assumes that no failure occurs during a recovery."""
    up = 1 / model.failures_per_s
    copies = 1 / expm1(model.failures_per_s * (model.interval_s + model.copy_s))  # expected between two failures
    lost_nodes = model.failures_per_s * model.node_share
    wait = model.node_share * model.requeue_s * erlang_b(lost_nodes * model.repair_s, model.spares)
    seconds = {
        "kept": copies * model.interval_s,
        "checkpoint": copies * model.copy_s,
        "repeated": up - copies * (model.interval_s + model.copy_s),
        "detection": model.detect_s,
        "restart": model.restart_s,
        "queue": wait,
    }
    total = sum(seconds.values())
    shares = {cause: model.trains * value / total for cause, value in seconds.items()}
    return {**shares, "spare": 1 - model.trains}


def erlang_b(load: float, servers: int) -> float:
    """Return the probability that all servers are busy (the Erlang B formula). The servers are the spare nodes, and the
    load is the mean number of nodes under repair."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


def simulate_goodput(model: FailureModel, failures: int = FAILURES, seed: int = 0) -> dict[str, float]:
    """Return the shares that `predict_goodput` predicts, from a simulation of events. Failures also occur during
    recoveries, which then start over."""
    source, now, spares = random.Random(seed), 0.0, model.spares
    repaired: list[float] = []
    seconds: defaultdict[str, float] = defaultdict(float)
    num_failures = 0
    period = model.interval_s + model.copy_s
    while num_failures < failures:
        up = source.expovariate(model.failures_per_s)
        copies = up // period
        seconds["kept"] += copies * model.interval_s
        seconds["checkpoint"] += copies * model.copy_s
        seconds["repeated"] += up - copies * period
        now += up
        recovered = False
        while not recovered:
            num_failures += 1
            parts = {"detection": model.detect_s, "queue": 0.0, "restart": model.restart_s}
            if source.random() < model.node_share:
                while repaired and repaired[0] <= now:
                    heapq.heappop(repaired)
                    spares += 1
                if spares:
                    spares -= 1
                    heapq.heappush(repaired, now + source.expovariate(1 / model.repair_s))
                else:
                    parts["queue"] = model.requeue_s
            left = source.expovariate(model.failures_per_s)  # time until the next failure
            recovered = left >= sum(parts.values())
            for cause, length in parts.items():
                spent = min(left, length)
                seconds[cause] += spent
                now += spent
                left -= spent
    total = sum(seconds.values())
    shares = {cause: model.trains * value / total for cause, value in seconds.items()}
    return {**shares, "spare": 1 - model.trains}
