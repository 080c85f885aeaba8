"""The tile of the head's logits on a GPU, of which linear_head.py makes one at a time."""

TILE = (4096, 8192)
"""Its tokens and its part of the vocabulary."""
