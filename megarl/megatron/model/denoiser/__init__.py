"""Image models' transformers in Megatron-core, built from a diffusers config, and their inputs."""
