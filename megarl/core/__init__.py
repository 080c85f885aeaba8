"""Modules that every room imports: the types that travel between rooms, metrics, the device, timing, files."""
