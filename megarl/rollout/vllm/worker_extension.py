"""Extend vLLM workers with in-place refits.

vLLM imports this module in every worker before it loads the model.
"""

from __future__ import annotations

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
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFp8BlockScaledMMKernel
from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megarl.core import device, stacks
from megarl.core.errors import UserError
from megarl.core.parent import signal_with_parent
from megarl.resharding.execute import Assembly
from megarl.resharding.families.vllm import DRAFTER
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region, check_weights, differing_regions
from megarl.rollout.engine import SyncStats
from megarl.rollout.vllm import cpu_support, draft_padding, draft_weights, multimodal_models
from megarl.rollout.vllm.environment import ENDS_WITH_PARENT
from megarl.rollout.vllm.route_capture import RouteCapture
from megarl.rollout.worker import WeightReceiver, describe_arithmetic, hashes, shapes_and_dtypes

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# With several tensor-parallel ranks, this process was started by vLLM, so megarl's process setup has not run yet.
stacks.write_on_request()
cpu_support.install()
draft_padding.install()
draft_weights.install()
multimodal_models.install()
if ENDS_WITH_PARENT in os.environ:
    signal_with_parent(signal.SIGKILL)

EXPERTS = ".routed_experts."
"""Substring of the names of stacked expert weights."""

DERIVED = ("W_UV", "W_UK_T")
"""Names of the parameters that latent attention derives from kv_b_proj."""

CHECKPOINT_LAYOUT_KERNELS = (
    CutlassFp8BlockScaledMMKernel,
    TritonFp8BlockScaledMMKernel,
    cpu_support.DequantizingKernel,
)
"""fp8 kernels that read weights and scales in the checkpoint's layout. DeepGEMM's kernel also reads this layout unless
it rounds the scales to powers of two (is_deep_gemm_e8m0_used)."""


def _repacking(model: torch.nn.Module) -> list[str]:
    """Return the names of fp8 kernels that do not read the checkpoint's layout, each with one layer that uses it.
    Shapes and dtypes do not reveal the layout."""
    layer_of: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, Fp8MoEMethod) and method.fp8_backend != Fp8MoeBackend.TRITON:
            layer_of.setdefault(method.fp8_backend.value, name)
        elif isinstance(method, Fp8LinearMethod) and not _reads_checkpoint_layout(method.fp8_linear):
            layer_of.setdefault(type(method.fp8_linear).__name__, name)
    return [f"{kernel} of {name}" for kernel, name in layer_of.items()]


def _reads_checkpoint_layout(kernel: object) -> bool:
    if isinstance(kernel, FlashInferFp8DeepGEMMDynamicBlockScaledKernel):
        # This kernel and its fallback expect the layout that DeepGEMM's preprocessing produces.
        return _reads_checkpoint_layout(kernel.fallback)
    if isinstance(kernel, DeepGemmFp8BlockScaledMMKernel):
        return not kernel.use_deep_gemm_e8m0
    return isinstance(kernel, CHECKPOINT_LAYOUT_KERNELS)


def _process_weights(model: torch.nn.Module, dtype: torch.dtype) -> bool:
    """Repeat vLLM's post-processing of loaded weights. Return whether parameters were modified."""
    rewritten = False
    for module in model.modules():
        if isinstance(module, MLAAttention):
            module.process_weights_after_loading(dtype)
        elif isinstance(module, RoutedExperts):
            rewritten |= cpu_support.pack_experts(module)
    return rewritten


