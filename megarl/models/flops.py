"""Count the floating-point operations for training, following the convention for model FLOPs utilization (MFU)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megarl.models.denoiser import TIME_CHANNELS, DenoiserShape, StableDiffusion3Shape, ZImageShape
from megarl.models.huggingface import WindowedAttention
from megarl.models.shape import ModelShape
from megarl.models.vision import VisionShape

NEWTON_SCHULZ_STEPS = 5
"""Number of Newton-Schulz iterations per matrix in Muon."""


def training_flops(shape: ModelShape, num_tokens: int, num_scored: int, num_attended: float) -> float:
    """Return the number of operations for one forward and backward pass. See `forward_flops` for the arguments. The
    backward pass takes twice as many operations as the forward pass. Recomputation is not counted (PaLM,
    arXiv:2204.02311, appendix B). A trained MTP layer counts as one more layer, plus a projection from 2h to h and an
    output layer whose weight gets no gradient."""
    flops = 3 * forward_flops(shape, num_tokens, num_scored, num_attended)
    if not shape.trains_mtp:
        return flops
    weights = attention_weights(shape) + mlp_weights(shape) + 2 * shape.hidden**2
    layer = 2 * weights * num_tokens + _attended_flops(shape, num_attended, 1)
    return flops + 3 * layer + 2 * 2 * shape.vocab * shape.hidden * num_scored


def forward_flops(shape: ModelShape, num_tokens: float, num_scored: float, num_attended: float) -> float:
    """Return the number of operations for one forward pass. A multiply-add counts as two operations.

    Args:
        num_tokens: number of tokens that the model processes.
        num_scored: number of rows that go through the LM head.
        num_attended: number of (query, key) pairs in attention: Σ n(n + 1) / 2 over documents with n tokens, minus
            `pairs_outside_window`.
    """
    weights = shape.softmax_layers * attention_weights(shape) + shape.num_layers * mlp_weights(shape)
    return (
        (2 * weights + delta_net_flops(shape)) * num_tokens
        + 2 * shape.vocab * shape.hidden * num_scored
        + 2 * (shape.query + shape.value) * shape.softmax_layers * num_attended  # q·k, and the weighted sum of values
    )


def pairs_outside_window(windows: WindowedAttention | None, num_tokens: float) -> float:
    """Return the number of (query, key) pairs in a document's causal attention that sliding windows leave out, averaged
    over the layers."""
    if windows is None:
        return 0
    outside = max(0, num_tokens - windows.size)
    return windows.share * outside * (outside + 1) / 2


def mean_context(windows: WindowedAttention | None, num_tokens: float) -> float:
    """Return the number of tokens that a document's last token attends to, averaged over the layers."""
    return num_tokens if windows is None else num_tokens - windows.share * max(0, num_tokens - windows.size)


def delta_net_flops(shape: ModelShape) -> int:
    """Return the number of operations per token in all gated delta net layers: projections, convolution, and three
    products with each head's state (the value under a key, its correction, and the value under a query)."""
    linear = shape.linear
    if linear is None:
        return 0
    projections = shape.hidden * (linear.projected + linear.per_token + linear.values)
    states = 3 * linear.key_dim * linear.values
    return 2 * (projections + linear.width * linear.channels + states) * sum(linear.layers)


def mlp_weights(shape: ModelShape) -> float:
    """Return the mean number of MLP weights in a layer that process a token: gate, up and down, or up and down."""
    matrices = 2 if isinstance(shape, StableDiffusion3Shape) else 3
    return matrices * shape.hidden * shape.active_intermediate


def _layer_flops(shape: DenoiserShape, num_tokens: float) -> float:
    """Return the number of operations for one document's forward pass through a denoiser's layer, without the
    modulation. Every token attends to all tokens."""
    weights = attention_weights(shape) + mlp_weights(shape)
    return 2 * weights * num_tokens + _attended_flops(shape, num_tokens, num_tokens)


def _attended_flops(shape: ModelShape, num_queries: float, num_keys: float) -> float:
    """Return the number of operations in attention without its projections."""
    return 2 * (shape.query + shape.value) * num_queries * num_keys


def _modulation_flops(shape: DenoiserShape, parts: float) -> float:
    """Return the number of operations that compute `parts` vectors of factors or shifts from the conditioning."""
    return 2 * shape.conditioning * parts * shape.hidden


def main_layer_flops(shape: DenoiserShape, image_tokens: float, caption_tokens: float) -> float:
    """Return the number of operations for one document's forward pass through a layer of the main stack, averaged over
    the layers."""
    tokens = image_tokens + caption_tokens
    if not isinstance(shape, StableDiffusion3Shape):
        return _layer_flops(shape, tokens) + _modulation_flops(shape, 4)
    dual = 2 * attention_weights(shape) * image_tokens + _attended_flops(shape, image_tokens, image_tokens)
    dual += _modulation_flops(shape, 3)
    # The last layer does not update captions. Their queries and attention count, because diffusers computes them.
    unused = 2 * (shape.value * shape.hidden + mlp_weights(shape)) * caption_tokens + _modulation_flops(shape, 4)
    each = _layer_flops(shape, tokens) + _modulation_flops(shape, 12)
    return each + (len(shape.dual_layers) * dual - unused) / shape.num_layers


