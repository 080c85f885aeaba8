"""Vision tower on the first pipeline stage, and placement of its features in the text model.

The tower is transformers' own module. Every tensor- and context-parallel rank of the stage holds the whole tower and
encodes all images in a microbatch. Features replace embeddings before sequence parallelism splits the tokens, so each
tensor-parallel rank computes the tower's full gradient. A context-parallel rank places only the features of its own
tokens; the data-parallel reduction sums the gradients.

Qwen3-VL also adds features of inner tower layers after the first text layers (deepstack, arXiv 2406.04334). They are
passed as the decoder's `context`, an argument that receives a gradient; otherwise recomputing a layer would run the
tower's backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.core import device
from megarl.core.token_batch import ImageBatch, TokenBatch
from megarl.megatron import parallel
from megarl.models.vision import VisionShape, vision_of


@dataclass(frozen=True, slots=True)
class Features:
    """Image features and the tokens they belong to.

    Attributes:
        sources: int64 [f], indices among the features of all images in the microbatch.
        places: int64 [f], indices among this rank's tokens.
    """

    sources: torch.Tensor
    places: torch.Tensor

    @classmethod
    def among(cls, images: ImageBatch, tokens: torch.Tensor, num_tokens: int) -> Features:
        """Select the features of this rank's tokens. `tokens`: their positions in a pack of `num_tokens` tokens,
        int64 [t], in host memory."""
        index = torch.full((num_tokens,), -1)
        index[tokens] = torch.arange(len(tokens))
        places = index[images.places]
        is_held = places >= 0
        return cls(images.sources[is_held], places[is_held])

    def to(self, target: torch.device) -> Features:
        return Features(device.send(self.sources, target), device.send(self.places, target))


@dataclass(frozen=True, slots=True)
class ImageInput:
    """The images in a microbatch, and the features that this rank places.

    Attributes:
        pixels: [P, channels · time · height · width of a patch], in the tower's dtype.
        grids: int64 [I, 3], as in ImageBatch, in host memory.
        derived: the tower's arguments that depend only on the grids; see `derived_arguments`.
        embedded: the features that replace embeddings, among this context-parallel rank's tokens.
        added: features to add to hidden states, indexed among the tokens whose hidden states this rank holds.
    """

    pixels: torch.Tensor
    grids: torch.Tensor
    derived: dict[str, torch.Tensor]
    embedded: Features
    added: Features


class VisionTower:
    """A chunk's vision tower, whose parameters are in the chunk's submodule `vision`.

    Set `images` immediately before each call of the chunk; the call clears it.
    """

    images: ImageInput | None = None

    def __init__(self, model: GPTModel, tower: torch.nn.Module, num_added: int):
        """DeepStack features are added to the outputs of the first `num_added` text layers."""
        assert num_added <= len(model.decoder.layers), "deepstack layers are split across chunks"
        self._tower, self._config = tower, model.config
        self._added: torch.Tensor | None = None
        model.embedding.register_forward_hook(self._replace_embeddings)
        if num_added:
            model.decoder.register_forward_pre_hook(self._pass_features, with_kwargs=True)
        for number in range(num_added):
            layer = model.decoder.layers[number]
            layer.register_forward_hook(partial(_add_features, number), with_kwargs=True)

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self._tower.parameters())

    def prepare(self, batch: TokenBatch, local: torch.Tensor, needs_gradient: bool) -> ImageInput | None:
        """Return the images in a microbatch; None if there are none. Runs no collectives.

        Args:
            local: int64 [T/cp], the pack positions of this context-parallel rank's tokens, in host memory.
            needs_gradient: whether every parameter must receive a gradient. If so, a trained tower
                encodes a dummy image in microbatches without images.
        """
        images = batch.images
        if images is None and needs_gradient and self.is_trained:
            images = self._featureless()
        if images is None:
            return None
        target = batch.tokens.device
        parts = [local, parallel.local_part(local) if self._config.sequence_parallel else local]
        embedded, added = (Features.among(images, part, len(batch.tokens)).to(target) for part in parts)
        pixels = images.pixels().to(self._patch_weight.dtype)
        derived = derived_arguments(self._tower, images.grids, target)
        return ImageInput(device.send(pixels, target), images.grids, derived, embedded, added)

    def _featureless(self) -> ImageBatch:
        """Return the smallest image with no placed features, which gives the tower a zero gradient."""
        merge: int = self._tower.spatial_merge_size  # pyright: ignore[reportAssignmentType]
        pixels, none = torch.zeros(merge**2, self._patch_weight[0].numel()), torch.empty(0, dtype=torch.int64)
        return ImageBatch(lambda: pixels, torch.tensor([[1, merge, merge]]), none, none)

    @property
    def _patch_weight(self) -> torch.Tensor:
        """The weight that maps a patch to a hidden state, [hidden, channels, time, height, width]."""
        return self._tower.get_parameter("patch_embed.proj.weight")

    def _replace_embeddings(self, _: torch.nn.Module, __: tuple, hidden: torch.Tensor) -> torch.Tensor | None:
        """Forward hook that puts image features into the embedding's output, [T/cp, 1, h]."""
        images, self.images = self.images, None
        if images is None:
            return None
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained):
            output: Any = self._tower(images.pixels, grid_thw=images.grids, **images.derived)
        self._added = self._features_to_add(images, getattr(output, "deepstack_features", None) or [])
        features = F.embedding(images.embedded.sources, output.pooler_output)
        return hidden.index_copy(0, images.embedded.places, features[:, None].to(hidden.dtype))

    def _features_to_add(self, images: ImageInput, features: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the features for this rank's hidden states, [layers, f, h]."""
        if not features:
            return None
        stacked = torch.stack(features, 1)
        if self._config.sequence_parallel:  # each rank adds some of the features, so its gradient is partial
            stacked = copy_to_tensor_model_parallel_region(stacked, group=parallel.tensor_group(is_expert=False))
        return F.embedding(images.added.sources, stacked.flatten(1)).unflatten(1, stacked.shape[1:]).transpose(0, 1)

    def _pass_features(self, _: torch.nn.Module, inputs: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict]:
        """Forward pre-hook that passes the features to add to the decoder, as its `context`."""
        added, self._added = self._added, None
        return inputs, keywords | {"context": added}


class PatchProjection(torch.nn.Conv3d):
    """The tower's patch convolution. Its kernel covers a whole patch, so it equals a matrix product, which is much
    faster than Conv3d."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map patches, [P, channels, time, height, width], to hidden states, [P, hidden]."""
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)


