from __future__ import annotations

import pytest
from transformers import AutoConfig

from megarl.models.huggingface import FAMILIES, TRANSFORMERS_TYPES, completed, untrained_part, without_untrained_part


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_match_transformers(model_type: str) -> None:
    ours = completed({"model_type": model_type})
    known = AutoConfig.for_model(TRANSFORMERS_TYPES.get(model_type, model_type))
    theirs = type(known)
    for key in ours.keys() - {"model_type", "rope_theta", "partial_rotary_factor"}:
        # Class attributes are the defaults; instances have derived values. Keys that a family lacks are off.
        assert ours[key] == getattr(theirs, key, FAMILIES["llama"].get(key)), key
    for key in ("rope_theta", "partial_rotary_factor"):
        assert ours[key] == known.rope_parameters.get(key, FAMILIES["llama"][key])


def test_multi_token_prediction_is_removed_and_described() -> None:
    config = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    assert untrained_part(config) == "multi-token prediction (num_nextn_predict_layers=1)"
    assert without_untrained_part(config) == {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    assert untrained_part(without_untrained_part(config)) is None
    assert without_untrained_part({"model_type": "llama"}) == {"model_type": "llama"}
