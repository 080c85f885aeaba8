"""Builds and verifies a recipe's refit plan without its machines, and reports the bytes that each kind of link
carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.config.device_spans import ENGINE, NAMES, device_spans
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.models.folder import ModelNotLocal, read_local_config
from megarl.models.rules import check_model
from megarl.models.trained_model import policy_hf_config
from megarl.resharding.families import (
    diffusers_holders,
    megatron_holders,
    quantized_destinations,
    quantized_sources,
    vllm_holders,
)
from megarl.resharding.piece import Holder
from megarl.resharding.planning.figures import Figures
from megarl.resharding.planning.preview import plan_figures, read_speeds


def preview_refit(config: Config, ranks_per_node: int, bandwidth: str) -> Figures:
    """Return the figures for the plan that copies the actor's weights into the recipe's engines. Ranks run on the GPUs
    that the recipe's placement assigns to them. Each node has ranks_per_node consecutive GPUs. Raise a UserError if the
    recipe has no engines, or its model is incompatible with the recipe or is not on this machine."""
    if config.is_offline:
        raise UserError(
            f"data.format={config.data.format}: the recipe has no engines, so there is no refit. Fix: use a recipe "
            "with rollouts"
        )
    speeds = read_speeds(ranks_per_node, bandwidth)
    try:
        hf_config = read_local_config(config.model.path, revision=config.model.revision)
    except ModelNotLocal as reason:
        raise UserError(
            f"model.path={config.model.path}: {reason}. Fix: use a folder that contains config.json"
        ) from None
    check_model(config, hf_config)
    # Trainers and engines hold unquantized weights.
    hf_config = {**policy_hf_config(config, hf_config), "quantization_config": None}
    layout, dtype, rollout = config.actor.layout, config.model.dtype, config.rollout
    spans = device_spans(config)
    trainer_gpus, engine_gpus = spans[NAMES["actor"]], spans[ENGINE]
    whole_experts = rollout.has_whole_experts
    bucket_bytes = None if rollout.refit_bucket_mib is None else rollout.refit_bucket_mib * 2**20

    def place(holders: Sequence[Holder], gpus: range) -> list[Holder]:
        pairs = zip(holders, gpus, strict=True)
        return [replace(holder, node=gpu // ranks_per_node, device=gpu) for holder, gpu in pairs]

    def make_sides() -> tuple[list[Holder], list[Holder]]:
        trainers = megatron_holders(hf_config, layout, dtype)
        if config.samples_images:
            engines = diffusers_holders(hf_config, rollout.replicas, dtype)
        else:
            engines = vllm_holders(
                hf_config,
                rollout.tp,
                rollout.replicas,
                dtype,
                expert_parallel=whole_experts,
                drafts=rollout.drafts_with_mtp,
            )
        if rollout.quantization is not None:
            trainers, engines = quantized_sources(hf_config, trainers), quantized_destinations(hf_config, engines)
        return place(trainers, trainer_gpus), place(engines, engine_gpus)

    placed = [list(trainer_gpus), list(engine_gpus), ranks_per_node]
    inputs = [
        hf_config,
        layout.model_dump(),
        dtype,
        rollout.tp,
        rollout.replicas,
        whole_experts,
        rollout.drafts_with_mtp,
        rollout.quantization,
        placed,
    ]
    return plan_figures(inputs, make_sides, speeds, bucket_bytes)


def transport_of(config: Config, figures: Figures) -> str:
    """Return a line that names the transport for the recipe's weights."""
    transport = "sent over NCCL or gloo" if config.sends_weights else "read in place, by CUDA IPC or in shared memory"
    if not config.sends_weights and figures.bytes_by_link["inter"] > 0:
        transport += "; sent between nodes over NCCL or gloo if an engine's node does not hold them"
    return f"cluster.placement={config.cluster.placement}, rollout.transport={config.rollout.transport}: {transport}"
