"""Profiles one rank's work in one step with torch's profiler."""

from __future__ import annotations

from pathlib import Path

import torch


class Profiler:
    """Records operators and kernels between `start` and `stop`. Shapes, stacks and memory would add overhead."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._profile.start()

    def stop(self, file: Path) -> None:
        """Write the recording as a Chrome trace, compressed if the file name ends in .gz."""
        assert self._profile is not None, "stop was called before start"
        self._profile.stop()
        self._profile.export_chrome_trace(str(file))
        self._profile = None
