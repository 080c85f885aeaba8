"""Transformer Engine where it is not installed: its layers with their parameters, and nothing that computes.

Megatron's own code then builds the models that it builds on GPUs. Names and shapes of the layers' parameters are those
of Transformer Engine 2.9 (transformer_engine/pytorch/module: linear, layernorm_linear, grouped_linear, rmsnorm).
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from types import ModuleType
from unittest import mock

import torch


class Linear(torch.nn.Module):
    """The weight [out, in] of one layer or, with numbers in their names, of several; and the biases."""

    def __init__(self, in_features, out_features, *, bias, parallel_mode, tp_size, params_dtype, num_gemms=None, **_):
        super().__init__()
        if parallel_mode == "column":
            out_features //= tp_size
        if parallel_mode == "row":
            in_features //= tp_size
        for i in [""] if num_gemms is None else range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(weight[:, 0]))


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, normalization, params_dtype, **rest):
        super().__init__(in_features, out_features, params_dtype=params_dtype, **rest)
        assert normalization == "RMSNorm"
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(in_features, dtype=params_dtype))


class GroupedLinear(Linear):
    def __init__(self, num_gemms, in_features, out_features, **rest):
        super().__init__(in_features, out_features, num_gemms=num_gemms, **rest)


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size, params_dtype, **_):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, dtype=params_dtype))


class DotProductAttention(torch.nn.Module):
    def __init__(self, softmax_scale=None, **_):
        super().__init__()


class _AnyAttribute(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Nothing(metaclass=_AnyAttribute):
    """Whatever else Megatron imports."""

    def __init__(self, *_, **__):
        pass

    def __iter__(self):
        return iter((None, None))


CONTENTS = {
    "transformer_engine": dict(__version__="2.9.0"),
    "transformer_engine.pytorch": dict(
        Linear=Linear,
        LayerNormLinear=LayerNormLinear,
        GroupedLinear=GroupedLinear,
        RMSNorm=RMSNorm,
        DotProductAttention=DotProductAttention,
    ),
}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path, target=None):
        if fullname.partition(".")[0] == "transformer_engine":
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(CONTENTS.get(module.__name__, {}))
        module.__getattr__ = lambda name: getattr(Nothing, name)


def main() -> None:
    """Reads a list of (config.json, layout, rank), and prints the shapes of each rank's parameters."""
    sys.meta_path.insert(0, Finder())
    import transformer_engine.common.recipe
    import transformer_engine.pytorch  # noqa: F401

    from megarl.config.schema import Layout
    from megarl.megatron.model import build, layer_spec
    from tests.unit.resharding.megatron_world import real_rank

    for module in (layer_spec, build):
        module.uses_transformer_engine = lambda: True
    kernels = build._kernels
    # This fusion allocates on a GPU when a model is built.
    unfused = mock.patch.object(build, "_kernels", lambda latent: kernels(latent) | {"moe_permute_fusion": False})
    with unfused:
        ranks = [real_rank(config, Layout(**layout), rank) for config, layout, rank in json.load(sys.stdin)]
    print(json.dumps([rank.shapes for rank in ranks]))


if __name__ == "__main__":
    main()
