"""The implementation of the public Python API, which the `megarl` package exports, and of `megarl convert`."""
