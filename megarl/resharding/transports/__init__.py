"""Transports, which deliver elements of source parameters to this process. They do not depend on the model."""
