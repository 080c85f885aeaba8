"""Closed-form estimates of GPU memory in each phase of a step, and of host memory on a node.

Phases run one after another, so their peaks are never added: a layout fits if its most memory-intensive phase fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.cluster.memory.parameters import ModelParameters, Models, draft_parts
from megarl.cluster.memory.rank import (
    RankMemory,
    forward_bytes,
    item_bytes,
    saved_bytes,
    stage_memory,
)
from megarl.cluster.memory.reserves import (
    FRAGMENT_BYTES,
    FRAGMENTS,
    awake_reserve,
    frozen_bytes,
    gpu_reserve,
    sampling_reserve,
)
from megarl.cluster.memory.shared_gpu import (
    Load,
    engine_loads,
    resident_states,
    reward_model_parts,
    staging_parts,
    teacher_head_parts,
    teacher_parts,
)
from megarl.cluster.memory.vision import patches_on_node, prompts_of_replica, tower_bytes, tower_pass_bytes
from megarl.cluster.object_store import object_store_mib, state_bytes, states_bytes
from megarl.config.device_spans import ENGINE, NAMES, device_spans, overlap, reward_model_is_beside_engines
from megarl.config.model_schema import Layout, Role, Teachers, Trained
from megarl.config.schema import Config
from megarl.models.denoiser import DenoiserShape
from megarl.models.shape import ModelShape
from megarl.planner.hardware import GIB, Cluster
from megarl.planner.workload import TextWorkload, Workload
from megarl.resharding.selection import trains_tower

SPARE_PROCESS_BYTES = 0.294e9
"""Host memory of a spare process, which holds no GPU memory. Measured as the mean PSS of four processes on a machine
without GPUs: tools/benchmarks/results/spares.json. CUDA libraries add to it."""

COPIES_SHARE = 0.25
"""Share of a node's memory that copies of the trained models' state may take: half of /dev/shm, whose default size is
half of the memory. If the copies would take more, the run makes none. See Recovery.fits."""

COPIES, SPARES = "copies in shared memory", "spare processes"
"""Purposes of the host memory used for replacing lost ranks."""


def phase_loads(config: Config, models: Models, workload: Workload, cluster: Cluster) -> list[Load]:
    """Return the memory load of the fullest GPU in each phase, in the order in which a step runs the phases. Besides
    the model that computes, the GPU is assumed to hold the largest rank of every model that shares its devices."""
    stages: dict[Role, list[tuple[RankMemory, int]]] = {}
    states: dict[Role, list[dict[str, float]]] = {}
    for role, model in models.trained.items():
        stages[role] = _stages(config, config.placed(role), model, workload)
        states[role] = [_states(config.placed(role), memory) for memory, _ in stages[role]]
    training: list[Load] = []
    for role, of_role in stages.items():
        beside = _beside(config, NAMES[role], states, role) | _untrained(config, models, NAMES[role])
        for stage, (memory, passing) in enumerate(of_role):
            where = f", on pipeline stage {stage}" if len(of_role) > 1 else ""
            held = states[role][stage]
            resident = held if workload.is_offline else resident_states(config, role, held)
            # All states are loaded while an implicit reward model scores and trains, and while KL rewards are computed.
            has_all = role == "implicit_reward" or (role == "actor" and config.kl_in_reward)
            in_passes = held if has_all else {"parameters": held["parameters"], **resident}
            reserve = _reserve(config, models, NAMES[role], {role: stage}, cluster.gpus_per_node)
            reserve |= {FRAGMENTS: FRAGMENT_BYTES}
            in_update, in_pass = (
                {f"{role}: {part}": size for part, size in parts.items() if size} | beside | reserve
                for parts in (held, in_passes)
            )
            if role == "actor" and config.compares_distributions and stage == len(of_role) - 1:
                num_bytes = config.actor.tokens_per_microbatch * state_bytes(config, _hidden_sizes(config, models))
                in_update["actor: teachers' states"] = num_bytes
            training += _training(config.placed(role), where, in_update, in_pass, memory, passing)
    training = [*_teaching(config, models, states, workload, cluster), *training]
    loads = training if workload.is_offline else [*training, *_engine(config, models, states, cluster)]
    return _fullest(loads)


def _stages(
    config: Config, settings: Trained | Teachers, model: ModelParameters, workload: Workload
) -> list[tuple[RankMemory, int]]:
    """Return each pipeline stage's memory per rank: the training memory, and the bytes for a forward-only pass."""
    layout, num_bytes = settings.layout, item_bytes(config)
    tokens = settings.tokens_per_microbatch * layout.cp
    packed = workload.packed(settings)
    rows, count = round(tokens * packed.scored_share), packed.microbatches
    stages = []
    for stage in range(layout.pp):
        held = model.of_stage(layout, stage)
        memory = stage_memory(model.shape, layout, stage, held, num_bytes, tokens, rows, count, settings.recompute)
        passing = forward_bytes(model.shape, layout, held, num_bytes, tokens, rows)
        if model.shape.vision is not None and stage == 0:
            vision, features = model.shape.vision, packed.most_features
            if isinstance(settings, Trained) and trains_tower(settings, model.hf_config):
                kept = tower_bytes(vision, layout, features, count, num_bytes, settings.recompute)
                memory = replace(memory, activations=memory.activations + kept)
            passing += tower_pass_bytes(vision, features, num_bytes)
        stages.append((memory, passing))
    return stages


