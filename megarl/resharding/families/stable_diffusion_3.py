"""The transformer of Stable Diffusion 3 and 3.5 (arXiv 2403.03206) in diffusers' format: its layers, and the tensors
outside the layers."""

from __future__ import annotations

from megarl.models.denoiser import TIME_CHANNELS, StableDiffusion3Shape
from megarl.resharding.families.part import Part, renamed
from megarl.resharding.families.tiling import Grouped, Split, Tiling, Whole

Shape = tuple[int, ...]


def layer_parts(model: StableDiffusion3Shape, layer: int) -> list[Part]:
    """Return the modulations, attention modules and MLPs of layer `layer`."""
    is_last, is_dual = model.is_last(layer), layer in model.dual_layers
    parts = [
        _modulation("norm1", "modulation", 9 if is_dual else 6),
        _modulation("norm1_context", "caption_modulation", 2 if is_last else 6),
        *_attention(model, "attn", ("to_q", "to_k", "to_v"), "to_out.0", ("norm_q", "norm_k"), "self_attention"),
        *_attention(
            model,
            "attn",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            None if is_last else "to_add_out",
            ("norm_added_q", "norm_added_k"),
            "caption_attention",
        ),
        *_mlp("ff", "mlp"),
    ]
    if is_dual:
        projections, norms = ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")
        parts += _attention(model, "attn2", projections, "to_out.0", norms, "image_attention")
    return parts if is_last else [*parts, *_mlp("ff_context", "caption_mlp")]


def outer_shapes(model: StableDiffusion3Shape) -> dict[str, Shape]:
    """Return diffusers' tensor -> shape for the tensors outside the layers. The position embedding is not trained."""
    hidden = model.hidden
    assert model.pooled is not None
    weights = {
        "pos_embed.proj": (hidden, model.channels, model.patch, model.patch),
        "time_text_embed.timestep_embedder.linear_1": (hidden, TIME_CHANNELS),
        "time_text_embed.timestep_embedder.linear_2": (hidden, hidden),
        "time_text_embed.text_embedder.linear_1": (hidden, model.pooled),
        "time_text_embed.text_embedder.linear_2": (hidden, hidden),
        "context_embedder": (hidden, model.caption),
        "norm_out.linear": (2 * hidden, hidden),
        "proj_out": (model.patch_dim, hidden),
    }
    shapes: dict[str, Shape] = {"pos_embed.pos_embed": (1, model.grid**2, hidden)}
    for name, shape in weights.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def first_stage_tilings() -> dict[str, Tiling]:
    """Return Megatron's parameter -> tiling for the parameters before the layers."""
    return {
        **_linear("image_embedder", "pos_embed.proj"),
        "position_embedding": Whole(("pos_embed.pos_embed",)),
        **_linear("caption_embedder", "context_embedder"),
    }


def every_stage_tilings() -> dict[str, Tiling]:
    """Return Megatron's parameter -> tiling for the embedders of the noise level and of the pooled caption. Every stage
    has them."""
    tilings = {}
    for megatron, diffusers in (("time_embedder", "timestep_embedder"), ("pooled_embedder", "text_embedder")):
        for number, layer in ((0, "linear_1"), (2, "linear_2")):
            tilings |= _linear(f"{megatron}.{number}", f"time_text_embed.{diffusers}.{layer}")
    return tilings


def last_stage_tilings() -> dict[str, Tiling]:
    """Return Megatron's parameter -> tiling for the parameters after the layers."""
    modulation = {f"output_modulation.{kind}": Split((f"norm_out.linear.{kind}",)) for kind in ("weight", "bias")}
    return {**modulation, **_linear("output_layer", "proj_out")}


def _linear(megatron: str, diffusers: str) -> dict[str, Tiling]:
    return {f"{megatron}.{kind}": Whole((f"{diffusers}.{kind}",)) for kind in ("weight", "bias")}


def _modulation(diffusers: str, megatron: str, count: int) -> Part:
    weight, bias = (f"{diffusers}.linear.{kind}" for kind in ("weight", "bias"))
    rows = ("hidden",) * count
    return Part(
        tensors={weight: (rows, "conditioning"), bias: (rows,)},
        megatron={f"{megatron}.weight": Split((weight,)), f"{megatron}.bias": Split((bias,))},
        vllm={},
        quantized=False,
    )


def _attention(
    model: StableDiffusion3Shape,
    prefix: str,
    projections: tuple[str, str, str],
    output: str | None,
    norms: tuple[str, str],
    megatron: str,
) -> list[Part]:
    """Return the parts of an attention module. `output` is the name of its output projection; None if it has none."""
    weights, biases = (tuple(f"{prefix}.{name}.{kind}" for name in projections) for kind in ("weight", "bias"))
    tensors: dict = {**dict.fromkeys(weights, ("query", "hidden")), **dict.fromkeys(biases, ("query",))}
    tilings: dict[str, Tiling] = {
        f"{megatron}.linear_qkv.weight": Grouped(weights),
        f"{megatron}.linear_qkv.bias": Grouped(biases),
    }
    if output is not None:
        weight, bias = (f"{prefix}.{output}.{kind}" for kind in ("weight", "bias"))
        tensors |= {weight: ("hidden", "query"), bias: ("hidden",)}
        tilings |= {f"{megatron}.linear_proj.weight": Split((weight,), axis=1)}
        tilings |= {f"{megatron}.linear_proj.bias": Whole((bias,))}
    parts = [Part(tensors, tilings, vllm={})]
    if model.qk_norm:
        pairs = zip(norms, ("q_layernorm", "k_layernorm"), strict=True)
        parts += [renamed(f"{prefix}.{a}.weight", ("head_dim",), f"{megatron}.{b}.weight") for a, b in pairs]
    return parts


def _mlp(diffusers: str, megatron: str) -> list[Part]:
    up, down = f"{diffusers}.net.0.proj", f"{diffusers}.net.2"
    return [
        Part(
            tensors={
                f"{up}.weight": ("intermediate", "hidden"),
                f"{up}.bias": ("intermediate",),
                f"{down}.weight": ("hidden", "intermediate"),
                f"{down}.bias": ("hidden",),
            },
            megatron={
                f"{megatron}.linear_fc1.weight": Split((f"{up}.weight",)),
                f"{megatron}.linear_fc1.bias": Split((f"{up}.bias",)),
                f"{megatron}.linear_fc2.weight": Split((f"{down}.weight",), axis=1),
                f"{megatron}.linear_fc2.bias": Whole((f"{down}.bias",)),
            },
            vllm={},
        )
    ]
