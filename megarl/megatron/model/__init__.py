"""The model that Megatron-core builds from a Hugging Face config, and what its layers read."""
