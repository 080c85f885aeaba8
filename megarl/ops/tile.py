"""Tile size for the head's logits on GPU. linear_head.py computes one tile at a time."""

TILE = (4096, 8192)
"""Size of a tile on GPU, (tokens, vocabulary entries)."""
