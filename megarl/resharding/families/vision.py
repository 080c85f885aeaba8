"""Vision towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5. Every trainer rank of the first stage and every engine rank holds
the whole tower."""

from __future__ import annotations

from megarl.models.vision import CANONICAL_PREFIX, CHANNELS, ENGINE_PREFIX, MEGATRON_PREFIX, VisionShape
from megarl.resharding.families.tiling import Tiling, Whole

Shape = tuple[int, ...]

ENGINE_TEXT_PREFIX = "language_model."
"""Prefix of the text model's parameters in vLLM if the model has a vision tower."""


def vision_shapes(vision: VisionShape) -> dict[str, Shape]:
    """Return canonical tensor -> shape for all tensors in the tower."""
    size, patch = vision.hidden, (CHANNELS, vision.temporal_patch, vision.patch, vision.patch)
    shapes: dict[str, Shape] = {"patch_embed.proj.weight": (size, *patch)}
    if vision.is_gated:
        shapes |= _merged({f"blocks.{layer}": _gated_block(vision) for layer in range(vision.depth)})
        merger = {"ln_q.weight": (size,)}
        merger |= _linear("mlp.0", vision.merged, vision.merged) | _linear("mlp.2", vision.out_hidden, vision.merged)
        shapes |= _merged({"merger": merger})
    else:
        shapes |= {"patch_embed.proj.bias": (size,), "pos_embed.weight": (vision.positions, size)}
        shapes |= _merged({f"blocks.{layer}": _block(vision) for layer in range(vision.depth)})
        shapes |= _merged({"merger": _merger(vision, size)})
        deepstack = range(len(vision.deepstack))
        shapes |= _merged({f"deepstack_merger_list.{i}": _merger(vision, vision.merged) for i in deepstack})
    return {CANONICAL_PREFIX + name: shape for name, shape in shapes.items()}


def megatron_tilings(vision: VisionShape) -> dict[str, Tiling]:
    """Return Megatron's parameter -> tiling for the first chunk."""
    return {_local(MEGATRON_PREFIX, tensor): Whole((tensor,)) for tensor in vision_shapes(vision)}


def vllm_tilings(vision: VisionShape) -> dict[str, Tiling]:
    """Return vLLM's parameter -> tiling. vLLM fuses the gate and up projections."""
    tilings: dict[str, Tiling] = {}
    for tensor in vision_shapes(vision):
        if ".gate_proj." in tensor:
            fused = tensor, tensor.replace(".gate_proj.", ".up_proj.")
            tilings[_local(ENGINE_PREFIX, tensor).replace(".gate_proj.", ".gate_up_proj.")] = Whole(fused)
        elif ".up_proj." not in tensor:
            tilings[_local(ENGINE_PREFIX, tensor)] = Whole((tensor,))
    return tilings


def _local(prefix: str, tensor: str) -> str:
    return prefix + tensor.removeprefix(CANONICAL_PREFIX)


def _block(vision: VisionShape) -> dict[str, Shape]:
    norms = {f"norm{i}.{kind}": (vision.hidden,) for i in (1, 2) for kind in ("weight", "bias")}
    up = _linear("mlp.linear_fc1", vision.intermediate, vision.hidden)
    return norms | _attention(vision) | up | _linear("mlp.linear_fc2", vision.hidden, vision.intermediate)


def _gated_block(vision: VisionShape) -> dict[str, Shape]:
    norms = {f"norm{i}.weight": (vision.hidden,) for i in (1, 2)}
    gate, up = (_linear(f"mlp.{name}_proj", vision.intermediate, vision.hidden) for name in ("gate", "up"))
    return norms | _attention(vision) | gate | up | _linear("mlp.down_proj", vision.hidden, vision.intermediate)


def _attention(vision: VisionShape) -> dict[str, Shape]:
    return _linear("attn.qkv", 3 * vision.hidden, vision.hidden) | _linear("attn.proj", vision.hidden, vision.hidden)


def _merger(vision: VisionShape, normalized: int) -> dict[str, Shape]:
    """Return tensor -> shape for a merger. `normalized` is the number of channels of its norm."""
    norm = {f"norm.{kind}": (normalized,) for kind in ("weight", "bias")}
    up = _linear("linear_fc1", vision.merged, vision.merged)
    return norm | up | _linear("linear_fc2", vision.out_hidden, vision.merged)


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _merged(modules: dict[str, dict[str, Shape]]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for prefix, tensors in modules.items() for name, shape in tensors.items()}
