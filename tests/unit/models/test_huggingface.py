from __future__ import annotations

import pytest
from transformers import AutoConfig

from megarl.models.huggingface import FAMILIES, completed, untrained_part, without_untrained_part


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_match_transformers(model_type: str) -> None:
    ours = completed({"model_type": model_type})
    theirs = type(AutoConfig.for_model(model_type))
    for key in ours.keys() - {"model_type", "rope_theta"}:
        # Class attributes are the defaults; instances have derived values. Keys that a family lacks are off.
        assert ours[key] == getattr(theirs, key, FAMILIES["llama"].get(key)), key
    assert ours["rope_theta"] == AutoConfig.for_model(model_type).rope_parameters["rope_theta"]


def test_multi_token_prediction_is_removed_and_described() -> None:
    config = {"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    assert untrained_part(config) == "multi-token prediction (num_nextn_predict_layers=1)"
    assert without_untrained_part(config) == {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}
    assert untrained_part(without_untrained_part(config)) is None
    assert without_untrained_part({"model_type": "llama"}) == {"model_type": "llama"}