def _states(settings: Trained, memory: RankMemory) -> dict[str, float]:
    """Return the GPU bytes of each model state, keyed by the name that `offload` uses for the state."""
    on_gpu = memory.optimizer * (1 - optimizer_share_in_host(settings, memory))
    return {"parameters": memory.weights, "gradients": memory.gradients, "optimizer": on_gpu}


def optimizer_share_in_host(settings: Trained, memory: RankMemory) -> float:
    """Return the fraction of the optimizer state that Megatron stores and updates in host memory. The fraction is set
    in megatron_overrides.optimizer. Main weights are offloaded only if use_precision_aware_optimizer is set."""
    overrides = settings.megatron_overrides.optimizer
    if not overrides.get("optimizer_cpu_offload"):
        return 0.0
    has_main_weights = memory.weights < memory.gradients  # true for 16-bit weights
    moments = 2 / 3 if has_main_weights and not overrides.get("use_precision_aware_optimizer") else 1.0
    return moments * overrides.get("optimizer_offload_fraction", 0.0)


def _beside(
    config: Config, name: str, states: Mapping[Role, Sequence[Mapping[str, float]]], role: Role | None = None
) -> dict[str, float]:
    """Return the bytes that the states of trained models other than `role` occupy on the GPUs of the processes called
    `name` because they are not offloaded."""
    spans = device_spans(config)
    others = {
        f"{other}: not offloaded": max(sum(resident_states(config, other, one).values()) for one in of_role)
        for other, of_role in states.items()
        if other != role and overlap(spans[name], spans[NAMES[other]])
    }
    return {name: size for name, size in others.items() if size}


def _teaching(
    config: Config,
    models: Models,
    states: Mapping[Role, Sequence[Mapping[str, float]]],
    workload: Workload,
    cluster: Cluster,
) -> list[Load]:
    """Return the memory load while each teacher computes log-probs. The states of trained models that share its devices
    are offloaded."""
    loads = []
    for teacher, model in models.teachers.items():
        settings, name = config.teacher_section(teacher), NAMES["teachers"]
        resident = _beside(config, name, states) | _untrained(config, models, name)
        resident |= _reserve(config, models, name, {}, cluster.gpus_per_node) | {FRAGMENTS: FRAGMENT_BYTES}
        if settings.engine == "vllm":  # the resident parts include all of its memory
            remedy = f"raise tp of the layout of {teacher}, or lower teachers.kv_cache_gib"
            loads.append(Load(f"while the teacher {teacher} computes log-probs", resident, remedy))
            continue
        for stage, (memory, passing) in enumerate(_stages(config, settings, model, workload)):
            where = f", on pipeline stage {stage}" if settings.layout.pp > 1 else ""
            parts = {**resident, f"teacher {teacher}: weights": memory.weights, "forward pass": passing}
            key = "teachers.layout" if settings.models[0].layout is None else f"the layout of {teacher}"
            remedy = f"raise tp, pp or ep of {key}, or lower teachers.tokens_per_microbatch"
            loads.append(Load(f"while the teacher {teacher} computes log-probs{where}", parts, remedy))
    return loads


def _reserve(
    config: Config, models: Models, name: str, stages: Mapping[Role, int], gpus_per_node: int
) -> dict[str, float]:
    """Return the bytes that processes reserve on a GPU in addition to their tensors.

    Args:
        name: processes whose GPU is considered; see `device_spans`.
        stages: the pipeline stage on that GPU for each role. The largest stage is assumed for missing roles.
    """
    spans = device_spans(config)
    span = spans[name]
    held = {}
    for role, model in models.trained.items():
        if overlap(span, spans[NAMES[role]]):
            layout = config.placed(role).layout
            on_gpu = [stages[role]] if role in stages else range(layout.pp)
            held[role] = model.shape, max(model.of_stage(layout, stage).matrices for stage in on_gpu)
    engine = models.actor.shape if ENGINE in spans and overlap(span, spans[ENGINE]) else None
    scorer = models.reward if models.reward and overlap(span, spans[NAMES["reward_model"]]) else None
    has_teachers = bool(models.teachers) and overlap(span, spans[NAMES["teachers"]])
    teachers = {name: model.shape for name, model in models.teachers.items()} if has_teachers else {}
    return gpu_reserve(config, held, engine, ModelShape.of(scorer) if scorer else None, gpus_per_node, teachers)


