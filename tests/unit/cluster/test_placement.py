from __future__ import annotations

import os

import pytest

from megarl.cluster.groups.trainers import readers_of
from megarl.cluster.placement import Placement, place
from megarl.config.device_spans import device_spans, is_alone, sharing
from megarl.config.load import load
from megarl.core.errors import UserError
from megarl.resharding.families import megatron_holders, vllm_holders
from megarl.resharding.planning.planner import make_plan
from tests.paths import QUICKSTART
from tests.unit.resharding.cases import config_of, layout_of


def placed(*overrides: str, cores: int | None = None, on_gpus: bool = False) -> Placement:
    return place(load(QUICKSTART, overrides), cores, on_gpus)


def layout(**sizes: int) -> str:
    """Return the override for the actor's layout."""
    return f"actor.layout={{{', '.join(f'{k}: {v}' for k, v in sizes.items())}, last_stage_layers: null}}"


def test_processes_have_role_index_and_name() -> None:
    placement = placed("actor.layout.dp=2", "rollout.replicas=2", cores=8)
    assert [process.name for process in placement.trainers] == ["trainer-0", "trainer-1", "trainer-2", "trainer-3"]
    assert [process.name for process in placement.engines] == ["engine-0", "engine-1"]
    assert placement.rewards[0].name == "rewards-0"
    assert placement.describe() == "4 trainer × 2 threads, 2 engine × 4 threads, 1 rewards × 8 threads"


@pytest.mark.parametrize(
    ("overrides", "cores", "trainer", "engine"),
    [
        ([], 8, 4, 8),  # two ranks share the cores; the engine, in turn, uses all of them
        (["rollout.tp=2"], 8, 4, 4),  # an engine's ranks also share the cores
        (["rollout.replicas=3"], 8, 4, 2),
        ([], 1, 1, 1),
        (["actor.threads=3", "rollout.threads=5"], 8, 3, 5),
    ],
)
def test_threads_share_the_cores(overrides: list[str], cores: int, trainer: int, engine: int) -> None:
    placement = placed(*overrides, cores=cores)
    assert {process.threads for process in placement.trainers} == {trainer}
    assert {process.threads for process in placement.engines} == {engine}


@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        ([], 1),
        (["actor.threads=3"], 3),
        (["actor.megatron_overrides.optimizer={optimizer_cpu_offload: true}"], 4),
    ],
)
def test_gpu_rank_has_one_thread_unless_optimizer_is_on_host(overrides: list[str], threads: int) -> None:
    trainers = placed("cluster.placement=disaggregated", *overrides, cores=8, on_gpus=True).trainers
    assert {process.threads for process in trainers} == {threads}


def test_default_cores_are_those_of_this_process() -> None:
    assert placed().engines[0].threads == len(os.sched_getaffinity(0))


def test_vllm_reward_model_has_a_process_per_engine() -> None:
    layout = ["reward_model.path=rm", "reward_model.layout={tp: 2, dp: 2}"]
    assert len(placed(*layout, cores=8).reward_models) == 4
    engines = placed(*layout, "reward_model.engine=vllm", cores=8).reward_models
    assert [(process.name, process.threads) for process in engines] == [("reward-model-0", 2), ("reward-model-1", 2)]


ALL_ROLES = (
    layout(pp=1, dp=4),
    "rollout={replicas: 2, tp: 2}",
    "algorithm.advantage.estimator=gae",
    "critic.layout.tp=2",
    "reward_model={path: rm, engine: vllm, layout: {tp: 2, dp: 2}}",
    "implicit_reward.coefficient=1.0",
)


@pytest.mark.parametrize(
    ("where", "firsts"), [("colocated", [0, 0, 0, 0, 0]), ("disaggregated", [0, 4, 7, 6, 11])], ids=str
)
def test_placement_decides_whether_roles_share_gpus(where: str, firsts: list[int]) -> None:
    placement = placed(*ALL_ROLES, f"cluster.placement={where}", cores=8, on_gpus=True)
    groups = [
        *(placement.trainers, placement.critics, placement.reward_models, placement.implicit_rewards),
        placement.engines,
    ]
    sizes = [[1, 1, 1, 1], [1, 1], [2, 2], [1], [2, 2]]
    for group, first, size in zip(groups, firsts, sizes, strict=True):
        assert [len(process.gpus) for process in group] == size
        assert [gpu for process in group for gpu in process.gpus] == list(range(first, first + sum(size)))
    assert placement.rewards[0].gpus == ()


