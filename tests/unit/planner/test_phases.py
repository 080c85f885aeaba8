"""GPU memory of each phase, and host memory of a node."""

from __future__ import annotations

import json

import pytest

from megarl.cluster.memory.rank import rank_memory
from megarl.cluster.memory.reserves import CONTEXTS, FRAGMENTS, GRAPHS, NCCL
from megarl.models.shape import ModelShape
from megarl.planner.hardware import GIB, read_cluster
from megarl.planner.phases import COPIES, SPARES
from megarl.planner.plan import plan_recipe
from tests.paths import ROOT
from tests.published_models import CONFIGS
from tests.unit.planner.plan_cases import ON_HOST, layout_keys, plan_of, recipe

DENSE = "Qwen2.5-7B"
KEYS = (*layout_keys(tp=2, pp=2, dp=2), "rollout.tp=2", "rollout.replicas=4", "rollout.kv_cache_gib=10")
TRAINS, PASSES, REFIT, SAMPLES = (
    "while the actor trains",
    "while the actor computes log-probs",
    "while the engine receives weights",
    "while the engine samples",
)


def loads_of(*overrides: str, gpus: str = "8xH100", model: str = DENSE):
    return {load.phase.partition(",")[0]: load for load in plan_of(model, gpus, *overrides).loads}


def test_training_load_is_rank_memory_plus_reserves():
    plan = plan_of(DENSE, "8xH100", *KEYS)
    layout, workload = plan.config.actor.layout, plan.workload
    rows = round(16384 * workload.packed(plan.config.actor).scored_share)
    ranks = [rank_memory(CONFIGS[DENSE], layout, rank, 2, 16384, rows, 99) for rank in (0, 4)]
    training = next(load for load in plan.loads if load.phase.startswith(TRAINS))
    reserve = sum(training.parts[item] for item in (CONTEXTS, NCCL, GRAPHS, FRAGMENTS))
    assert training.total == pytest.approx(max(rank.total for rank in ranks) + reserve)


def test_phase_peaks_are_not_added():
    loads = loads_of(*KEYS)
    assert set(loads) == {PASSES, TRAINS, REFIT, SAMPLES}
    assert "engine: KV cache" in loads[SAMPLES].parts and "engine: KV cache" not in loads[REFIT].parts
    assert not any(part.startswith("engine:") for part in loads[TRAINS].parts)
    assert "activations" in loads[TRAINS].parts and "activations" not in loads[PASSES].parts
    assert loads[PASSES].total < loads[TRAINS].total


def test_disaggregated_devices_hold_only_their_own_role():
    engines = ("rollout.tp=2", "rollout.replicas=2", "rollout.kv_cache_gib=10", "cluster.placement=disaggregated")
    loads = loads_of(*layout_keys(tp=2, dp=2), *engines)
    assert not any(part.startswith("actor") for part in (*loads[REFIT].parts, *loads[SAMPLES].parts))
    assert "refit: buckets" in loads[REFIT].parts
    assert GRAPHS in loads[SAMPLES].parts and GRAPHS not in loads[TRAINS].parts


def ppo_plan(tmp_path, *overrides, gpus=2):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-0.6B"]))
    keys = (*layout_keys(dp=2), "critic.layout.dp=2", "rollout.replicas=2", "algorithm.advantage.estimator=gae")
    return plan_recipe(
        recipe(f"model.path={tmp_path}", *keys, *overrides), read_cluster(f"{gpus}xH100"), as_is=True
    ).best


def test_critic_stays_on_the_gpu_while_the_actor_trains(tmp_path):
    plan = ppo_plan(tmp_path)
    loads = {load.phase: load.parts for load in plan.loads}
    assert "critic: not offloaded" in loads[TRAINS]
    assert "actor: not offloaded" in loads["while the critic trains"]
    assert {"actor: weights, gradients, optimizer", "critic: weights, gradients, optimizer"} <= set(loads[REFIT])
    assert set(plan.times.training) == {"actor", "critic"}
    assert plan.times.training["actor"].passes == {} and plan.times.training["critic"].passes


def test_offloaded_critic_states_free_memory_for_the_actor(tmp_path):
    """Each model gains the bytes of the other's optimizer, and steps include the time to move both."""
    stay, leave = (
        ppo_plan(tmp_path, *keys) for keys in ((), [f"{m}.offload=[optimizer]" for m in ("actor", "critic")])
    )
    before, after = ({load.phase: load for load in plan.loads} for plan in (stay, leave))
    optimizer = after["while the critic trains"].parts["critic: optimizer"]
    gained = before[TRAINS].total - after[TRAINS].total
    assert gained == pytest.approx(optimizer) and optimizer > GIB
    assert "critic: optimizer" not in after["while the critic computes log-probs"].parts
    assert {"actor: weights, gradients", "critic: weights, gradients"} <= set(after["while the critic is saved"].parts)
    assert stay.times.moving == 0 < leave.times.moving


