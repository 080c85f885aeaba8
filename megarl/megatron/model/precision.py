"""Numeric precision of parameters, activations, and matrix products in Transformer Engine's layers."""

from __future__ import annotations

from typing import Any

import torch

from megarl.config.model_schema import Placed
from megarl.core import device
from megarl.core.errors import UserError
from megarl.megatron.model.layer_spec import uses_transformer_engine

FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3"}
"""fp8 recipe -> fp8 format. hybrid is e4m3 in the forward pass and e5m2 for gradients. With one scale per tensor,
gradients need the range of e5m2."""

CAPABILITIES = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}
"""fp8 recipe -> minimum CUDA compute capability (Ada, Hopper or Blackwell)."""


def precision(dtype: torch.dtype, settings: Placed) -> dict[str, Any]:
    """Return the TransformerConfig fields. Raise a UserError if this machine does not support the fp8 recipe."""
    fields: dict[str, Any] = dict(
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        attention_softmax_in_fp32=True,
    )
    if settings.fp8 is not None:
        check_fp8(f"{settings.section}.fp8", settings.fp8)
        fields |= dict(fp8=FORMATS[settings.fp8], fp8_recipe=settings.fp8)
    return fields


def check_fp8(key: str, recipe: str) -> None:
    if not uses_transformer_engine():
        raise UserError(
            f"{key}={recipe}: fp8 requires a CUDA device and the package transformer-engine. "
            f"Fix: install the package, or set {key}=null"
        )
    needed, capability = CAPABILITIES[recipe], device.capability()
    if capability < needed:
        choices = ", ".join(name for name, least in CAPABILITIES.items() if capability >= least)
        remedy = f"one of {choices}" if choices else "null"
        raise UserError(
            f"{key}={recipe}: requires compute capability {needed[0]}.{needed[1]}, but this device has "
            f"{capability[0]}.{capability[1]}. Fix: set {key} to {remedy}"
        )


def token_multiple(fp8: str | None) -> int:
    """Return the block size of fp8 matrix products, which must divide each rank's number of tokens in a pack."""
    if fp8 is None:
        return 1
    return 32 if fp8 == "mxfp8" else 16
