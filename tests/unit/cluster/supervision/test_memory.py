"""The memory sampler of a run."""

import threading

from megarl.cluster.supervision import memory
from tests.timing import WAIT_S


def test_sampler_keeps_the_peak_until_exit(monkeypatch):
    readings, taken_up = [(2.0, 1.0), (1.0, 3.0)], threading.Event()

    def memory_gb() -> tuple[float, float]:
        if readings:
            return readings.pop(0)
        taken_up.set()
        return 0.0, 0.0

    monkeypatch.setattr(memory, "INTERVAL_S", 0.01)
    monkeypatch.setattr(memory.processes, "memory_gb", memory_gb)
    with memory.MemorySampler() as sampler:
        [thread] = [thread for thread in threading.enumerate() if thread.name == "memory"]
        assert taken_up.wait(WAIT_S)
        assert sampler.peak_gb() == (2.0, 3.0)
    thread.join(WAIT_S)
    assert not thread.is_alive()
