"""Sharded checkpoints of a run and their conversion to and from Hugging Face folders."""
