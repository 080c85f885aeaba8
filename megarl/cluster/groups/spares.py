"""Spare processes that start Python and import Megatron in advance, ready to become a model's ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.actor import ActorHandle

from megarl.cluster.pending import outcome
from megarl.cluster.placement import Process

PROMOTE_S = 5.0
"""Timeout in seconds for a spare to become a rank. It takes milliseconds, unless the process is suspended."""

MAX_FAILURES = 3
"""A rank gets no new spare process after this many have failed."""


@dataclass(slots=True)
class _Spare:
    """A spare process.

    Attributes:
        call: its latest call: `prepare`, or a ping.
        is_ready: whether `prepare` has returned.
    """

    actor: ActorHandle
    call: ray.ObjectRef
    is_ready: bool = False


class SpareProcesses:
    """A model's spare processes, at most one per rank, on the rank's node. The run does not depend on them: a spare
    that has died is replaced, and a rank without a spare starts in a new process."""

    def __init__(self, processes: Sequence[Process], create: Callable[[Process], ActorHandle], logs: Path):
        """`create` starts the actor of a rank's spare. Spares have their own logs until they become ranks."""
        self._processes, self._create, self._logs = {process.name: process for process in processes}, create, logs
        self._spares: dict[str, _Spare] = {}
        self._num_failed: Counter[str] = Counter()

    def refill(self) -> None:
        """Start missing spares without waiting for them."""
        self._update()
        for name, process in self._processes.items():
            if name not in self._spares and self._num_failed[name] < MAX_FAILURES:
                actor = self._create(process)
                self._spares[name] = _Spare(actor, actor.call.remote("prepare"))
        for spare in self._spares.values():
            if spare.is_ready:
                spare.call = spare.actor.__ray_ready__.remote()  # fails if the process has died

    def drop(self, names: Collection[str]) -> None:
        """Kill the spares of these ranks, because the ranks move to another node."""
        for name in self._spares.keys() & names:
            ray.kill(self._spares.pop(name).actor)

    def take(self) -> Mapping[str, ActorHandle]:
        """Turn the ready spares into ranks, and return their actors by rank name. Kill the others, because a spare that
        is still importing at low priority may take longer than a new process."""
        self._update()
        spares, self._spares = self._spares, {}
        calls = {
            name: spare.actor.call.remote("promote", self._processes[name], self._logs)
            for name, spare in spares.items()
            if spare.is_ready
        }
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=PROMOTE_S)
        promoted = {name for name, call in calls.items() if outcome(call)[1] is None}
        for name in spares.keys() - promoted:
            ray.kill(spares[name].actor)
        return {name: spares[name].actor for name in self._processes if name in promoted}

    def _update(self) -> None:
        """Note which spares are ready, and drop those that have failed."""
        calls = {spare.call: name for name, spare in self._spares.items()}
        ended, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0) if calls else ([], [])
        for call in ended:
            name, error = calls[call], outcome(call)[1]
            if error is None:
                self._spares[name].is_ready = True
            else:
                log = self._logs / f"spare-{name}.log"
                print(f"recovery: the spare process of {name} failed, and the run continues. See {log}", flush=True)
                self._num_failed[name] += 1
                ray.kill(self._spares.pop(name).actor)
