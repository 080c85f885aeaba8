"""Megatron-core models built from a Hugging Face config, and their inputs."""
