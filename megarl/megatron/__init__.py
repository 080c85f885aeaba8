"""Megatron-core: model, step and optimizer of actor and reference. The only room that imports megatron.core."""
