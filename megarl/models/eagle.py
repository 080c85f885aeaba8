"""Drafts of EAGLE-3 (arXiv 2503.01840): decoder layers that predict the next tokens from a policy's hidden states and
its sampled tokens, as vLLM loads them (model_executor/models/llama_eagle3.py and qwen3_eagle3.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "llama": ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
    "qwen3": ("Eagle3Qwen3ForCausalLM",),
}
"""`model_type` of a draft -> its architectures in vLLM. vLLM also accepts the name of the plain model, such as
LlamaForCausalLM."""

WITHOUT_HIDDEN_STATES = ("glm4_moe", "mixtral")
"""Policy families whose class in vLLM does not return hidden states (SupportsEagle3)."""

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key, in config.json or its eagle_config, that lists the layers of the policy whose input hidden states the draft
reads."""

_SPECULATORS_KEYS = ("draft_vocab_size", "fc_norm", "norm_before_fc", "target_hidden_size", LAYER_IDS)


@dataclass(frozen=True, slots=True)
class EagleDraft:
    """The sizes of a draft that differ from those of a decoder.

    Attributes:
        policy_hidden: size of the policy's hidden states.
        num_states: number of hidden states that the draft reads for each token.
        vocab: number of tokens that the draft can predict.
        layer_ids: layers of the policy whose input hidden states the draft reads; the policy's number of layers stands
            for the last layer's output. None: vLLM's default for the policy.
        has_joint_norm, has_norms: whether the draft normalizes the hidden states before their projection, all together
            or each separately.
    """

    policy_hidden: int
    num_states: int
    vocab: int
    layer_ids: tuple[int, ...] | None
    has_joint_norm: bool
    has_norms: bool

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> EagleDraft:
        nested = hf_config.get("eagle_config") or {}
        counts = [hf_config.get("num_aux_hidden_states"), len(nested.get(LAYER_IDS) or ()), 3]
        if hf_config["model_type"] == "qwen3":
            counts = [hf_config.get("num_aux_layers"), counts[0], len(hf_config.get(LAYER_IDS) or ()), *counts[1:]]
        layer_ids = hf_config.get(LAYER_IDS) or nested.get(LAYER_IDS)
        return cls(
            policy_hidden=hf_config.get("target_hidden_size") or hf_config["hidden_size"],
            num_states=next(count for count in counts if count),
            vocab=hf_config.get("draft_vocab_size") or hf_config["vocab_size"],
            layer_ids=tuple(layer_ids) if layer_ids else None,
            has_joint_norm=bool(nested.get("norm_before_fc", hf_config.get("norm_before_fc"))),
            has_norms=bool(hf_config.get("fc_norm")),
        )

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose inputs the draft reads from a policy with this number of layers."""
        return (2, num_layers // 2, num_layers - 3) if self.layer_ids is None else self.layer_ids


def is_eagle(hf_config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes an EAGLE-3 draft that vLLM loads."""
    family, names = ARCHITECTURES.get(str(hf_config.get("model_type")), ()), hf_config.get("architectures") or ()
    plain = tuple(name.replace("Eagle3", "") for name in family)
    return any(name in family or (name in plain and "draft_vocab_size" in hf_config) for name in names)


def flattened(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a draft's config from the format of vLLM's speculators library: move its layer's keys to the top level,
    as vLLM does (transformers_utils/configs/speculators/algos.py). Other configs are returned unchanged."""
    layer = hf_config.get("transformer_layer_config")
    if hf_config.get("speculators_model_type") != "eagle3" or not isinstance(layer, dict):
        return dict(hf_config)
    own = {key: hf_config[key] for key in _SPECULATORS_KEYS if hf_config.get(key) is not None}
    model_type = layer.get("model_type", "llama")
    architectures = list(ARCHITECTURES.get(str(model_type), ()))[:1]
    return {**layer, **own, "model_type": model_type, "architectures": architectures}
