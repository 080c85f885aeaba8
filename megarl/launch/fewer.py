"""A run on fewer nodes than it was launched for: with fewer replicas, among which its batches are shared out."""

from __future__ import annotations

from megarl.config.schema import Config
from megarl.core.errors import UserError


def fewer_replicas(config: Config, nodes: int) -> list[str]:
    """Return the overrides by which the run has the share of its data-parallel replicas and of its engines that this
    many of its nodes have. What a step learns stays the same, to rounding. Raises UserError where a share is no
    whole number."""
    whole = config.cluster.nodes
    if config.cluster.roles.given:
        raise UserError("cluster.roles: its devices are for all nodes")
    counts = {f"{placed.section}.layout.dp": placed.layout.dp for placed in config.all_placed}
    if not config.is_offline:
        counts["rollout.replicas"] = config.rollout.replicas
    for key, count in counts.items():
        if count * nodes % whole:
            raise UserError(f"{key}={count}: {count} x {nodes} / {whole} nodes is no whole number")
    return [f"{key}={count * nodes // whole}" for key, count in counts.items()]
