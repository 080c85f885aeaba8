"""Sharded checkpoints of a run, and conversion between them and Hugging Face folders."""
