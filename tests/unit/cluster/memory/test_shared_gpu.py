"""The memory load of a shared GPU for a model with a known number of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.cluster.memory.reserves import ACTIVATIONS, CONTEXTS, GRAPHS, LOGITS, NCCL
from megarl.cluster.memory.shared_gpu import Load, fullest_phase
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.resharding.families.eagle import eagle_bytes
from tests.paths import BASE
from tests.unit.cluster.memory.test_rank import PARAMETERS, QWEN_1_5B

GIB = 2**30
ITEMS = {CONTEXTS, NCCL, GRAPHS, ACTIVATIONS, LOGITS, "reward model: activations", "reward model: logits"}


def config(*overrides: str) -> Config:
    return load(BASE, ["model.path=qwen", "data.source=arithmetic", *overrides])


def fullest(*overrides: str, gpu: int = 0, reward=None, critic: bool = False) -> Load:
    """Return the fullest phase, without the reserves that test_reserves.py covers."""
    trained = {"actor": QWEN_1_5B, **({"critic": QWEN_1_5B} if critic else {})}
    load = fullest_phase(config(*overrides), QWEN_1_5B, trained, reward, gpu, gpus_per_node=8)
    return replace(load, parts={part: size for part, size in load.parts.items() if part not in ITEMS})


def test_trainer_state_and_engine_weights_share_the_gpu():
    """In bfloat16, each parameter takes 2 + 4 + 12 bytes in the actor and 2 in the engine."""
    load = fullest("rollout.kv_cache_gib=1")
    assert load.phase == "while the engine samples"
    assert sum(load.parts.values()) == 20 * PARAMETERS + GIB
    load = fullest("rollout.kv_cache_gib=1", "actor.offload=[parameters]")
    assert load.phase == "while the engine receives weights"
    assert load.parts == {"actor: weights, gradients, optimizer": 18 * PARAMETERS, "engine: weights": 2 * PARAMETERS}


@pytest.mark.parametrize(("away", "name", "size"), [("gradients", "optimizer", 14), ("optimizer", "gradients", 6)])
def test_offloaded_state_is_absent_during_the_refit(away: str, name: str, size: int):
    load = fullest("rollout.kv_cache_gib=1", f"actor.offload=[parameters, {away}]")
    assert load.phase == "while the engine receives weights"
    assert load.parts == {f"actor: weights, {name}": size * PARAMETERS, "engine: weights": 2 * PARAMETERS}
    load = fullest("rollout.kv_cache_gib=1", "actor.offload=[parameters, gradients, optimizer]")
    assert load.parts == {"actor: weights": 2 * PARAMETERS, "engine: weights": 2 * PARAMETERS}


def test_memory_during_rollout():
    load = fullest("rollout.kv_cache_gib=60", "actor.offload=[optimizer, gradients]")
    assert load.phase == "while the engine samples"
    assert load.parts == {
        "actor: parameters": 2 * PARAMETERS,
        "engine: weights": 2 * PARAMETERS,
        "engine: KV cache": 60 * GIB,
    }
    assert "actor: parameters" not in fullest("rollout.kv_cache_gib=60", "actor.offload=[parameters]").parts


def test_float32_has_no_separate_main_weights():
    load = fullest("model.dtype=float32", "actor.offload=[parameters]", "rollout.kv_cache_gib=0.1")
    assert load.parts == {"actor: weights, gradients, optimizer": 16 * PARAMETERS, "engine: weights": 4 * PARAMETERS}


def test_ranks_of_several_models_add_up_on_a_gpu():
    settings = (
        "algorithm.advantage.estimator=gae",
        "actor.layout.dp=2",
        "rollout.replicas=2",
        "rollout.kv_cache_gib=1",
    )
    offload = "critic.offload=[parameters, optimizer]"
    first, second = (fullest(*settings, offload, gpu=gpu, critic=True).parts for gpu in range(2))
    # In the fullest phase, the critic is saved: its weights are loaded, and its optimizer state is loaded one parameter
    # at a time.
    own = 2 * PARAMETERS + 4 * PARAMETERS + 6 * PARAMETERS  # the optimizer is sharded over two ranks
    assert first["actor: weights, gradients, optimizer"] == own
    assert first["critic: weights, gradients"] == 2 * PARAMETERS + 4 * PARAMETERS
    assert second["actor: optimizer"] == 6 * PARAMETERS
    assert not any("critic" in part for part in second), "the critic has only one rank"


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("{path: rm}", {"reward model: weights": 2 * PARAMETERS}),
        ("{path: rm, offload: [parameters]}", {}),
        (
            "{path: rm, engine: vllm, kv_cache_gib: 3}",
            {"reward model: weights": 2 * PARAMETERS, "reward model: KV cache": 3 * GIB},
        ),
        (
            "{path: rm, engine: vllm, kv_cache_gib: 3, input_format: question}",
            {"reward model: weights": 2 * PARAMETERS, "reward model: KV cache": 3 * GIB},
        ),
    ],
)
def test_reward_model_remains_unless_offloaded(settings: str, parts: dict[str, float]):
    few, many = (
        fullest(
            f"reward_model={settings}", f"rollout.kv_cache_gib={size}", "actor.offload=[parameters]", reward=QWEN_1_5B
        )
        for size in (1, 60)
    )
    assert (few.phase, many.phase) == ("while the engine receives weights", "while the engine samples")
    for found in (few, many):
        assert {part: size for part, size in found.parts.items() if "reward" in part} == parts


@pytest.mark.parametrize("offload", [False, True])
def test_teachers_remain_unless_offloaded(offload: bool):
    """The second GPU has no rank of the teachers."""
    models = "models: [{name: a, path: x}, {name: b, path: y}]"
    keys = [f"teachers={{{models}, offload: {'[parameters]' if offload else '[]'}}}", "actor.layout.dp=2"]
    keys += ["rollout={replicas: 2, kv_cache_gib: 1}"]
    found = [
        fullest_phase(
            config(*keys), QWEN_1_5B, {"actor": QWEN_1_5B}, None, gpu, 8, teachers=dict.fromkeys("ab", QWEN_1_5B)
        ).parts
        for gpu in range(2)
    ]
    weights = [{part: size for part, size in parts.items() if part.startswith("teacher")} for parts in found]
    expected = {} if offload else {f"teacher {name}: weights": 2 * PARAMETERS for name in "ab"}
    assert weights == [expected, {}]
    assert found[0][CONTEXTS] > 2 * found[1][CONTEXTS], "each teacher has a process with a CUDA context"


def test_teachers_in_vllm_hold_their_weights_and_kv_cache():
    """The first teacher has one rank, and the second teacher has two, on both GPUs."""
    models = "{name: a, path: x}, {name: b, path: y, engine: vllm, layout: {tp: 2}}"
    keys = [f"teachers={{models: [{models}], offload: [parameters], kv_cache_gib: 3}}", "actor.layout.dp=2"]
    keys += ["rollout={replicas: 2, kv_cache_gib: 1}"]
    found = [
        fullest_phase(
            config(*keys), QWEN_1_5B, {"actor": QWEN_1_5B}, None, gpu, 8, teachers=dict.fromkeys("ab", QWEN_1_5B)
        ).parts
        for gpu in range(2)
    ]
    for parts in found:
        assert "teacher a: weights" not in parts
        assert parts["teacher b: weights"] == PARAMETERS and parts["teacher b: KV cache"] == 3 * 2**30
        assert parts["teacher b: logits"] == 1024 * 151_936 * 4 * 2.5


def test_exact_divergence_keeps_output_layers_on_last_stage():
    """QWEN_1_5B has 151,936 tokens and a hidden size of 1,536. One of the teachers is the policy itself."""
    keys = ["teachers.models=[{name: a, path: x}, {name: b, prompt_column: hint}]", "data.source=rows.jsonl"]
    keys += ["rollout={replicas: 4, kv_cache_gib: 1}"]
    keys += ["actor.layout={tp: 2, pp: 2, sequence_parallel: true}"]
    keys += ["algorithm.distillation={divergence: jsd, placement: loss}"]
    found = [
        fullest_phase(config(*keys), QWEN_1_5B, {"actor": QWEN_1_5B}, None, gpu, 8, teachers={"a": QWEN_1_5B}).parts
        for gpu in range(4)
    ]
    sizes = [parts.get("actor: teachers' output layers") for parts in found]
    assert sizes == [None, None, *[151_936 // 2 * 2 * 1536 * 2] * 2]


@pytest.mark.parametrize("extra", ["actor.frozen=[model.layers.0.*]", "actor.megatron_overrides.optimizer={a: 1}"])
def test_uncertain_memory_is_not_counted(extra: str):
    load = fullest(extra, "rollout.vllm_overrides={quantization: fp8}", "rollout.kv_cache_gib=60")
    assert load.parts == {"actor: parameters": 2 * PARAMETERS, "engine: weights": 0, "engine: KV cache": 60 * GIB}


def test_draft_model_adds_its_weights():
    drafted = fullest_phase(config(), QWEN_1_5B, {"actor": QWEN_1_5B}, None, 0, 8, draft=QWEN_1_5B)
    assert drafted.parts["engine: draft model"] == 2 * PARAMETERS
    assert drafted.total == fullest_phase(config(), QWEN_1_5B, {"actor": QWEN_1_5B}, None, 0, 8).total + 2 * PARAMETERS


def test_eagle_draft_adds_its_weights():
    draft = QWEN_1_5B | dict(model_type="llama", architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1)
    eagle = config("rollout.speculative={method: eagle3, path: m}")
    found = fullest_phase(eagle, QWEN_1_5B, {"actor": QWEN_1_5B}, None, 0, 8, draft=draft)
    assert found.parts["engine: draft model"] == eagle_bytes(draft, eagle.rollout.tp, "bfloat16")
