"""Step times at sizes with known answers, and compared with recorded plans and published runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.model_schema import Layout
from megarl.models.flops import attention_weights, forward_flops
from megarl.models.huggingface import WindowedAttention
from megarl.models.mtp import add_mtp
from megarl.models.shape import ModelShape
from megarl.planner.hardware import DENSE_SHARE, MEMORY_SHARE, read_cluster
from megarl.planner.plan import plan_recipe
from megarl.planner.refit_time import min_refit_time
from megarl.planner.rollout_time import engine_kv_bytes, kv_bytes, recompute_seconds, state_bytes
from megarl.resharding.families import vllm_holder
from megarl.resharding.planning.schedule import Bandwidth
from megarl.resharding.planning.side import _fields
from megarl.resharding.selection import ONE_PROCESS
from tests.marks import exhaustive_but
from tests.paths import ROOT
from tests.published_models import CONFIGS
from tests.unit.planner.plan_cases import layout_keys, plan_of, recipe
from tools.benchmarks import predictions

RESULTS = ROOT / "tools" / "benchmarks" / "results"
DENSE = "Qwen2.5-7B"
ENGINE = ("rollout.tp=1", "rollout.replicas=8", "rollout.kv_cache_gib=20")
BATCH = ("batch.prompts_per_step=64", "batch.samples_per_prompt=16", "batch.prompts_per_update=64")


def test_update_time_follows_from_flops():
    plan = plan_of(DENSE, "8xH100", *layout_keys(dp=8), *ENGINE, *BATCH)
    time, workload = plan.times.training["actor"], plan.workload
    shape, count = ModelShape.of(CONFIGS[DENSE]), workload.trained
    prompt, response = workload.prompt_tokens, workload.response_tokens
    together = min(16, (16384 - prompt) / response)
    pairs = response**2 / 2 + prompt * response + prompt**2 / 2 / together
    flops = 3 * forward_flops(shape, count * (prompt / together + response), count * response, count * pairs)
    assert time.update["matrix products"] == pytest.approx(flops / (8 * 989.5e12 * DENSE_SHARE), rel=1e-3)
    assert time.passes == {} and time.bubble == 0
    assert set(time.volume) == {"replicas"}


@pytest.mark.parametrize("sizes", [dict(dp=8), dict(tp=2, dp=4)], ids=["DP8", "TP2 DP4"])
def test_muon_adds_its_products_and_its_exchange(sizes):
    """The ranks share the work on all matrices, whose shapes are those of Qwen2.5-7B: hidden size 3,584, 512 key
    features, and 18,944 MLP features."""
    keys = (*layout_keys(**sizes), *ENGINE, *BATCH)
    adamw, muon = (
        plan_of(DENSE, "8xH100", *keys, f"actor.optimizer.name={name}").times.training["actor"].update
        for name in ("adamw", "muon")
    )
    hidden, key, mlp = 3584, 512, 18944
    matrices = 28 * [(hidden, hidden), (hidden, key), (hidden, key), (hidden, hidden), *3 * [(hidden, mlp)]]
    flops = sum(5 * (4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3) for m in matrices)
    exchanged = 8 * sum(rows * columns for rows, columns in matrices) / 8 * 7 / 8
    cluster = read_cluster("8xH100")
    seconds = flops / 8 / (989.5e12 * DENSE_SHARE) + exchanged / cluster.link_bytes_per_second(8)
    assert muon["Muon"] == pytest.approx(seconds)
    assert {name: value for name, value in muon.items() if name != "Muon"} == adamw


def test_recompute_costs_as_much_as_prefill():
    """The rollout's time is that of eight engines, which prefill 64 prompts in total."""
    plan = plan_of(DENSE, "8xH100", *layout_keys(dp=8), *ENGINE, *BATCH, prompt_tokens=3000)
    seconds = recompute_seconds(plan.config, ModelParameters(CONFIGS[DENSE]), plan.cluster, prompt_tokens=1000)
    assert seconds(2000) == pytest.approx(plan.times.rollout.parts["prompts"] / 64 * 8)


