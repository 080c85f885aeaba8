"""Extends vLLM's workers by a refit that writes their weights in place.

vLLM imports this module in every worker before it loads the model.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm.model_executor.kernels.linear import (
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    TritonFp8BlockScaledMMKernel,
)
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megarl.core import stacks
from megarl.core.parent import signal_with_parent
from megarl.resharding.execute import Assembly, execute
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region, check_weights, differing_regions
from megarl.rollout.engine import SyncStats
from megarl.rollout.vllm import cpu_support
from megarl.rollout.vllm.environment import ENDS_WITH_PARENT
from megarl.rollout.vllm.route_capture import RouteCapture

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# This may be a process of vLLM's own, of several tensor-parallel ranks.
stacks.write_on_request()
cpu_support.install()
if ENDS_WITH_PARENT in os.environ:
    signal_with_parent(signal.SIGKILL)

DERIVED = ("W_UV", "W_UK_T")
"""The parameters that latent attention computes from its kv_b_proj."""


PLAIN = (CutlassFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel, cpu_support.DequantisingKernel)
"""The kernels for fp8 blocks that read weights and scales as a checkpoint has them. So does DeepGEMM's, unless it has
the scales rounded to powers of two (is_deep_gemm_e8m0_used)."""


def _repacking(model: torch.nn.Module) -> list[str]:
    """Returns the kernels for fp8 blocks that read other bytes than the checkpoint's, each with a layer that has it.
    Shapes and dtypes do not tell them."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8MoEMethod) and method.fp8_backend != Fp8MoeBackend.TRITON:
            found.setdefault(method.fp8_backend.value, name)
        elif isinstance(method, Fp8LinearMethod) and not _is_plain(method.fp8_linear):
            found.setdefault(type(method.fp8_linear).__name__, name)
    return [f"{kernel} of {name}" for kernel, name in found.items()]


def _is_plain(kernel: object) -> bool:
    if isinstance(kernel, FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
        return _is_plain(kernel.fallback)  # both read what DeepGEMM's has made of the weights
    if isinstance(kernel, DeepGemmFp8BlockScaledMMKernel):
        return not kernel.use_deep_gemm_e8m0
    return isinstance(kernel, PLAIN)


def _prepare(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Does again with new weights what vLLM does with weights after it has loaded them. Returns whether it has
    rewritten some."""
    rewritten = False
    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)
        elif isinstance(module, RoutedExperts):
            rewritten |= cpu_support.pack_experts(module)
    return rewritten


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer of a worker that could not do what was asked."""

    error: Exception


def _answer(function: Callable[..., Any], *args: Any) -> Any:
    """Returns what the function returns, or Failed: at the first error that a worker raises, vLLM would no longer read
    the answers of the others, and would take them for answers to its next call."""
    try:
        return function(*args)
    except Exception as error:
        return Failed(error)


class RefitExtension:
    """A base class that vLLM gives its worker class; VllmEngine has its methods called in every worker."""

    rank: int
    """The worker's rank of the engine's tensor-parallel ranks."""
    model_runner: GPUModelRunner
    """The worker's runner, which is of this type on CPU too."""

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> Failed | None:
        """See Engine.connect."""
        return _answer(self._connect, plan, channel, holders, by_loader)

    def refit(self, expected: Mapping[Region, Checksum] | None) -> SyncStats | Failed:
        """Writes this worker's parameters from the trainer's."""
        return _answer(self._load if self._by_loader else self._refit, expected)

    def _connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        self._by_loader, self._is_rewritten = by_loader, False
        self._holder = holders[self.rank]
        part = plan.part([self._holder.name])
        self._writes = part.into(self._holder.name)
        self._transport = channel.open(self._holder.name, self._parameters(), part, in_place=not by_loader)

    def _refit(self, expected: Mapping[Region, Checksum] | None) -> SyncStats:
        num_bytes = execute(self._writes, self._parameters(), self._transport)
        if expected is not None:
            check_weights(self._holder, self._parameters(), expected)
        if _prepare(self.model_runner.get_model(), self.model_runner.model_config.dtype):
            self._is_rewritten = True
        return SyncStats(num_bytes, self._transport.staging_bytes)

    def _load(self, expected: Mapping[Region, Checksum] | None) -> SyncStats:
        """Writes by vLLM's loader, layer by layer into memory of the loader's own, and from there, processed, into
        place."""
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        assembly = Assembly(self._writes, self._transport, next(model.parameters()).device)
        initialize_layerwise_reload(model)
        names = {name for name, _ in model.named_parameters()}
        try:
            loaded = model.load_weights(self._checked(assembly, expected))
        finally:
            finalize_layerwise_reload(model, config)  # else layers would take the next refit for the rest of this one
        # Parameters that quantisation adds to a layer are not loaded, but made.
        if config.quantization is None and (left := sorted(names.difference(loaded))):
            raise RuntimeError(f"vLLM's loader has left {', '.join(left)} as they were")
        return SyncStats(self._holder.shard.num_bytes, self._transport.staging_bytes + assembly.staging_bytes)

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | Failed | None:
        """See Engine.differing."""
        if self._by_loader or self._is_rewritten:
            return None
        return _answer(differing_regions, self._holder, self._parameters(), expected)

    def _checked(
        self, assembly: Assembly, expected: Mapping[Region, Checksum] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        compared = {region.tensor for region in expected or ()}
        for name, tensor in assembly.parameters():
            if expected is not None and name in compared:
                check_weights(self._holder, {name: tensor}, expected)
            yield name, tensor

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Returns the parameters that a refit writes: name -> shape and dtype."""
        return {name: (tuple(p.shape), dtype_name(p.dtype)) for name, p in self._parameters().items()}

    def capture_routes(self) -> None:
        """Keeps from now on the experts that each token goes to. All ranks choose the same; the first tells them."""
        self._routes = RouteCapture(self.model_runner) if self.rank == 0 else None

    def take_routes(self, names: Sequence[str]) -> list[NDArray[np.int64]] | None:
        """Returns the routes of requests that have ended, as RouteCapture.take does."""
        return None if self._routes is None else self._routes.take(names)

    def repacking(self) -> list[str]:
        """Returns why the parameters, although they are described rightly, cannot be written in place; a line for each
        reason."""
        return _repacking(self.model_runner.get_model())

    def describe(self) -> str:
        """Returns what may differ between two starts of an engine, and with it the last digits of its log-probs."""
        model, settings = self.model_runner.get_model(), self.model_runner.vllm_config
        attention = sorted({type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl")})
        return (
            f"vLLM {vllm.__version__}, attention by {', '.join(attention)}, {dtype_name(settings.model_config.dtype)}, "
            f"keys and values in {settings.cache_config.cache_dtype}, mode of compilation "
            f"{settings.compilation_config.mode}, {torch.get_num_threads()} threads, "
            f"{torch.backends.cpu.get_cpu_capability()}, precision of float32 products "
            f"{torch.backends.fp32_precision}"
        )

    def checksums(self) -> dict[str, str]:
        """Returns the SHA-256 of each parameter's bytes."""
        return {
            name: hashlib.sha256(parameter.contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, parameter in self._parameters().items()
        }

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Returns the parameters by name. Stacks of experts, [experts, rows, columns], have two axes, as their holder
        describes them."""
        weights = {name: p.data for name, p in self.model_runner.get_model().named_parameters()}
        return {
            name: weight.view(-1, weight.shape[-1]) if weight.dim() == 3 else weight
            for name, weight in weights.items()
            if not name.endswith(DERIVED)
        }