@torch.inference_mode()  # vLLM may have created the tensors in inference mode
def _clear_deepstack(model: torch.nn.Module) -> None:
    """Clear Qwen3-VL's tensors for deepstack features, which vLLM adds to the hidden states of all tokens. Level-2
    sleep discards them, but waking restores only registered buffers."""
    for tensor in getattr(model, "deepstack_input_embeds", None) or ():
        tensor.zero_()
    count = "deepstack_input_embeds_num_tokens"
    if hasattr(model, count):
        setattr(model, count, 0)


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of a call that failed in a worker."""

    error: Exception


def _catch_error(function: Callable[..., Any], *args: Any) -> Any:
    """Call the function and return its result, or Failed if it raises. If a worker raised an error, vLLM would not read
    the results of the remaining workers, and would mistake them for the results of the next call."""
    try:
        return function(*args)
    except Exception as error:
        return Failed(error)


class RefitExtension:
    """A mixin that vLLM adds to its worker class. VllmEngine calls these methods in every worker."""

    rank: int
    """Tensor-parallel rank of the worker."""
    model_runner: GPUModelRunner
    """The worker's model runner, which has this type even on CPU."""

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> Failed | None:
        return _catch_error(self._connect, plan, channel, holders, by_loader)

    def disconnect(self) -> None:
        """See Engine.disconnect."""
        vars(self).pop("_receiver", None)  # absent before the first connection
        device.release_cache()

    def refit(self, expected: Mapping[Region, Checksum] | None) -> SyncStats | Failed:
        """Write the trainer's weights into this worker."""
        _clear_deepstack(self.model_runner.get_model())
        return _catch_error(self._load if self._by_loader else self._refit, expected)

    def _connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        if by_loader and self._drafter is not None:
            raise UserError(
                "rollout.speculative.method=mtp: vLLM's kernels for this model repack weights, so refits cannot write "
                "the MTP layer. Fix: set rollout.speculative.method=null"
            )
        self._by_loader, self._is_rewritten = by_loader, False
        self._receiver = WeightReceiver(plan, channel, holders[self.rank], self._parameters(), not by_loader)

    def _refit(self, expected: Mapping[Region, Checksum] | None) -> SyncStats:
        stats = self._receiver.write(self._parameters(), expected)
        for model in self._models:
            if _process_weights(model, self.model_runner.model_config.dtype):
                self._is_rewritten = True
        return stats

    def _load(self, expected: Mapping[Region, Checksum] | None) -> SyncStats:
        """Load the weights with vLLM's loader, which processes each layer in temporary memory before copying it."""
        model, config = self.model_runner.get_model(), self.model_runner.model_config
        transport = self._receiver.transport
        assembly = Assembly(self._receiver.writes, transport, next(model.parameters()).device)
        initialize_layerwise_reload(model)
        names = {name for name, _ in model.named_parameters()}
        checksums: dict[int, int] = {}
        try:
            weights = self._checked(assembly, expected, checksums)
            loaded = model.load_weights(weights)  # pyright: ignore[reportCallIssue]  # vLLM declares a plain Module
        finally:
            finalize_layerwise_reload(model, config)  # also after errors: the next refit must not continue this reload
        # With quantization, skip the check: the loader computes additional parameters instead of loading them.
        if config.quantization is None and (missing := sorted(names.difference(loaded))):
            raise RuntimeError(
                f"vLLM's loader did not load {', '.join(missing)}. Fix: check with megarl doctor that this version of "
                "vLLM is supported"
            )
        num_bytes = self._receiver.holder.shard.num_bytes
        return SyncStats(num_bytes, transport.staging_bytes + assembly.staging_bytes, checksums)

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | Failed | None:
        """See Engine.differing."""
        if self._by_loader or self._is_rewritten:
            return None
        return _catch_error(differing_regions, self._receiver.holder, self._parameters(), expected)

    def _checked(
        self, assembly: Assembly, expected: Mapping[Region, Checksum] | None, checksums: dict[int, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the received tensors. Verify those with expected checksums, and add their checksums to `checksums`."""
        compared = {region.tensor for region in expected or ()}
        for name, tensor in assembly.parameters():
            if expected is not None and name in compared:
                checksums |= check_weights(self._receiver.holder, {name: tensor}, expected)
            yield name, tensor

    @property
    def _drafter(self) -> torch.nn.Module | None:
        """The policy's MTP layer; None unless the engine drafts tokens with it. It shares the policy's embedding and
        output layer. vLLM's model runners have different names for it."""
        runner, settings = self.model_runner, self.model_runner.vllm_config.speculative_config
        if settings is None or settings.method != "mtp":
            return None
        return getattr(runner, "drafter" if hasattr(runner, "drafter") else "speculator").model

    @property
    def _models(self) -> list[torch.nn.Module]:
        """The models whose weights a refit writes: the policy and, if it drafts tokens, its MTP layer."""
        return [self.model_runner.get_model(), *([] if self._drafter is None else [self._drafter])]

    def parameters(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the parameters that a refit writes: name -> (shape, dtype)."""
        return shapes_and_dtypes(self._parameters())

    def capture_routes(self) -> None:
        """Start recording the experts chosen for each token. Only the first rank records, because all ranks choose the
        same experts."""
        self._routes = RouteCapture(self.model_runner) if self.rank == 0 else None

    def take_routes(self, names: Sequence[str]) -> list[NDArray[np.int64]] | None:
        """Return the routes for finished requests (see RouteCapture.take) on the first rank, and None on all others."""
        return None if self._routes is None else self._routes.take(names)

    def divide_logits(self, temperature: float) -> None:
        """Divide the logits of all tokens, including those of prompts, by a temperature."""
        modules = self.model_runner.get_model().modules()
        processors = [module for module in modules if isinstance(module, LogitsProcessor)]
        assert processors, "the model has no logits processor"
        for processor in processors:
            processor.scale /= temperature

    def repacking(self) -> list[str]:
        """See Engine.repacking."""
        return [line for model in self._models for line in _repacking(model)]

    def describe(self) -> str:
        """Describe the settings that can change the last digits of log-probs when an engine restarts."""
        model, settings = self.model_runner.get_model(), self.model_runner.vllm_config
        attention = sorted({type(m.impl).__name__ for m in model.modules() if hasattr(m, "impl")})
        return (
            f"vLLM {vllm.__version__}, attention {', '.join(attention)}, {dtype_name(settings.model_config.dtype)}, "
            f"KV cache {settings.cache_config.cache_dtype}, compilation mode {settings.compilation_config.mode}, "
            f"{describe_arithmetic()}"
        )

    def checksums(self) -> dict[str, str]:
        """See megarl.rollout.worker.hashes."""
        return hashes(self._parameters())

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name. The first two axes of stacked expert weights are flattened, as in the
        holder."""
        weights = {name: p.data for name, p in self.model_runner.get_model().named_parameters()}
        if (drafter := self._drafter) is not None:
            own = {id(parameter) for parameter in self.model_runner.get_model().parameters()}
            weights |= {DRAFTER + name: p.data for name, p in drafter.named_parameters() if id(p) not in own}
        return {
            name: weight.view(-1, *weight.shape[2:]) if EXPERTS in name else weight
            for name, weight in weights.items()
            if not name.endswith(DERIVED)
        }
