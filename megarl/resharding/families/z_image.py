"""Z-Image's transformer (arXiv 2511.22699) in diffusers' format: its layers, and the tensors outside the main stack."""

from __future__ import annotations

from megarl.models.denoiser import TIME_CHANNELS, ZImageShape
from megarl.resharding.families.part import Part, renamed
from megarl.resharding.families.tiling import Grouped, Split

_QKV = tuple(f"attention.to_{x}.weight" for x in "qkv")
_OUT = "attention.to_out.0.weight"
_GATE_UP, _DOWN = ("feed_forward.w1.weight", "feed_forward.w3.weight"), "feed_forward.w2.weight"

WEIGHTS = Part(
    tensors={
        **dict.fromkeys(_QKV, ("query", "hidden")),
        _OUT: ("hidden", "query"),
        **dict.fromkeys(_GATE_UP, ("intermediate", "hidden")),
        _DOWN: ("hidden", "intermediate"),
    },
    megatron={
        "self_attention.linear_qkv.weight": Grouped(_QKV),
        "self_attention.linear_proj.weight": Split((_OUT,), axis=1),
        "mlp.linear_fc1.weight": Split(_GATE_UP),
        "mlp.linear_fc2.weight": Split((_DOWN,), axis=1),
    },
    vllm={},
)
NORMS = [
    renamed("attention.norm_q.weight", ("head_dim",), "self_attention.q_layernorm.weight"),
    renamed("attention.norm_k.weight", ("head_dim",), "self_attention.k_layernorm.weight"),
    renamed("attention_norm1.weight", ("hidden",), "input_layernorm.weight"),
    renamed("attention_norm2.weight", ("hidden",), "post_attention_layernorm.weight"),
    renamed("ffn_norm1.weight", ("hidden",), "pre_mlp_layernorm.weight"),
    renamed("ffn_norm2.weight", ("hidden",), "post_mlp_layernorm.weight"),
]
MODULATION = [
    renamed("adaLN_modulation.0.weight", (("hidden",) * 4, "conditioning"), "modulation.weight", quantized=False),
    renamed("adaLN_modulation.0.bias", (("hidden",) * 4,), "modulation.bias"),
]

CAPTION_STACK = "context_refiner"
STACKS = ("noise_refiner", CAPTION_STACK)
"""The stacks of layers before the main stack: one processes images, the other captions."""


def layer_parts(stack: str) -> list[Part]:
    """Return the parts of a layer in a stack. Caption refiners have no modulation: they do not depend on the noise
    level."""
    return [WEIGHTS, *NORMS, *([] if stack == CAPTION_STACK else MODULATION)]


def outer_shapes(model: ZImageShape) -> dict[str, tuple[int, ...]]:
    """Return diffusers' tensor -> shape for the tensors outside the layers."""
    hidden, conditioning, kind = model.hidden, model.conditioning, f"{model.patch}-1"
    linear = {
        f"all_x_embedder.{kind}": (hidden, model.patch_dim),
        "cap_embedder.1": (hidden, model.caption),
        "t_embedder.mlp.0": (model.time_hidden, TIME_CHANNELS),
        "t_embedder.mlp.2": (conditioning, model.time_hidden),
        f"all_final_layer.{kind}.adaLN_modulation.1": (hidden, conditioning),
        f"all_final_layer.{kind}.linear": (model.patch_dim, hidden),
    }
    weights = {f"{name}.weight": shape for name, shape in linear.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in linear.items()}
    pads = dict.fromkeys(("x_pad_token", "cap_pad_token"), (1, hidden))
    return weights | biases | pads | {"cap_embedder.0.weight": (model.caption,)}


def first_stage_tensors(model: ZImageShape) -> dict[str, str]:
    """Return Megatron's parameter -> diffusers' tensor for the parameters before the layers."""
    return {
        **_linear("image_embedder", f"all_x_embedder.{model.patch}-1"),
        "caption_norm.weight": "cap_embedder.0.weight",
        **_linear("caption_embedder", "cap_embedder.1"),
        "image_padding": "x_pad_token",
        "caption_padding": "cap_pad_token",
    }


def every_stage_tensors() -> dict[str, str]:
    """Return Megatron's parameter -> diffusers' tensor for the embedder of the noise level. Every stage has it, because
    its layers depend on the noise level."""
    return {**_linear("time_embedder.0", "t_embedder.mlp.0"), **_linear("time_embedder.2", "t_embedder.mlp.2")}


def last_stage_tensors(model: ZImageShape) -> dict[str, str]:
    """Return Megatron's parameter -> diffusers' tensor for the parameters after the layers."""
    final = f"all_final_layer.{model.patch}-1"
    return {
        **_linear("output_modulation", f"{final}.adaLN_modulation.1"),
        **_linear("output_layer", f"{final}.linear"),
    }


def _linear(megatron: str, diffusers: str) -> dict[str, str]:
    return {f"{megatron}.{kind}": f"{diffusers}.{kind}" for kind in ("weight", "bias")}
