"""Report a run's progress to the process that started it. `megarl.run_training` passes these events to its callbacks.

Each event is one line of JSON in a pipe. Without a pipe, events are dropped.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

VARIABLE = "MEGARL_EVENTS"
"""Environment variable with the file descriptor of the pipe."""

_pipes: list[io.FileIO] = []


@contextmanager
def connected() -> Iterator[None]:
    """Send the events of the body through the pipe, if there is one."""
    number = os.environ.pop(VARIABLE, None)  # so that child processes do not write to the pipe
    if number is None:
        yield
        return
    with io.FileIO(int(number), "w") as pipe:
        _pipes.append(pipe)
        try:
            yield
        finally:
            _pipes.remove(pipe)


def send(event: str, **fields: Any) -> None:
    """Send an event. The run continues if the receiver is gone."""
    for pipe in _pipes:
        left = memoryview(json.dumps({"event": event, **fields}).encode() + b"\n")
        with suppress(BrokenPipeError):
            while left:
                left = left[pipe.write(left) :]


class EventSink:
    """A metrics sink that sends each step's metrics as an event."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        send("step", step=step, metrics=metrics)
