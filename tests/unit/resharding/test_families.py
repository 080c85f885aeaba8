from __future__ import annotations

import json
import math
import random
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.config.load import load
from megarl.config.rules.layout import check_layout
from megarl.models.families import FAMILIES, TRANSFORMERS_TYPES
from megarl.models.multimodal import WHOLE_ONLY, text_config
from megarl.models.rules import check_model
from megarl.models.shape import ModelShape
from megarl.models.vision import add_vision
from megarl.resharding.families import huggingface_holder, megatron_holder, vllm_holder
from megarl.resharding.families.megatron import chunk_layers, megatron_holders, stage_sizes
from tests.paths import BASE
from tests.published_models import CONFIGS, PARAMETERS, VISION_CONFIGS, VISION_PARAMETERS
from tests.unit.resharding.cases import config_of, layout_of

CONFIG = load(BASE, ["model.path=m", "data.source=arithmetic"])
MIXTRAL = dict(model_type="mixtral", num_local_experts=4)


def test_shape_uses_defaults_for_omitted_config_keys():
    config = config_of(hidden_size=12, num_attention_heads=6, head_dim=None, num_key_value_heads=None)
    del config["tie_word_embeddings"]
    shape = ModelShape.of(config)
    assert (shape.head_dim, shape.kv_heads, shape.tied, shape.qkv_bias) == (2, 6, False, False)
    assert ModelShape.of(config_of(model_type="qwen2")).qkv_bias


@pytest.mark.parametrize("model", PARAMETERS)
def test_checkpoint_has_the_published_parameter_count(model):
    shapes = huggingface_holder(CONFIGS[model]).shapes
    assert sum(map(math.prod, shapes.values())) == PARAMETERS[model]
    assert ("lm_head.weight" in shapes) != CONFIGS[model]["tie_word_embeddings"]


