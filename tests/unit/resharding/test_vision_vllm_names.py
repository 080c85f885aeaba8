"""Compare the declarations of vision-language models with those that vLLM's own classes build and load."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from megarl.models.folder import read_config
from megarl.models.multimodal import text_config
from megarl.models.vision import add_vision
from megarl.models.weight_files import SINGLE
from megarl.resharding.families import vllm_holder
from megarl.rollout.vllm import multimodal_models
from tests import tiny_vision
from tests.published_models import VISION_CONFIGS
from tests.unit.resharding.test_vision import KINDS, read_all
from tests.unit.resharding.test_vllm_names import assert_declared, held
from tests.unit.resharding.vllm_world import weights, worker

multimodal_models.install()


@pytest.mark.parametrize("tp", [1, 4, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_vision_language_models_match_vllm(name, tp, tmp_path):
    """Four text layers and two tower layers cover all kinds of layers."""
    config = VISION_CONFIGS[name]
    layers = {"num_hidden_layers": 4}
    config = config | ({"text_config": config["text_config"] | layers} if "text_config" in config else layers)
    deepstack = {"deepstack_visual_indexes": [0, 1]} if name.startswith("Qwen3-VL") else {}
    config |= {"vision_config": config["vision_config"] | {"depth": 2} | deepstack}
    holder = vllm_holder(add_vision(text_config(config)), tp, tp - 1, replica=0, dtype="bfloat16")
    with worker(tmp_path, config, tp, tp - 1) as model:
        assert_declared(holder, model)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_loads_towers_where_declared(kind, tmp_path):
    """vLLM's loader reads the folder's tensors as they are stored."""
    folder = tiny_vision.build(tmp_path, kind)
    hf_config, config = add_vision(read_config(folder)), json.loads((folder / "config.json").read_text())
    tensors = read_all(folder)
    for rank in range(2):
        holder = vllm_holder(hf_config, 2, rank, replica=0, dtype="float32")
        with worker(folder, config, 2, rank, dtype=torch.float32, device="cpu") as model:
            for parameter in model.parameters():
                parameter.data.fill_(math.nan)
            model.load_weights(iter(load_file(folder / SINGLE).items()))
            real = weights(model)
        declared = held(holder, tensors)
        assert declared.keys() == real.keys()
        assert not [name for name, weight in real.items() if not torch.equal(weight, declared[name])], f"rank {rank}"
