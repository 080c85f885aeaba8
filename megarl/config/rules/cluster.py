"""Rules for section `cluster`."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.device_spans import overlap
from megarl.config.schema import Config


def all_or_no_roles_have_devices(config: Config) -> Iterator[str]:
    assigned, roles = config.cluster.roles.assigned, config.num_ranks
    if not assigned or assigned.keys() == roles.keys():
        return
    missing, unused = [r for r in roles if r not in assigned], [r for r in assigned if r not in roles]
    problem = f"no devices are set for {', '.join(missing)}" if missing else f"the run has no {', '.join(unused)}"
    yield f"cluster.roles: {problem}. Fix: set devices for all of {', '.join(roles)} and no other role, or for no role"


def roles_on_nodes_have_equal_ranks_per_node(config: Config) -> Iterator[str]:
    roles, ranks, each = config.cluster.roles, config.num_ranks, {}
    for role in sorted(roles.on_nodes & ranks.keys()):
        nodes = len(roles.assigned[role])
        if nodes == 0 or ranks[role] % nodes:
            yield (
                f"cluster.roles.{role}={getattr(roles, role)}: the {ranks[role]} ranks of {_sizes(role)} cannot be "
                f"spread evenly over {nodes} nodes. Fix: choose a number of nodes that divides {ranks[role]}"
            )
            return
        each[role] = ranks[role] // nodes
    if len(set(each.values())) > 1:
        counts = ", ".join(f"{role} {count}" for role, count in each.items())
        yield (
            "cluster.roles: roles placed by nodes need the same number of ranks per node, but the numbers are "
            f"{counts}. Fix: change the numbers of nodes, or place the roles by device numbers"
        )


def each_rank_has_a_device(config: Config) -> Iterator[str]:
    roles, ranks = config.cluster.roles, config.num_ranks
    for role, span in roles.assigned.items():
        if role in ranks.keys() - roles.on_nodes and len(span) != ranks[role]:
            fitting = _show_range(role, range(span.start, span.start + ranks[role]))
            yield (
                f"{_show_range(role, span)}: the range has {len(span)} devices, but {_sizes(role)} has {ranks[role]} "
                f"ranks. Fix: set {fitting}, or change {_sizes(role)}"
            )


def engine_devices_match_placement(config: Config) -> Iterator[str]:
    """Colocated engines must read the actor's weights on their own devices; disaggregated engines must not share
    devices."""
    spans = config.role_devices
    if config.is_offline or spans.keys() != config.num_ranks.keys():
        return
    engines, actor = spans.pop("rollout"), spans["actor"]
    if config.is_colocated and engines.start != actor.start:
        yield (
            f"{_assignment(config, 'rollout')}: colocated engines must start on the actor's first device, but "
            f"{_assignment(config, 'actor')}. Fix: start both ranges at the same device, or set "
            "cluster.placement=disaggregated"
        )
    shared = [role for role, span in spans.items() if overlap(engines, span)]
    if shared and not config.is_colocated:
        yield (
            f"{_assignment(config, 'rollout')}: disaggregated engines cannot share devices with models, but "
            f"{_assignment(config, shared[0])}. Fix: choose ranges that do not overlap, or set "
            "cluster.placement=colocated"
        )


def _sizes(role: str) -> str:
    """Return the keys that determine a role's number of ranks."""
    return "rollout.replicas x rollout.tp" if role == "rollout" else f"{role}.layout"


def _assignment(config: Config, role: str) -> str:
    return f"cluster.roles.{role}={getattr(config.cluster.roles, role)}"


def _show_range(role: str, span: range) -> str:
    return f"cluster.roles.{role}={span.start}-{span.stop - 1}"


RULES = (
    all_or_no_roles_have_devices,
    roles_on_nodes_have_equal_ranks_per_node,
    each_rank_has_a_device,
    engine_devices_match_placement,
)