def test_samples_share_prompts_only_without_cp():
    """A long prompt of 16 samples is computed once, or 16 times with context parallelism."""
    lengths = dict(prompt_tokens=4096.0, response_tokens=256.0)
    shared, apart = (
        plan_of(
            DENSE, "8xH100", *layout_keys(**layout), *ENGINE, *BATCH, f"actor.tokens_per_microbatch={budget}", **lengths
        )
        for layout, budget in ((dict(dp=8), 16384), (dict(cp=2, dp=4), 8192))
    )
    packed = [plan.workload.packed(plan.config.actor) for plan in (shared, apart)]
    assert [round(one.microbatches * one.tokens) for one in packed] == [8 * (4096 + 16 * 256), 16 * 16 * (4096 + 256)]
    assert [one.scored_share for one in packed] == pytest.approx([1 / 2, 1 / 17])
    seconds = [plan.times.training["actor"].update["matrix products"] for plan in (shared, apart)]
    assert seconds[0] < 0.2 * seconds[1]


def test_pipeline_bubble_matches_closed_form():
    """The bubble takes as long as (p − 1) / v microbatches of the slowest stage, the step as long as m + (p −
    1) / v.
    """
    keys = (*ENGINE, *BATCH, "actor.recompute=full")
    plain, virtual = (
        plan_of(DENSE, "8xH100", *layout_keys(pp=4, dp=2, vpp=vpp), *keys).times.training["actor"] for vpp in (1, 7)
    )
    count = plain.microbatches
    assert plain.bubble == pytest.approx(3 / (count + 3))
    assert virtual.bubble == pytest.approx((3 / 7) / (count + 3 / 7))
    assert plain.update["pipeline bubble"] == pytest.approx(7 * virtual.update["pipeline bubble"], rel=0.1)
    assert plain.update["recomputation"] == pytest.approx(
        (plain.update["matrix products"] + plain.update["pipeline sends"]) / 3
    )


def test_passes_are_those_that_the_algorithm_requires():
    keys = (*layout_keys(dp=8), *ENGINE, *BATCH)
    without, reference, both = (
        plan_of(DENSE, "8xH100", *keys, *more).times.training["actor"]
        for more in (
            (),
            ("algorithm.kl.coefficient=0.1",),
            ("algorithm.kl.coefficient=0.1", "batch.prompts_per_update=32"),
        )
    )
    assert without.passes == {}
    assert 2 * sum(reference.passes.values()) == pytest.approx(sum(both.passes.values()))
    assert sum(reference.passes.values()) == pytest.approx(without.update["matrix products"] / 3)


def test_epochs_multiply_updates_but_not_passes():
    keys = (*layout_keys(dp=8), *ENGINE, *BATCH, "algorithm.kl.coefficient=0.1", "batch.prompts_per_update=32")
    once, thrice = (
        plan_of(DENSE, "8xH100", *keys, f"batch.epochs={epochs}").times.training["actor"] for epochs in (1, 3)
    )
    assert thrice.passes == pytest.approx(once.passes)
    assert thrice.update == pytest.approx({name: 3 * seconds for name, seconds in once.update.items()})
    assert thrice.volume["replicas"] == pytest.approx(3 * once.volume["replicas"])


def test_trpo_product_costs_two_passes_and_a_gradient():
    keys = (*layout_keys(dp=8), *ENGINE, *BATCH, "model.dtype=float32", "algorithm.objective.name=unclipped")
    region = "algorithm.trust_region={kl_limit: 0.01, iterations: 4}"
    plain, trpo = (plan_of(DENSE, "8xH100", *keys, *more).times.training["actor"] for more in ((), (region,)))
    assert trpo.update["matrix products"] == pytest.approx(5 * plain.update["matrix products"])
    # One old-policy pass, two passes per Fisher-vector product, and one line-search pass. An update costs three passes.
    assert trpo.passes["matrix products"] == pytest.approx(10 * plain.update["matrix products"] / 3)


def test_expert_all_to_all_over_nodes_uses_the_network():
    keys = ("rollout.tp=4", "rollout.replicas=8", *BATCH, "actor.recompute=full")
    plans = [plan_of("Qwen3-30B-A3B", "32xH100", *layout_keys(ep=ep, etp=1, dp=32), *keys) for ep in (8, 32)]
    near, far = (plan.times.training["actor"] for plan in plans)
    work = plans[0].workload
    together = (16384 - work.prompt_tokens) / work.response_tokens
    tokens = 64 * 16 / 32 * (work.prompt_tokens / together + work.response_tokens)
    active, hidden, layers = 8, 2048, 48
    sent = 2 * tokens * active * hidden * 2 * layers * 4  # 2 directions; forward, recomputation, 2 · backward
    assert near.volume["expert"] == pytest.approx(sent * 7 / 8, rel=0.1)
    assert far.volume["expert"] == pytest.approx(sent * 31 / 32, rel=0.1)
    assert far.update["expert-parallel all-to-all"] > 5 * near.update["expert-parallel all-to-all"]


