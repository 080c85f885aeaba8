"""Closed-form estimate of the time to save a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.memory.parameters import Models
from megarl.config.device_spans import sharing
from megarl.config.schema import Config
from megarl.planner.hardware import LINK_SHARE, STORAGE_GB_S, Cluster
from megarl.planner.phases import most_saved


@dataclass(frozen=True, slots=True)
class SaveTime:
    """Time and size of a checkpoint save.

    Attributes:
        node_bytes: largest number of bytes that any node writes.
        copying: minimum seconds for the copy to host memory. Training is blocked during the copy.
        writing: seconds for writing the files. Training continues during the write if checkpoint.background is set.
    """

    node_bytes: float
    copying: float
    writing: float


def save_time(config: Config, models: Models, cluster: Cluster) -> SaveTime | None:
    """Return the time of a checkpoint save, or None if the recipe saves no checkpoints. All ranks write their own
    ranges concurrently. Every rank on a node is assumed to write as much as the largest rank."""
    if not config.checkpoint.may_be_saved:
        return None
    sizes = {role: most_saved(config, config.placed(role).layout, model) for role, model in models.trained.items()}
    rank_bytes = max(sum(sizes[one] for one in (role, *others)) for role, others in sharing(config).items())
    node_bytes = rank_bytes * min(cluster.num_gpus, cluster.gpus_per_node)
    return SaveTime(
        node_bytes=node_bytes,
        copying=rank_bytes / (cluster.gpu.host_gb_s * 1e9 * LINK_SHARE),
        writing=node_bytes / (STORAGE_GB_S * 1e9),
    )
