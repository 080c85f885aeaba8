"""The dispatcher, which sends tokens to the ranks that hold their experts and returns the outputs."""

from __future__ import annotations

import importlib.util
from typing import Any

from megarl.config.model_schema import Layout
from megarl.core import device
from megarl.core.errors import UserError

DISPATCHER = dict(moe_token_dispatcher_type="alltoall")
"""Our default for Megatron's field: one all-to-all in each direction, over NCCL or gloo. Megatron rejects allgather,
the third option, because packs differ in length."""


def check_dispatcher(key: str, fields: dict[str, Any], layout: Layout) -> None:
    """Check that Megatron's flexible dispatcher, if selected, can work with this layout. It communicates with DeepEP
    (https://github.com/deepseek-ai/DeepEP), whose kernels use NVLink and InfiniBand.

    Args:
        key: the config key that holds the fields, for the error message.
        fields: TransformerConfig fields.

    Raises:
        UserError: the flexible dispatcher is selected but cannot work.
    """
    if fields["moe_token_dispatcher_type"] != "flex":
        return
    wrong = None
    if not device.on_cuda():
        wrong = "requires a GPU, but this trainer has none"
    elif importlib.util.find_spec("deep_ep") is None:
        wrong = "requires the package deep_ep, which is not installed"
    elif layout.ep * layout.expert_tp == 1:
        wrong = "each rank in the layout has all experts (ep=1, etp=1), so there are no tokens to dispatch"
    if wrong is not None:
        raise UserError(f"{key}.moe_token_dispatcher_type=flex: {wrong}. Fix: remove the key to use alltoall")