def test_kv_cache_bytes_match_published_sizes():
    """Published sizes per token and rank: 128 KiB for Llama-3.1-8B, about 69 kB for DeepSeek-V3's latents."""
    assert kv_bytes(ModelParameters(CONFIGS["Llama-3.1-8B"]), 1, 2) == 128 * 2**10
    assert kv_bytes(ModelParameters(CONFIGS["Llama-3.1-8B"]), 8, 2) == 16 * 2**10
    # With 16 ranks, each of the 8 heads is on two of them.
    assert kv_bytes(ModelParameters(CONFIGS["Llama-3.1-8B"]), 16, 2) == 16 * 2**10
    assert kv_bytes(ModelParameters(CONFIGS["DeepSeek-V3"]), 32, 2) == 61 * 576 * 2
    assert kv_bytes(ModelParameters(CONFIGS["Kimi-K2"]), 32, 2) == 61 * 576 * 2
    assert kv_bytes(ModelParameters(CONFIGS["GLM-4.6"]), 8, 2) == 92 * 2 * 128 * 2


@pytest.mark.parametrize(("dp", "cp"), [(8, 1), (4, 2)])
def test_windows_limit_the_pairs_in_training(dp, cp):
    """With cp=1, a prompt of 16 samples is computed once."""
    lengths = dict(prompt_tokens=1000.0, response_tokens=500.0)
    plan = plan_of(DENSE, "8xH100", *layout_keys(dp=dp, cp=cp), *ENGINE, *BATCH, **lengths)
    packed = replace(plan.workload, windows=WindowedAttention(128, (True, False, False))).packed(plan.config.actor)
    samples, shared = 64 * 16 / dp, 16 if cp == 1 else 1
    in_prompt, in_response = (
        sum(min(n, 128) / 3 + 2 * n / 3 for n in tokens) for tokens in (range(1, 1001), range(1001, 1501))
    )
    pairs = packed.microbatches * packed.tokens * packed.pairs_per_token
    assert pairs == pytest.approx(samples * (in_prompt / shared + in_response), rel=2e-3)


def test_windows_limit_the_kv_cache():
    """Half of gpt-oss's 24 layers cache 128 tokens per sequence. The longest sequence has 8,192 here."""
    keys = (*layout_keys(dp=8, tp=1), *ENGINE, *BATCH, "rollout.context_length=8192", "rollout.max_new_tokens=4096")
    plan = plan_of("gpt-oss-20b", "8xH100", *keys)
    per_layer_and_token = 2 * 8 * 64 * 2
    sequence = 12 * (8192 + 128) * per_layer_and_token
    assert plan.times.rollout.guaranteed == int(20 * 2**30 / sequence)


def test_states_of_gated_delta_nets_match_vllms_shapes():
    """30 of the 40 layers of Qwen3.5-35B-A3B have a state of 32 × 128 × 128 and three inputs of 8,192 channels."""
    shape = ModelShape.of(CONFIGS["Qwen3.5-35B-A3B"])
    states, inputs = 30 * 32 * 128 * 128 * 4, 30 * 3 * 8192 * 2
    assert state_bytes(shape, 1, 2) == states + inputs
    assert state_bytes(shape, 4, 2) == (states + inputs) / 4
    assert state_bytes(ModelShape.of(CONFIGS["Llama-3.1-8B"]), 1, 2) == 0


def test_drafts_enlarge_the_kv_cache_of_hybrid_models():
    """The MTP layer is one of eleven layers with keys and values. Each of three draft tokens has a block of states."""
    speculative = ("rollout.speculative={method: mtp, tokens: 3}", "actor.mtp.loss_coefficient=0.0")
    plain, drafting = recipe(), recipe(*speculative)
    model = ModelParameters(add_mtp(CONFIGS["Qwen3.5-35B-A3B"]))
    layer = 2 * 2 * 256 * 2
    block = 30 * (32 * 128 * 128 * 4 + 6 * 8192 * 2)
    assert engine_kv_bytes(drafting, model, None, 1000) == 11 * layer * 1000 + 4 * block
    assert engine_kv_bytes(plain, model, None, 1000) == 10 * layer * 1000 + state_bytes(model.shape, 1, 2)
    ngram = recipe("rollout.speculative={method: ngram, tokens: 3}")
    assert engine_kv_bytes(ngram, model, None, 1000) == 10 * layer * 1000 + 4 * block
    latent = ModelParameters(add_mtp(CONFIGS["DeepSeek-V3"]))
    assert engine_kv_bytes(drafting, latent, None, 1000) == 62 * 576 * 2 * 1000


