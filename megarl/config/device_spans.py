"""The devices of each role, by their numbers over all nodes of a run: one for each rank."""

from __future__ import annotations

from megarl.config.model_schema import MegatronRole, Role
from megarl.config.schema import Config
from megarl.core.spans import overlap

NAMES: dict[MegatronRole, str] = {
    "actor": "trainer",
    "critic": "critic",
    "reward_model": "reward-model",
    "implicit_reward": "implicit-reward",
}
"""The names of a model's processes, by its role."""

ENGINE = "engine"


def device_spans(config: Config) -> dict[str, range]:
    """Returns the devices of each role, one for each of its ranks, by the name of its processes: those that
    cluster.roles gives it. Without, colocated spans all begin with the first device; else each begins where the one
    before ends."""
    given = config.role_devices
    spans, first = {}, 0
    for role, count in config.num_ranks.items():
        spans[NAMES.get(role, ENGINE)] = given[role] if given else range(first, first + count)
        first += 0 if config.is_colocated else count
    return spans


def num_devices(config: Config) -> int:
    """Returns the devices that a recipe's ranks are on."""
    return max(span.stop for span in device_spans(config).values())


def places_per_node(config: Config) -> int:
    """Returns the devices of each node that an even share of the ranks needs."""
    return -(-num_devices(config) // config.cluster.nodes)


def sharing(config: Config) -> dict[Role, frozenset[Role]]:
    """Returns for each model that the run trains the others that have devices in common with it."""
    spans = device_spans(config)
    own: dict[Role, range] = {trained.section: spans[NAMES[trained.section]] for trained in config.all_trained}
    return {
        role: frozenset(other for other in own if other != role and overlap(own[other], span))
        for role, span in own.items()
    }


def reward_model_is_beside_engines(config: Config) -> bool:
    """Returns whether a reward model has devices in common with the engines, which leave them to it when it scores."""
    spans = device_spans(config)
    return overlap(spans[ENGINE], spans.get(NAMES["reward_model"], range(0)))


def is_alone(config: Config, role: MegatronRole) -> bool:
    """Returns whether a model's devices have ranks of no other role, neither a model's nor an engine's."""
    spans = device_spans(config)
    own = spans.pop(NAMES[role])
    return not any(overlap(own, span) for span in spans.values())
