"""Closed-form estimates of training time in Megatron, and of the bytes that each GPU sends."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from megarl.cluster.memory.parameters import ModelParameters
from megarl.cluster.memory.rank import RankParameters
from megarl.config.model_schema import Layout, Teachers, Trained
from megarl.models.denoiser import DenoiserShape
from megarl.models.flops import (
    embedding_flops,
    expert_flops,
    forward_flops,
    main_layer_flops,
    mlp_weights,
    output_flops,
    vision_flops,
)
from megarl.planner.hardware import (
    DENSE_SHARE,
    EXPERT_ROWS,
    EXPERT_SHARE,
    HOST_LINK_SHARE,
    LINK_SHARE,
    OPTIMIZER_SHARE,
    Cluster,
)
from megarl.planner.workload import Packed, Workload
from megarl.resharding.selection import trains_tower

TOWER = "vision tower"
"""Name of the vision tower's part of the time."""

HOST_ADAM_BYTES = 10e9
"""Bytes of optimizer state per second that a rank's CPU cores can update in host memory. This value assumes that a rank
achieves half of its share, an eighth, of the node's memory bandwidth."""


@dataclass(frozen=True, slots=True)
class TrainTime:
    """Time of one model's forward-only passes and updates in a step.

    Attributes:
        passes: duration of the forward-only passes in seconds, split by cause.
        update: duration of the updates in seconds, split by cause.
        microbatches: number of microbatches per update on each replica.
        bubble: fraction of an update in which a pipeline stage is idle because it waits for the other stages.
        volume: bytes that a GPU sends in a step, keyed by kind of communication.
    """

    passes: dict[str, float]
    update: dict[str, float]
    microbatches: int
    bubble: float
    volume: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.passes.values()) + sum(self.update.values())


def train_time(
    settings: Trained | Teachers,
    model: ModelParameters,
    workload: Workload,
    cluster: Cluster,
    num_bytes: int,
    num_passes: int,
    epochs: int,
    host_share: float = 0.0,
) -> TrainTime:
    """Return the time of a model's forward-only passes and updates in a step.

    A pipeline with p stages and v virtual stages processes m microbatches in (m + (p − 1) / v) times the time that its
    slowest stage takes for one microbatch (Narayanan et al., arXiv:2104.04473). Communication within a layer is not
    overlapped with computation. With overlap_communication, communication between replicas overlaps with the backward
    pass of one microbatch.

    Args:
        num_bytes: bytes per parameter and per activation element.
        num_passes: number of forward-only passes before the updates.
        epochs: number of times that the model trains on each sample; 0 for a teacher.
        host_share: fraction of the optimizer state that is updated in host memory.
    """
    layout = settings.layout
    packed = workload.packed(settings)
    count = packed.microbatches
    stages = [
        _Stage(settings, model, model.of_stage(layout, stage), stage == 0, packed, cluster, num_bytes)
        for stage in range(layout.pp)
    ]
    slowest = max(stages, key=lambda stage: sum(stage.forward.values()))
    waiting = (layout.pp - 1) / layout.vpp
    # With adapters, the frozen weights need no gradients.
    work = 3.0 if settings.adapters is None else 2.0  # relative to a forward pass
    total_work = work + (settings.recompute == "full")
    update: dict[str, float] = defaultdict(float)
    is_tower_trained = isinstance(settings, Trained) and trains_tower(settings, model.hf_config)
    for name, seconds in slowest.forward.items():
        is_trained = name != TOWER or is_tower_trained
        update[name] += count * (work if is_trained else 1.0) * seconds
        if settings.recompute == "full" and is_trained:
            update["recomputation"] += count * seconds
    if settings.recompute == "selective":
        update["recomputation"] += count * slowest.mlp
    microbatch_seconds = sum(update.values()) / count
    update["pipeline bubble"] = waiting * microbatch_seconds
    bubble = waiting / (count + waiting)
    first = model.of_stage(layout, 0)
    groups = _replica_groups(layout, first, num_bytes)
    # Gradients are reduce-scattered and parameters all-gathered over the replicas.
    reduced = sum(size / cluster.link_bytes_per_second(ranks, stride) for size, ranks, stride in groups)
    hidden = microbatch_seconds * (work - 1) / work if settings.overlap_communication else 0.0
    update["gradients and parameters between replicas"] = max(0.0, reduced - hidden)
    update["optimizer"] = _optimizer(layout, first, cluster, host_share)
    update["Muon"] = _muon(layout, first, cluster)
    forward: dict[str, float] = defaultdict(float)
    for name, seconds in slowest.forward.items():
        forward[name] += (count + waiting) * seconds
    forwards, steps = num_passes * workload.updates, epochs * workload.updates
    rounds = count * (total_work * steps + forwards)
    volume = {name: size * rounds for name, size in slowest.volume.items()}
    volume["replicas"] = steps * sum(size for size, _, _ in groups)
    return TrainTime(
        passes={name: forwards * seconds for name, seconds in forward.items() if seconds and forwards},
        update={name: steps * seconds for name, seconds in update.items() if seconds and steps},
        microbatches=count,
        bubble=bubble,
        volume={name: size for name, size in volume.items() if size},
    )


