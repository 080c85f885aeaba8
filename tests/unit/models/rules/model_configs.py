"""config.json files of small models, and the error lines of `check_model` for changes to them."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.models.rules import check_model
from tests.unit.config.rules.recipes import recipe

SMOLLM2 = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
}

MIXTRAL = SMOLLM2 | {"model_type": "mixtral", "num_attention_heads": 12, "num_key_value_heads": 6}
QWEN3_MOE = MIXTRAL | {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 10}

DEEPSEEK = SMOLLM2 | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 9,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {"rope_type": "yarn", "factor": 40},
}

CLASSIFIER = SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
TOKEN_CLASSIFIER = CLASSIFIER | {"architectures": ["LlamaForTokenClassification"], "vocab_size": 300}


def model_errors(hf_config: dict[str, Any], *overrides: str) -> list[str]:
    config = recipe(*overrides)
    with pytest.raises(ValueError) as error:
        check_model(config, hf_config)
    return str(error.value).splitlines()