def _untrained(config: Config, models: Models, name: str) -> dict[str, float]:
    """Return the bytes that the reward model, the teachers, and the teachers' output layers in the actor's head keep on
    GPUs shared with the processes `name`."""
    spans, parts = device_spans(config), {}
    if models.reward is not None and overlap(spans[name], spans[NAMES["reward_model"]]):
        parts |= reward_model_parts(config, models.reward, spans[NAMES["reward_model"]].start)
    if models.teachers and overlap(spans[name], spans[NAMES["teachers"]]):
        configs = {teacher: model.hf_config for teacher, model in models.teachers.items()}
        parts |= teacher_parts(config, configs, spans[NAMES["teachers"]].start)
    if config.distills_exactly and overlap(spans[name], spans[NAMES["actor"]]):
        parts |= teacher_head_parts(config, ModelShape.of(models.actor.hf_config).vocab, _hidden_sizes(config, models))
    return parts


def _hidden_sizes(config: Config, models: Models) -> list[int]:
    """Return the hidden size of each teacher. Teachers without a path have the actor's."""
    own = [models.actor] * len(config.self_teachers)
    return [model.shape.hidden for model in (*models.teachers.values(), *own)]


def _training(
    settings: Trained,
    where: str,
    resident: Mapping[str, float],
    in_passes: Mapping[str, float],
    memory: RankMemory,
    passing: int,
) -> list[Load]:
    """Return the memory loads of the phases in which the model computes.

    Args:
        where: suffix of the phase name that identifies the pipeline stage.
        resident: bytes on the GPU during updates, excluding activations.
        in_passes: bytes on the GPU during forward-only passes, excluding the pass's own memory.
        passing: bytes that a forward-only pass needs.
    """
    role = settings.section
    kept = {"activations": memory.activations, "head": memory.head}
    update = {**resident, **{part: size for part, size in kept.items() if size}}
    remedy = (
        f"raise tp, pp or ep of {role}.layout, or raise dp to shard the optimizer over more ranks"
        if sum(resident.values()) > memory.activations + memory.head
        else f"set {role}.recompute=full, or lower {role}.tokens_per_microbatch"
    )
    return [
        Load(f"while the {role} computes log-probs{where}", {**in_passes, "forward pass": passing}, remedy),
        Load(f"while the {role} trains{where}", update, remedy),
    ]


def _engine(
    config: Config, models: Models, states: Mapping[Role, list[dict[str, float]]], cluster: Cluster
) -> list[Load]:
    """Return the memory loads of the phases in which the engine is awake. Colocated engines share GPUs with the actor's
    ranks, so the result contains loads for each pipeline stage of the actor."""
    actor = models.actor
    weights = actor.engine_bytes(config)
    awake = staging_parts(config, weights, cluster.gpus_per_node) | _untrained(config, models, ENGINE)
    awake |= awake_reserve(config, actor.shape)
    awake |= draft_parts(config, None if models.draft is None else models.draft.hf_config)
    spans = device_spans(config)
    fullest: dict[Role, dict[str, float]] = {
        role: max(of_role, key=lambda sizes: sum(sizes.values()))
        for role, of_role in states.items()
        if role != "actor" and overlap(spans[ENGINE], spans[NAMES[role]])
    }
    sampling = sampling_reserve(config, actor.shape)
    beside: list[dict[Role, dict[str, float]]] = [{}]
    if config.is_colocated:
        beside = [{"actor": stage, **fullest} for stage in states["actor"]]
    loads = []
    for stage, on_gpu in enumerate(beside):
        reserve = _reserve(config, models, ENGINE, {"actor": stage}, cluster.gpus_per_node)
        loads += engine_loads(config, on_gpu, weights, awake | reserve, sampling)
    return loads


def _fullest(loads: list[Load]) -> list[Load]:
    """Return the largest load in each phase over all pipeline stages."""
    fullest: dict[str, Load] = {}
    for load in loads:
        phase = load.phase.partition(",")[0]
        if phase not in fullest or load.total > fullest[phase].total:
            fullest[phase] = load
    return list(fullest.values())


def overfull(loads: Sequence[Load], cluster: Cluster) -> Load | None:
    """Return the load of the first phase that does not fit, or None if all phases fit. Only the first is returned
    because its fix may also help the later phases."""
    return next((load for load in loads if load.total > cluster.memory_bytes), None)


def refusal(load: Load, cluster: Cluster) -> str:
    """Return the error line for a phase that does not fit."""
    limit = f"it has only {cluster.gpu.memory_gib:.1f} GiB"
    if cluster.headroom:
        limit = f"only {cluster.describe_memory()} may be used"
    return (
        f"--gpus {cluster.num_gpus}x{cluster.name}: {load.phase}, a GPU would hold {load.arithmetic}, but {limit}. "
        f"Fix: {load.remedy}"
    )


