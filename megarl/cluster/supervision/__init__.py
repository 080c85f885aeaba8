"""Supervision of a run's processes: signals, logs, memory, shared memory, and cleanup."""
