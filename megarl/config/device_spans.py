"""The devices of each role, one per rank, numbered across all nodes."""

from __future__ import annotations

from megarl.config.model_schema import MegatronRole, Role
from megarl.config.schema import Config

NAMES: dict[str, str] = {
    "actor": "trainer",
    "critic": "critic",
    "reward_model": "reward-model",
    "implicit_reward": "implicit-reward",
    "teachers": "teacher",
}
"""Role -> name of the model's processes."""

ENGINE = "engine"


def device_spans(config: Config) -> dict[str, range]:
    """Return the devices of each role, keyed by the name of its processes, as set in cluster.roles. Without
    cluster.roles, colocated roles all start at the first device, and disaggregated roles use consecutive devices."""
    assigned = config.role_devices
    spans, first = {}, 0
    for role, count in config.num_ranks.items():
        spans[NAMES.get(role, ENGINE)] = assigned[role] if assigned else range(first, first + count)
        first += 0 if config.is_colocated else count
    return spans


def overlap(one: range, other: range) -> bool:
    """Return whether two spans share a device."""
    return max(one.start, other.start) < min(one.stop, other.stop)


def num_devices(config: Config) -> int:
    """Return the number of devices that the run uses."""
    return max(span.stop for span in device_spans(config).values())


def devices_per_node(config: Config) -> int:
    """Return the number of devices per node, assuming that ranks are spread evenly."""
    return -(-num_devices(config) // config.cluster.nodes)


def sharing(config: Config) -> dict[Role, frozenset[Role]]:
    """Return, for each trained model, the other trained models on its devices."""
    spans = device_spans(config)
    trained: dict[Role, range] = {model.section: spans[NAMES[model.section]] for model in config.all_trained}
    return {
        role: frozenset(other for other in trained if other != role and overlap(trained[other], span))
        for role, span in trained.items()
    }


def reward_model_is_beside_engines(config: Config) -> bool:
    """Return whether a reward model shares devices with the engines. If so, the engines release them while it
    scores."""
    spans = device_spans(config)
    return overlap(spans[ENGINE], spans.get(NAMES["reward_model"], range(0)))


def is_alone(config: Config, role: MegatronRole) -> bool:
    """Return whether no other model or engine uses this model's devices."""
    spans = device_spans(config)
    model_span = spans.pop(NAMES[role])
    has_siblings = role == "teachers" and len(config.placed_teachers) > 1
    return not has_siblings and not any(overlap(model_span, span) for span in spans.values())
