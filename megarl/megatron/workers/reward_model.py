"""One rank of a reward model: a classifier that scores whole samples or their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.distributed_c10d import Store

from megarl.config.device_spans import is_alone
from megarl.config.schema import Config
from megarl.core import device
from megarl.data.local_batch import LocalBatch
from megarl.megatron import parallel
from megarl.megatron.offload import Offload
from megarl.megatron.workers.model import ModelWorker
from megarl.models.classifier import score_head_of


class RewardModelWorker(ModelWorker):
    role = "reward_model"
    reads = "tokens"

    def __init__(self, config: Config, model_folder: Path, rank: int, store: Store, threads: int):
        super().__init__(config, model_folder, rank, store, threads)
        head = score_head_of(self._hf_config)
        assert head is not None, "the reward model is not a classifier"
        self._kind = head.kind
        self._offload = Offload(self.chunks)
        if freed := self._move_out():
            print(f"reward_model: offloaded {freed / 1e9:.3f} GB to host memory while it is idle", flush=True)

    def score_tokens(self, batch: LocalBatch) -> dict[str, torch.Tensor]:
        """Run a forward-only pass and return sample id -> score for each response token, float32 [R] on the host. A
        sequence classifier returns the last token's score, [1]. One rank per replica returns the scores."""
        with self._present():
            scores = self._first_column(batch)
        if not parallel.returns_results():
            return {}
        first = -1 if self._kind == "sequence" else 0
        return {name: score[first:].cpu() for name, score in scores.items()}

    @contextmanager
    def _present(self) -> Iterator[None]:
        """Return a context manager that keeps the parts in `reward_model.offload` on the device."""
        for part in set(self._settings.offload):
            self._offload.move_in(part)
        yield
        self._move_out()
        if not is_alone(self._config, self.role):
            device.release_cache()  # a different model on the device may run next

    def _move_out(self) -> int:
        """Offload the parts listed in `reward_model.offload` and return the number of bytes freed on the device."""
        return sum(self._offload.move_out(part) for part in set(self._settings.offload))
