"""The devices of each role, by their numbers over all nodes of a run: one for each rank."""

from __future__ import annotations

from megarl.config.schema import Config, MegatronRole

NAMES: dict[MegatronRole, str] = {
    "actor": "trainer",
    "critic": "critic",
    "reward_model": "reward-model",
    "implicit_reward": "implicit-reward",
}
"""The names of a model's processes, by its role."""

ENGINE = "engine"


def device_spans(config: Config) -> dict[str, range]:
    """Returns the devices of each role, one for each of its ranks, by the name of its processes. Colocated, all spans
    begin with the first device; else each begins where the one before ends."""
    ranks = {NAMES[placed.section]: placed.layout.world_size for placed in config.all_placed}
    if not config.is_offline:
        ranks[ENGINE] = config.rollout.replicas * config.rollout.tp
    spans, first = {}, 0
    for role, count in ranks.items():
        spans[role] = range(first, first + count)
        first += 0 if config.is_colocated else count
    return spans


def num_devices(config: Config) -> int:
    """Returns the devices that a recipe's ranks are on."""
    return max(span.stop for span in device_spans(config).values())
