"""Model folders and data sets: everything that a run reads before its first step, and the order of prompts."""
