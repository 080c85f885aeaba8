from __future__ import annotations

from typing import Any

import pytest

from megarl.config.huggingface import FAMILIES
from megarl.config.load import load
from megarl.config.model_rules import check_critic_model, check_model, check_reward_model
from megarl.config.names import keys
from megarl.config.schema import Config
from megarl.config.vllm_arguments import GIVEN
from tests.paths import BASE

RECIPE = (
    "model.path=smollm2",
    "data.source=arithmetic",
    "actor.layout={tp: 1, pp: 2, dp: 1, last_stage_layers: 13}",
    "actor.tokens_per_microbatch=1024",
    "rollout={max_new_tokens: 16, context_length: 256, tp: 1}",
    "batch={prompts_per_step: 16, samples_per_prompt: 8, prompts_per_update: 16}",
)

GAE = "algorithm.advantage.estimator=gae"

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


def recipe(*overrides: str) -> Config:
    return load(BASE, [*RECIPE, *overrides])


def errors(*overrides: str) -> list[str]:
    with pytest.raises(ValueError) as error:
        recipe(*overrides)
    return str(error.value).splitlines()


def model_errors(hf_config: dict[str, Any], *overrides: str) -> list[str]:
    config = recipe(*overrides)
    with pytest.raises(ValueError) as error:
        check_model(config, hf_config)
    return str(error.value).splitlines()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.refit_delta=true", "rollout.transport=auto"],
            "rollout.refit_delta=true: with rollout.transport=auto and cluster.placement=colocated engines read the "
            "weights where they lie, and nothing is sent; set rollout.transport=p2p or rollout.refit_delta=false",
        ),
        (
            ["rollout.refit_delta=true", "rollout.transport=shared_memory", "cluster.placement=disaggregated"],
            "rollout.refit_delta=true: with rollout.transport=shared_memory and cluster.placement=disaggregated",
        ),
        (
            ["batch.prompts_per_update=5"],
            "batch.prompts_per_update=5: 16 prompts per step do not divide by 5 (16 / 5 = 3.2); "
            "choose from 1, 2, 4, 8, 16",
        ),
        (["batch.prompts_per_update=32"], "16 prompts per step do not divide by 32 (16 / 32 = 0.5)"),
        (["batch.samples_per_prompt=1"], "batch.samples_per_prompt=1: grpo compares the samples of a prompt"),
        (["rollout.top_p=0.9"], "rollout.top_p=0.9: the trainer needs the tokens that the engine kept"),
        (["actor.layout.sequence_parallel=true"], "actor.layout.sequence_parallel=true: it shards over"),
        (["actor.layout.pp=1"], "actor.layout.last_stage_layers given, but actor.layout.pp=1 is a single stage"),
        (["actor.layout={pp: 1, vpp: 2, last_stage_layers: null}"], "actor.layout.vpp=2: virtual stages interleave"),
        (
            ["actor.layout.ep=3", "actor.layout.dp=4"],
            "actor.layout.ep=3: a pipeline stage has tp x cp x dp = 1 x 1 x 4 = 4 ranks, which do not divide by etp x "
            "ep = 1 x 3 = 3; choose ep from 1, 2, 4",
        ),
        (
            ["actor.layout={tp: 2, etp: 1}"],
            "actor.layout.etp=1: without expert parallelism (actor.layout.ep=1) experts are sharded like the other "
            "layers (tp=2); set actor.layout.etp=null or raise ep",
        ),
        (["rollout.max_new_tokens=256"], "rollout.max_new_tokens=256: 0 of rollout.context_length=256 tokens"),
        (["actor.tokens_per_microbatch=255"], "(255 < 256); set actor.tokens_per_microbatch to at least 256"),
        (
            ["actor.layout.cp=6", "actor.tokens_per_microbatch=43"],
            "may have rollout.context_length=256 tokens on actor.layout.cp=6 ranks and is never split over "
            "microbatches (43 < 44); set actor.tokens_per_microbatch to at least 44",
        ),
        (["actor.layout.dp=129"], "actor.layout.dp=129: an update has 128 samples (16 prompts x 8 samples), fewer"),
        (
            [GAE, "critic.optimizer.schedule.min_lr=1e-7"],
            "critic.optimizer.schedule.min_lr=1e-07: critic.optim",
        ),
        (["actor.fp8=delayed", "model.dtype=float32"], "actor.fp8=delayed: its matrix products are between parameters"),
        (
            ["actor.optimizer.schedule.warmup=2.5"],
            "actor.optimizer.schedule.warmup=2.5: from 1 on this counts updates; give a whole number, or a share",
        ),
        (
            ["actor.optimizer.schedule.name=wsd"],
            "actor.optimizer.schedule.name=wsd: it needs the length of its decay; set actor.optimizer.schedule.decay=",
        ),
        (
            ["actor.optimizer.schedule={name: cosine, decay: 0.2}"],
            "actor.optimizer.schedule.decay=0.2: only wsd has it, and actor.optimizer.schedule.name=cosine; set decay=",
        ),
        (
            ["actor.optimizer.schedule.min_lr=1e-7"],
            "actor.optimizer.schedule.min_lr=1e-07: actor.optimizer.schedule.name=constant does not decay to it; set",
        ),
        (
            ["actor.optimizer.schedule={name: linear, min_lr: 1e-3}"],
            "actor.optimizer.schedule.min_lr=0.001: the schedule decays to it from actor.optimizer.lr=1e-06; set",
        ),
        (
            ["run.steps=10", "actor.optimizer.schedule={name: wsd, warmup: 6, decay: 0.5}"],
            "actor.optimizer.schedule.warmup=6, decay=0.5: 6 + 5 = 11 updates, but in the run there are 10; give "
            "both as shares of the run",
        ),
        (
            [GAE, "critic.layout.cp=2", "critic.tokens_per_microbatch=127"],
            "critic.tokens_per_microbatch=127: a sample may",
        ),
        ([GAE, "critic.layout.vpp=2"], "critic.layout.vpp=2: virtual stages interleave the layers of several"),
        (
            [GAE, "run.steps=3", "critic.warmup_steps=3"],
            "critic.warmup_steps=3: in these steps only the critic is trained, and the run has run.steps=3; set",
        ),
        (
            ["algorithm.advantage.gae_lambda=0.9"],
            "algorithm.advantage.gae_lambda=0.9: not read by algorithm.advantage.estimator=grpo, which has the options",
        ),
        (
            ["algorithm.advantage.estimator=rloo", "batch.samples_per_prompt=1"],
            "batch.samples_per_prompt=1: rloo compares the samples of a prompt with each other and needs at least 2",
        ),
        (
            ["algorithm.advantage.estimator=reinforce", "batch.samples_per_prompt=1", "batch.sampling_rounds=3"],
            "batch.sampling_rounds=3: prompts whose samples all have one reward are replaced, and with "
            "batch.samples_per_prompt=1 that is each of them; set batch.sampling_rounds=1",
        ),
        (
            ["algorithm.advantage.estimator=pass_at_k", "algorithm.advantage.k=9"],
            "algorithm.advantage.k=9: the best of k is among batch.samples_per_prompt=8 samples; set k to at most 7",
        ),
        (
            ["algorithm.advantage={estimator: pass_at_k, k: 8}"],
            "algorithm.advantage.k=8: of batch.samples_per_prompt=8 samples there is one set of 8, whose best",
        ),
        (
            ["algorithm.advantage={estimator: pass_at_k, k: 9, pass_at_k_baseline: without}"],
            "algorithm.advantage.k=9: the best of k is among batch.samples_per_prompt=8 samples; set k to at most 8",
        ),
        (
            ["algorithm.advantage={estimator: pass_at_k, std: sample}"],
            "algorithm.advantage.std=sample: pass_at_k divides by the deviation over all sets of k samples, which is "
            "that of the population; set algorithm.advantage.std=null",
        ),
        (
            [GAE, "critic.trunk=actor", "critic.warmup_steps=1"],
            "critic.warmup_steps=1: with critic.trunk=actor the critic is not trained without the actor; set",
        ),
        (["rewards.functions=[]"], "rewards.functions=[]: nothing would reward the samples; list a function"),
        (
            ["rewards.functions=[{function: numeric_match, per_turn: true}]"],
            "rewards.functions: numeric_match with per_turn=true: it returns one reward, of the whole response; set "
            "per_turn=false, or name path/to/file.py:function, a function of your own that returns a list",
        ),
        (
            ["algorithm.kl.adaptive_target=0.1"],
            "algorithm.kl.adaptive_target=0.1: algorithm.kl.coefficient=0 stays 0 whatever it is multiplied with",
        ),
        (
            ["algorithm.kl={coefficient: 0.1, adaptive_target: 0.1, adaptive_horizon: 127}"],
            "algorithm.kl.adaptive_horizon=127: a step has 16 x 8 = 128 samples and would change the coefficient by",
        ),
        (
            ["algorithm.kl.renew_steps=2"],
            "algorithm.kl.renew_steps=2: with algorithm.kl.coefficient=0 there is no reference to renew; set",
        ),
        (
            ["algorithm.kl.coefficient=0.1", "algorithm.kl.renew_share=0.1"],
            "algorithm.kl.renew_share=0.1: with algorithm.kl.renew_steps=null the reference is never renewed; set",
        ),
        (["algorithm.objective.clip_low=1"], "algorithm.objective.clip_low=1: the ratio's lower bound 1 - 1 = 0"),
        (
            ["algorithm.correction={old: rollout, mask: sequence}"],
            "algorithm.correction.mask=sequence: with algorithm.correction.old=rollout the old policy is the one that",
        ),
        (
            ["algorithm.correction={mask: token, mask_low: 5}"],
            "algorithm.correction.mask_low=5: no ratio is between it and mask_high=5; set mask_low below 5",
        ),
        (
            ["rewards.overlong_buffer=17"],
            "rewards.overlong_buffer=17: it is the last part of rollout.max_new_tokens=16; set it to at most 16",
        ),
        (
            ["algorithm.objective={name: clip_cov, covariance_low: 6}"],
            "algorithm.objective.covariance_low=6: no covariance is between it and covariance_high=5; set",
        ),
        (
            ["algorithm.objective.name=gspo", "algorithm.objective.dual_clip=3"],
            "algorithm.objective.dual_clip=3.0: algorithm.objective.name=gspo reads clip_low and clip_high, and "
            "dual_clip belongs to clip; set algorithm.objective.dual_clip=null",
        ),
        (
            ["algorithm.objective={name: unclipped, tau_positive: 1}"],
            "algorithm.objective.tau_positive=1.0: algorithm.objective.name=unclipped reads no option",
        ),
    ],
)
def test_broken_rule_is_reported_alone(overrides: list[str], message: str) -> None:
    (line,) = errors(*overrides)
    assert message in line


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.prompts_per_update=8"],
        ["run.steps=10", "actor.optimizer.schedule={name: wsd, warmup: 5, decay: 0.5}"],
        ["actor.optimizer.schedule={name: cosine, warmup: 200, min_lr: 1e-6}"],
        ["batch.samples_per_prompt=2"],
        ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
        ["actor.layout.pp=1", "actor.layout.last_stage_layers=null"],
        ["rollout.max_new_tokens=255"],
        ["actor.tokens_per_microbatch=256"],
        ["actor.layout.dp=128"],
        [GAE, "batch.samples_per_prompt=1", "run.steps=3", "critic.warmup_steps=2"],
        ["algorithm.objective.clip_low=0.99"],
        ["algorithm.objective={name: gmpo, clip_low: 1.5}"],
        ["algorithm.objective={name: dro, tau: 0.1, level: token}"],
        ["rollout.top_p=0.9", "rollout.top_k=20"],
        ["rollout.top_k=1"],
    ],
)
def test_edge_of_a_rule_is_kept(overrides: list[str]) -> None:
    recipe(*overrides)


