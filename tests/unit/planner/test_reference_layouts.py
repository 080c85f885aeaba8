"""Published layouts fit on their GPUs. Layouts that ran out of memory in bug reports do not, for the right reason."""

from __future__ import annotations

import pytest

from megarl.planner.hardware import GIB
from tests.unit.planner.plan_cases import ON_HOST, layout_keys, plan_of

QWEN = "Qwen3-235B-A22B"
CONTEXT = ("rollout.context_length=8192", "rollout.max_new_tokens=7168", "actor.tokens_per_microbatch=16384")
OFFLOAD_ALL = "actor.offload=[parameters, gradients, optimizer]"

PUBLISHED = {
    "NeMo-RL, 16 nodes": (
        "128xH100",
        *layout_keys(tp=2, pp=8, cp=2, ep=16, etp=1, dp=4, first_stage_layers=11, last_stage_layers=11),
        *("rollout.tp=16", "rollout.replicas=8", "rollout.kv_cache_gib=8", OFFLOAD_ALL),
    ),
    "NeMo-RL, one step off, 32 nodes": (
        "256xH100",
        *layout_keys(tp=4, pp=8, ep=16, etp=1, dp=4, first_stage_layers=11, last_stage_layers=11),
        *("rollout.tp=8", "rollout.replicas=16", "rollout.kv_cache_gib=8", "cluster.placement=disaggregated"),
    ),
    "slime": (
        "64xH100",
        *layout_keys(tp=4, pp=4, cp=2, ep=16, etp=1, dp=2, last_stage_layers=22),
        *("rollout.tp=32", "rollout.replicas=2", "rollout.kv_cache_gib=14", ON_HOST, "actor.offload=[gradients]"),
    ),
    "verl, engines of 16": (
        "32xH20",
        *layout_keys(tp=4, pp=8, ep=4, etp=1, first_stage_layers=11, last_stage_layers=11),
        *("rollout.tp=16", "rollout.replicas=2", "rollout.kv_cache_gib=8", ON_HOST, OFFLOAD_ALL),
    ),
}


@pytest.mark.parametrize("who", PUBLISHED)
def test_published_layout_fits(who):
    gpus, *overrides = PUBLISHED[who]
    plan = plan_of(QWEN, gpus, *CONTEXT, "actor.recompute=full", *overrides)
    assert plan.problem is None
    assert plan.fullest.total > 0.5 * plan.cluster.memory_bytes


def test_verls_tp8_engines_require_offloaded_gradients():
    """verl's own recipe has engines with tp=8 and offloads gradients before a refit."""
    gpus, *overrides = PUBLISHED["verl, engines of 16"]
    eight = (*CONTEXT, "actor.recompute=full", "rollout.tp=8", "rollout.replicas=4", "rollout.kv_cache_gib=8")
    assert plan_of(QWEN, gpus, *overrides, *eight).problem is None
    plan = plan_of(QWEN, gpus, *overrides, *eight, "actor.offload=[optimizer]")
    loads = {load.phase.partition(",")[0]: load for load in plan.loads}
    refit = loads["while the engine receives weights"]
    assert plan.cluster.memory_bytes < refit.total < 1.25 * plan.cluster.memory_bytes
    assert refit.arithmetic.startswith("41.7 (actor: weights, gradients) + 5")


def test_bad_split_of_235b_on_128_h20_is_refused():
    """ms-swift#7125 ran out of memory on these GPUs with engines of tp=8 and a model sharded over too few GPUs. Two
    pipeline stages are rejected; as many as in NeMo-RL, with engines of tp=16 and offloaded gradients, fit."""
    bad = layout_keys(tp=4, pp=2, ep=8, etp=1, dp=16)
    engines = ("rollout.tp=8", "rollout.replicas=16", "rollout.kv_cache_gib=8")
    plan = plan_of(QWEN, "128xH20", *CONTEXT, "actor.recompute=full", *bad, *engines)
    assert plan.problem.startswith(
        "--gpus 128xH20-96GB: while the actor computes log-probs, on pipeline stage 1, a GPU"
    )
    assert "28.3 (actor: parameters) + 56.7 (actor: gradients) + 2" in plan.problem
    assert plan.problem.endswith(
        "raise tp, pp or ep of actor.layout, or raise dp to shard the optimizer over more ranks"
    )
    good = layout_keys(tp=2, pp=8, ep=8, etp=1, dp=8, first_stage_layers=11, last_stage_layers=11)
    engines = ("rollout.tp=16", "rollout.replicas=8", "rollout.kv_cache_gib=8", "actor.offload=[gradients]")
    assert plan_of(QWEN, "128xH20", *CONTEXT, "actor.recompute=full", *good, *engines).problem is None


def test_30b_on_32_h200_fits_only_with_offloading():
    """verl#3364 ran out of memory on these GPUs. An engine with most of the memory fits only if the model's optimizer
    and gradients are offloaded."""
    split = layout_keys(tp=4, pp=2, dp=4, ep=2, etp=1)
    cache = ("rollout.tp=4", "rollout.replicas=8", "rollout.kv_cache_gib=96")
    keys = (*CONTEXT, "actor.recompute=full", *split, *cache)
    resident = plan_of("Qwen3-30B-A3B", "32xH200", *keys)
    assert resident.problem.startswith("--gpus 32xH200-141GB: while the engine samples, a GPU would hold")
    assert "(actor: optimizer) + " in resident.problem
    assert resident.problem.endswith(
        "lower rollout.kv_cache_gib, or add parameters, gradients or optimizer to actor.offload"
    )
    offloaded = plan_of(
        "Qwen3-30B-A3B",
        "32xH200",
        *CONTEXT,
        "actor.recompute=full",
        *split,
        *cache,
        "actor.offload=[optimizer, gradients]",
    )
    assert offloaded.problem is None
    assert resident.fullest.total - offloaded.fullest.total > 20 * GIB
