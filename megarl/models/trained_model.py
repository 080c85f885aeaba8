"""Derive the Hugging Face configs of trained models from those of their initial models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.models.classifier import as_classifier
from megarl.models.mtp import add_mtp
from megarl.models.value_head import add_value_head
from megarl.models.vision import add_vision


def trained_hf_config(config: Config, role: Role, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face config of the model that a role trains, including its heads."""
    kind = config.algorithm.objective.spec.classifier
    if role == "critic":
        return as_classifier(hf_config)
    if role == "actor" and kind is not None:
        return as_classifier(hf_config, kind)
    if role != "actor":
        return dict(hf_config)
    policy = policy_hf_config(config, hf_config)
    return add_value_head(policy) if config.actor_has_values else policy


def policy_hf_config(config: Config, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face config of the policy in engines and exports, which have no value head."""
    mtp, policy = config.actor.mtp, add_vision(hf_config) if config.model.vision else dict(hf_config)
    return policy if mtp.loss_coefficient is None else add_mtp(policy, mtp.is_trained)
