"""The host memory of a run without a GPU, computed by hand for a model with a known number of parameters."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from megarl.cluster.memory.parameters import ModelParameters, Models, min_host_bytes
from megarl.config.load import load
from tests.paths import BASE

HF_CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
BLOCKS = dict(hidden_size=256, intermediate_size=512, num_attention_heads=2, num_key_value_heads=1, head_dim=128)
COUNT = LlamaForCausalLM(HF_CONFIG).num_parameters()
ACTOR, REFERENCE, ENGINES = "actor: weights, gradients, optimizer", "reference: weights", "engines: weights"


def parts(*overrides: str, model: LlamaConfig = HF_CONFIG) -> dict[str, int]:
    hf_config = model.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config = load(BASE, ["model.path=m", "data.source=arithmetic", *overrides])
    return min_host_bytes(
        config, Models.of({"actor": hf_config}, lora=config.actor.adapters), ModelParameters(hf_config)
    )


@pytest.mark.parametrize(
    ("overrides", "actor", "engines"),
    [
        (["model.dtype=float32"], 4 + 4 + 8, 4),
        (["model.dtype=bfloat16"], 2 + 4 + 12, 2),
        (["model.dtype=float32", "actor.layout.dp=2", "rollout.replicas=3"], 2 * (4 + 4) + 8, 3 * 4),
        (["model.dtype=float32", "actor.layout.pp=2", "actor.layout.tp=2"], 4 + 4 + 8, 4),
        (["model.dtype=float32", "actor.frozen=['*.layers.0.*']"], 4, 4),
    ],
    ids=["float32", "bfloat16", "replicas", "stages", "frozen"],
)
def test_bytes_per_parameter(overrides, actor, engines):
    """Norms, which tensor parallelism replicates, are one percent of this model."""
    found = parts(*overrides)
    assert found.keys() == {ACTOR, ENGINES}
    assert found[ACTOR] == pytest.approx(actor * COUNT, rel=0.01)
    assert found[ENGINES] == engines * COUNT


def test_reference_is_a_copy_of_the_weights():
    found = parts("model.dtype=float32", "algorithm.kl.coefficient=0.1")
    assert found[REFERENCE] == 4 * COUNT


def test_adapters_replace_trained_weights_and_reference():
    """The number of adapter parameters equals PEFT's. Engines receive the merged matrices, which are all weights except
    embedding, head and norms.
    """
    adapted = get_peft_model(LlamaForCausalLM(HF_CONFIG), LoraConfig(r=4, target_modules="all-linear"))
    adapters, _ = adapted.get_nb_trainable_parameters()
    matrices = COUNT - 2 * 256 * 64 - 9 * 64
    found = parts("model.dtype=bfloat16", "actor.lora.rank=4", "algorithm.kl.coefficient=0.1")
    assert found == {ACTOR: 2 * (COUNT + matrices) + (4 + 4 + 8) * adapters, ENGINES: 2 * COUNT}


def test_fp8_engine_and_its_copy_of_the_weights():
    """Llama's matrices take one byte per element, and the rest is bfloat16. Scales add 1/4000."""
    model = LlamaConfig(**HF_CONFIG.to_dict() | BLOCKS)
    sizes = {name: p.numel() for name, p in LlamaForCausalLM(model).named_parameters()}
    matrices = sum(size for name, size in sizes.items() if "proj" in name)
    found = parts("rollout.quantization=fp8_block", "model.dtype=bfloat16", "actor.layout.dp=2", model=model)
    assert found["actor: fp8 copy for the engines"] == 2 * matrices
    assert found[ENGINES] == pytest.approx(2 * sum(sizes.values()) - matrices, rel=1e-3)


def test_engine_with_its_own_quantization_is_skipped():
    assert ENGINES not in parts("model.dtype=float32", "rollout.vllm_overrides={quantization: fp8}")


def test_each_rank_of_an_engine_holds_a_draft_model() -> None:
    hf_config = HF_CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config = load(BASE, ["model.path=m", "data.source=arithmetic", "rollout.replicas=3", "model.dtype=float32"])
    models = Models.of({"actor": hf_config}, draft=hf_config)
    found = min_host_bytes(config, models, ModelParameters(hf_config))
    assert found["engines: draft models"] == 3 * 4 * COUNT == found[ENGINES]


def test_each_replica_of_a_teacher_holds_its_weights():
    hf_config = HF_CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    models = "models: [{name: a, path: x}]"
    keys = ["model.path=m", "data.source=arithmetic", f"teachers={{{models}, layout: {{dp: 2, pp: 2}}}}"]
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        config = load(BASE, [*keys, f"model.dtype={dtype}"])
        held = Models.of({"actor": hf_config}, teachers={"a": hf_config})
        assert min_host_bytes(config, held, ModelParameters(hf_config))["teacher a: weights"] == 2 * size * COUNT