def test_all_broken_rules_are_reported_together() -> None:
    assert len(errors("rollout.top_p=0.9", "actor.layout.ep=2", "batch.samples_per_prompt=1")) == 3


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
        ["actor.layout.dp=2"],
        ["rollout.tp=3"],
        ["rollout.context_length=8192", "actor.tokens_per_microbatch=8192"],
        ["actor.layout.pp=4", "actor.layout.last_stage_layers=6"],
        ["actor.layout.pp=4", "actor.layout.first_stage_layers=8", "actor.layout.last_stage_layers=6"],
        ["actor.layout.first_stage_layers=17"],
        ["actor.layout.pp=30", "actor.layout.last_stage_layers=null"],
    ],
)
def test_model_fits(overrides: list[str]) -> None:
    check_model(recipe(*overrides), SMOLLM2)


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["actor.layout.tp=2"],
            [
                "actor.layout.tp=2: 9 attention heads do not divide by 2 (9 / 2 = 4.5); choose from 1, 3",
                "actor.layout.tp=2: 3 KV heads do not divide by 2 (3 / 2 = 1.5); choose from 1, 3",
            ],
        ),
        (
            ["actor.layout.tp=9"],
            [
                "actor.layout.tp=9: 3 KV heads do not divide by 9 (3 / 9 = 0.3333); choose from 1, 3",
                "actor.layout.tp=9: 1536 MLP rows (intermediate_size) do not divide by 9 (1536 / 9 = 170.7); choose",
            ],
        ),
        (
            ["rollout.tp=2"],
            [
                "rollout.tp=2: 9 attention heads do not divide by 2 (9 / 2 = 4.5); choose from 1, 3",
                "rollout.tp=2: 3 KV heads do not divide by 2 (3 / 2 = 1.5); choose from 1, 3",
            ],
        ),
        (["rollout.tp=9"], ["rollout.tp=9: 1536 MLP rows (intermediate_size) do not divide by 9"]),
        (
            ["actor.layout.pp=4", "actor.layout.last_stage_layers=null"],
            [
                "actor.layout.pp=4: 30 layers do not tile the stages: 30 layers over 4 stages (30 / 4 = 7.5); choose "
                "pp from 1, 2, 3, 5, 6, 10, 15, 30 with first_stage_layers and last_stage_layers null, or "
                "last_stage_layers=6 alone (3 x 8 + 6 = 30)"
            ],
        ),
        (
            ["actor.layout.pp=3", "actor.layout.last_stage_layers=13"],
            [
                "actor.layout.pp=3, last_stage_layers=13: 30 layers do not tile the stages: 30 - 13 = 17 layers over 2 "
                "other stages (17 / 2 = 8.5); choose pp"
            ],
        ),
        (["actor.layout.last_stage_layers=30"], ["30 - 30 = 0 layers over 1 other stage (0 / 1 = 0); choose pp"]),
        (["actor.layout.first_stage_layers=13"], ["30 - 13 - 13 = 4 layers over 0 other stages; choose pp"]),
        (
            ["actor.layout.pp=31", "actor.layout.last_stage_layers=null"],
            ["30 layers over 31 stages (30 / 31 = 0.9677)"],
        ),
        (
            ["rollout.context_length=8193", "actor.tokens_per_microbatch=10000"],
            ["rollout.context_length=8193: the model has 8192 positions (max_position_embeddings); set"],
        ),
        (
            ["rollout.top_k=49153"],
            ["rollout.top_k=49153: the model's vocabulary has 49152 tokens; set rollout.top_k to"],
        ),
    ],
)
def test_layout_that_does_not_fit_the_model(overrides: list[str], messages: list[str]) -> None:
    lines = model_errors(SMOLLM2, *overrides)
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert message in line


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, f"model_type gpt2 is not supported; the known ones are {', '.join(FAMILIES)}"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling with rope_type dynamic is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling with rope_type yarn is not supported"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2}},
            "rope_parameters with rope_type llama3 without low_freq_factor, high_freq_factor is not supported",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ({"model_type": "qwen2", "mlp_bias": True}, "mlp_bias true is not supported"),
        (
            {"model_type": "mistral", "mlp_bias": True, "attention_bias": True},
            "attention_bias true and mlp_bias true is not supported",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias true is not supported"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "resid_pdrop 0.1 is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config with quant_method fp8 is not supp"),
    ],
)
def test_unsupported_feature_is_named(changed: dict[str, Any], message: str) -> None:
    (line,) = model_errors(SMOLLM2 | changed)
    assert line.startswith("model.path=smollm2: ") and message in line


