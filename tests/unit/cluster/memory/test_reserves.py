"""GPU memory that processes use in addition to tensors, item by item, and the rejection of runs that do not fit."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.cluster.memory import reserves
from megarl.cluster.memory.rank import RankParameters
from megarl.cluster.memory.reserves import ACTIVATIONS, CONTEXTS, FP8, FRAGMENTS, GRAPHS, LOGITS, NCCL, SENT, WORKSPACE
from megarl.cluster.memory.shared_gpu import Load
from megarl.config.model_schema import Layout
from megarl.core.errors import UserError
from megarl.megatron import parallel
from megarl.models.shape import ModelShape
from megarl.planner.hardware import GIB, read_cluster
from megarl.planner.plan import plan_recipe
from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.figures import figures
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.planning.schedule import TYPICAL
from tests.published_models import CONFIGS
from tests.unit.planner.plan_cases import layout_keys, plan_of, recipe
from tests.unit.resharding.cases import layout_of

MIB = 2**20
DENSE, EXPERTS = "Qwen2.5-7B", "Qwen3-30B-A3B"
ITEMS = {CONTEXTS, NCCL, GRAPHS, FP8, FRAGMENTS, ACTIVATIONS, LOGITS}


def reserve(*overrides: str, model: str = DENSE) -> dict[str, float]:
    """Return the items of one of eight GPUs, shared by an actor rank and an engine rank, during rollout."""
    config, shape = recipe(*overrides), ModelShape.of(CONFIGS[model])
    rank = RankParameters.of(CONFIGS[model], config.actor.layout, 0)
    items = reserves.gpu_reserve(config, {"actor": (shape, rank.matrices)}, shape, None, 8)
    return items | reserves.sampling_reserve(config, shape)


def nccl(model: str = DENSE, gpus_per_node: int = 8, **sizes: int) -> float:
    """Return the MiB of a trainer's communicators."""
    settings = recipe(*layout_keys(**sizes)).actor
    return reserves.trainer_reserve(settings, ModelShape.of(CONFIGS[model]), 0, gpus_per_node)[NCCL] / MIB


RING, RING_OVER_NODES, NETWORK = 24 * 12, 16 * 12, 128
"""Size in MiB of a communicator's rings within a node and across nodes, and of message buffers for other nodes."""


def test_communicator_memory_depends_on_ranks_and_nodes():
    assert nccl() == 0
    assert nccl(dp=2) == 3 * RING, "one for gradients and two for all ranks"
    assert nccl(dp=8) == 3 * RING + 8 * 32, "NVLink SHARP adds memory for more than two GPUs"
    assert nccl(tp=4, dp=2) == 4 * RING + 4 * 32
    assert nccl(tp=8, dp=2) == RING + 8 * 32 + 3 * RING_OVER_NODES
    assert nccl(dp=16) == 3 * RING_OVER_NODES + 8 * 32
    stages = nccl(pp=2, dp=4)
    assert stages == 3 * RING + 4 * 32 + 2 * 32 * 12, "32 channels to each of two neighbors"
    assert nccl(pp=2, dp=8) == 2 * RING_OVER_NODES + RING + 8 * 32 + NETWORK


def test_experts_have_separate_communicators():
    """Each of eight ranks sends tokens to every other over 32 channels: 3 GiB, consistent with NCCL issue 1685."""
    shared = 2 * RING + RING + 8 * 32
    assert nccl(EXPERTS, dp=8, ep=8) == shared + 8 * 32 * 12 + RING + 8 * 32
    assert nccl(EXPERTS, dp=8, ep=2) == shared + 2 * 32 * 12 + RING + RING + 4 * 32


GROUPS = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "dp_cp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "ep_dp": parallel_state.get_expert_data_parallel_group,
}


@pytest.mark.parametrize(
    "sizes",
    [
        dict(tp=2, cp=2, dp=2, pp=2),
        dict(tp=4, ep=4, etp=1, dp=4, pp=2),
        dict(tp=2, ep=2, etp=2, dp=4),
        dict(ep=2, dp=4),
    ],
    ids=str,
)
def test_process_groups_match_megatrons(sizes: dict):
    layout: Layout = layout_of(**sizes)
    with parallel.simulated_rank(layout, rank=0):
        made = {name: dist.get_process_group_ranks(group()) for name, group in GROUPS.items()}
    groups = reserves.parallel_groups(layout, has_experts=True)
    assert {name: list(range(0, n * stride, stride)) for name, (n, stride) in groups.items()} == {
        name: ranks for name, ranks in made.items() if len(ranks) > 1
    }


def test_cuda_contexts_include_reading_processes():
    each, trainer, engine = 554_500_096, 685_768_704 + 973_144_064, GIB / 4
    both = 2 * each + trainer + engine
    assert reserve()[CONTEXTS] == both, "the engine reads on the same GPU"
    keys = (*layout_keys(tp=4, dp=2), "rollout.tp=2", "rollout.replicas=4")
    assert reserve(*keys)[CONTEXTS] == both + 4 * each
    assert reserve(*keys, "cluster.placement=disaggregated")[CONTEXTS] == both, "the engine receives the weights"


