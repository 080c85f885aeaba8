"""The seconds of a save in closed form."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.memory.parameters import Models
from megarl.config.device_spans import sharing
from megarl.config.schema import Config
from megarl.planner.hardware import LINK_SHARE, STORAGE_GB_S, Cluster
from megarl.planner.phases import most_saved


@dataclass(frozen=True, slots=True)
class SaveTime:
    """The time and the bytes of a save.

    node_bytes   what the node with the most to write does write
    copying      the seconds in which all is copied to host memory at the link's rate, while training waits: at least
    writing      the seconds of the files, while training goes on with checkpoint.background
    """

    node_bytes: float
    copying: float
    writing: float


def save_time(config: Config, models: Models, cluster: Cluster) -> SaveTime | None:
    """Return the time of a save, None where nothing is saved. All ranks write at once, each its own ranges. A node is
    taken to be full of ranks that write as much as those with the most."""
    if not config.checkpoint.may_be_saved:
        return None
    sizes = {role: most_saved(config, config.placed(role).layout, model) for role, model in models.trained.items()}
    of_rank = max(sizes[role] + sum(map(sizes.get, others)) for role, others in sharing(config).items())
    of_node = of_rank * min(cluster.num_gpus, cluster.gpus_per_node)
    return SaveTime(
        node_bytes=of_node,
        copying=of_rank / (cluster.gpu.host_gb_s * 1e9 * LINK_SHARE),
        writing=of_node / (STORAGE_GB_S * 1e9),
    )