@pytest.mark.parametrize(
    ("changed", "window"),
    [
        ({"sliding_window": 255}, 255),
        ({"model_type": "mistral"}, 4096),  # transformers' default
        ({"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}, 9),
    ],
)
def test_samples_longer_than_the_attention_window_are_refused(changed: dict[str, Any], window: int) -> None:
    context = window + 1
    overrides = (f"rollout.context_length={context}", f"actor.tokens_per_microbatch={context}")
    (line,) = model_errors(SMOLLM2 | changed, *overrides, "rollout.max_new_tokens=1")
    assert line.startswith(f"rollout.context_length={context}: with sliding_window {window} the model would not see")
    overrides = (f"rollout.context_length={window}", f"actor.tokens_per_microbatch={context}")
    check_model(recipe(*overrides, "rollout.max_new_tokens=1"), SMOLLM2 | changed)


def test_incomplete_model_config_is_refused() -> None:
    lines = model_errors({"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 9})
    assert lines == [
        "model.path=smollm2: its config.json lacks intermediate_size, num_attention_heads; take the "
        "config.json of the original model"
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen2", "sliding_window": 4096},
        {"sliding_window": None, "rope_scaling": None},
        {"rope_parameters": None, "rope_theta": 1e4},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"mlp_bias": True, "attention_bias": True},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen3", "sliding_window": 9},
    ],
)
def test_supported_variants(changed: dict[str, Any]) -> None:
    check_model(recipe(), SMOLLM2 | changed)


MIXTRAL = SMOLLM2 | {"model_type": "mixtral", "num_attention_heads": 12, "num_key_value_heads": 6}
QWEN3_MOE = MIXTRAL | {"model_type": "qwen3_moe", "num_experts": 12, "moe_intermediate_size": 10}


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        (SMOLLM2, ["actor.layout.ep=2", "actor.layout.dp=2"], "actor.layout.ep=2: model.path=smollm2 has no experts"),
        (
            MIXTRAL,
            ["actor.layout.ep=3", "actor.layout.dp=3"],
            "actor.layout.ep=3: 8 experts do not divide by 3 (8 / 3 = 2.667); choose from 1, 2, 4, 8",
        ),
        (
            QWEN3_MOE,
            ["actor.layout.ep=3", "actor.layout.dp=12", "actor.layout.etp=4"],
            "actor.layout.etp=4: 10 MLP rows of an expert do not divide by 4 (10 / 4 = 2.5); choose from 1, 2, 5, 10",
        ),
        (
            QWEN3_MOE,
            ["actor.layout.tp=6", "actor.layout.sequence_parallel=true"],
            "actor.layout.tp=6: 10 MLP rows of an expert do not divide by 6",
        ),
        (
            QWEN3_MOE,
            ["actor.layout.tp=2"],
            "actor.layout.tp=2, sequence_parallel=false: with experts every rank would dispatch all tokens",
        ),
        (QWEN3_MOE, ["rollout.tp=6"], "rollout.tp=6: 10 MLP rows of an expert do not divide by 6"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, [], "router_jitter_noise 0.1 is not supported"),
    ],
)
def test_experts_that_do_not_fit(model: dict[str, Any], overrides: list[str], message: str) -> None:
    (line,) = model_errors(model, *overrides)
    assert message in line


