"""Describe the tensors in a model's checkpoint, in the format of transformers or diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from megarl.models.classifier import score_head_of
from megarl.models.denoiser import DenoiserShape, StableDiffusion3Shape, ZImageShape, is_denoiser
from megarl.models.shape import LayerKind, ModelShape
from megarl.models.value_head import value_head_shapes
from megarl.resharding.families import stable_diffusion_3, vision, z_image
from megarl.resharding.families.attention import attention_parts
from megarl.resharding.families.experts import expert_parts
from megarl.resharding.families.gated_delta import gated_delta_parts
from megarl.resharding.families.latent_attention import latent_attention_parts
from megarl.resharding.families.mlp import mlp_parts
from megarl.resharding.families.mtp import EMBEDDING_COPY, HEAD_COPY, SEPARATE, is_separate, mtp_parts
from megarl.resharding.families.part import Part
from megarl.resharding.families.tiling import Padded, Tiling, Whole

Shape = tuple[int, ...]

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class Canonical:
    """Names and shapes of the tensors in a checkpoint.

    `outer_shapes` covers the tensors outside the layers, and `layer_shapes` those in one layer. Names in a layer omit
    the layer's prefix.
    """

    model: ModelShape
    outer_shapes: dict[str, Shape]
    mtp_layers: int = 0
    """Number of MTP layers."""

    def __init__(self, hf_config: Mapping[str, Any]):
        self.model = ModelShape.of(hf_config)
        self.mtp_layers = self.model.mtp_layers
        self.outer_shapes = {
            EMBEDDING: (self.model.vocab, self.model.hidden),
            FINAL_NORM: (self.model.hidden,),
        }
        self.score_head = score_head_of(hf_config)
        if self.score_head is not None:
            self.outer_shapes |= self.score_head.shapes(self.model.hidden)
        elif not self.model.tied:
            self.outer_shapes[HEAD] = (self.model.vocab, self.model.hidden)
        self.value_head = value_head_shapes(hf_config)
        self.outer_shapes |= self.value_head
        if self.model.vision is not None:
            self.outer_shapes |= vision.vision_shapes(self.model.vision)
        self._layers: dict[tuple[LayerKind, bool], _Layer] = {}
        """Cache: (kind, whether it is an MTP layer) -> layer."""

    @property
    def head(self) -> str:
        """Name of the tensor that a language model's output layer uses as its weight."""
        return EMBEDDING if self.model.tied else HEAD

    @property
    def num_layers(self) -> int:
        """Number of layers, including those before and after the main stack."""
        return self.model.num_layers + self.mtp_layers

    def preceding_layers(self) -> dict[str, int]:
        """Return Megatron's prefix -> layer for the layers before the main stack, all on the first pipeline stage."""
        return {}

    def following_layers(self) -> dict[str, int]:
        """Return Megatron's prefix -> layer for the layers after the main stack, all on the last pipeline stage."""
        return {f"mtp.layers.{i}.": self.model.num_layers + i for i in range(self.mtp_layers)}

    def copies(self) -> dict[str, str]:
        """Return copy -> original for the tensors that a checkpoint contains twice."""
        copied = [] if is_separate(self.model) else self.following_layers().values()
        prefixes = [self.layer_prefix(layer) for layer in copied]
        originals = {EMBEDDING_COPY: EMBEDDING, HEAD_COPY: self.head} if prefixes else {}
        return {prefix + copy: original for prefix in prefixes for copy, original in originals.items()}

    def tilings_before_layers(self, is_first: bool, vocab_multiple: int) -> dict[str, Tiling]:
        """Return Megatron's parameter -> tiling for a model chunk's parameters before its layers.

        Args:
            is_first: whether the chunk is the model's first.
            vocab_multiple: the vocabulary size is padded to a multiple of this number.
        """
        if not is_first:
            return {}
        embedding = {"embedding.word_embeddings.weight": self._vocabulary(EMBEDDING, vocab_multiple)}
        return embedding | (vision.megatron_tilings(self.model.vision) if self.model.vision is not None else {})

    def tilings_after_layers(self, is_first: bool, is_last: bool, vocab_multiple: int) -> dict[str, Tiling]:
        """Return Megatron's parameter -> tiling for a model chunk's parameters after its layers. With tied weights, the
        last chunk has its own copy of the embedding unless it is also the first chunk."""
        if not is_last:
            return {}
        tilings: dict[str, Tiling] = {"decoder.final_layernorm.weight": Whole((FINAL_NORM,))}
        if self.score_head is not None:
            tensors = self.score_head.shapes(self.model.hidden)
            tilings |= {tensor.replace("score.", "output_layer."): Whole((tensor,)) for tensor in tensors}
        elif not (self.model.tied and is_first):
            tilings["output_layer.weight"] = self._vocabulary(self.head, vocab_multiple)
        return tilings | {f"output_layer.{tensor}": Whole((tensor,)) for tensor in self.value_head}

    def _vocabulary(self, tensor: str, multiple: int) -> Tiling:
        return Padded((tensor,), padded=-(-self.model.vocab // multiple) * multiple)

    def layer_prefix(self, layer: int) -> str:
        if layer >= self.model.num_layers and is_separate(self.model):
            return SEPARATE
        return f"model.layers.{layer}."

    def layer_parts(self, layer: int) -> list[Part]:
        return self._layer(layer).parts

    def layer_shapes(self, layer: int) -> dict[str, Shape]:
        return self._layer(layer).shapes

    def float32(self, layer: int) -> frozenset[str]:
        """Return the names of the layer's tensors that are float32 regardless of the model's dtype."""
        return self._layer(layer).float32

    def quantized(self, layer: int) -> frozenset[str]:
        """Return the names of the layer's tensors that are quantized for engines with quantized weights."""
        return self._layer(layer).quantized

    def _layer(self, layer: int) -> _Layer:
        kind, is_mtp = self.model.kind(layer), layer >= self.model.num_layers
        if (kind, is_mtp) not in self._layers:
            parts = parts_of_layer(self.model, kind)
            self._layers[kind, is_mtp] = _Layer.of(self.model, mtp_parts(self.model, parts) if is_mtp else parts)
        return self._layers[kind, is_mtp]


class StableDiffusion3Canonical(Canonical):
    """Names and shapes of the tensors in the diffusers checkpoint of Stable Diffusion 3's transformer."""

    def __init__(self, model: StableDiffusion3Shape):
        self.model = self._denoiser = model
        self.outer_shapes = stable_diffusion_3.outer_shapes(model)
        self._kinds: dict[tuple[bool, bool], _Layer] = {}

    def tilings_before_layers(self, is_first: bool, vocab_multiple: int) -> dict[str, Tiling]:
        first = stable_diffusion_3.first_stage_tilings() if is_first else {}
        return stable_diffusion_3.every_stage_tilings() | first

    def tilings_after_layers(self, is_first: bool, is_last: bool, vocab_multiple: int) -> dict[str, Tiling]:
        return stable_diffusion_3.last_stage_tilings() if is_last else {}

    def layer_prefix(self, layer: int) -> str:
        return f"transformer_blocks.{layer}."

    def _layer(self, layer: int) -> _Layer:
        kind = layer in self._denoiser.dual_layers, self._denoiser.is_last(layer)
        if kind not in self._kinds:
            self._kinds[kind] = _Layer.of(self.model, stable_diffusion_3.layer_parts(self._denoiser, layer))
        return self._kinds[kind]


class ZImageCanonical(Canonical):
    """Names and shapes of the tensors in the diffusers checkpoint of Z-Image's transformer.

    The main stack's layers come first, then the image refiners, then the caption refiners.
    """

    def __init__(self, model: ZImageShape):
        self.model = self._denoiser = model
        self.outer_shapes = z_image.outer_shapes(self._denoiser)
        self._stacks = [("layers", i) for i in range(self.model.num_layers)]
        self._stacks += [(stack, i) for stack in z_image.STACKS for i in range(self._denoiser.refiners)]
        self._kinds = {stack: _Layer.of(self.model, z_image.layer_parts(stack)) for stack, _ in self._stacks}

    @property
    def num_layers(self) -> int:
        return len(self._stacks)

    def preceding_layers(self) -> dict[str, int]:
        first = self.model.num_layers
        return {f"{stack}.layers.{i}.": first + n for n, (stack, i) in enumerate(self._stacks[first:])}

    def tilings_before_layers(self, is_first: bool, vocab_multiple: int) -> dict[str, Tiling]:
        return _whole(z_image.every_stage_tensors() | (z_image.first_stage_tensors(self._denoiser) if is_first else {}))

    def tilings_after_layers(self, is_first: bool, is_last: bool, vocab_multiple: int) -> dict[str, Tiling]:
        return _whole(z_image.last_stage_tensors(self._denoiser)) if is_last else {}

    def layer_prefix(self, layer: int) -> str:
        stack, number = self._stacks[layer]
        return f"{stack}.{number}."

    def _layer(self, layer: int) -> _Layer:
        return self._kinds[self._stacks[layer][0]]


def canonical_of(config: Mapping[str, Any]) -> Canonical:
    """Return the names and shapes of the checkpoint with this config.json."""
    if not is_denoiser(config):
        return Canonical(config)
    shape = DenoiserShape.of(config)
    if isinstance(shape, StableDiffusion3Shape):
        return StableDiffusion3Canonical(shape)
    assert isinstance(shape, ZImageShape), f"{type(shape).__name__} has no family"
    return ZImageCanonical(shape)


def _whole(tensors: Mapping[str, str]) -> dict[str, Tiling]:
    return {parameter: Whole((tensor,)) for parameter, tensor in tensors.items()}


class _Layer(NamedTuple):
    """The parts and tensors in a layer. All layers of a kind, such as those with experts, share them."""

    parts: list[Part]
    shapes: dict[str, Shape]
    float32: frozenset[str]
    quantized: frozenset[str]

    @classmethod
    def of(cls, model: ModelShape, parts: list[Part]) -> Self:
        shapes = {name: shape for part in parts for name, shape in part.shapes(model).items()}
        quantized_shapes = (part.shapes(model) for part in parts if part.quantized)
        return cls(
            parts,
            shapes,
            frozenset(name for part in parts for name in part.float32),
            frozenset(name for tensors in quantized_shapes for name, shape in tensors.items() if len(shape) == 2),
        )


def parts_of_layer(model: ModelShape, kind: LayerKind) -> list[Part]:
    if kind.is_linear:
        attention = gated_delta_parts(model)
    else:
        attention = latent_attention_parts(model) if model.latent else attention_parts(model)
    return [*attention, *(expert_parts(model) if kind.has_experts else mlp_parts(model))]
