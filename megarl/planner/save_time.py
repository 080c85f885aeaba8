"""Time of saving a checkpoint in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.memory.parameters import Models
from megarl.config.device_spans import sharing
from megarl.config.schema import Config
from megarl.planner.hardware import LINK_SHARE, STORAGE_GB_S, Cluster
from megarl.planner.phases import most_saved


@dataclass(frozen=True, slots=True)
class SaveTime:
    """Time and bytes of a save.

    Attributes:
        node_bytes: bytes that the node with the most to write writes.
        copying: minimum seconds of the copy to host memory, during which training waits.
        writing: seconds to write the files. Training continues meanwhile if checkpoint.background is set.
    """

    node_bytes: float
    copying: float
    writing: float


def save_time(config: Config, models: Models, cluster: Cluster) -> SaveTime | None:
    """Return the time of a save, None if the recipe saves nothing.

    All ranks write their own ranges at once. Every rank of a node is assumed to write as much as the largest one.
    """
    if not config.checkpoint.may_be_saved:
        return None
    sizes = {role: most_saved(config, config.placed(role).layout, model) for role, model in models.trained.items()}
    rank_bytes = max(sizes[role] + sum(map(sizes.get, others)) for role, others in sharing(config).items())
    node_bytes = rank_bytes * min(cluster.num_gpus, cluster.gpus_per_node)
    return SaveTime(
        node_bytes=node_bytes,
        copying=rank_bytes / (cluster.gpu.host_gb_s * 1e9 * LINK_SHARE),
        writing=node_bytes / (STORAGE_GB_S * 1e9),
    )
