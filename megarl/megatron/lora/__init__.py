"""LoRA adapters for linear layers in a model whose base weights are frozen."""
