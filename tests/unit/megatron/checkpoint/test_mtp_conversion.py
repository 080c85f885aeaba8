"""Conversion of MTP layers from Hugging Face folders to Megatron checkpoints and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megarl.megatron.checkpoint.conversion import huggingface_to_megatron, megatron_to_huggingface, reshape
from tests.unit.megatron.checkpoint.test_conversion import (
    DEEPSEEK,
    GATED_DELTA,
    GATED_DELTA_EXPERTS,
    GLM,
    assert_same,
    weights_of,
    write_tensors,
)
from tests.unit.resharding.cases import config_of, layout_of, random_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("family", [GLM, DEEPSEEK], ids=["GLM-4.6", "DeepSeek-V3"])
def test_mtp_layer_survives_conversions(tmp_path, family):
    """An MTP layer's decoder layer has the tensors of an ordinary layer. A folder also has copies of the embedding and
    the head."""
    config = config_of(**family, num_nextn_predict_layers=1)
    hidden, prefix = config["hidden_size"], f"model.layers.{config['num_hidden_layers']}."
    tensors = random_checkpoint(config | dict(num_hidden_layers=config["num_hidden_layers"] + 1))
    for name, shape in (("eh_proj", (hidden, 2 * hidden)), *((n, (hidden,)) for n in ("enorm", "hnorm"))):
        tensors[f"{prefix}{name}.weight"] = torch.randn(shape)
    tensors[f"{prefix}shared_head.norm.weight"] = torch.randn(hidden)
    copies = {f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    copies |= {f"{prefix}shared_head.head.weight": tensors["lm_head.weight"].clone()}
    write_tensors(tmp_path / "hf", config, tensors | copies)
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "first", layout_of(tp=3, dp=2, ep=2))
    reshape(tmp_path / "first", tmp_path / "second", layout_of(pp=2, vpp=2, dp=4, ep=4))
    megatron_to_huggingface(tmp_path / "second", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors | copies)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["num_nextn_predict_layers"] == 1 and not any("megarl" in key for key in written)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_separate_mtp_layer_survives_conversions(tmp_path, model_type):
    """The folder of a separate layer has no copies of the embedding and the head. Qwen3-Next's config.json does not
    count the layer."""
    family = GATED_DELTA if model_type == "qwen3_5_text" else GATED_DELTA_EXPERTS
    count = {} if model_type == "qwen3_next" else dict(mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False)
    config = config_of(**family, model_type=model_type, **count)
    tensors = with_separate_layer(config)
    write_tensors(tmp_path / "hf", config, tensors)
    experts = dict(dp=2, ep=2) if "num_experts" in family else {}
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "first", layout_of(tp=3, **experts))
    reshape(tmp_path / "first", tmp_path / "second", layout_of(pp=2, vpp=2, **experts))
    megatron_to_huggingface(tmp_path / "second", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config | {"dtype": "float32"}


def test_multimodal_checkpoint_keeps_its_mtp_layer(tmp_path):
    """The checkpoint's experts are stacked, and its vision encoder is dropped."""
    text = config_of(**GATED_DELTA_EXPERTS, model_type="qwen3_5_moe_text", mtp_num_hidden_layers=1)
    tensors = with_separate_layer(text)
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stacked(tensors).items()}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in stored
    outer = dict(model_type="qwen3_5_moe", architectures=["Qwen3_5MoeForConditionalGeneration"])
    config = outer | dict(text_config=text, vision_config=dict(depth=1))
    write_tensors(tmp_path / "hf", config, stored | {"model.visual.blocks.0.norm1.weight": torch.ones(2)})
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of(dp=2, ep=2))
    megatron_to_huggingface(tmp_path / "out", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), tensors)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written == text | dict(architectures=["Qwen3_5MoeForCausalLM"], dtype="float32")


def test_incomplete_separate_mtp_layer_is_dropped(tmp_path):
    config = config_of(**GATED_DELTA_EXPERTS, model_type="qwen3_next")
    tensors = with_separate_layer(config)
    del tensors["mtp.fc.weight"]
    write_tensors(tmp_path / "hf", config, tensors)
    huggingface_to_megatron(tmp_path / "hf", tmp_path / "out", layout_of())
    megatron_to_huggingface(tmp_path / "out", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), random_checkpoint(config))


def with_separate_layer(config: dict[str, Any]) -> Tensors:
    """Return a checkpoint whose MTP layer has tensors of the same names and shapes as the last layer, which has full
    attention."""
    tensors, hidden = random_checkpoint(config), config["hidden_size"]
    last = f"model.layers.{config['num_hidden_layers'] - 1}."
    inner = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    layer = {f"layers.0.{name}": torch.randn(tensor.shape) for name, tensor in inner.items()}
    layer |= {f"{name}.weight": torch.randn(hidden) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    layer["fc.weight"] = torch.randn(hidden, 2 * hidden)
    return tensors | {f"mtp.{name}": tensor for name, tensor in layer.items()}


def stacked(checkpoint: Tensors) -> Tensors:
    """Return the checkpoint with the experts of each layer stacked as in Qwen3.5's files, [experts, rows, columns]."""
    tensors: Tensors = {}
    stacks: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in checkpoint.items():
        prefix, separator, rest = name.partition(".experts.")
        if separator:  # experts are in order
            stacks.setdefault(prefix + separator, {}).setdefault(rest.split(".")[1], []).append(tensor)
        else:
            tensors[name] = tensor
    for prefix, experts in stacks.items():
        gate, up, down = (torch.stack(experts[f"{name}_proj"]) for name in ("gate", "up", "down"))
        tensors |= {f"{prefix}gate_up_proj": torch.cat((gate, up), 1), f"{prefix}down_proj": down}
    return tensors