def test_only_models_on_the_same_devices_share_memory(tmp_path):
    """The critic has its own two GPUs or shares the actor's; the engines have two others."""
    apart, shared = (
        ppo_plan(
            tmp_path,
            "cluster.placement=disaggregated",
            f"cluster.roles={{actor: 0-1, critic: {c}, rollout: 4-5}}",
            gpus=6,
        )
        for c in ("2-3", "0-1")
    )
    for plan, beside in ((apart, set()), (shared, {"critic: not offloaded"})):
        loads = {load.phase: load.parts for load in plan.loads}
        assert {
            part
            for part in loads[TRAINS].keys() - {CONTEXTS, NCCL, FRAGMENTS}
            if not part.startswith(("actor: ", "activations", "head"))
        } == beside
        assert not any("actor" in part or "critic" in part for part in loads[SAMPLES])
    assert apart.times.seconds < shared.times.seconds, "the models are trained concurrently"


@pytest.mark.parametrize(("offload", "stays"), [("[]", 3), ("[gradients, optimizer]", 1)])
def test_offloaded_states_are_on_the_host_during_sampling(offload, stays):
    plan = plan_of(DENSE, "8xH100", *KEYS, f"actor.offload={offload}")
    sampling = next(load for load in plan.loads if load.phase == SAMPLES)
    assert sum(part.startswith("actor: ") for part in sampling.parts) == stays
    assert ("actor: offloaded" in plan.host) == (stays == 1)
    assert (plan.times.moving > 0) == (stays == 1)


def test_cpu_offloaded_optimizer_is_only_in_host_memory():
    here, there = (plan_of(DENSE, "8xH100", *KEYS, *more) for more in ((), (ON_HOST,)))
    moved = here.fullest.parts.get("actor: optimizer", 0)
    assert "actor: optimizer" not in {part for load in there.loads if "train" in load.phase for part in load.parts}
    assert there.host["actor: optimizer on the host"] == pytest.approx(8 * moved, rel=0.2)
    assert there.times.training["actor"].update["optimizer"] > 10 * here.times.training["actor"].update["optimizer"]


ROUNDS, REWARD_MODEL = "batch.sampling_rounds=2", "reward_model.path=rm"
ELSEWHERE = "cluster.roles={actor: 0-7, rollout: 0-7, reward_model: 8}"


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ([ROUNDS], False),
        ([REWARD_MODEL], False),
        ([ROUNDS, REWARD_MODEL], True),
        ([ROUNDS, REWARD_MODEL, ELSEWHERE], False),
        (["rollout.vllm_overrides={quantization: fp8}"], True),
    ],
)
def test_sleeping_engines_keep_weights_if_no_refit_follows(keys, kept):
    """Between rounds, engines sleep only if a reward model shares their GPUs."""
    host = plan_of(DENSE, "16xH100", *KEYS, *keys).host
    assert ("sleeping engines: weights" in host) == kept


def test_full_host_memory_is_a_problem():
    keys = (*layout_keys(tp=4, pp=8, ep=4, etp=1, first_stage_layers=11, last_stage_layers=11), ON_HOST)
    engines = ("rollout.tp=8", "rollout.replicas=4", "rollout.kv_cache_gib=1", "actor.recompute=full")
    engines += ("actor.offload=[parameters, gradients, optimizer]", ROUNDS, REWARD_MODEL)
    without, reference = (
        plan_of("Qwen3-235B-A22B", "32xH20", *keys, *engines, f"algorithm.kl.coefficient={kl}") for kl in (0, 0.1)
    )
    assert without.problem is None and 1900 * GIB < sum(without.host.values()) < 2048 * GIB
    assert reference.host["reference: weights"] == pytest.approx(8 * 14 * GIB, rel=0.02)
    assert "a node's host memory would hold" in reference.problem and reference.problem.count("\n") == 0
    assert (
        "has only 2048 GiB. Fix: remove states from actor.offload, or set checkpoint.background=false"
        in reference.problem
    )
    assert COPIES not in without.host, "copies would take 3/4 of the memory, so the run makes none"


