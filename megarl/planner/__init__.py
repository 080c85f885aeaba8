"""Offline prediction: what fits on GPUs that are not there, and how long a step takes. The runtime never imports it."""
