"""torch's profiler around the work of a rank in one step."""

from __future__ import annotations

from pathlib import Path

import torch


class Profiler:
    """Notes each operator and kernel from `start` to `stop`; shapes, stacks and memory, which cost much more, are left
    out."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._profile.start()

    def stop(self, file: Path) -> None:
        """Write what was noted, as Chrome's trace events, compressed where the name ends so."""
        assert self._profile is not None, "stop without start"
        self._profile.stop()
        self._profile.export_chrome_trace(str(file))
        self._profile = None