def test_copies_and_spare_processes_are_in_host_memory(tmp_path):
    """Each of 8 ranks keeps two copies with 2 bytes of weights and 12 bytes of AdamW state per parameter that it
    updates."""
    plan, without = (plan_of(DENSE, "8xH100", *KEYS, *more) for more in ((), ("cluster.replace_ranks=false",)))
    parameters = plan.save.node_bytes / 14
    assert plan.host[COPIES] == plan.copies == pytest.approx(2 * 14 * parameters)
    figures = json.loads((ROOT / "tools/benchmarks/results/spares.json").read_text())
    measured = figures["runs"]["spare"]["spare_gb"] * 1e9
    assert plan.host[SPARES] == pytest.approx(8 * measured, rel=0.01)
    assert plan.host.keys() - without.host.keys() == {COPIES, SPARES}
    assert sum(plan.host.values()) - sum(without.host.values()) == pytest.approx(plan.host[COPIES] + plan.host[SPARES])
    assert ppo_plan(tmp_path).host[SPARES] == pytest.approx(2 * 2 * measured, rel=0.01), "two ranks of two models"
    assert SPARES not in plan_of(DENSE, "8xH100", *KEYS, "cluster.spare_processes=false").host


def teacher_plan(tmp_path, *overrides):
    for name in ("student", "large"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "student/config.json").write_text(json.dumps(CONFIGS["Qwen3-0.6B"]))
    (tmp_path / "large/config.json").write_text(json.dumps(CONFIGS[DENSE]))
    keys = (*layout_keys(dp=2), f"model.path={tmp_path / 'student'}", "rollout.replicas=2", *overrides)
    return plan_recipe(recipe(*keys), read_cluster("2xH100"), as_is=True).best


def test_self_teacher_is_a_pass_of_the_actor(tmp_path):
    plan = teacher_plan(tmp_path, "teachers.models=[{name: t, prompt_column: hint}]", "data.source=rows.jsonl")
    without = teacher_plan(tmp_path, "data.source=rows.jsonl")
    assert {load.phase for load in plan.loads} == {load.phase for load in without.loads}
    assert not any(name.startswith("teacher") for name in plan.times.phases)
    assert (plan.workload.passes, without.workload.passes) == (2, 0)  # the advantages need the old log-probs


def test_teacher_has_its_own_phase_and_time(tmp_path):
    """The teacher is larger than the actor: its weights, its forward pass and their time are those of its layout."""
    models = f"teachers.models=[{{name: large, path: {tmp_path / 'large'}}}]"
    without = teacher_plan(tmp_path)
    plan, offloaded = (
        teacher_plan(tmp_path, models, "teachers.layout={tp: 2, sequence_parallel: true}", f"teachers.offload={parts}")
        for parts in ("[]", "[parameters]")
    )
    phase, part = "while the teacher large computes log-probs", "teacher large: weights"
    loads, away = ({load.phase: load for load in each.loads} for each in (plan, offloaded))
    weights = rank_memory(CONFIGS[DENSE], plan.config.teachers.layout, 0, 2, 0, 0, 1).weights
    assert loads[phase].parts[part] == away[phase].parts[part] == weights > 7 * GIB
    assert loads[phase].parts["forward pass"] > 0 and loads[phase].parts["actor: not offloaded"] > 0
    assert loads[TRAINS].parts[part] == loads[SAMPLES].parts[part] == weights
    assert part not in away[TRAINS].parts and part not in away[SAMPLES].parts
    assert (plan.host.keys() & {"teacher large: offloaded"}, plan.times.moving) == (set(), 0)
    assert offloaded.host["teacher large: offloaded"] == 2 * weights and offloaded.times.moving > 0
    assert phase not in {load.phase for load in without.loads}
    added = plan.times.phases["teacher large: passes"]
    # The advantages need a pass for the old log-probs.
    assert plan.times.seconds == pytest.approx(without.times.seconds + added + plan.times.phases["actor: passes"])
    # On the same GPUs, a pass of 7.6 billion parameters takes longer than one of 0.6 billion.
    assert added > 5 * sum(plan.times.training["actor"].passes.values())
    assert plan.times.training["teacher large"].update == {}


def test_exact_divergence_adds_output_layers_and_states(tmp_path):
    """The teacher's output layer is on the actor's GPUs in all phases, and the states of a microbatch in updates. The
    states of a step are in the object store."""
    models = f"teachers.models=[{{name: large, path: {tmp_path / 'large'}}}]"
    sampled, exact = (
        teacher_plan(tmp_path, models, f"algorithm.distillation={{divergence: {kind}, placement: loss}}")
        for kind in ("sampled", "jsd")
    )
    shape = ModelShape.of(CONFIGS[DENSE])
    layer, states = "actor: teachers' output layers", "actor: teachers' states"
    loads = {load.phase: load.parts for load in exact.loads}
    actor = ModelShape.of(CONFIGS["Qwen3-0.6B"])
    assert loads[TRAINS][layer] == loads[SAMPLES][layer] == 2 * actor.vocab * shape.hidden
    assert loads[TRAINS][states] == 2 * exact.config.actor.tokens_per_microbatch * shape.hidden
    assert states not in loads[SAMPLES]
    assert not any(layer in load.parts or states in load.parts for load in sampled.loads)
    assert exact.host["samples of a step"] > sampled.host["samples of a step"]
