"""Lower bound on the host memory that a run without GPUs needs."""

from __future__ import annotations

from megarl.cluster.memory.parameters import ModelParameters, Models
from megarl.cluster.memory.rank import item_bytes, stage_memory
from megarl.config.schema import Config


def least_host_bytes(config: Config, models: Models, policy: ModelParameters) -> dict[str, int]:
    """Return the host memory in bytes that models and engines always hold, by purpose.

    Activations, KV caches and the processes' own memory come on top, so a machine with less memory cannot run the
    config.

    Args:
        policy: the actor's model as the engines hold it, without heads that exist only in the trainer.
    """
    num_bytes = item_bytes(config)
    parts: dict[str, int] = {}
    for role, model in models.trained.items():
        settings = config.placed(role)
        layout = settings.layout
        stages = [
            stage_memory(model.shape, layout, stage, model.of_stage(layout, stage), num_bytes, 1, 1, 1)
            for stage in range(layout.pp)
        ]
        ranks = layout.tp * layout.cp * layout.dp
        weights = ranks * sum(stage.weights for stage in stages)
        trained = 0 if settings.frozen else ranks * sum(stage.gradients + stage.optimizer for stage in stages)
        parts[f"{role}: weights, gradients, optimizer"] = weights + trained
        if role == "actor" and config.has_reference and settings.adapters is None:
            parts["reference: weights"] = weights
    rollout = config.rollout
    if not config.is_offline and rollout.quantization is not None:
        layout, actor = config.actor.layout, models.actor
        matrices = sum(actor.of_stage(layout, stage).matrices for stage in range(layout.pp))
        parts["actor: fp8 copy for the engines"] = layout.tp * layout.cp * layout.dp * matrices
    if not config.is_offline and rollout.vllm_overrides.get("quantization") is None:  # otherwise the size is unknown
        parts["engines: weights"] = rollout.replicas * rollout.tp * policy.engine_bytes(config)
    return parts