class _Stage:
    """The forward pass of one microbatch through a pipeline stage.

    Attributes:
        mlp: duration of the MLPs in seconds.
        volume: bytes that a rank sends, keyed by kind of communication.
    """

    def __init__(
        self,
        settings: Trained | Teachers,
        model: ModelParameters,
        held: RankParameters,
        is_first: bool,
        packed: Packed,
        cluster: Cluster,
        num_bytes: int,
    ):
        layout, shape, tokens = settings.layout, model.shape, packed.tokens
        share = len(held.layers) / shape.num_layers
        experts = expert_flops(shape, tokens) * share
        if isinstance(shape, DenoiserShape):
            dense = _denoising_flops(shape, held, is_first, packed)
        else:
            pairs = tokens * packed.pairs_per_token
            rows = tokens * packed.scored_share if held.is_last else 0
            dense = forward_flops(shape, tokens, 0, pairs) * share - experts + forward_flops(shape, 0, rows, 0)
        speed = layout.tp * layout.cp * cluster.gpu.tflops * 1e12
        dense_mlp = 2 * mlp_weights(shape) * shape.num_layers * tokens * share - experts
        in_experts = 0.0
        if shape.experts is not None:
            expert_rows = shape.experts.intermediate / layout.expert_tp
            in_experts = experts / (speed * EXPERT_SHARE * expert_rows / (expert_rows + EXPERT_ROWS))
        self.mlp = max(dense_mlp, 0.0) / (speed * DENSE_SHARE) + in_experts
        products = dense / (speed * DENSE_SHARE) + in_experts
        self.volume, seconds = _layers(layout, model, held, tokens / layout.cp, cluster, num_bytes)
        if shape.vision is not None and is_first:
            # Each rank of the stage computes all features in its microbatch.
            operations = vision_flops(shape.vision, packed.features, packed.image_features)
            seconds = {TOWER: operations / (cluster.gpu.tflops * 1e12 * DENSE_SHARE), **seconds}
        self.forward = {"matrix products": products} | {name: time for name, time in seconds.items() if time}


def _denoising_flops(shape: DenoiserShape, held: RankParameters, is_first: bool, packed: Packed) -> float:
    """Return the operations in the forward pass of a microbatch through a denoiser's pipeline stage."""
    num_layers = len(held.layers) - (shape.refiners if is_first else 0)
    flops = 0.0
    for document in packed.documents:
        flops += num_layers * main_layer_flops(shape, document.image, document.caption)
        flops += embedding_flops(shape, document.image, document.caption) if is_first else 0.0
        flops += output_flops(shape, document.image, document.caption) if held.is_last else 0.0
    return flops * packed.tokens / sum(document.tokens for document in packed.documents)