def host_parts(config: Config, models: Models, workload: Workload, cluster: Cluster) -> dict[str, float]:
    """Return the bytes in a node's host memory, keyed by purpose. The host stores offloaded states, optimizer states
    that are updated on the CPU, the reference model's weights, the copy for background saves, the weights of sleeping
    engines, the frozen models of image engines, the patches of a step's images, the samples of a step, the copies of
    the trained models' state and the spare processes. Every rank on the node is assumed to need as much as the largest
    rank."""
    ranks = min(cluster.num_gpus, cluster.gpus_per_node)
    parts: dict[str, float] = {}
    for role, model in models.trained.items():
        settings = config.placed(role)
        memory = max((m for m, _ in _stages(config, settings, model, workload)), key=lambda m: m.weights + m.optimizer)
        states = _states(settings, memory)
        offloaded = sum(states[part] for part in {*settings.offload} - {"gradients"})
        parts[f"{role}: offloaded"] = ranks * offloaded
        parts[f"{role}: optimizer on the host"] = ranks * (memory.optimizer - states["optimizer"])
        if config.checkpoint.every_steps is not None and config.checkpoint.background:
            parts[f"{role}: copy for the background save"] = ranks * max_saved_bytes(config, settings.layout, model)
    for name, model in models.teachers.items() if config.teachers.offload else ():
        settings = config.teacher_section(name)
        if settings.engine == "megatron":
            weights = max(memory.weights for memory, _ in _stages(config, settings, model, workload))
            parts[f"teacher {name}: offloaded"] = min(ranks, settings.layout.world_size) * weights
    if config.keeps_reference and config.actor.adapters is None:
        actor = [m.weights for m, _ in _stages(config, config.actor, models.actor, workload)]
        parts["reference: weights"] = ranks * max(actor)
    vision = models.actor.shape.vision
    if vision is not None and isinstance(workload, TextWorkload):
        features = prompts_of_replica(config) * workload.image_features
        parts["actor: patches of images"] = patches_on_node(vision, config.actor.layout, features, ranks)
    if not workload.is_offline:
        if config.rollout.sleep and _engines_keep_weights(config):
            parts["sleeping engines: weights"] = ranks * models.actor.engine_bytes(config)
        shape = models.actor.shape
        if isinstance(shape, DenoiserShape) and (config.rollout.sleep or config.rollout.denoising.offload):
            parts["engines: text encoder and VAE"] = ranks * frozen_bytes(config, shape)
        store_mib = object_store_mib(config, models.actor.shape.experts, _hidden_sizes(config, models))
        parts["samples of a step"] = store_mib * 2**20
    else:
        parts["teachers' states of a step"] = states_bytes(config, _hidden_sizes(config, models))
    if config.cluster.replace_ranks:
        copies = copies_bytes(config, models, cluster)
        parts[COPIES] = copies if copies <= COPIES_SHARE * host_memory(cluster) else 0
        has_spares = config.cluster.spare_processes is not False
        parts[SPARES] = has_spares * ranks * len(models.trained) * SPARE_PROCESS_BYTES
    return {part: size for part, size in parts.items() if size}


def copies_bytes(config: Config, models: Models, cluster: Cluster) -> float:
    """Return the bytes of shared memory for copies of the trained models' state on the fullest node: two per rank, each
    as large as the rank's part of a checkpoint. This excludes the copies that each rank also keeps for another rank if
    there is a spare node."""
    ranks = min(cluster.num_gpus, cluster.gpus_per_node)
    sizes = (max_saved_bytes(config, config.placed(role).layout, model) for role, model in models.trained.items())
    return 2 * ranks * sum(sizes)


def host_memory(cluster: Cluster) -> float:
    """Return a node's host memory in bytes. If the cluster has fewer GPUs than a node, return only their share."""
    return cluster.gpu.host_gib * GIB * min(cluster.num_gpus, cluster.gpus_per_node)


def _engines_keep_weights(config: Config) -> bool:
    """Return whether sleeping engines keep their weights in host memory. See `EngineGroup.sleep`."""
    rollout = config.rollout
    between_rounds = config.batch.sampling_rounds > 1 and reward_model_is_beside_engines(config)
    return between_rounds or rollout.vllm_overrides.get("quantization") is not None


def max_saved_bytes(config: Config, layout: Layout, model: ModelParameters) -> int:
    """Return the largest number of bytes that any rank writes to a checkpoint."""
    stages = (model.of_stage(layout, stage) for stage in range(layout.pp))
    return max(saved_bytes(layout, held, item_bytes(config)) for held in stages)
