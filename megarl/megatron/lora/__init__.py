"""Adapters of low rank beside the linear layers of a model whose own weights are frozen."""