def test_eagle_drafts_have_their_own_keys_and_values():
    eagle = dict(architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, draft_vocab_size=32000)
    policy = CONFIGS["Llama-3.1-8B"]
    models = ModelParameters(policy), ModelParameters(policy | eagle)
    drafting = recipe("rollout.speculative={method: eagle3, path: m}", "rollout.sleep=false")
    assert engine_kv_bytes(drafting, *models, 1000) == (32 + 1) * 2 * 8 * 128 * 2 * 1000


def test_decoding_one_sequence_reads_all_weights_per_token():
    one = ("batch.prompts_per_step=4", "batch.samples_per_prompt=2", "batch.prompts_per_update=4")
    plan = plan_of(DENSE, "8xH100", *layout_keys(dp=8), *ENGINE, *one, response_tokens=1023)
    tokens = plan.workload.longest_response
    weights = plan.times.rollout.parts["reading weights"]
    assert weights == pytest.approx(tokens * 2 * 7_615_616_512 / (3350e9 * MEMORY_SHARE), rel=0.01)


def test_larger_kv_cache_speeds_up_sampling():
    keys = (*layout_keys(dp=8), "rollout.tp=1", "rollout.replicas=8", *BATCH)
    small, large = (plan_of(DENSE, "8xH100", *keys, f"rollout.kv_cache_gib={gib}").times.rollout for gib in (0.25, 20))
    assert large.concurrent == pytest.approx(80 * small.concurrent, rel=0.05)
    assert large.guaranteed < large.concurrent
    assert large.seconds < small.seconds
    assert large.full <= large.seconds


def test_overlap_on_separate_devices_takes_the_slower_side():
    engines = ("rollout.tp=1", "rollout.replicas=4", "rollout.kv_cache_gib=20", "cluster.placement=disaggregated")
    times = plan_of(DENSE, "8xH100", *layout_keys(dp=4), *engines, *BATCH).times
    training = times.training["actor"].seconds
    assert times.overlapped(False) == max(times.rollout.seconds, training) + times.refit.seconds
    assert times.overlapped(True) < times.seconds


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
def test_models_on_separate_devices_train_concurrently(tmp_path, placement):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-0.6B"]))
    keys = (*layout_keys(dp=2), "critic.layout.dp=2", "rollout.replicas=2", "algorithm.advantage.estimator=gae")
    config = recipe(f"model.path={tmp_path}", *keys, f"cluster.placement={placement}", "batch.prompts_per_update=32")
    times = plan_recipe(config, read_cluster("6xH100"), as_is=True).best.times
    phases, spans = times.phases, times.spans
    assert {name: end - start for name, (start, end) in spans.items()} == pytest.approx(phases)
    updates = [phases["actor: update"], phases["critic: update"]]
    passes = [phases["actor: passes"], phases["critic: passes"]]
    rest = phases["rollout"] + phases["refit"]
    if placement == "colocated":
        assert times.seconds == pytest.approx(sum(phases.values()))
    else:
        assert times.seconds == pytest.approx(rest + max(passes) + max(updates))
        assert spans["actor: update"][0] == spans["critic: update"][0]


def test_flops_per_token_follow_the_active_parameters():
    """The model cards give 32, 32, 12, 5.1 and 3.6 billion active parameters. Moonlight's report (arXiv 2502.16982)
    gives 2.24 billion without the embedding and the head."""
    for name, billions in (("Kimi-K2", 32), ("GLM-4.6", 32), ("GLM-4.5-Air", 12)):
        flops = forward_flops(ModelShape.of(CONFIGS[name]), num_tokens=1, num_scored=1, num_attended=0)
        assert flops / 2e9 == pytest.approx(billions, abs=0.8), name
    for name, billions in (("gpt-oss-120b", 5.13), ("gpt-oss-20b", 3.61)):
        flops = forward_flops(ModelShape.of(CONFIGS[name]), num_tokens=1, num_scored=1, num_attended=0)
        assert flops / 2e9 == pytest.approx(billions, abs=0.02), name
    moonlight = forward_flops(ModelShape.of(CONFIGS["Moonlight-16B-A3B"]), 1, num_scored=0, num_attended=0)
    assert moonlight / 2e9 == pytest.approx(2.24, abs=0.005)