SEGMENTS = "megarl_flash_segments"
"""Name of `attend_in_segments` in transformers. It contains "flash" so that towers call it once per layer
with all tokens instead of once per segment."""


def attend_in_segments(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within segments, which are a tower's images or windows. Consecutive segments of equal length are one
    batch, because an image can have a hundred windows.

    Args:
        query, key, value: [1, heads, P, channels].
        cu_seq_lens_q: int32 [segments + 1], the boundaries of the segments, in host memory.

    Returns:
        [1, P, heads, channels], and None for the attention weights.
    """
    batches = [(len([*run]), length) for length, run in groupby(cu_seq_lens_q.diff().tolist())]
    parts = (x[0].transpose(0, 1).split([count * length for count, length in batches]) for x in (query, key, value))
    outputs = []
    for batch, part in zip(batches, zip(*parts, strict=True), strict=True):
        queries, keys, values = (x.unflatten(0, batch).transpose(1, 2) for x in part)
        output = F.scaled_dot_product_attention(queries, keys, values, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


def derived_arguments(tower: Any, grids: torch.Tensor, target: torch.device) -> dict[str, torch.Tensor]:
    """Precompute the arguments that transformers' tower would derive from the grids on the device. Deriving them there
    would synchronize with the device, as would each layer's attention, which reads the segment boundaries on the host.

    Args:
        grids: int64 [I, 3], as in ImageBatch.
        target: the device for tensors that the device reads. Boundaries stay on the host.
    """
    from transformers import vision_utils

    merge = tower.spatial_merge_size
    on_host = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids)}
    on_device = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    if hasattr(tower, "window_size"):
        sizes = merge, tower.window_size, tower.patch_size
        windows = vision_utils.get_vision_window_index(grids, *sizes)
        on_device["window_index"], on_host["cu_window_seqlens"] = _ordered_by_size(*windows, grids, merge)
    if hasattr(tower, "pos_embed"):
        sizes = tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        taps = vision_utils.get_vision_interpolation_indices_and_weights(grids, *sizes)
        on_device["interp_indices"], on_device["interp_weights"] = taps
    return on_host | {name: device.send(values, target) for name, values in on_device.items()}


def _ordered_by_size(
    index: torch.Tensor, boundaries: torch.Tensor, grids: torch.Tensor, merge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Order the windows of each image by decreasing size, so that windows of equal size are consecutive. The tower's
    last step restores the order of the features.

    Args:
        index: int64 [F], the features in the order of their windows.
        boundaries: int32 [windows + 1], the boundaries of the windows, in patches.
    """
    assert (grids[:, 0] == 1).all(), "windows of different frames must not be mixed"
    sizes, ends = boundaries.diff(), grids.prod(1).cumsum(0)
    images = torch.bucketize(boundaries[:-1], ends, right=True)
    order = (images * (1 + sizes.max()) - sizes).argsort(stable=True)
    windows = index.split((sizes // merge**2).tolist())
    return torch.cat([windows[i] for i in order.tolist()]), F.pad(sizes[order].cumsum(0, dtype=torch.int32), (1, 0))


def _add_features(
    number: int, _: torch.nn.Module, __: tuple, keywords: dict[str, Any], outputs: tuple
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Forward hook of text layer `number`. A layer recomputed in the backward pass adds its own microbatch's features,
    because it receives them, and their places, as arguments."""
    features, (hidden, context) = keywords["context"], outputs
    if features is None:
        return None
    places = keywords["packed_seq_params"].feature_places
    return hidden.index_add(0, places, features[number][:, None].to(hidden.dtype)), context


def add_vision_tower(model: GPTModel, hf_config: Mapping[str, Any], config: TransformerConfig) -> None:
    """Add the vision tower to the model's first chunk. Weights are loaded later."""
    shape = vision_of(hf_config)
    assert shape is not None, "the model has no vision tower"
    tower = build_tower(shape, hf_config["vision_config"], config)
    for parameter in tower.parameters():
        # On GPU, the tower's attention backward is nondeterministic; without averaging, replicas would diverge.
        parallel.mark(parameter, average_gradients_across_tp_domain=True)
    # DDP reduces gradients in reverse module order, and the tower's gradients are computed last.
    model._modules = {"vision": tower, **model._modules}
    vars(model)["vision_tower"] = VisionTower(model, tower, len(shape.deepstack))


def build_tower(shape: VisionShape, vision_config: Mapping[str, Any], config: TransformerConfig) -> torch.nn.Module:
    """Return transformers' tower with uninitialized weights."""
    # Imported here, because transformers takes seconds to import and text models do not use it.
    from transformers import AttentionInterface, AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    # The model_type in vision_config differs between versions of transformers.
    sizes = {key: value for key, value in vision_config.items() if key != "model_type"}
    tower_config = AutoConfig.for_model(f"{shape.model_type}_vision", **sizes)
    with no_init_weights():
        tower = AutoModel.from_config(tower_config, dtype=config.params_dtype, attn_implementation="sdpa")
    tower.patch_embed.proj.__class__ = PatchProjection
    AttentionInterface.register(SEGMENTS, attend_in_segments)
    tower.config._attn_implementation = SEGMENTS
    if config.recompute_granularity == "full":
        tower.main_input_name = "hidden_states"  # by default, transformers looks for token embeddings
        tower.gradient_checkpointing_enable({"use_reentrant": False})
    return tower


def vision_tower(model: GPTModel) -> VisionTower | None:
    """Return a chunk's vision tower; None if it has none."""
    return vars(model).get("vision_tower")
