"""Relative costs of the parts of a training step: accurate enough to balance ranks, but not to predict times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.denoiser import shape_of
from megarl.models.flops import pairs_outside_window, training_flops
from megarl.models.huggingface import WindowedAttention


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Costs relative to processing one token in the linear layers.

    Attributes:
        attended: cost of one (query, key) pair in attention.
        scored: cost of one token whose log-prob is computed.
        windows: the layers with a sliding window.
    """

    attended: float
    scored: float
    windows: WindowedAttention | None = None

    def pairs(self, num_tokens: int) -> float:
        """Return the number of (query, key) pairs in a document, averaged over the layers with attention."""
        return num_tokens * (num_tokens + 1) // 2 - pairs_outside_window(self.windows, num_tokens)

    def of(self, num_tokens: int, num_scored: int, num_attended: float) -> float:
        return num_tokens + self.scored * num_scored + self.attended * num_attended

    @classmethod
    def of_model(cls, hf_config: Mapping[str, Any]) -> TokenCost:
        shape = shape_of(hf_config)
        token = training_flops(shape, num_tokens=1, num_scored=0, num_attended=0)
        return cls(
            attended=training_flops(shape, num_tokens=0, num_scored=0, num_attended=1) / token,
            scored=training_flops(shape, num_tokens=0, num_scored=1, num_attended=0) / token,
            windows=shape.windows,
        )