@pytest.mark.parametrize("name", ["latent", "direct"])
def test_latent_attention_weights_are_its_projections(name):
    config = CONFIGS["DeepSeek-V3"] | ({"q_lora_rank": None} if name == "direct" else {})
    query = 7168 * 1536 + 1536 * 128 * 192 if name == "latent" else 7168 * 128 * 192
    rest = 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    assert attention_weights(ModelShape.of(config)) == query + rest


RECORDED = json.loads((RESULTS / "reshard.json").read_text())["runs"]
PLANS = {
    "deepseek-v3": ("DeepSeek-V3", "tp=8,pp=16,ep=32,etp=1,dp=4,last_stage_layers=1", (8, 32), False),
    "qwen3-235b-nemo-rl-16-nodes": (
        "Qwen3-235B-A22B",
        "tp=2,pp=8,cp=2,ep=16,etp=1,dp=4,first_stage_layers=11,last_stage_layers=11",
        (16, 8),
        False,
    ),
    "qwen3-235b-slime": ("Qwen3-235B-A22B", "tp=4,pp=4,cp=2,ep=16,etp=1,dp=2,last_stage_layers=22", (32, 2), False),
    "qwen3-235b-verl-colocated": (
        "Qwen3-235B-A22B",
        "tp=4,pp=8,ep=4,etp=1,first_stage_layers=11,last_stage_layers=11",
        (8, 4),
        True,
    ),
    "llama-3.1-405b": ("Llama-3.1-405B", "tp=8,pp=16,dp=8,first_stage_layers=7,last_stage_layers=7", (8, 64), False),
}


@pytest.mark.parametrize("case", exhaustive_but(PLANS, "qwen3-235b-verl-colocated", "llama-3.1-405b"))
def test_refit_time_matches_the_simulated_plan(case):
    """The plans are recorded by `megarl reshard` for links of 50 and 400 GB/s."""
    model, text, engines, colocated = PLANS[case]
    layout = Layout(
        **{**ONE_PROCESS, **{k: int(v) for k, v in _fields(text, ONE_PROCESS).items()}}, sequence_parallel=False
    )
    speeds = Bandwidth(inter=50e9, intra=400e9)
    rank_bytes = vllm_holder(CONFIGS[model], engines[0], 0, 0, "bfloat16").shard.num_bytes
    least = min_refit_time(layout, engines, ModelParameters(CONFIGS[model]), rank_bytes, 8, speeds, colocated)
    figures = RECORDED[case]["figures"]
    assert least.seconds == pytest.approx(figures["floor_seconds"], rel=0.06)
    assert least.seconds == pytest.approx(figures["predicted_seconds"], rel=0.1)


PUBLISHED = json.loads((RESULTS / "published_steps.json").read_text())["runs"]


@pytest.mark.exhaustive
def test_recorded_published_steps_are_current():
    """`python tools/benchmarks/predictions.py published --out …` updates the record."""
    assert json.loads(json.dumps([predictions.predict_published(case) for case in predictions.CASES])) == PUBLISHED


def test_published_steps_are_within_the_stated_factor():
    within = [run for run in PUBLISHED if 1 / predictions.FACTOR <= run["ratio"] <= predictions.FACTOR]
    missed = [(run["who"], run["model"], run["gpus"]) for run in PUBLISHED if run not in within]
    assert missed == predictions.MISSES


def test_refit_inside_a_node_uses_nvlink():
    """Two trainer ranks each send half of the weights to an engine on the same node over NVLink."""
    keys = ("cluster.placement=disaggregated", "rollout.tp=2", *layout_keys(tp=2))
    plan = plan_of("Qwen3-0.6B", "4xH100", *keys)
    assert plan.problem is None
    assert plan.times.refit.seconds == pytest.approx(0.596e9 / 337.5e9, rel=0.01)


def test_fp8_engines_read_one_byte_per_matrix_element():
    """Each block has a scale of four bytes. All other parameters are in bfloat16."""
    keys = (*layout_keys(dp=4), *ENGINE[:1], "rollout.replicas=4", "cluster.placement=disaggregated")
    whole, quantized = (
        plan_of(DENSE, "8xH100", *keys, *BATCH, *more).times for more in ((), ("rollout.quantization=fp8_block",))
    )
    matrices = 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    saved = whole.refit.entering - quantized.refit.entering
    assert saved == pytest.approx(matrices * (1 - 4 / 128**2), rel=1e-6)
    assert quantized.rollout.seconds < whole.rollout.seconds