@pytest.mark.parametrize(("where", "first"), [("colocated", 0), ("disaggregated", 2)])
def test_teachers_share_devices_with_each_other(where: str, first: int) -> None:
    models = "teachers.models=[{name: math, path: x}, {name: c-1.5, path: y}]"
    keys = (layout(pp=2), models, "teachers.layout={tp: 3, dp: 2}", "rollout={replicas: 2, tp: 1}")
    placement = placed(*keys, f"cluster.placement={where}", cores=8, on_gpus=True)
    for name, processes in zip(("math", "c-1.5"), placement.teachers, strict=True):
        assert [process.name for process in processes] == [f"teacher-{name}-{rank}" for rank in range(6)]
        assert [process.index for process in processes] == list(range(6))
        assert [gpu for process in processes for gpu in process.gpus] == list(range(first, first + 6))
    assert "6 teacher-math × 1 thread on GPUs" in placement.describe()


def test_teachers_may_have_their_own_layouts() -> None:
    """The largest teacher determines the devices. A teacher in vLLM has one process per engine."""
    models = "{name: a, path: x}, {name: b, path: y, layout: {pp: 2, dp: 3}}"
    models += ", {name: c, path: z, engine: vllm, layout: {tp: 2, dp: 2}}"
    keys = (f"teachers.models=[{models}]", "teachers.layout={tp: 3}", "cluster.placement=disaggregated")
    placement = placed(*keys, cores=8, on_gpus=True)
    gpus = [[process.gpus for process in processes] for processes in placement.teachers]
    assert gpus[:2] == [[(gpu,) for gpu in range(2, 5)], [(gpu,) for gpu in range(2, 8)]]
    assert gpus[2] == [(2, 3), (4, 5)]
    assert [process.name for process in placement.teachers[2]] == ["teacher-c-0", "teacher-c-1"]
    assert placement.engines[0].gpus == (8,)


def test_teacher_is_alone_only_without_others() -> None:
    one, two = (
        f"teachers.models=[{models}]" for models in ("{name: a, path: x}", "{name: a, path: x}, {name: b, path: y}")
    )
    apart = "cluster.placement=disaggregated"
    assert is_alone(load(QUICKSTART, [one, apart]), "teachers")
    assert not is_alone(load(QUICKSTART, [two, apart]), "teachers")
    assert not is_alone(load(QUICKSTART, [one]), "teachers") and not is_alone(load(QUICKSTART, [one]), "actor")


def test_description_lists_the_gpus_of_each_role() -> None:
    described = placed(*ALL_ROLES, "cluster.placement=disaggregated", cores=8, on_gpus=True).describe()
    assert described == (
        "4 trainer × 1 thread on GPUs 0-3, 2 critic × 1 thread on GPUs 4-5, 2 reward-model × 2 threads on GPUs 7-10, "
        "1 implicit-reward × 1 thread on GPU 6, 2 engine × 2 threads on GPUs 11-14, 1 rewards × 8 threads"
    )


@pytest.mark.parametrize(
    ("where", "visible"),
    [("colocated", ["0,1,2,3", "2,3,0,1"]), ("disaggregated", ["4,5,0,1,2,3", "6,7,0,1,2,3"])],
)
def test_engine_sees_its_gpus_then_those_of_the_weights(where: str, visible: list[str]) -> None:
    settings = (layout(pp=2, dp=2), "rollout={replicas: 2, tp: 2}", f"cluster.placement={where}")
    placement = placed(*settings, on_gpus=True)
    assert [process.environment(None) for process in placement.engines] == [
        {"CUDA_VISIBLE_DEVICES": numbers} for numbers in visible
    ]
    assert [process.environment("")["CUDA_VISIBLE_DEVICES"] for process in placement.trainers] == ["0", "1", "2", "3"]
    # The run itself may be restricted to some of the machine's GPUs.
    of_run = "GPU-a,GPU-b,GPU-c,GPU-d,4,5,6,7"
    assert placement.trainers[2].environment(of_run) == {"CUDA_VISIBLE_DEVICES": "GPU-c"}
    assert placement.rewards[0].environment(of_run) == {}
    assert placed(*settings).engines[0].environment(of_run) == {}, "on CPU"


