"""A run's peak memory, sampled over all of its processes."""

from __future__ import annotations

import threading

from megarl.cluster.supervision import processes

INTERVAL_S = 2.0


class MemorySampler:
    """Samples the memory of this process and its descendants in a thread, until the context exits."""

    def __init__(self) -> None:
        self._peak = (0.0, 0.0)
        self._stopped = threading.Event()
        threading.Thread(target=self._sample, name="memory", daemon=True).start()

    def peak_gb(self) -> tuple[float, float]:
        """Return the peak memory so far, summed over processes, in 10⁹ bytes: (RSS, PSS)."""
        return self._peak

    def __enter__(self) -> MemorySampler:
        return self

    def __exit__(self, *_) -> None:
        self._stopped.set()

    def _sample(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            rss, pss = processes.memory_gb()
            self._peak = (max(self._peak[0], rss), max(self._peak[1], pss))
