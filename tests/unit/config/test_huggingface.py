from __future__ import annotations

import pytest
from transformers import AutoConfig

from megarl.config.huggingface import FAMILIES, completed


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_config_json_leaves_out_is_what_transformers_takes(model_type: str) -> None:
    ours = completed({"model_type": model_type})
    theirs = type(AutoConfig.for_model(model_type))
    for key in ours.keys() - {"model_type", "rope_theta"}:
        # Class attributes are the defaults; instances have derived values. Keys that a family lacks are off.
        assert ours[key] == getattr(theirs, key, FAMILIES["llama"].get(key)), key
    assert ours["rope_theta"] == AutoConfig.for_model(model_type).rope_parameters["rope_theta"]
