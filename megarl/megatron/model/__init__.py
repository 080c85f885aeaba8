"""Megatron-core models built from Hugging Face configs, and their inputs."""
