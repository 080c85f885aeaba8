"""Derive the Hugging Face configs of trained models from those of their initial models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.models.classifier import as_classifier
from megarl.models.value_head import add_value_head


def trained_hf_config(config: Config, role: Role, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face config of the model that a role trains, including its heads."""
    kind = config.algorithm.objective.spec.classifier
    if role == "critic":
        return as_classifier(hf_config)
    if role == "actor" and kind is not None:
        return as_classifier(hf_config, kind)
    return add_value_head(hf_config) if role == "actor" and config.actor_has_values else dict(hf_config)
