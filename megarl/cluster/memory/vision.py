"""GPU memory that a vision tower needs in trainers and engines, and host memory of the images' patches."""

from __future__ import annotations

from megarl.cluster.memory.rank import FLOAT32, Recompute
from megarl.config.model_schema import Layout
from megarl.config.schema import Config
from megarl.models.vision import VisionShape


def tower_bytes(
    vision: VisionShape, layout: Layout, features: float, num_microbatches: int, num_bytes: int, recompute: Recompute
) -> int:
    """Return the activation bytes kept for backward passes of all microbatches in flight.

    With full recomputation, a layer keeps its input, and one layer at a time holds the other activations. The patches
    are kept as well. `features` is the number of features in a microbatch.
    """
    kept = vision.hidden * num_bytes if recompute == "full" else _layer_bytes(vision, num_bytes)
    patches = features * vision.merge**2
    in_flight = towers_in_flight(layout, num_microbatches)
    per_microbatch = patches * kept * vision.depth + _end_bytes(vision, features, num_bytes)
    return round(in_flight * per_microbatch + patches * (_layer_bytes(vision, num_bytes) - kept))


def tower_pass_bytes(vision: VisionShape, features: float, num_bytes: int) -> int:
    """Return the activation bytes of a forward-only pass that computes this number of features."""
    patches = features * vision.merge**2
    return round(patches * _layer_bytes(vision, num_bytes) + _end_bytes(vision, features, num_bytes))


def patches_on_node(vision: VisionShape, layout: Layout, features: float, num_ranks: int) -> float:
    """Return the size in bytes of the patches on the node with the most first-stage actor ranks. Each rank keeps its
    replica's patches until the epoch ends.

    Args:
        features: number of features of a replica's images in a step.
        num_ranks: number of the actor's ranks on a node.
    """
    patches = features * vision.merge**2 * vision.patch_dim * FLOAT32
    return min(num_ranks, layout.tp * layout.cp * layout.dp) * patches


def prompts_of_replica(config: Config) -> int:
    """Return the maximum number of prompts per step whose images one data-parallel rank of the actor keeps, assuming
    that all samples cost the same. A prompt's samples can be on several ranks, except for the two of a preference
    pair."""
    batch = config.batch
    num_units = 1 if config.algorithm.objective.spec.is_pairwise else config.trained_per_prompt
    return min(batch.prompts_per_step, -(-batch.prompts_per_step * num_units // config.actor.layout.dp))


def towers_in_flight(layout: Layout, num_microbatches: int) -> int:
    """Return the maximum number of microbatches whose tower activations the first stage keeps.

    The tower belongs to the stage's first chunk. The interleaved schedule (Narayanan et al., arXiv:2104.04473) runs pp
    microbatches through each chunk in turn. The first chunk's forward passes come first and its backward passes last,
    so it starts a second round of pp microbatches before it finishes the first.
    """
    return min(num_microbatches, layout.pp if layout.vpp == 1 else 2 * layout.pp)


def _layer_bytes(vision: VisionShape, num_bytes: int) -> int:
    """Return the activation bytes of a layer per patch.

    With hidden size h, f rows in an MLP and b bytes per element: 4h · b + 2 · 4 for the norms' and the projections'
    inputs; 6h · b in attention: queries and keys before and after rotation, values and output; and 2f · b in the MLP,
    or 4f · b if it has a gate.
    """
    rows = (4 if vision.is_gated else 2) * vision.intermediate
    return (10 * vision.hidden + rows) * num_bytes + 2 * FLOAT32


def _end_bytes(vision: VisionShape, features: float, num_bytes: int) -> float:
    """Return the activation bytes of the patches and of the mergers that turn merged patches into features."""
    mergers = features * (1 + len(vision.deepstack)) * (3 * vision.merged + vision.out_hidden)
    return (mergers + features * vision.merge**2 * vision.patch_dim) * num_bytes
