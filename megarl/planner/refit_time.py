"""Closed-form lower bound on the refit time. `megarl reshard` builds the actual refit plan and simulates it."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.cluster.memory.parameters import ModelParameters
from megarl.config.device_spans import num_devices
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.planner.hardware import LINK_SHARE, Cluster
from megarl.resharding.planning.schedule import Bandwidth


@dataclass(frozen=True, slots=True)
class RefitTime:
    """Time and traffic of a refit.

    Attributes:
        parts: seconds that each potential bottleneck takes. All of them overlap.
        entering: bytes that each engine node receives.
    """

    parts: dict[str, float]
    entering: float

    @property
    def seconds(self) -> float:
        return max(self.parts.values())


def refit_time(config: Config, model: ModelParameters, cluster: Cluster) -> RefitTime:
    """Return the minimum time to copy the actor's weights into every engine. Links are assumed to achieve the fraction
    LINK_SHARE of their nominal bandwidth."""
    return min_refit_time(
        config.actor.layout,
        (config.rollout.tp, config.rollout.replicas),
        model,
        model.engine_bytes(config),
        cluster.gpus_per_node,
        _speeds(config, cluster),
        config.is_colocated,
    )


def _speeds(config: Config, cluster: Cluster) -> Bandwidth:
    """Return the link bandwidths. NVLink is used if the trainer and the engines are on the same node."""
    network, nvlink = (1e9 * LINK_SHARE * speed for speed in (cluster.gpu.network_gb_s, cluster.gpu.nvlink_gb_s))
    return Bandwidth(inter=nvlink if num_devices(config) <= cluster.gpus_per_node else network, intra=nvlink)


def min_refit_time(
    layout: Layout,
    engines: tuple[int, int],
    model: ModelParameters,
    rank_bytes: int,
    gpus_per_node: int,
    speeds: Bandwidth,
    colocated: bool,
) -> RefitTime:
    """Return the minimum time of a refit.

    The weights that a node's engines need enter the node once, over the network cards of all its GPUs, and are then
    forwarded within the node. Colocated engines receive only the weights that the trainer ranks on their node do not
    hold. The load is assumed to be balanced over the source ranks.

    Args:
        engines: tensor-parallel size of each engine, and the number of engines.
        rank_bytes: size of each engine rank's weights in bytes.
    """
    tp, replicas = engines
    workers = tp * replicas
    on_node = min(workers, gpus_per_node)
    nodes = -(-workers // gpus_per_node)
    needed = rank_bytes * min(tp, on_node)
    local_share = _share_on_node(layout, model, gpus_per_node) if colocated else 0.0
    entering = needed * (1 - local_share)
    if colocated and nodes == 1:
        entering = 0.0
    sources = layout.world_size
    return RefitTime(
        parts={
            "bytes into a node": entering / on_node / speeds.inter,
            "bytes out of the trainer": entering * nodes / sources / speeds.inter,
            "bytes inside a node": rank_bytes / speeds.intra,
        },
        entering=entering,
    )


def _share_on_node(layout: Layout, model: ModelParameters, gpus_per_node: int) -> float:
    """Return the fraction of the weights that the trainer ranks on one node hold together."""
    stage_ranks = layout.tp * layout.cp * layout.dp
    stages = max(1, gpus_per_node // stage_ranks)
    within = min(gpus_per_node, stage_ranks)
    count = 0.0
    for stage in range(min(stages, layout.pp)):
        held = model.of_stage(layout, stage)
        count += (held.count - held.experts) * min(layout.tp, within)
        count += held.experts * min(layout.ep * layout.expert_tp, within)
    return min(1.0, count / model.count)