def _layers(
    layout: Layout, model: ModelParameters, held: RankParameters, tokens: float, cluster: Cluster, num_bytes: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the bytes that a rank sends in the forward pass through its layers, and the seconds for sending them.

    Both are keyed by kind of communication. In the formulas, h is the hidden size, k the size of a token's keys, and b
    the bytes per element.

    - tensor: all-gather and reduce-scatter around attention and MLP: tokens · h · b · (tp − 1) / tp each.
    - context: all-gather of keys and values: (cp − 1) · tokens · 2 k / tp · b. Gated delta nets exchange tokens for
      heads and back instead: (cp − 1) / cp · tokens · rows / tp · b.
    - expert: all-to-all that sends each token to its active experts and back. Ranks that share an expert gather its
      tokens: 2 · tokens / tp · active · h · b · ((ep − 1) / ep + etp − 1).
    - pipeline: hidden states sent to the next stage, once per virtual stage.

    Args:
        tokens: number of tokens in a microbatch, per context-parallel rank.
    """
    shape, tp = model.shape, layout.tp
    hidden = tokens * shape.hidden * num_bytes
    mixed = sum(kind.has_experts for kind in held.layers)
    linear = sum(kind.is_linear for kind in held.layers)
    plain = 2 * len(held.layers) - mixed  # number of attention layers and dense MLPs
    keys = shape.latent_and_position * tp if shape.latent else 2 * shape.key
    gathered = (len(held.layers) - linear) * keys
    if shape.linear is not None:
        gathered += linear * (shape.linear.projected + shape.linear.per_token + shape.linear.values) / layout.cp
    volume = {
        "tensor": 2 * plain * hidden * (tp - 1) / tp,
        "context": (layout.cp - 1) * tokens * gathered / tp * num_bytes,
        "expert": 0.0,
        "pipeline": layout.vpp * hidden / tp if layout.pp > 1 else 0.0,
    }
    inside = outside = 0.0
    if mixed and shape.experts is not None:
        sent = 2 * mixed * hidden / tp * shape.experts.active
        near = min(layout.ep, max(1, cluster.gpus_per_node // layout.expert_tp))
        inside = sent * ((near - 1) / layout.ep + layout.expert_tp - 1)
        outside = sent * (layout.ep - near) / layout.ep
        volume["expert"] = inside + outside
    stride = tp * layout.cp * layout.dp
    seconds = {
        "tensor-parallel collectives": volume["tensor"] / cluster.link_bytes_per_second(tp),
        "context-parallel collectives": volume["context"] / cluster.link_bytes_per_second(layout.cp, tp),
        "expert-parallel all-to-all": max(
            inside / (LINK_SHARE * 1e9 * cluster.gpu.nvlink_gb_s),
            outside / (LINK_SHARE * 1e9 * cluster.gpu.network_gb_s),
        ),
        "pipeline sends": volume["pipeline"] / cluster.link_bytes_per_second(layout.pp, stride),
    }
    return volume, seconds


def _replica_groups(layout: Layout, held: RankParameters, num_bytes: int) -> list[tuple[float, int, int]]:
    """Return (bytes that a rank sends, number of ranks, stride) for each of two process groups. Dense parameters are
    reduced over all replicas, expert parameters over the ranks that hold the same experts."""
    ranks = layout.tp * layout.cp * layout.dp
    groups = (
        (held.trained - held.trained_experts, layout.cp * layout.dp, layout.tp),
        (held.trained_experts, ranks // (layout.ep * layout.expert_tp), layout.ep * layout.expert_tp),
    )
    return [(size * (4 + num_bytes) * (n - 1) / n, n, stride) for size, n, stride in groups]


def _optimizer(layout: Layout, held: RankParameters, cluster: Cluster, host_share: float) -> float:
    """Return the duration of an Adam step in seconds. On the GPU, the step reads and writes 30 bytes for each parameter
    in the rank's shard. For the part of the optimizer state in host memory, gradients are copied over PCIe, the CPU
    reads and writes 28 bytes per parameter, and the updated weights are copied back."""
    share = _share(layout, held.trained, held.trained_experts)
    on_gpu = share * (1 - host_share) * 30 / (cluster.gpu.memory_gb_s * 1e9 * OPTIMIZER_SHARE)
    copied = share * host_share * 6 / (cluster.gpu.host_gb_s * 1e9 * HOST_LINK_SHARE)
    return on_gpu + copied + share * host_share * 28 / HOST_ADAM_BYTES


def _muon(layout: Layout, held: RankParameters, cluster: Cluster) -> float:
    """Return the seconds that Muon adds to those of `_optimizer` in an update. The ranks of a pipeline stage
    orthogonalize different matrices at the same time. For each element in its shard, a rank sends the momentum and, as
    the owner of other matrices, the update, 4 bytes each."""
    ranks = layout.tp * layout.cp * layout.dp
    products = _share(layout, held.muon_flops, held.muon_expert_flops) / (cluster.gpu.tflops * 1e12 * DENSE_SHARE)
    sent = 8 * _share(layout, held.muon, held.muon_experts) * (ranks - 1) / ranks
    return products + sent / cluster.link_bytes_per_second(ranks)


def _share(layout: Layout, count: float, experts: float) -> float:
    """Return a data-parallel rank's share of `count`, a sum over the parameters that a rank holds. `experts` is the
    part of `count` for routed experts."""
    shared = experts * layout.expert_tp * layout.ep / (layout.tp * layout.cp * layout.dp)
    return (count - experts) / (layout.dp * layout.cp) + shared
