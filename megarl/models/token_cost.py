"""Relative costs of the parts of a training step: accurate enough to balance ranks, but not to predict times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.denoiser import shape_of
from megarl.models.flops import image_flops, pairs_outside_window, training_flops
from megarl.models.huggingface import WindowedAttention
from megarl.models.vision import VisionShape


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Costs relative to processing one token in the linear layers.

    Attributes:
        attended: cost of one (query, key) pair in attention.
        scored: cost of one token whose log-prob is computed.
        windows: the layers with a sliding window.
        vision: the vision tower; None without one.
        trains_tower: whether any parameter of the tower is trained. A partly frozen tower counts as fully trained.
        tower_operation: cost of one operation of the tower.
    """

    attended: float
    scored: float
    windows: WindowedAttention | None = None
    vision: VisionShape | None = None
    trains_tower: bool = False
    tower_operation: float = 0.0

    def pairs(self, num_tokens: int) -> float:
        """Return the number of (query, key) pairs in a document, averaged over the layers with attention."""
        return num_tokens * (num_tokens + 1) // 2 - pairs_outside_window(self.windows, num_tokens)

    def of(self, num_tokens: int, num_scored: int, num_attended: float) -> float:
        return num_tokens + self.scored * num_scored + self.attended * num_attended

    def of_images(self, grids: Iterable[tuple[int, int, int]]) -> float:
        """Return the cost of encoding images. `grids`: as in PromptImage."""
        if self.vision is None:
            return 0.0
        return self.tower_operation * sum(image_flops(self.vision, grid, self.trains_tower) for grid in grids)

    @classmethod
    def of_model(cls, hf_config: Mapping[str, Any], trains_tower: bool = False, num_ranks: int = 1) -> TokenCost:
        """Return the costs of a model whose text model is fully trained. With adapters, a token costs less, so the
        relative cost of images is underestimated by up to a third.

        Args:
            num_ranks: number of ranks per replica. Token work is divided among them; every first-stage rank encodes
                all images.
        """
        shape = shape_of(hf_config)
        token = training_flops(shape, num_tokens=1, num_scored=0, num_attended=0)
        return cls(
            attended=training_flops(shape, num_tokens=0, num_scored=0, num_attended=1) / token,
            scored=training_flops(shape, num_tokens=0, num_scored=1, num_attended=0) / token,
            windows=shape.windows,
            vision=shape.vision,
            trains_tower=trains_tower,
            tower_operation=num_ranks / token,
        )
