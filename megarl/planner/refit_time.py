"""The least seconds of a refit in closed form. `megarl reshard` makes the plan itself, and simulates it."""

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
    """The time and the bytes of a refit.

    parts      what bounds it -> seconds; these go on at once
    entering   bytes that enter each node of engines
    """

    parts: dict[str, float]
    entering: float

    @property
    def seconds(self) -> float:
        return max(self.parts.values())


def refit_time(config: Config, model: ModelParameters, cluster: Cluster) -> RefitTime:
    """Return the least time in which every engine has the actor's weights, over links of which a collective's share of
    the stated bandwidth is got."""
    return least_refit(
        config.actor.layout,
        (config.rollout.tp, config.rollout.replicas),
        model,
        model.engine_bytes(config),
        cluster.gpus_per_node,
        _speeds(config, cluster),
        config.is_colocated,
    )


def _speeds(config: Config, cluster: Cluster) -> Bandwidth:
    """Return the speeds of the links. Trainer and engines that are on one node have its own between them."""
    network, nvlink = (1e9 * LINK_SHARE * speed for speed in (cluster.gpu.network_gb_s, cluster.gpu.nvlink_gb_s))
    return Bandwidth(inter=nvlink if num_devices(config) <= cluster.gpus_per_node else network, intra=nvlink)


def least_refit(
    layout: Layout,
    engines: tuple[int, int],
    model: ModelParameters,
    rank_bytes: int,
    gpus_per_node: int,
    speeds: Bandwidth,
    colocated: bool,
) -> RefitTime:
    """Return the least time of a refit. What a node's engines need enters it once, over the cards of all its GPUs, and
    is handed on inside; colocated, what the node's own trainer ranks hold does not enter. All sources give alike.

    engines      tp of an engine, and the number of engines
    rank_bytes   what each of an engine's ranks takes
    """
    tp, replicas = engines
    workers = tp * replicas
    on_node = min(workers, gpus_per_node)
    nodes = -(-workers // gpus_per_node)
    needed = rank_bytes * min(tp, on_node)
    there = _share_on_node(layout, model, gpus_per_node) if colocated else 0.0
    entering = needed * (1 - there)
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
    """Return the share of the weights that the trainer's ranks on one node hold together."""
    stage_ranks = layout.tp * layout.cp * layout.dp
    stages = max(1, gpus_per_node // stage_ranks)
    within = min(gpus_per_node, stage_ranks)
    found = 0.0
    for stage in range(min(stages, layout.pp)):
        held = model.of_stage(layout, stage)
        found += (held.count - held.experts) * min(layout.tp, within)
        found += held.experts * min(layout.ep * layout.expert_tp, within)
    return min(1.0, found / model.count)
