"""The dispatcher, which sends tokens to the ranks of their experts and their outputs back."""

from __future__ import annotations

import importlib.util
from typing import Any

from megarl.config.model_schema import Layout
from megarl.core import device
from megarl.core.errors import UserError

DISPATCHER = dict(moe_token_dispatcher_type="alltoall")
"""The default of Megatron's field: one all-to-all each way, in NCCL or gloo. Packs differ in length, and so the third
one, allgather, is refused by Megatron."""


def check_dispatcher(key: str, fields: dict[str, Any], layout: Layout) -> None:
    """Check that Megatron's flexible dispatcher can work, if it is the one that the fields of TransformerConfig
    choose: it sends by DeepEP (https://github.com/deepseek-ai/DeepEP), in kernels of its own for NVLink and InfiniBand.

    key: the key that has the fields, for the message of the UserError
    """
    if fields["moe_token_dispatcher_type"] != "flex":
        return
    wrong = None
    if not device.on_cuda():
        wrong = "it sends from GPU to GPU, and this trainer has none"
    elif importlib.util.find_spec("deep_ep") is None:
        wrong = "it needs the package deep_ep, which is not installed"
    elif layout.ep * layout.expert_tp == 1:
        wrong = "each rank of the layout has all experts, so that nothing is sent (ep=1, etp=1)"
    if wrong is not None:
        raise UserError(f"{key}.moe_token_dispatcher_type=flex: {wrong}; leave it out, for alltoall")