@pytest.mark.parametrize("model", VISION_PARAMETERS)
def test_vision_language_checkpoint_matches_transformers(model):
    """Names, shapes, and the published parameter count."""
    shapes = huggingface_holder(add_vision(text_config(VISION_CONFIGS[model]))).shapes
    assert sum(map(math.prod, shapes.values())) == VISION_PARAMETERS[model]
    with torch.device("meta"):
        theirs = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**VISION_CONFIGS[model])).state_dict()
    assert sum(tensor.numel() for tensor in theirs.values()) == VISION_PARAMETERS[model]
    named = {name.replace("model.language_model.", "model."): tuple(t.shape) for name, t in theirs.items()}
    separate = {name: shape for name, shape in named.items() if ".experts." not in name}
    assert separate == {name: shape for name, shape in shapes.items() if ".experts." not in name}


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in WHOLE_ONLY])
def test_checkpoint_size_matches_transformers(model_type):
    """Uses the default sizes in transformers, up to DeepSeek-V3 with 671 billion parameters."""
    config = AutoConfig.for_model(TRANSFORMERS_TYPES.get(model_type, model_type), sliding_window=None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = huggingface_holder(json.loads(config.to_json_string()) | {"model_type": model_type}).shapes
    assert sum(map(math.prod, shapes.values())) == sum(tensor.numel() for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, f"model_type gpt2 is not supported. Fix: use a model of type {', '.join(FAMILIES)}"),
        ({"vocab_size": None}, "vocab_size must be an integer, found None"),
        (
            {"model_type": "qwen3", "attention_bias": True},
            "attention_bias true: megarl does not support this for qwen3",
        ),
        ({"mlp_bias": True, "model_type": "mistral", "hidden_act": "gelu"}, "hidden_act gelu: megarl does not support"),
    ],
)
def test_unsupported_configs_are_rejected(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.of(config_of(**changes))


@pytest.mark.parametrize(
    ("num_layers", "layout", "counts"),
    [
        (6, layout_of(pp=3), [2, 2, 2]),
        (30, layout_of(pp=2, last=13), [17, 13]),
        (7, layout_of(pp=3, first=1), [1, 3, 3]),
        (8, layout_of(pp=4, first=1, last=3), [1, 2, 2, 3]),
        (5, layout_of(pp=2, first=2, last=3), [2, 3]),
        (4, layout_of(pp=1), [4]),
    ],
)
def test_stages_divide_the_layers_in_order(num_layers, layout, counts):
    assert stage_sizes(num_layers, layout) == counts
    [stages] = chunk_layers(num_layers, layout)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_virtual_stages_are_interleaved():
    chunks = chunk_layers(12, layout_of(pp=3, vpp=2, first=2, last=6))
    assert chunks == [[range(0, 1), range(1, 3), range(3, 6)], [range(6, 7), range(7, 9), range(9, 12)]]


def test_indivisible_virtual_stages_are_rejected():
    with pytest.raises(ValueError, match="the 3 layers of pipeline stage 0 are not divisible by 2"):
        chunk_layers(6, layout_of(pp=2, vpp=2))


@pytest.mark.parametrize(
    ("num_layers", "layout", "layers_left", "stages_left"),
    [
        (5, layout_of(pp=2), 5, 2),
        (6, layout_of(pp=3, first=1), 5, 2),
        (5, layout_of(pp=2, first=2, last=2), 1, 0),
        (2, layout_of(pp=3, first=2), 0, 2),
        (5, layout_of(pp=1, last=3), 2, 0),
    ],
)
def test_indivisible_stages_are_rejected(num_layers, layout, layers_left, stages_left):
    message = (
        f"remaining {layers_left} of {num_layers} layers cannot be distributed evenly over the remaining {stages_left} "
    )
    with pytest.raises(ValueError, match=message):
        stage_sizes(num_layers, layout)


def test_transformer_engine_fuses_norms_into_linear_layers():
    plain, fused = (megatron_holder(config_of(), layout_of(), 0, transformer_engine=flag) for flag in (False, True))
    renamed = {
        "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
        "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    }
    expected = {}
    for name, shape in plain.shapes.items():
        prefix, _, rest = name.partition("layers.")
        number, _, local = rest.partition(".")
        expected[f"{prefix}layers.{number}.{renamed[local]}" if local in renamed else name] = shape
    assert fused.shapes == expected


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (
            lambda: megatron_holder(CONFIGS["SmolLM2-135M"], layout_of(tp=2), 0),
            "^tp=2: 9 attention heads are not divisible by 2",
        ),
        (
            lambda: megatron_holder(config_of(), layout_of(tp=6), 0),
            "^tp=6: 3 KV heads are not divisible by 6",
        ),
        (
            lambda: megatron_holder(config_of(**MIXTRAL), layout_of(ep=3), 0),
            "^ep=3: 4 experts are not divisible by 3",
        ),
        (
            lambda: megatron_holder(config_of(**MIXTRAL), layout_of(ep=4, etp=4), 0),
            "^etp=4: 18 MLP rows of an expert are not divisible by 4",
        ),
        (
            lambda: vllm_holder(config_of(**MIXTRAL, num_attention_heads=12), 12, 0, 0),
            "18 MLP rows of an expert are not divisible by 12",
        ),
        (lambda: vllm_holder(config_of(), 4, 0, 0), "rollout.tp=4: 6 attention heads are not divisible by 4"),
        (
            lambda: vllm_holder(
                config_of(**MIXTRAL, num_attention_heads=16, num_key_value_heads=8), 8, 0, 0, expert_parallel=True
            ),
            "rollout.tp=8: with expert parallelism, 4 of 8 workers would have none of the 4 experts. Fix: set ",
        ),
        (
            lambda: vllm_holder(config_of(), 2, 0, 0),
            "rollout.tp=2: 2 is neither a divisor nor a multiple of num_key_value_heads=3",
        ),
        (
            lambda: vllm_holder(config_of(), 3, 0, 0),
            r"rollout.tp=3: 64 vocabulary rows \(vocab_size padded to a multiple of 64\) are not divisible by 3",
        ),
    ],
)
def test_indivisible_sizes_are_rejected(holder, message):
    with pytest.raises(ValueError, match=message):
        holder()


def test_planning_imports_no_torch():
    code = (
        "import sys; import megarl.resharding.families, megarl.resharding.planning.check;"
        "print({'torch', 'megatron', 'vllm', 'transformers'} & set(sys.modules))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "set()"


MODELS = (
    config_of(num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=6, intermediate_size=24),
    config_of(num_hidden_layers=5, **MIXTRAL),
    config_of(
        model_type="qwen3_moe",
        num_hidden_layers=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=4,
        mlp_only_layers=[0],
        decoder_sparse_step=1,
    ),
)


SIZES = dict(
    tp=(1, 2, 3, 4, 6),
    pp=(1, 2, 3, 4),
    vpp=(1, 2),
    dp=(1, 2, 3, 6),
    ep=(1, 2, 3, 6),
    etp=(None, 1, 2, 3),
    first=(None, None, 1, 2, 3),
    last=(None, None, 1, 2, 3),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model["model_type"])
def test_layouts_accepted_by_config_rules_have_holders(model):
    """The config rules reject all other layouts first, with messages that name the role's key."""
    source, num_accepted = random.Random(0), 0
    for _ in range(1000):
        layout = layout_of(**{name: source.choice(sizes) for name, sizes in SIZES.items()})
        layout = layout.model_copy(update={"sequence_parallel": layout.tp > 1})
        config = CONFIG.model_copy(update={"actor": CONFIG.actor.model_copy(update={"layout": layout})})
        try:
            check_layout("actor.layout.", layout)
            check_model(config, {"max_position_embeddings": 10**6, "rope_theta": 10000.0} | model)
        except ValueError as error:
            assert all(line.startswith("actor.layout.") for line in str(error).splitlines())
            continue
        assert len(megatron_holders(model, layout)) == layout.world_size
        num_accepted += 1
    assert num_accepted > 5
