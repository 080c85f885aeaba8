"""A run's configuration: the schema, the YAML loader and the validation rules. Does not import torch."""
