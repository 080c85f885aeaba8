"""LoRA adapters for the linear layers of a model whose own weights are frozen."""
