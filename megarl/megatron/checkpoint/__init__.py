"""Sharded checkpoints and their conversion to and from Hugging Face folders."""