@pytest.mark.parametrize(
    ("model", "sizes", "tp", "most"),
    [
        ("Qwen2.5-0.5B", dict(dp=8), 2, 0),
        ("Llama-3.1-8B", dict(tp=4, dp=2), 4, 1),
        ("Llama-3.1-8B", dict(tp=4, dp=2), 2, 4),
        ("Llama-3.1-8B", dict(tp=4, dp=2), 8, 3),
        ("Llama-3.1-8B", dict(tp=8), 2, 7),
        ("Llama-3.1-8B", dict(tp=2, pp=4), 4, 7),
        (DENSE, dict(pp=4, dp=2), 2, 7),
        (DENSE, dict(tp=2, pp=2, dp=4), 1, 4),
        ("Mixtral-8x7B", dict(tp=2, ep=2, dp=4), 4, 5),
    ],
    ids=str,
)
def test_refit_plan_has_at_most_the_counted_readers_per_gpu(model: str, sizes: dict, tp: int, most: int):
    """Count the readers of each source in a real refit plan."""
    layout = layout_of(**sizes)
    replicas = layout.world_size // tp
    sources = megatron_holders(CONFIGS[model], layout, "bfloat16")
    engines = vllm_holders(CONFIGS[model], tp, replicas, "bfloat16")
    plan = make_plan(*([replace(h, node=i // 8, device=i) for i, h in enumerate(s)] for s in (sources, engines)))
    readers: dict[int, set[int]] = defaultdict(set)
    for source, reader in (link for bucket in plan.buckets for link in bucket.links):
        if plan.nodes[source] == plan.nodes[reader] and plan.devices[source] != plan.devices[reader]:
            readers[source].add(reader)
    keys = (*layout_keys(**sizes), f"rollout.tp={tp}", f"rollout.replicas={replicas}")
    counted = reserves._num_readers(recipe(*keys), gpus_per_node=8)
    assert max(map(len, readers.values()), default=0) <= counted == most


@pytest.mark.parametrize(
    ("overrides", "sizes"),
    [("{}", 51), ("{max_num_seqs: 64}", 19), ("{max_num_seqs: 2}", 3), ("{cudagraph_capture_sizes: [1, 8]}", 2)],
)
def test_graph_memory_depends_on_layers_and_captured_batches(overrides: str, sizes: int):
    found = reserve(f"rollout.vllm_overrides={overrides}")[GRAPHS]
    assert found == pytest.approx(28 * 2 * sizes * 0.38 * MIB)


@pytest.mark.parametrize("overrides", ["{enforce_eager: true}", "{compilation_config: {cudagraph_mode: NONE}}"])
def test_engine_without_graphs_needs_no_graph_memory(overrides: str):
    assert GRAPHS not in reserve(f"rollout.vllm_overrides={overrides}")


def test_activations_of_a_batch_of_prompts():
    """Qwen2.5-7B has 3,584 channels and MLPs of 18,944 rows, DeepSeek-V3 7,168 and 128 heads of 192 and 128."""
    keys = ("rollout.vllm_overrides={max_num_batched_tokens: 16384}", "rollout.tp=2")
    assert reserve(*keys)[ACTIVATIONS] == 16384 * 2 * (3 * 3584 + 3 * 18944 / 2)
    assert reserve("rollout.context_length=4096")[ACTIVATIONS] == 4096 * 2 * (3 * 3584 + 3 * 18944)
    latent = reserve(*keys, model="DeepSeek-V3")[ACTIVATIONS]
    assert latent == 16384 * 2 * (3 * 7168 + 128 * (3 * 192 + 2 * 128) / 2)


@pytest.mark.parametrize(("whole", "rows"), [("false", 768 / 4), ("true", 768)])
def test_experts_have_a_workspace_from_the_refit(whole: str, rows: float):
    """The model has 8 active experts of 768 rows, and 2,048 channels."""
    keys = (*layout_keys(tp=4, dp=2, ep=2), "rollout.tp=4", "rollout.replicas=2", "rollout.context_length=4096")
    plan = plan_of(EXPERTS, "8xH100", *keys, f"rollout.vllm_overrides={{enable_expert_parallel: {whole}}}")
    has = [load.phase for load in plan.loads if WORKSPACE in load.parts]
    assert has == ["while the engine receives weights", ENGINE_SAMPLES]
    assert {load.parts.get(WORKSPACE, 0) for load in plan.loads} == {0, 4096 * 2 * 8 * (2048 + max(2048, rows))}


@pytest.mark.parametrize(
    ("keys", "copies"),
    [
        ((), 1),
        (("rollout.temperature=0.7",), 2),
        (("rollout.top_k=20",), 2),
        (("rollout.tp=4",), 2.25),
        (("rollout.vllm_overrides={max_num_seqs: 256}",), 0.25),
    ],
)
def test_float32_logits_of_all_sequences_are_counted(keys: tuple[str, ...], copies: float):
    assert reserve(*keys)[LOGITS] == copies * 1024 * 152064 * 4


@pytest.mark.parametrize(("tp", "copies"), [(1, 2), (4, 2.25)])
def test_judge_has_the_logits_of_a_sampling_engine(tp: int, copies: float):
    judge = f"reward_model={{path: rm, engine: vllm, input_format: question, layout: {{tp: {tp}}}}}"
    held = reserves.gpu_reserve(recipe(judge), {}, None, ModelShape.of(CONFIGS[DENSE]), 8)
    assert held["reward model: logits"] == copies * 1024 * 152064 * 4
    scores = recipe(judge, "reward_model.input_format=text")
    assert "reward model: logits" not in reserves.gpu_reserve(scores, {}, None, ModelShape.of(CONFIGS[DENSE]), 8)


def test_fp8_copies_cover_the_matrices_of_all_layers():
    """A layer has 3,584 channels, query and output projections, keys and values of 512 rows, and three MLP matrices."""
    layer = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    assert reserve("actor.fp8=blockwise")[FP8] == 2 * 28 * layer
    assert reserve("actor.fp8=mxfp8", *layout_keys(tp=4))[FP8] == pytest.approx(2 * 28 * layer / 4 * 33 / 32)
    experts = 2048 * (2 * 4096 + 2 * 512) + 128 * 3 * 2048 * 768
    assert reserve("actor.fp8=blockwise", model=EXPERTS)[FP8] == 2 * 48 * experts, "routers are not converted to fp8"
    assert FP8 not in reserve()
    uncached = "actor.megatron_overrides.model={disable_parameter_transpose_cache: true}"
    assert FP8 not in reserve("actor.fp8=blockwise", uncached)


def test_size_of_the_copy_for_fp8_engines():
    """One byte per element of the layers' matrices, and a four-byte scale per 128 x 128 block."""
    layer = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    assert reserve("rollout.quantization=fp8_block")[SENT] == 28 * layer * (1 + 4 / 128**2)
    assert SENT not in reserve()


KEYS = (
    *layout_keys(tp=2, dp=4),
    *("rollout.tp=2", "rollout.replicas=4", "actor.offload=[gradients, optimizer]", "actor.recompute=full"),
)
ENGINE_SAMPLES = "while the engine samples"


def load_of(phase: str, *overrides: str) -> Load:
    plan = plan_of(DENSE, "8xH100", *KEYS, *overrides)
    return next(load for load in plan.loads if load.phase == phase)


def test_memory_of_a_sleeping_engine():
    trains, samples = (load_of(phase).parts for phase in ("while the actor trains", ENGINE_SAMPLES))
    assert [trains[item] for item in (CONTEXTS, NCCL, GRAPHS)] == [samples[item] for item in (CONTEXTS, NCCL, GRAPHS)]
    assert not {ACTIVATIONS, LOGITS} & trains.keys()


def test_fp8_copies_remain_when_weights_are_offloaded():
    keys = ("actor.fp8=blockwise", "actor.offload=[parameters, gradients, optimizer]")
    parts = load_of(ENGINE_SAMPLES, *keys).parts
    assert "actor: parameters" not in parts and parts[FP8] > 5 * GIB


def test_kv_cache_without_room_for_reserves_is_rejected(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[DENSE]))
    cluster = read_cluster("8xH100")
    without = sum(
        size for part, size in load_of(ENGINE_SAMPLES, "rollout.kv_cache_gib=1").parts.items() if part not in ITEMS
    )
    cache = 1 + (cluster.memory_bytes - without) / GIB - 0.1
    with pytest.raises(UserError) as error:
        plan_recipe(recipe(f"model.path={tmp_path}", *KEYS, f"rollout.kv_cache_gib={cache:.2f}"), cluster, as_is=True)
    line = str(error.value)
    assert line.startswith("--gpus 8xH100-80GB: while the engine samples, a GPU would hold") and "\n" not in line
    for item in (CONTEXTS, NCCL, GRAPHS, ACTIVATIONS, LOGITS):
        assert f"({item})" in line


@pytest.mark.parametrize("tp", [1, 4])
def test_refit_buffers_match_the_plan(tp: int) -> None:
    """Two trainer nodes send to one engine node, whose ranks forward to each other."""
    keys = [f"rollout={{tp: {tp}, replicas: {8 // tp}}}", "cluster.placement=disaggregated"]
    config = recipe(*layout_keys(tp=4, pp=4), *keys)
    trainers = megatron_holders(CONFIGS[DENSE], config.actor.layout)
    sources = [replace(holder, node=rank // 8) for rank, holder in enumerate(trainers)]
    engines = [replace(holder, node=2) for holder in vllm_holders(CONFIGS[DENSE], tp, 8 // tp)]
    found = figures(make_plan(sources, engines), sources, engines, TYPICAL)
    assert reserves._refit_buffers(config, True, 8) == found.communicator_bytes
    assert reserves._refit_buffers(config, False, 8) == NETWORK * MIB