def test_offline_data_uses_gpus_for_the_model_only() -> None:
    config = load(QUICKSTART, ["data.format=messages", "algorithm.objective.name=sft", layout(pp=2, dp=2)])
    assert device_spans(config) == {"trainer": range(4)}


@pytest.mark.parametrize(
    ("sizes", "tp"), [(dict(pp=1, dp=1024), 1), (dict(tp=8, pp=16, dp=8), 8), (dict(tp=4, pp=8, cp=2, dp=16), 16)]
)
def test_1024_ranks_share_1024_gpus(sizes: dict[str, int], tp: int) -> None:
    rollout = f"rollout={{replicas: {1024 // tp}, tp: {tp}}}"
    batch = "batch={prompts_per_step: 1024, prompts_per_update: 1024}"
    placement = placed(layout(**sizes), rollout, batch, cores=64, on_gpus=True)
    assert [process.gpus for process in placement.trainers] == [(gpu,) for gpu in range(1024)]
    assert [gpu for process in placement.engines for gpu in process.gpus] == list(range(1024))
    for process in placement.engines:
        assert process.gpus == tuple(range(process.index * tp, (process.index + 1) * tp))
        assert sorted((*process.gpus, *process.reads)) == list(range(1024))


@pytest.mark.parametrize(("tp", "engine_tp"), [(1, 1), (2, 2), (2, 1)])
def test_engine_reads_weights_from_its_own_gpu(tp: int, engine_tp: int) -> None:
    """The engine rank reads all weights from the trainer rank on its GPU, not from that rank's replicas."""
    hf_config = config_of(num_attention_heads=4, num_key_value_heads=2, vocab_size=256)
    rollout = f"rollout={{replicas: {8 // engine_tp}, tp: {engine_tp}}}"
    placement = placed(layout(pp=1, tp=tp, dp=8 // tp), rollout, on_gpus=True)
    ranks = megatron_holders(hf_config, layout_of(tp=tp, dp=8 // tp), "float32")
    workers = iter(vllm_holders(hf_config, engine_tp, 8 // engine_tp, "float32"))
    sources = [holder for process in placement.trainers for holder in process.hold([ranks[process.index]])]
    destinations = [h for engine in placement.engines for h in engine.hold([next(workers) for _ in engine.gpus])]
    readers = readers_of(make_plan(sources, destinations))
    for gpu, worker in enumerate(destinations):
        assert readers[f"megatron:{gpu}"][worker.name] == set(sources[gpu].shapes)
        assert not any(worker.name in readers[f"megatron:{other}"] for other in range(gpu % tp, 8, tp) if other != gpu)


CRITIC = ("algorithm.advantage.estimator=gae", "critic.layout.tp=8")


def on_nodes(*overrides: str, gpus: int | None = None) -> Placement:
    config = load(QUICKSTART, ["cluster.placement=disaggregated", *overrides])
    return place(config, cores=8, on_gpus=gpus is not None, gpus_per_node=gpus)


def test_ranks_fill_the_nodes_in_order() -> None:
    settings = (layout(pp=2, dp=4), "rollout={replicas: 4, tp: 2}", "cluster.nodes=4")
    placement = on_nodes(*settings, gpus=4)
    assert [process.node.number for process in placement.trainers] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [process.node.number for process in placement.engines] == [2, 2, 3, 3]
    assert placement.rewards[0].node.number == 0
    assert placement.describe().splitlines()[1:] == [
        "node 0: trainer-0 to 3 on GPUs 0-3, rewards-0",
        "node 1: trainer-4 to 7 on GPUs 4-7",
        "node 2: engine-0 to 1 on GPUs 8-11",
        "node 3: engine-2 to 3 on GPUs 12-15",
    ]
    workers = vllm_holders(config_of(num_attention_heads=4, num_key_value_heads=2), 2, 1, "float32")
    # A process sees GPUs by their indices on its node, and only those GPUs with weights that are on its node.
    visible = [process.environment(None)["CUDA_VISIBLE_DEVICES"] for process in placement.engines]
    assert visible == ["0,1", "2,3", "0,1", "2,3"]
    holders = [holder for process in placement.engines for holder in process.hold(workers[:2])]
    assert [(holder.node, holder.device) for holder in holders] == [(2 + i // 4, 8 + i) for i in range(8)]


def test_cpu_nodes_get_equal_shares_of_the_ranks() -> None:
    placement = on_nodes(layout(pp=2, dp=1), "rollout.replicas=2", "cluster.nodes=2")
    assert [(process.node.number, process.threads) for process in placement.trainers] == [(0, 4), (0, 4)]
    assert [(process.node.number, process.threads) for process in placement.engines] == [(1, 4), (1, 4)]
    assert {process.gpus for process in (*placement.trainers, *placement.engines)} == {()}
    shared = on_nodes(layout(pp=2, dp=1), "cluster.nodes=2", "cluster.placement=colocated")
    assert [(process.node.number, process.threads) for process in shared.trainers] == [(0, 8), (1, 8)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((layout(pp=1, dp=4), "cluster.nodes=3"), "so 1 of 3 nodes would be empty. Fix: set cluster.nodes=2"),
        (
            (layout(pp=1, dp=12), "cluster.nodes=3"),
            "3 nodes with 4 devices each have 12. Fix: set cluster.nodes=4, or lower dp",
        ),
        (
            (layout(pp=1, dp=3), "rollout.tp=2", "cluster.nodes=2"),
            "rollout.tp=2: the tensor-parallel group on devices 3-4 crosses a node boundary",
        ),
        (
            (layout(pp=1, dp=2), "rollout.tp=8", "cluster.nodes=3"),
            "rollout.tp=8: a tensor-parallel group larger than a node .* starting at device 2 do not fill nodes with 4",
        ),
        (
            ("reward_model={path: rm, engine: vllm, layout: {tp: 8}}", layout(pp=1, dp=3), "cluster.nodes=3"),
            "reward_model.layout.tp=8: .* starting at device 3 do not fill",
        ),
        ((layout(pp=1, dp=2), *CRITIC, "cluster.nodes=3"), "critic.layout.tp=8: .* starting at device 2 do not fill"),
        (
            (layout(pp=1, tp=6), "rollout.tp=2", "cluster.nodes=2"),
            "actor.layout.tp=6: a tensor-parallel group larger than a node must fill whole nodes",
        ),
    ],
)
def test_ranks_beyond_the_nodes_capacity_are_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        on_nodes(*settings, gpus=4)


def test_tensor_parallel_ranks_may_span_nodes() -> None:
    placement = on_nodes(layout(pp=1, tp=8), "rollout={replicas: 2, tp: 2}", "cluster.nodes=3", gpus=4)
    assert [process.node.number for process in placement.trainers] == [0] * 4 + [1] * 4


def test_engine_over_nodes_has_a_process_on_each() -> None:
    placement = on_nodes(layout(pp=1, dp=4), "rollout={replicas: 2, tp: 8}", "cluster.nodes=5", gpus=4)
    assert [[(p.name, p.node.number, p.gpus) for p in engine.parts] for engine in placement.engines] == [
        [("engine-0", 1, (4, 5, 6, 7)), ("engine-0.1", 2, (8, 9, 10, 11))],
        [("engine-1", 3, (12, 13, 14, 15)), ("engine-1.1", 4, (16, 17, 18, 19))],
    ]
    assert [part.environment(None)["CUDA_VISIBLE_DEVICES"] for part in placement.engines[1].parts] == ["0,1,2,3"] * 2
    described = placement.describe().splitlines()
    assert "2 engine × 2 threads on GPUs 4-19" in described[0]
    assert described[2:4] == ["node 1: engine-0 on GPUs 4-7", "node 2: engine-0.1 on GPUs 8-11"]
    sizes = dict(num_attention_heads=8, num_key_value_heads=8, intermediate_size=16)
    workers = vllm_holders(config_of(**sizes), 8, 2, "float32")
    holders = [h for engine in placement.engines for h in engine.hold(workers[engine.index * 8 :][:8])]
    assert [(holder.node, holder.device) for holder in holders] == [(1 + i // 4, 4 + i) for i in range(16)]


@pytest.mark.parametrize("rollout", ["8-11", "node 2"])
@pytest.mark.parametrize("actor", ["0-7", "nodes 0-1"])
def test_roles_are_on_their_assigned_devices(actor: str, rollout: str) -> None:
    """Actor and critic share two nodes, and the engines are on a third."""
    roles = f"cluster.roles={{actor: {actor}, critic: 4-7, rollout: {rollout}}}"
    overrides = ("algorithm.advantage.estimator=gae", "critic.layout.dp=4", layout(pp=1, tp=2, dp=4))
    config = load(
        QUICKSTART,
        [*overrides, "rollout={tp: 2, replicas: 2}", "cluster.nodes=3", "cluster.placement=disaggregated", roles],
    )
    placement = place(config, 8, on_gpus=True, gpus_per_node=4)
    where = {p.name: (p.node.number, p.devices) for group in placement.groups for p in group if p.devices}
    assert [where[f"trainer-{i}"] for i in range(8)] == [(i // 4, (i,)) for i in range(8)]
    assert [where[f"critic-{i}"] for i in range(4)] == [(1, (4 + i,)) for i in range(4)]
    assert [where[f"engine-{i}"] for i in range(2)] == [(2, (8, 9)), (2, (10, 11))]
    assert sharing(config) == {"actor": {"critic"}, "critic": {"actor"}}
    assert [is_alone(config, role) for role in ("actor", "critic")] == [False, False]


@pytest.mark.parametrize("roles", ["{actor: nodes 0-1, rollout: nodes 2-3}", "{actor: node 0, rollout: node 4}"])
def test_role_devices_must_match_the_runs_nodes(roles: str) -> None:
    """Each role has eight ranks on four nodes of eight GPUs: half nodes, and one node too many."""
    keys = [layout(pp=1, dp=8), "rollout={tp: 2, replicas: 4}", "cluster.nodes=4", "cluster.placement=disaggregated"]
    config = load(QUICKSTART, [*keys, f"cluster.roles={roles}"])
    with pytest.raises(
        UserError, match=r"cluster\.roles\..*=nodes? .*: this puts [48] ranks on each node, but the run has 4"
    ):
        place(config, 8, on_gpus=True, gpus_per_node=8)


def test_models_on_separate_devices_do_not_take_turns() -> None:
    keys = ("algorithm.advantage.estimator=gae", "cluster.placement=disaggregated", layout(pp=2))
    roles = "cluster.roles={actor: 1-2, critic: 0, rollout: 3}"
    apart, together = (load(QUICKSTART, [*keys, *more]) for more in ([roles], ["cluster.placement=colocated"]))
    assert sharing(apart) == {"actor": set(), "critic": set()}
    assert sharing(together) == {"actor": {"critic"}, "critic": {"actor"}}
    assert is_alone(apart, "actor") and not is_alone(together, "actor")


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["environment.class=calculator"], ["environments-0", "environments-1"]),
        (["evaluation.sets=[{name: a, environment: {class: calculator}}]"], ["environments-0", "environments-1"]),
        (["evaluation.sets=[{name: a}]"], []),
    ],
)
def test_environment_hosts_are_next_to_each_engine(overrides: list[str], names: list[str]) -> None:
    placement = placed("rollout.replicas=2", *overrides, cores=8)
    assert [process.name for process in placement.environments] == names
