"""Check that this machine's devices support the run, before any process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import psutil

from megarl.cluster.memory.parameters import ModelParameters, Models, min_host_bytes
from megarl.cluster.memory.shared_gpu import Load, fullest_phase
from megarl.cluster.placement import Placement, place
from megarl.config.device_spans import ENGINE, device_spans, devices_per_node
from megarl.config.model_schema import entry_prefix, layout_key
from megarl.config.rules import shared_gpu as shared_gpu_rules
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core import device
from megarl.models.engine_kernels import check_cpu_kernels, check_cpu_speculation
from megarl.models.folder import read_config
from megarl.models.run_models import ModelFolders
from megarl.models.trained_model import policy_hf_config

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The environment variable that selects vLLM's model runner on GPUs. The default is V2."""


def place_here(config: Config) -> Placement:
    """Place the run's processes on this machine or on several identical nodes. Raises UserError like `place`."""
    gpus = device.num_gpus() if config.cluster.nodes > 1 else None
    return place(config, on_gpus=device.on_cuda(), gpus_per_node=gpus)


def check_machine(config: Config) -> None:
    """Raise a UserError with one line for each setting that the devices do not support."""
    raise_all([rule(config) for rule in (_GPU_RULES if device.on_cuda() else _CPU_RULES)])


def check_gpu_memory(config: Config, models: ModelFolders) -> None:
    """Raise a UserError if a shared GPU has too little memory for the models and engines on it at the same time."""
    if not device.on_cuda() or not config.is_colocated or config.is_offline:
        return
    trained = models.trained(config)
    reward, draft = (None if path is None else read_config(path) for path in (models.reward_model, models.draft))
    num_gpus, spans = device.num_gpus(), device_spans(config)
    # Check this node's GPUs and those where a model begins or ends, because all other nodes have the same load as this
    # one. gpus_suffice reports missing GPUs.
    ends = {end for span in spans.values() for end in (span.start, span.stop - 1)}
    for gpu in sorted(ends.union(range(num_gpus)).intersection(spans[ENGINE])):
        policy = policy_hf_config(config, models.hf_config)
        load = fullest_phase(config, policy, trained, reward, gpu, num_gpus, draft, models.teacher_configs)
        raise_all([fits(gpu, device.memory_bytes(gpu % num_gpus), load)])


def check_host_memory(config: Config, models: ModelFolders) -> None:
    """Raise a UserError if a machine without GPUs lacks the host memory that models and engines always hold."""
    if not device.on_cuda():
        parts = host_parts(config, models)
        raise_all([host_suffices(psutil.virtual_memory().total, parts, config.cluster.nodes)])


def host_parts(config: Config, models: ModelFolders) -> dict[str, int]:
    """Return the host memory in bytes that the run uses at all times, by purpose."""
    draft = None if models.draft is None else read_config(models.draft)
    teachers = models.teacher_configs
    trained, lora = models.trained(config), config.actor.adapters
    held = Models.of(trained, lora=lora, draft=draft, teachers=teachers, muon=config.muon_roles)
    return min_host_bytes(config, held, ModelParameters(policy_hf_config(config, models.hf_config)))


def host_suffices(memory_bytes: int, parts: Mapping[str, int], num_nodes: int = 1) -> str | None:
    """Return an error if all nodes together have too little host memory. memory_bytes: memory of one node."""
    needed, total = sum(parts.values()), num_nodes * memory_bytes
    if needed <= total:
        return None
    installed = f"{memory_bytes / 2**30:.1f} GiB is installed"
    if num_nodes > 1:
        installed = (
            f"{num_nodes} x {memory_bytes / 2**30:.1f} = {total / 2**30:.1f} GiB is installed in total on "
            f"cluster.nodes={num_nodes} nodes like this one"
        )
    arithmetic = " + ".join(f"{size / 2**30:.1f} ({purpose})" for purpose, size in parts.items())
    return (
        f"model.path: without a GPU, models and engines need {arithmetic} = {needed / 2**30:.1f} GiB of host memory, "
        f"but only {installed}. Fix: use a smaller model, or lower rollout.replicas or dp in the layouts"
    )


def check_engine_kernels(config: Config, models: ModelFolders) -> None:
    """Raise a UserError if vLLM's CPU build has no kernel for a model that runs in it."""
    if device.on_cuda() or config.samples_images:
        return
    in_engines = set() if config.is_offline else {models.actor}
    if models.reward_model is not None and config.reward_model.engine == "vllm":
        in_engines.add(models.reward_model)
    in_engines |= {models.teachers[teacher.name] for teacher, _ in config.placed_teachers if teacher.engine == "vllm"}
    if models.draft is not None:
        in_engines.add(models.draft)
    for folder in sorted(in_engines):
        check_cpu_kernels(folder, read_config(folder))
    if (method := config.rollout.speculative.method) is not None:
        check_cpu_speculation(models.actor, read_config(models.actor), method)


