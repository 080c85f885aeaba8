"""Rules for section `cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.config.schema import Config
from megarl.core.spans import overlap


def all_roles_have_devices_or_none(config: Config) -> str | None:
    given, roles = config.cluster.roles.given, config.num_ranks
    if not given or given.keys() == roles.keys():
        return None
    missing, strange = [r for r in roles if r not in given], [r for r in given if r not in roles]
    problem = f"{', '.join(missing)} missing" if missing else f"the run has no {', '.join(strange)}"
    return f"cluster.roles: {problem}. Fix: set {', '.join(roles)} and no other role, or none"


def whole_nodes_have_as_many_devices_for_each_role(config: Config) -> str | None:
    roles, ranks, each = config.cluster.roles, config.num_ranks, {}
    for role in sorted(roles.on_nodes & ranks.keys()):
        nodes = len(roles.given[role])
        if nodes == 0 or ranks[role] % nodes:
            return (
                f"cluster.roles.{role}={getattr(roles, role)}: {nodes} nodes, and {_sizes(role)} makes {ranks[role]} "
                "ranks, which do not divide by the nodes. Fix: set a number of nodes that divides the ranks"
            )
        each[role] = ranks[role] // nodes
    if len(set(each.values())) < 2:
        return None
    found = ", ".join(f"{role} {count}" for role, count in each.items())
    return (
        f"cluster.roles: roles placed by nodes need the same number of ranks per node, and have {found}. Fix: set "
        "equal numbers, or place the roles by device numbers"
    )


def each_rank_has_a_device(config: Config) -> str | None:
    return "\n".join(_wrong_sizes(config)) or None


def _wrong_sizes(config: Config) -> Iterator[str]:
    """Yield a line for each role that does not have one device per rank."""
    ranks = config.num_ranks
    roles = config.cluster.roles
    for role, span in roles.given.items():
        if role in ranks.keys() - roles.on_nodes and len(span) != ranks[role]:
            fitting = _shown(role, range(span.start, span.start + ranks[role]))
            yield (
                f"{_shown(role, span)}: {len(span)} devices for the {ranks[role]} ranks of {_sizes(role)}. Fix: set "
                f"{fitting}, or another layout"
            )


def engines_are_where_placement_says(config: Config) -> str | None:
    """Colocated engines must read the actor's weights on their own devices; disaggregated engines must not share
    devices."""
    spans = config.role_devices
    if config.is_offline or spans.keys() != config.num_ranks.keys():
        return None
    engines, actor = spans.pop("rollout"), spans["actor"]
    if config.is_colocated and engines.start != actor.start:
        return (
            f"{_given(config, 'rollout')}: colocated engines start on the actor's first device, and "
            f"{_given(config, 'actor')}. Fix: start both there, or set cluster.placement=disaggregated"
        )
    shared = [] if config.is_colocated else [role for role, span in spans.items() if overlap(engines, span)]
    if not shared:
        return None
    return (
        f"{_given(config, 'rollout')}: disaggregated engines cannot share devices with models, and "
        f"{_given(config, shared[0])}. Fix: choose other devices, or set cluster.placement=colocated"
    )


def _sizes(role: str) -> str:
    """Return the keys that determine a role's number of ranks."""
    return "rollout.replicas x rollout.tp" if role == "rollout" else f"{role}.layout"


def _given(config: Config, role: str) -> str:
    return f"cluster.roles.{role}={getattr(config.cluster.roles, role)}"


def _shown(role: str, span: range) -> str:
    return f"cluster.roles.{role}={span.start}-{span.stop - 1}"


RULES: tuple[Callable[[Config], str | None], ...] = (
    all_roles_have_devices_or_none,
    whole_nodes_have_as_many_devices_for_each_role,
    each_rank_has_a_device,
    engines_are_where_placement_says,
)
