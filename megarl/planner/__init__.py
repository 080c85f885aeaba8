"""Predicts memory and step time on GPUs that this machine does not have. The runtime never imports this package."""
