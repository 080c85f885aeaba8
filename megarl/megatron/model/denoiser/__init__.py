"""Transformers of image models in megatron-core, built from a diffusers config, and their inputs."""
