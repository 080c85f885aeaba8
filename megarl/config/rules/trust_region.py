"""The rules of section `algorithm.trust_region`; that a model has no experts is one of `model`."""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.document import show
from megarl.config.schema import Config


def trust_region_goes_with_the_rest(config: Config) -> str | None:
    limit = config.algorithm.trust_region.kl_limit
    if limit is None:
        return None
    batch, objective = config.batch, config.algorithm.objective
    needed = {
        "algorithm.objective.name": (objective.name, "unclipped", "it bounds the surrogate that has no clip"),
        "batch.prompts_per_update": (
            *(batch.prompts_per_update, batch.prompts_per_step),
            "it bounds the one update of a step, at whose start the policy is the old one",
        ),
        "batch.epochs": (batch.epochs, 1, "it bounds the one update of a step"),
        "model.dtype": (
            *(config.model.dtype, "float32"),
            "it differentiates between weights that lie closer together than those of bfloat16",
        ),
        "actor.lora.rank": (config.actor.lora.rank, None, "its vectors are of whole weights"),
        "critic.shared_backbone": (config.critic.shared_backbone, False, "its divergence says nothing of values"),
        "algorithm.correction.old": (
            *(config.algorithm.correction.old, "trainer"),
            "the divergence from the old policy begins at 0",
        ),
    }
    lines = [
        f"{key}={show(value)}: algorithm.trust_region.kl_limit={limit:g} is TRPO, and {reason}; set "
        f"{key}={show(wanted)}, or algorithm.trust_region.kl_limit=null"
        for key, (value, wanted, reason) in needed.items()
        if value != wanted
    ]
    return "\n".join(lines) or None


RULES: tuple[Callable[[Config], str | None], ...] = (trust_region_goes_with_the_rest,)
