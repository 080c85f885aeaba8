"""Scales a run down to fewer nodes, with proportionally fewer data-parallel replicas and engines."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.core.errors import UserError


def fewer_replicas(config: Config, nodes: int) -> list[str]:
    """Return the overrides that scale data-parallel replicas and engines down to `nodes` nodes. Batches stay the same,
    so updates are equal up to rounding. Raise UserError if a count does not scale to an integer."""
    num_nodes = config.cluster.nodes
    if config.cluster.roles.assigned:
        raise UserError(
            "cluster.roles: explicit device ranges do not fit on fewer nodes. Fix: remove cluster.roles and set "
            "cluster.placement"
        )
    counts = {f"{placed.section}.layout.dp": placed.layout.dp for placed in config.all_placed}
    if not config.is_offline:
        counts["rollout.replicas"] = config.rollout.replicas
    for key, count in counts.items():
        if count * nodes % num_nodes:
            raise UserError(f"{key}={count}: {count} x {nodes} / {num_nodes} nodes is not an integer")
    return [f"{key}={count * nodes // num_nodes}" for key, count in counts.items()]