DEEPSEEK = SMOLLM2 | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 9,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_parameters": {"rope_type": "yarn", "factor": 40},
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        ({"topk_method": "greedy"}, "topk_method greedy is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"topk_group": 2}, "num_experts_per_tok 8 with topk_group 2 is not supported"),
        ({"rope_interleave": False}, "rope_interleave false is not supported"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 is not supported"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters with rope_type llama3 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters with rope_type yarn without factor is not"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": False}},
            "rope_parameters with truncate false is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "attention_factor": 0.5}},
            "rope_parameters with attention_factor 0.5 is not supported",
        ),
        ({"attention_bias": True}, "attention_bias true is not supported"),
    ],
)
def test_features_of_deepseek_that_are_not_done_are_named(changed: dict[str, Any], message: str) -> None:
    check_model(recipe(), DEEPSEEK)
    (line,) = model_errors(DEEPSEEK | changed)
    assert message in line


def test_router_that_the_engine_would_not_see_is_refused() -> None:
    (line,) = model_errors({key: value for key, value in DEEPSEEK.items() if key != "topk_method"})
    assert "its config.json lacks topk_method, and the engine would route by softmax, without the bias; add" in line


def test_rows_of_a_dense_mlp_matter_only_where_there_is_one() -> None:
    odd = QWEN3_MOE | {"intermediate_size": 7}
    check_model(recipe("rollout.tp=2", "actor.layout.tp=2", "actor.layout.sequence_parallel=true"), odd)
    lines = model_errors(
        odd | {"mlp_only_layers": [3]}, "rollout.tp=2", "actor.layout.tp=2", "actor.layout.sequence_parallel=true"
    )
    assert ["7 MLP rows (intermediate_size) do not divide by 2" in line for line in lines] == [True, True]


