"""One rank of a model that only runs forward passes. Its weights may be offloaded while it is idle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from megarl.config.device_spans import is_alone
from megarl.config.schema import Config
from megarl.core import device
from megarl.megatron.offload import Offload
from megarl.megatron.workers.model import ModelWorker


class UntrainedWorker(ModelWorker):
    """The base class for roles that are not trained."""

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        self._offload = Offload(self.chunks)
        if freed := self._move_out():
            print(f"{self.role}: offloaded {freed / 1e9:.3f} GB to host memory while idle", flush=True)

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Return a context manager that keeps the parts in the section's `offload` key on the device."""
        for part in set(self._settings.offload):
            self._offload.move_in(part)
        yield
        self._move_out()
        if not is_alone(self._config, self.role):
            device.release_cache()  # a different model on the device may run next

    def _move_out(self) -> int:
        """Offload the parts listed in the section's `offload` key and return the number of bytes freed on the
        device."""
        return sum(self._offload.move_out(part) for part in set(self._settings.offload))
