"""Transports deliver elements of source parameters to this process, independently of the model."""
