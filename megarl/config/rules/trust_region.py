"""Rules for section `algorithm.trust_region`; mixture-of-experts models are rejected in `megarl.models.rules`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config


def trust_region_requirements_are_met(config: Config) -> str | None:
    limit = config.algorithm.trust_region.kl_limit
    if limit is None:
        return None
    batch, objective = config.batch, config.algorithm.objective
    needed = {
        "algorithm.objective.name": (objective.name, "unclipped", "TRPO maximizes the unclipped surrogate"),
        "batch.prompts_per_update": (
            *(batch.prompts_per_update, batch.prompts_per_step),
            "TRPO makes a single update per step, starting at the old policy",
        ),
        "batch.epochs": (batch.epochs, 1, "TRPO makes a single update per step"),
        "model.dtype": (
            *(config.model.dtype, "float32"),
            "TRPO's finite differences are too small for other dtypes",
        ),
        "actor.lora.rank": (config.actor.lora.rank, None, "TRPO's vectors have the shapes of the full weights"),
        "critic.shared_backbone": (
            config.critic.shared_backbone,
            False,
            "TRPO's divergence does not include a value head",
        ),
        "algorithm.correction.old": (
            *(config.algorithm.correction.old, "trainer"),
            "TRPO's divergence from the old policy must start at 0",
        ),
    }
    lines = [
        f"{key}={show(value)}: with algorithm.trust_region.kl_limit={limit:g}, {reason}. Fix: set "
        f"{key}={show(wanted)}, or algorithm.trust_region.kl_limit=null"
        for key, (value, wanted, reason) in needed.items()
        if value != wanted
    ]
    return "\n".join(lines) or None


RULES: tuple[Callable[[Config], str | None], ...] = (trust_region_requirements_are_met,)
