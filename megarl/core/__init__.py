"""Modules shared by the whole package: the types passed between subpackages, metrics, device, timing and files."""
