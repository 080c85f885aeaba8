"""The scale of a float16 model's loss: without one, most gradients inside the model would be rounded to 0.

Megarl takes the scale out of the gradients before it looks at their norm, so that all that is said of them, clipping
too, is of those of the loss. A norm that is not finite says that one overflowed: by Megatron's rule for dynamic scales
the next loss has half the scale, and twice the scale after so many updates without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.utils import unwrap_model

DEFAULTS = {"initial_loss_scale": 2.0**16, "hysteresis": 1}
"""Our values of Megatron's fields. Its own are 2³², by which the first 16 updates or so would be lost, and 2, by which
an overflow now and then does not change the scale."""

TRACKERS = {"loss_scale_updates": "growth_tracker", "loss_scale_overflows_left": "hysteresis_tracker"}
"""Names of counters, and Megatron's of the numbers that they are of."""


class LossScale:
    """The scale of the loss of one model: of float16. With other dtypes there is none, and nothing is done."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype, config: OptimizerConfig):
        self._chunks, self._scaler = chunks, None
        if dtype is torch.float16:
            self._scaler = DynamicGradScaler(
                initial_scale=config.initial_loss_scale,
                min_scale=config.min_loss_scale,
                growth_factor=2.0,
                backoff_factor=0.5,
                growth_interval=config.loss_scale_window,
                hysteresis=config.hysteresis,
            )
            # Megatron's schedules call it on the loss, and auxiliary losses take their scale from it.
            for chunk in chunks:
                unwrap_model(chunk).config.grad_scale_func = self._scaled

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return self._scaler.scale * loss

    @property
    def value(self) -> float | None:
        return None if self._scaler is None else self._scaler.scale.item()

    @property
    def is_least(self) -> bool:
        """Whether it cannot become smaller, so that a gradient which is not finite is no overflow of its making."""
        return self._scaler is None or self._scaler.scale.item() <= self._scaler.min_scale.item()

    def take_out(self) -> None:
        """Divide the accumulated gradients by it."""
        if self._scaler is not None:
            for chunk in self._chunks:
                chunk.scale_gradients(self._scaler.inv_scale)

    def update(self, has_overflown: bool) -> None:
        if self._scaler is not None:
            self._scaler.update(has_overflown)

    def counters(self) -> dict[str, float]:
        if self._scaler is None:
            return {}
        state = self._scaler.state_dict()
        return {"loss_scale": self.value} | {name: state[theirs] for name, theirs in TRACKERS.items()}

    def restore(self, counters: Mapping[str, float]) -> None:
        if self._scaler is not None:
            scale = torch.full_like(self._scaler.scale, counters["loss_scale"])
            trackers = {theirs: int(counters[name]) for name, theirs in TRACKERS.items()}
            self._scaler.load_state_dict({"scale": scale} | trackers)