def fits(gpu: int, memory_bytes: int, load: Load) -> str | None:
    if load.total <= memory_bytes:
        return None
    return (
        f"cluster.placement=colocated: {load.phase}, GPU {gpu} would hold {load.arithmetic}, but it has "
        f"{memory_bytes / 2**30:.1f} GiB of memory. Fix: {load.remedy}"
    )


def gpus_suffice(config: Config) -> str | None:
    if config.cluster.nodes > 1:  # see placement.check_nodes
        return None
    spans, available = device_spans(config), device.num_gpus()
    needed = max(span.stop for span in spans.values())
    if needed <= available:
        return None
    ranks = [f"{len(span)} {role}" for role, span in spans.items()]
    if config.cluster.roles.assigned:
        return (
            f"cluster.roles: GPU {needed - 1} does not exist, because the last GPU of this machine is GPU "
            f"{available - 1}. Fix: set cluster.roles to GPUs up to {available - 1}, or lower dp in the layouts"
        )
    if config.is_colocated:
        return (
            f"cluster.placement=colocated: the roles share GPUs and need max({', '.join(ranks)}) = {needed}, but this "
            f"machine has {available}. Fix: lower dp in the layouts"
        )
    return (
        f"cluster.placement=disaggregated: {' + '.join(ranks)} = {needed} ranks need a GPU each, but this machine has "
        f"{available}. Fix: set cluster.placement=colocated, or lower dp in the layouts"
    )


def parameters_can_move(config: Config) -> str | None:
    """Reject offloading of the actor's parameters on CPU, because engines on CPU read them from host memory."""
    if "parameters" not in config.actor.offload:
        return None
    return (
        f"actor.offload={config.actor.offload}: without a GPU, the actor's parameters are already in host memory, "
        "where the engines read them. Fix: remove parameters from actor.offload"
    )


def ranks_of_an_engine_have_cores(config: Config) -> str | None:
    tp = {} if config.is_offline else {"rollout.tp": config.rollout.tp}
    if config.has_reward_model and config.reward_model.engine == "vllm":
        tp["reward_model.layout.tp"] = config.reward_model.layout.tp
    for teacher, _ in config.placed_teachers if "vllm" in config.teacher_engines else ():
        placed = config.teachers.only(teacher)
        if placed.engine == "vllm":
            tp[f"{entry_prefix(placed)}{layout_key(placed)}.tp"] = placed.layout.tp
    cores, places = len(os.sched_getaffinity(0)), devices_per_node(config)
    refused = [key for key, ranks in tp.items() if min(ranks, places) > cores]
    if not refused:
        return None
    return (
        f"{', '.join(f'{key}={tp[key]}' for key in refused)}: without a GPU, each rank of a vLLM engine needs its own "
        f"core, but this machine has {cores} for the run. Fix: set {' and '.join(refused)} to at most {cores}"
    )


def parts_of_an_engine_have_one_rank(config: Config) -> str | None:
    """Reject engines that span several nodes with several ranks per node: on CPU, vLLM supports one rank per node."""
    if config.is_offline:
        return None
    places, tp = devices_per_node(config), config.rollout.tp
    if places == 1 or tp <= places:
        return None
    return (
        f"rollout.tp={tp}: without a GPU, an engine that spans nodes must have one rank per node, but with "
        f"cluster.nodes={config.cluster.nodes} each node has {places} ranks of a role. Fix: set rollout.tp to at most "
        f"{places}, or set cluster.nodes to the number of ranks"
    )


def model_runner_returns_routes(config: Config) -> str | None:
    value = os.environ.get(MODEL_RUNNER)
    if value != "0" or config.is_offline or not config.actor.experts.replay_routes:
        return None
    return (
        f"actor.experts.replay_routes=true: only vLLM's Model Runner V2 returns routes, but the environment variable "
        f"{MODEL_RUNNER}={value} selects V1. Fix: unset {MODEL_RUNNER}, or set actor.experts.replay_routes=false"
    )


_GPU_RULES: tuple[Callable[[Config], str | None], ...] = (
    gpus_suffice,
    model_runner_returns_routes,
    *shared_gpu_rules.RULES,
)

_CPU_RULES: tuple[Callable[[Config], str | None], ...] = (
    parameters_can_move,
    ranks_of_an_engine_have_cores,
    parts_of_an_engine_have_one_rank,
)
