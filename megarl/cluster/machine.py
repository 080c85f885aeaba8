"""Rules between a run and the devices of this machine, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import psutil

from megarl.cluster.memory.host import least_host_bytes
from megarl.cluster.memory.parameters import ModelParameters, Models
from megarl.cluster.memory.shared_gpu import Load, fullest_phase
from megarl.cluster.placement import Placement, place
from megarl.config.device_spans import ENGINE, device_spans, places_per_node
from megarl.config.rules import shared_gpu as shared_gpu_rules
from megarl.config.schema import Config
from megarl.config.violations import raise_all
from megarl.core import device
from megarl.models.folder import read_config
from megarl.models.run_models import ModelFolders
from megarl.models.shape import ModelShape

CPU_EXPERTS_MULTIPLE = 32
"""The divisor of the hidden size that vLLM's kernels for experts ask for on CPU."""


def place_here(config: Config) -> Placement:
    """Places the processes of a run on this machine, or on several nodes that are equal to it. Raises UserError as
    `place` does."""
    gpus = device.num_gpus() if config.cluster.nodes > 1 else None
    return place(config, on_gpus=device.on_cuda(), gpus_per_node=gpus)


def check_machine(config: Config) -> None:
    """Raises UserError with a line for each thing that the devices do not allow."""
    raise_all([rule(config) for rule in (_GPU_RULES if device.on_cuda() else _CPU_RULES)])


def check_gpu_memory(config: Config, models: ModelFolders) -> None:
    """Raises UserError for shared GPUs without room for all that is on them at once."""
    if not device.on_cuda() or not config.is_colocated or config.is_offline:
        return
    trained = models.trained(config)
    reward = None if models.reward_model is None else read_config(models.reward_model)
    here, spans = device.num_gpus(), device_spans(config)
    # The nodes are equal, but for those where another model begins or ends; too few GPUs are told by other rules.
    ends = {end for span in spans.values() for end in (span.start, span.stop - 1)}
    for gpu in sorted(ends.union(range(here)).intersection(spans[ENGINE])):
        load = fullest_phase(config, models.hf_config, trained, reward, gpu, here)
        raise_all([fits(gpu, device.memory_bytes(gpu % here), load)])


def check_host_memory(config: Config, models: ModelFolders) -> None:
    """Raises UserError for a machine without a GPU, and without room for what models and engines hold all the time."""
    if not device.on_cuda():
        total = config.cluster.nodes * psutil.virtual_memory().total
        raise_all([host_suffices(total, host_parts(config, models))])


def host_parts(config: Config, models: ModelFolders) -> dict[str, int]:
    """Returns the bytes of host memory that the run holds all the time, by what they are for."""
    return least_host_bytes(
        config, Models.of(models.trained(config), lora=config.actor.adapters), ModelParameters(models.hf_config)
    )


def host_suffices(memory_bytes: int, parts: Mapping[str, int]) -> str | None:
    needed = sum(parts.values())
    if needed <= memory_bytes:
        return None
    arithmetic = " + ".join(f"{size / 2**30:.1f} ({what})" for what, size in parts.items())
    return (
        f"model.path: without a GPU, models and engines would hold {arithmetic} = {needed / 2**30:.1f} GiB, and there "
        f"are {memory_bytes / 2**30:.1f}; take a smaller model, or lower dp of the layouts or rollout.replicas"
    )


def check_engine_kernels(config: Config, models: ModelFolders) -> None:
    """Raises ValueError for a model whose experts vLLM's CPU build cannot compute. It pads their intermediate size, but
    not the hidden size."""
    if device.on_cuda() or config.is_offline:
        return
    model = ModelShape.of(read_config(models.actor))
    if model.experts and model.hidden % CPU_EXPERTS_MULTIPLE:
        raise ValueError(
            f"{models.actor}: hidden_size {model.hidden}, and vLLM's CPU build has experts for multiples of "
            f"{CPU_EXPERTS_MULTIPLE} only; run this model on GPUs"
        )


def fits(gpu: int, memory_bytes: int, load: Load) -> str | None:
    if load.total <= memory_bytes:
        return None
    return (
        f"cluster.placement=colocated: {load.phase}, GPU {gpu} would hold {load.arithmetic}, and has "
        f"{memory_bytes / 2**30:.1f}; {load.remedy}"
    )


def gpus_suffice(config: Config) -> str | None:
    if config.cluster.nodes > 1:  # see placement.check_nodes
        return None
    spans, there = device_spans(config), device.num_gpus()
    needed = max(span.stop for span in spans.values())
    if needed <= there:
        return None
    ranks = [f"{len(span)} {role}" for role, span in spans.items()]
    if config.cluster.roles.given:
        return (
            f"cluster.roles: the last GPU that it names is {needed - 1}, and this machine has {there}, from 0 on; name "
            "these, or lower dp of the layouts"
        )
    if config.is_colocated:
        return (
            f"cluster.placement=colocated: each role has a rank on each GPU, so that max({', '.join(ranks)}) = "
            f"{needed} are needed, and this machine has {there}; lower dp of the layouts"
        )
    return (
        f"cluster.placement=disaggregated: {' + '.join(ranks)} = {needed} ranks need a GPU each, and this machine has "
        f"{there}; set cluster.placement=colocated, or lower dp of the layouts"
    )


def parameters_can_move(config: Config) -> str | None:
    """The actor's parameters can be offloaded only where the engines do not read them."""
    if "parameters" not in config.actor.offload:
        return None
    return (
        f"actor.offload={config.actor.offload}: without a GPU the actor's parameters are in host memory already, where "
        "the engines read them; leave parameters out"
    )


def ranks_of_an_engine_have_cores(config: Config) -> str | None:
    tp = {} if config.is_offline else {"rollout.tp": config.rollout.tp}
    if config.has_reward_model and config.reward_model.engine == "vllm":
        tp["reward_model.layout.tp"] = config.reward_model.layout.tp
    cores, places = len(os.sched_getaffinity(0)), places_per_node(config)
    refused = [f"{key}={ranks}" for key, ranks in tp.items() if min(ranks, places) > cores]
    if not refused:
        return None
    return (
        f"{', '.join(refused)}: without a GPU each rank of an engine in vLLM has cores of its own, and this machine "
        f"has {cores} for the run; set at most {cores}"
    )


def parts_of_an_engine_have_one_rank(config: Config) -> str | None:
    """Refuses what vLLM has without a GPU for one rank on each node only."""
    if config.is_offline:
        return None
    places, tp = places_per_node(config), config.rollout.tp
    if places == 1 or tp <= places:
        return None
    return (
        f"rollout.tp={tp}: without a GPU an engine over several nodes has one rank on each, and cluster.nodes="
        f"{config.cluster.nodes} have places for {places} ranks of a role each; set rollout.tp to at most {places}, or "
        "cluster.nodes to the number of ranks"
    )


_GPU_RULES: tuple[Callable[[Config], str | None], ...] = (gpus_suffice, *shared_gpu_rules.RULES)

_CPU_RULES: tuple[Callable[[Config], str | None], ...] = (
    parameters_can_move,
    ranks_of_an_engine_have_cores,
    parts_of_an_engine_have_one_rank,
)
