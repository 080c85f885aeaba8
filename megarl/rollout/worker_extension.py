"""What megarl adds to vLLM's workers: weights that stay writable, and a refit that writes them in place.

vLLM imports this module in every worker before it loads the model.
"""

from __future__ import annotations

import hashlib

import torch
import vllm.model_executor.layers.utils as linear_layers

from megarl.resharding.execute import execute
from megarl.resharding.plan import Plan
from megarl.resharding.transports.transport import Transport


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


# vLLM's CPU build packs every linear layer for oneDNN and frees the weight: nothing would be left to write into.
linear_layers.dispatch_cpu_unquantized_gemm = _keep_weight


class RefitExtension:
    """Mixed into vLLM's worker; its methods are called by LLM.collective_rpc."""

    def refit(self, plan: Plan, replica: int, transport: Transport) -> int:
        """Writes this worker's parameters from the trainer's. Returns the bytes written."""
        return execute(plan.for_destination(f"vllm:{replica}.{self.rank}"), self._parameters(), transport)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self._parameters().items()}

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter's bytes."""
        return {
            name: hashlib.sha256(parameter.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, parameter in self._parameters().items()
        }

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.data for name, p in self.model_runner.get_model().named_parameters()}
