"""Data sets: reading, tokenization and packing of rows, and the order of prompts."""
