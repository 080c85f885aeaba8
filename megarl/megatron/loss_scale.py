"""Loss scaling for float16 models. Without it, most gradients inside the model would underflow to 0.

Gradients are unscaled before their norm is computed, so that the norm and clipping refer to the unscaled loss. A
non-finite norm means that a gradient overflowed: as in Megatron's dynamic scaling, the scale is then halved, and it is
doubled after a number of updates without overflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megarl.core.errors import UserError
from megarl.megatron.routes import model_of

DEFAULTS = {"initial_loss_scale": 2.0**16, "hysteresis": 1}
"""megarl's defaults for OptimizerConfig. With Megatron's initial scale of 2³², about the first 16 updates would be
skipped. With its hysteresis of 2, a single overflow would not reduce the scale."""

TRACKERS = {"loss_scale_updates": "growth_tracker", "loss_scale_overflows_left": "hysteresis_tracker"}
"""Checkpoint counter name -> Megatron's name for the tracker."""


class LossScale:
    """The loss scale for one float16 model. Models with any other dtype have no scale, and all methods are no-ops."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], dtype: torch.dtype, config: OptimizerConfig):
        self._chunks = chunks
        self._scaler = _scaler(config) if dtype is torch.float16 else None
        if (scaler := self._scaler) is not None:
            # Megatron's schedules call this on the loss and use it to scale auxiliary losses.
            for chunk in chunks:
                model_of(chunk).config.grad_scale_func = lambda loss: scaler.scale * loss

    @property
    def value(self) -> float | None:
        return None if self._scaler is None else self._scaler.scale.item()

    @property
    def is_minimal(self) -> bool:
        """Whether the scale cannot be reduced further; a non-finite gradient then has a different cause."""
        return self._scaler is None or self._scaler.scale.item() <= self._scaler.min_scale.item()

    def unscale_gradients(self) -> None:
        """Divide the accumulated gradients by the scale."""
        if self._scaler is not None:
            for chunk in self._chunks:
                chunk.scale_gradients(self._scaler.inv_scale)  # pyright: ignore[reportArgumentType]  # accepts a tensor

    def update(self, has_overflown: bool) -> None:
        if self._scaler is not None:
            self._scaler.update(has_overflown)

    def counters(self) -> dict[str, float]:
        if self._scaler is None:
            return {}
        state = self._scaler.state_dict()
        return {"loss_scale": self._scaler.scale.item()} | {name: state[key] for name, key in TRACKERS.items()}

    def restore(self, counters: Mapping[str, float]) -> None:
        if self._scaler is not None:
            if missing := {"loss_scale", *TRACKERS} - counters.keys():
                raise UserError(
                    f"the checkpoint has no counter {min(missing)}, which a float16 model needs. Fix: resume from "
                    "another checkpoint"
                )
            scale = torch.full_like(self._scaler.scale, counters["loss_scale"])
            trackers = {tracker: int(counters[name]) for name, tracker in TRACKERS.items()}
            self._scaler.load_state_dict({"scale": scale} | trackers)


def _scaler(config: OptimizerConfig) -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,  # pyright: ignore[reportArgumentType]  # Megatron annotates a float
        hysteresis=config.hysteresis,
    )
