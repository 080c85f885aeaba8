"""Transports: how the elements of a source's parameter reach this process. They know nothing of models."""