def test_heads_without_groups_are_their_own_kv_heads() -> None:
    ungrouped = {name: value for name, value in SMOLLM2.items() if name != "num_key_value_heads"}
    (line,) = model_errors(ungrouped, "actor.layout.tp=9")
    assert "MLP rows" in line


def test_engine_may_repeat_kv_heads() -> None:
    wide = SMOLLM2 | {"num_attention_heads": 12}
    check_model(recipe("rollout.tp=6"), wide)
    assert model_errors(wide, "rollout.tp=4") == [
        "rollout.tp=4: 3 KV heads do not divide by 4 (3 / 4 = 0.75); choose from 1, 3, 6, 12"
    ]


CLASSIFIER = SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["critic.layout.tp=2"], "critic.layout.tp=2: 9 attention heads do not divide by 2 (9 / 2 = 4.5); choose"),
        ({}, ["critic.layout.pp=7"], "critic.layout.pp=7: 30 layers do not tile the stages"),
        ({"model_type": "gpt2"}, [], "critic.path=rm: model_type gpt2 is not supported"),
        ({"hidden_act": "gelu"}, [], "critic.path=rm: hidden_act gelu is not supported"),
        ({"id2label": {"0": "bad", "1": "good"}}, [], "critic.path=rm: it has 2 labels (id2label), and a score is one"),
        ({"vocab_size": 49151}, [], "critic.path=rm: its vocab_size 49151 is below the actor's 49152, whose token ids"),
    ],
)
def test_critic_that_does_not_fit(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe(GAE, "critic.path=rm", "critic.layout.pp=1", "critic.tokens_per_microbatch=256", *overrides)
    with pytest.raises(ValueError) as error:
        check_critic_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_critic_from_the_actors_model_fits() -> None:
    model = SMOLLM2 | {"vocab_size": 49152, "architectures": ["LlamaForCausalLM"]}
    check_critic_model(recipe(GAE, "critic.layout.tp=3"), model, model)


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["reward_model.layout.tp=2"], "reward_model.layout.tp=2: 9 attention heads do not divide by 2"),
        ({"architectures": ["LlamaForCausalLM"]}, [], "reward_model.path=rm: its architecture is LlamaForCausalLM, wi"),
        ({"id2label": {"0": "bad", "1": "good"}}, [], "reward_model.path=rm: it has 2 labels (id2label), and a score"),
        ({}, ["reward_model.step_end='. '"], "reward_model.step_end='. ': reward_model.path=rm scores whole samples"),
        ({"vocab_size": 9}, [], "reward_model.path=rm: its vocab_size 9 is below the actor's 49152"),
    ],
)
def test_reward_model_that_does_not_fit(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe("reward_model.path=rm", *overrides)
    with pytest.raises(ValueError) as error:
        check_reward_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


VLLM = "reward_model.engine=vllm"


@pytest.mark.parametrize(
    ("changed", "overrides", "message"),
    [
        ({}, ["reward_model.layout.tp=2"], "reward_model.layout.tp=2: 9 attention heads do not divide by 2"),
        ({"max_position_embeddings": 128}, [], "rollout.context_length=256: the model has 128 positions"),
        ({"hidden_act": "gelu"}, [], "reward_model.path=rm: hidden_act gelu is not supported"),
        ({"id2label": {"0": "bad", "1": "good"}}, [], "reward_model.path=rm: it has 2 labels (id2label), and a score"),
    ],
)
def test_reward_model_that_vllm_does_not_serve(changed: dict[str, Any], overrides: list[str], message: str) -> None:
    config = recipe("reward_model.path=rm", VLLM, *overrides)
    with pytest.raises(ValueError) as error:
        check_reward_model(config, SMOLLM2 | {"vocab_size": 49152}, CLASSIFIER | {"vocab_size": 49152} | changed)
    assert message in str(error.value)


def test_vllm_attends_in_windows_where_megatron_does_not() -> None:
    model = CLASSIFIER | {"vocab_size": 49152, "model_type": "mistral", "sliding_window": 64}
    check_reward_model(recipe("reward_model.path=rm", VLLM), SMOLLM2 | {"vocab_size": 49152}, model)
    with pytest.raises(ValueError, match="with sliding_window 64 the model would not see"):
        check_reward_model(recipe("reward_model.path=rm"), SMOLLM2 | {"vocab_size": 49152}, model)


def test_reward_engines_keep_their_parameters() -> None:
    keys = ["reward_model.path=rm", "reward_model.offload=[parameters]"]
    recipe(*keys)
    assert errors(*keys, VLLM) == [
        "reward_model.offload=['parameters']: only a reward model in Megatron moves them, and "
        "reward_model.engine=vllm; set reward_model.offload=[] or reward_model.engine=megatron"
    ]


def test_reward_engines_have_no_other_layout_than_tensor_and_data_parallel() -> None:
    assert errors("reward_model.path=rm", VLLM, "reward_model.layout={tp: 2, pp: 2, sequence_parallel: true}") == [
        "reward_model.engine=vllm: its layout is dp engines of tp ranks, and reward_model.layout has pp=2, "
        "sequence_parallel=true; take the default there, or set reward_model.engine=megatron"
    ]
    recipe("reward_model.path=rm", VLLM, "reward_model.layout={tp: 3, dp: 2}")


def test_arguments_of_vllm_have_one_home() -> None:
    extra = "rollout.vllm_overrides={logprobs_mode: raw_logprobs, dtype: float16, block_size: 32, load_format: auto}"
    assert errors(extra, "reward_model.vllm_overrides.tensor_parallel_size=2") == [
        "reward_model.vllm_overrides.tensor_parallel_size=2: this follows from reward_model.layout.tp; set it there",
        "rollout.vllm_overrides.dtype=float16: this follows from model.dtype; set it there",
        "rollout.vllm_overrides.logprobs_mode=raw_logprobs: megarl relies on its own value; leave it out",
    ]


def test_weights_stay_where_refits_write_them() -> None:
    extra = "{expert_placement_strategy: round_robin, enable_eplb: true, offload_group_size: 2}"
    placement, balance, offload = errors(f"rollout.vllm_overrides={extra}")
    assert placement.startswith(
        "rollout.vllm_overrides.expert_placement_strategy=round_robin: a refit writes a rank's "
    )
    assert balance.startswith("rollout.vllm_overrides.enable_eplb=true: experts would move between ranks, ")
    assert offload.startswith(
        "rollout.vllm_overrides.offload_group_size=2: a layer's parameters would be read from copies"
    )
    assert placement.endswith("; leave it out")
    as_ever = "{expert_placement_strategy: linear, enable_eplb: false, offload_group_size: 0, cpu_offload_gb: 4}"
    recipe(f"rollout.vllm_overrides={as_ever}")
    recipe(f"reward_model.vllm_overrides={extra}")  # nothing is written into it


def test_the_keys_that_arguments_of_vllm_follow_from_exist() -> None:
    homes = {home for given in GIVEN.values() for home in given.values() if home is not None}
    assert homes <= set(keys())


TOKEN_CLASSIFIER = CLASSIFIER | {"architectures": ["LlamaForTokenClassification"], "vocab_size": 300}


@pytest.mark.parametrize(
    "overrides",
    [
        ["reward_model.reads=ids"],
        ["reward_model.reads=chat", "reward_model.step_end=."],
        ["reward_model.reads=chat", "reward_model.aggregation=mean"],
        ["reward_model.reads=chat", "algorithm.advantage.estimator=grpo"],
    ],
)
def test_rewards_of_tokens_are_of_sampled_ones(overrides: list[str]) -> None:
    actor = SMOLLM2 | {"vocab_size": 300}
    check_reward_model(recipe("reward_model.path=rm", GAE, *overrides), actor, TOKEN_CLASSIFIER)
    with pytest.raises(ValueError, match=r"reward_model.reads=text: reward_model.path=rm scores tokens of its own"):
        check_reward_model(recipe("reward_model.path=rm", GAE, "reward_model.reads=text"), actor, TOKEN_CLASSIFIER)


def test_a_reward_model_that_reads_text_may_have_any_vocabulary_and_a_length_of_its_own() -> None:
    read = ["reward_model.path=rm", "reward_model.reads=text", "reward_model.aggregation=mean"]
    check_reward_model(recipe(*read), SMOLLM2 | {"vocab_size": 49152}, TOKEN_CLASSIFIER)
    long = recipe(*read, "reward_model.context_length=9000")
    with pytest.raises(ValueError, match=r"reward_model.context_length=9000: the model has 8192 positions"):
        check_reward_model(long, SMOLLM2 | {"vocab_size": 49152}, TOKEN_CLASSIFIER)
    (line,) = errors(*read, "reward_model.context_length=20000")
    assert line.startswith(
        "reward_model.tokens_per_microbatch=16384: a sample may have reward_model.context_length=20000"
    )
    (line,) = errors("reward_model.path=rm", "reward_model.context_length=512")
    assert line == (
        "reward_model.context_length=512: with reward_model.reads=ids it reads the sampled tokens, at most "
        "rollout.context_length=256; set reward_model.context_length=null"
    )


def test_layout_rules_hold_for_the_reward_model() -> None:
    (line,) = errors("reward_model.path=rm", "reward_model.layout.vpp=2")
    assert line.startswith("reward_model.layout.vpp=2: virtual stages interleave")
    recipe("reward_model.path=rm", "rewards.functions=[]")


def test_a_judge_rewards_samples_that_it_can_compare() -> None:
    judge = ("rewards.functions=[]", "rewards.judge=judge.py:better")
    assert recipe(*judge).rewards.judge == "judge.py:better"
    one = ("batch.samples_per_prompt=1", "algorithm.advantage.estimator=policy_gradient")
    with pytest.raises(ValueError, match=r"^rewards.judge=judge.py:better: it compares the samples of a prompt with"):
        recipe(*judge, *one)
    with pytest.raises(ValueError, match=r"^rewards.functions=\[\]: nothing would reward .* or rewards.judge$"):
        recipe("rewards.functions=[]")
