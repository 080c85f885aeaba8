"""Transports, which move elements from source parameters to destinations. They do not depend on the model."""