def embedding_flops(shape: DenoiserShape, image_tokens: float, caption_tokens: float) -> float:
    """Return the number of operations that embed a document's tokens and refine them in the layers that process only
    images or only captions."""
    embedded = 2 * shape.hidden * (shape.patch_dim * image_tokens + shape.caption * caption_tokens)
    refined = _layer_flops(shape, image_tokens) + _modulation_flops(shape, 4) + _layer_flops(shape, caption_tokens)
    return embedded + shape.refiners * refined


def velocity_flops(shape: DenoiserShape, image_tokens: float, caption_tokens: float) -> float:
    """Return the number of operations for one velocity: a forward pass through a denoiser, for one branch of the
    guidance. The numbers of tokens include padding."""
    return (
        embedding_flops(shape, image_tokens, caption_tokens)
        + shape.num_layers * main_layer_flops(shape, image_tokens, caption_tokens)
        + output_flops(shape, image_tokens, caption_tokens)
        + _conditioning_flops(shape)
    )


def _conditioning_flops(shape: DenoiserShape) -> float:
    """Return the number of operations that embed the noise level and the pooled caption, including the output's
    modulation."""
    if isinstance(shape, ZImageShape):
        return 2 * shape.time_hidden * (TIME_CHANNELS + shape.conditioning) + _modulation_flops(shape, 1)
    networks = 2 * shape.hidden * (TIME_CHANNELS + (shape.pooled or 0) + 2 * shape.conditioning)
    return networks + _modulation_flops(shape, 2)


def output_flops(shape: DenoiserShape, image_tokens: float, caption_tokens: float) -> float:
    """Return the number of operations of the projection from hidden states to velocities. Z-Image also projects the
    caption's tokens."""
    tokens = image_tokens + (caption_tokens if isinstance(shape, ZImageShape) else 0)
    return 2 * shape.hidden * shape.patch_dim * tokens


def vision_flops(vision: VisionShape, num_features: float, image_features: float) -> float:
    """Return the number of operations for one forward pass through a vision tower, for square images of equal
    size.

    Args:
        num_features: number of features to compute.
        image_features: number of features per image.
    """
    if not num_features:
        return 0.0
    side = vision.merge * math.sqrt(image_features)
    return num_features / image_features * image_flops(vision, (1, side, side))


def image_flops(vision: VisionShape, grid: Sequence[float], trains_tower: bool = False) -> float:
    """Return the number of operations of a vision tower for one image: a forward pass and, for a trained tower, the
    backward pass. The backward pass computes no gradient for the pixels. Recomputation is not counted.

    Args:
        grid: numbers of patches in time, height and width.
    """
    frames, height, width = grid
    patches = frames * height * width
    in_windows = _squared_parts(height, vision.window) * _squared_parts(width, vision.window)
    forward = _tower_flops(vision, patches, frames * (height * width) ** 2, frames * in_windows)
    return 3 * forward - 2 * vision.hidden * vision.patch_dim * patches if trains_tower else forward


def _squared_parts(side: float, window: int | None) -> float:
    """Return the sum of the squared window lengths along one side. Only the last window can be shorter."""
    if window is None:
        return side**2
    return side // window * window**2 + (side % window) ** 2


def _tower_flops(vision: VisionShape, patches: float, in_images: float, in_windows: float) -> float:
    """Return the number of operations for one forward pass through a vision tower.

    Args:
        patches: number of patches.
        in_images, in_windows: numbers of (query, key) pairs of patches in the same image, and in the same window.
    """
    mlp = (3 if vision.is_gated else 2) * vision.hidden * vision.intermediate
    weights = vision.depth * (4 * vision.hidden**2 + mlp) + vision.hidden * vision.patch_dim
    full = vision.depth if vision.window is None else len(vision.full_layers)
    pairs = full * in_images + (vision.depth - full) * in_windows
    mergers = (1 + len(vision.deepstack)) * vision.merged * (vision.merged + vision.out_hidden)
    return 2 * patches * weights + 4 * vision.hidden * pairs + 2 * patches / vision.merge**2 * mergers


def expert_flops(shape: ModelShape, num_tokens: float) -> float:
    """Return the number of operations in routed experts for one forward pass."""
    if shape.experts is None:
        return 0.0
    rows = shape.experts.active * shape.experts.intermediate * sum(shape.experts.layers)
    return 2 * 3 * shape.hidden * rows * num_tokens


def attention_weights(shape: ModelShape) -> int:
    """Return the number of weights in the projections of a layer with softmax attention. These are the query, key,
    value and output projections, and the gate's if there is one. Latent attention has down- and up-projections for its
    latents instead."""
    latent, output = shape.latent, shape.value * shape.hidden
    if latent is None:
        gate = shape.query if shape.has_output_gate else 0
        return shape.hidden * (shape.query + gate + 2 * shape.key) + output
    rank = latent.query_rank
    query = shape.hidden * shape.query if rank is None else rank * (shape.hidden + shape.query)
    return query + shape.hidden * shape.latent_and_position + latent.kv_rank * shape.latent_keys_and_values + output


def orthogonalization_flops(rows: int, columns: int) -> int:
    """Return the number of operations for orthogonalizing a matrix by Newton-Schulz iterations. For dimensions m ≤ n,
    each iteration consists of the products [m, n] · [n, m], [m, m] · [m, m] and [m, m] · [m, n]."""
    m, n = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * 2 * (2 * m * m * n + m**3)
