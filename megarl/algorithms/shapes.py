"""Shape checks that reject inputs which would otherwise broadcast silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def require_one_shape(**tensors: torch.Tensor) -> None:
    """Raise a ValueError unless all tensors have the same shape [N]."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        *names, last = shapes
        raise ValueError(
            f"{', '.join(names)} and {last} must have the same shape [N], got {', '.join(map(str, shapes.values()))}"
        )


def require_list(name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError unless the tensor has exactly one dimension."""
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")


def require_latents(**tensors: torch.Tensor) -> None:
    """Raise a ValueError unless all tensors have the same shape [B, …] and dtype, float32 or float64."""
    kinds = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    [(shape, dtype), *others] = set(kinds.values())
    if others or len(shape) < 2:
        shown = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in kinds.items())
        raise ValueError(f"latents must have the same shape [B, …] and dtype, got {shown}")
    if dtype.itemsize < 4:
        raise ValueError(f"latents must be float32 or float64, got {dtype}. Fix: convert them before this call")
