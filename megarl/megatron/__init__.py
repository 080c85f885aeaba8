"""Megatron-core: model, step and optimizer of actor and reference. The only room that imports megatron.core."""

from megarl.megatron import cpu_support  # noqa: F401  before any other module: on CPU it says how megatron.core is imported
