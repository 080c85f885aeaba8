"""What the parts of a training step cost, relative to each other: enough to balance ranks, not to predict seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.resharding.families.shape import ModelShape


@dataclass(frozen=True, slots=True)
class TokenCost:
    """In units of one token's way through the linear layers.

    attended   one pair of a query and a key that it sees
    scored     one token whose log-prob is computed
    """

    attended: float
    scored: float

    def of(self, num_tokens: int, num_scored: int, num_attended: int) -> float:
        return num_tokens + self.scored * num_scored + self.attended * num_attended

    @classmethod
    def of_model(cls, hf_config: Mapping[str, Any]) -> TokenCost:
        """A multiply-add counts 2: a linear layer of n weights takes 2n for a token, and a pair takes 2 · head_dim for
        its score and as much for its share of the value, in every head. Backward passes multiply all alike."""
        shape = ModelShape.of(hf_config)
        attention = 2 * shape.hidden * (shape.query + shape.key)
        linear = 2 * shape.num_layers * (attention + 3 * shape.hidden * shape.active_intermediate)
        return cls(
            attended=shape.num_layers * 4 * shape.query / linear,
            scored=2 * shape.vocab * shape.hidden / linear,
        )
