"""Transformer Engine's Python sources on CPU, without its compiled module.

A mock replaces the compiled module, except for the optimizer's functions. Torch implementations replace functions that
launch kernels. They bind arguments by the original signatures, so that arguments unknown to Transformer Engine fail.
Layer constructors, parameters, contexts, recipes and FusedAdam are Transformer Engine's.
"""

from __future__ import annotations

import enum
import inspect
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from tests.paths import TRANSFORMER_ENGINE

Tensors = list[list[torch.Tensor]]

quantized: set[tuple[str, str, str]] = set()
"""(layer class, recipe, fp8 format) of the layers called with fp8 enabled."""

attended: list[str] = []
"""The layer class of each call to Transformer Engine's attention."""


def install() -> None:
    """Make transformer_engine importable. Call this before importing Megatron, which checks for it."""
    assert TRANSFORMER_ENGINE.is_dir(), (
        f"{TRANSFORMER_ENGINE} is missing. Fix: make .venv/transformer-engine/.installed"
    )
    assert "megatron" not in sys.modules
    sys.path.insert(0, str(TRANSFORMER_ENGINE))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # prevents loading CUDA libraries
    sys.modules["transformer_engine_torch"] = _empty_module("transformer_engine_torch", COMPILED)
    sys.modules |= {name: _empty_module(name, {}) for name in ("onnx", "onnxscript")}
    import transformer_engine.common
    from torch.nn.attention import flex_attention

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import cpp_extensions, distributed, permutation, quantization
    from transformer_engine.pytorch.attention import rope
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    _replace(te.Linear, "forward", _linear)
    _replace(te.LayerNormLinear, "forward", _norm_linear)
    _replace(te.GroupedLinear, "forward", _grouped_linear)
    _replace(te.RMSNorm, "forward", _norm)
    _replace(te.DotProductAttention, "forward", _attention)
    _replace(rope, "apply_rotary_pos_emb", _rotate)
    _replace(cpp_extensions, "general_gemm", _product)
    _replace(permutation, "moe_permute_with_probs", _permute)
    _replace(permutation, "moe_unpermute", _unpermute)
    _replace(permutation, "moe_sort_chunks_by_index", _sort_chunks)
    _replace(permutation, "moe_sort_chunks_by_index_with_probs", _sort_chunks_with_probs)
    _replace(flex_attention, "_validate_device", lambda **_: None)  # FlexAttention rejects backward passes on CPU
    _replace(distributed, "_get_cuda_rng_state", lambda **_: torch.get_rng_state())
    _replace(distributed, "_set_cuda_rng_state", lambda new_state, **_: torch.set_rng_state(new_state))
    TransformerEngineBaseModule.__init__ = _as_on_cuda(TransformerEngineBaseModule.__init__)
    for flag in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        assert hasattr(quantization, flag)
        setattr(quantization, flag, (True, ""))
    from megarl.megatron import cpu_support

    dispatcher = cpu_support._resolve("transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.__init__")
    for function in (te.optimizers.FusedAdam.__init__, dispatcher):
        function.__code__ = cpu_support._on_cpu(function.__code__)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function or method. The replacement receives all arguments by keyword, including defaults."""
    signature = inspect.signature(getattr(owner, name))

    def bound(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        return function(**arguments.arguments)

    setattr(owner, name, bound)


def _as_on_cuda(function: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that sees a GPU, which layers require."""

    def call(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            function(*args, **kwargs)

    return call


def _empty_module(name: str, contents: dict[str, Any]) -> ModuleType:
    """Return a module with these contents whose other attributes are mocks."""

    def absent(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return module.__dict__.setdefault(attribute, mock.MagicMock(name=f"{name}.{attribute}"))

    module = ModuleType(name)
    module.__dict__.update(contents, __spec__=ModuleSpec(name, None), __file__=name, __getattr__=absent)
    return module


def _observe(layer: torch.nn.Module, inputs: torch.Tensor) -> None:
    """Record the fp8 recipe of a layer's call, and check that the tensors' sizes suit fp8."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.utils import assert_dim_for_fp8_exec

    if FP8GlobalStateManager.is_fp8_enabled():
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        quantized.add((type(layer).__name__, type(recipe).__name__, recipe.fp8_format.name))
        assert_dim_for_fp8_exec(inputs, *(weight for name, weight in layer.named_parameters() if weight.dim() == 2))


def _linear(self, inp, **_):
    _observe(self, inp)
    return _with_bias(self, F.linear(inp, self.weight), self.bias)


def _norm_linear(self, inp, **_):
    _observe(self, inp)
    normed = _rms_norm(self, inp, self.layer_norm_weight)
    return _with_bias(self, F.linear(normed, self.weight), self.bias)


def _grouped_linear(self, inp, m_splits, **_):
    _observe(self, inp)
    parts = inp.split([int(size) for size in m_splits])
    biases = [getattr(self, f"bias{i}") for i in range(len(parts))] if self.use_bias else []
    added = [None] * len(parts) if self.return_bias or not biases else biases
    out = torch.cat([F.linear(part, getattr(self, f"weight{i}"), added[i]) for i, part in enumerate(parts)])
    return (out, biases) if self.return_bias else out


def _with_bias(layer, out: torch.Tensor, bias: torch.Tensor):
    """Return a layer's output; the layer or its caller adds the bias, which is empty if there is none."""
    if layer.return_bias:
        return out, bias
    return out + bias if bias.numel() else out


def _norm(self, input, **_):
    return _rms_norm(self, input, self.weight)


def _rms_norm(layer, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(inputs, inputs.shape[-1:], weight + 1 if layer.zero_centered_gamma else weight, layer.eps)


def _attention(
    self,
    query_layer,
    key_layer,
    value_layer,
    qkv_format,
    cu_seqlens_q,
    cu_seqlens_kv,
    max_seqlen_q,
    attn_mask_type,
    **_,
):
    attended.append(type(self).__name__)
    assert (qkv_format, attn_mask_type, cu_seqlens_q.dtype) == ("thd", "padding_causal", torch.int32)
    assert torch.equal(cu_seqlens_q, cu_seqlens_kv) and int(cu_seqlens_q[-1]) == len(query_layer)
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) <= max_seqlen_q
    queries, keys, values = (x.transpose(0, 1).split(lengths, dim=1) for x in (query_layer, key_layer, value_layer))
    options = dict(is_causal=True, scale=self.softmax_scale, enable_gqa=query_layer.shape[1] != key_layer.shape[1])
    outs = [F.scaled_dot_product_attention(*heads, **options) for heads in zip(queries, keys, values, strict=True)]
    return torch.cat(outs, dim=1).transpose(0, 1).flatten(1)


def _rotate(t, freqs, tensor_format, start_positions, interleaved, fused, cu_seqlens, cp_size, cp_rank):
    """Rotate pairs of channels, one from each half of the rotary channels."""
    assert (tensor_format, start_positions, interleaved, fused, cp_size) == ("thd", None, False, True, 1)
    angles = torch.cat([freqs[:length, 0] for length in cu_seqlens.diff().tolist()])
    rotated, rest = t.split([angles.shape[-1], t.shape[-1] - angles.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    turned = rotated * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    return torch.cat((turned.to(t.dtype), rest), dim=-1)


def _product(A, B, out_dtype, layout, bias, **_):
    """Return a matrix product with operands in BLAS's column-major order, transposed relative to torch."""
    left, right = (B.T if layout[1] == "T" else B), (A.T if layout[0] == "T" else A)
    out = left.to(out_dtype) @ right.to(out_dtype)
    return (out if bias is None else out + bias), None, None, None


def _permute(inp, probs, routing_map, num_out_tokens):
    chosen = routing_map.bool().T
    tokens = chosen.nonzero()[:, 1]
    assert len(tokens) == num_out_tokens
    return inp[tokens], probs.T[chosen], tokens


def _unpermute(inp, row_id_map, merging_probs, restore_shape, **_):
    assert merging_probs is None
    return inp.new_zeros(restore_shape).index_add(0, row_id_map, inp)


def _sort_chunks(inp, split_sizes, sorted_index):
    chunks = inp.split(split_sizes.tolist())
    return torch.cat([chunks[i] for i in sorted_index.tolist()])


def _sort_chunks_with_probs(inp, probs, split_sizes, sorted_index):
    return _sort_chunks(inp, split_sizes, sorted_index), _sort_chunks(probs, split_sizes, sorted_index)


DTYPES = ("kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1")
ATTENTION_KERNELS = ("NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8")


def _adam(
    chunk_size: int,
    noop: torch.Tensor,
    lists: Tensors,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    assert decoupled and bias_correction
    for gradient, weight, mean, square in zip(*lists, strict=True):
        mean.lerp_(gradient, 1 - beta1)
        square.lerp_(gradient**2, 1 - beta2)
        update = mean / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + eps)
        weight.sub_(lr * (update + weight_decay * weight))


def _norm_of_all(chunk_size: int, noop: torch.Tensor, lists: Tensors, per_tensor: bool):
    assert not per_tensor
    return torch.stack([tensor.norm() for tensor in lists[0]]).norm()[None], None


def _scale(chunk_size: int, noop: torch.Tensor, lists: Tensors, scale: float | torch.Tensor) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


COMPILED = dict(
    DType=enum.IntEnum("DType", DTYPES, start=0),
    NVTE_Fused_Attn_Backend=enum.IntEnum("NVTE_Fused_Attn_Backend", ATTENTION_KERNELS),
    get_cudnn_version=lambda: 92000,
    multi_tensor_adam=_adam,
    multi_tensor_l2norm=_norm_of_all,
    multi_tensor_scale=_scale,
    multi_tensor_scale_tensor=_scale,
)
