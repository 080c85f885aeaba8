"""Implementation of `megarl convert` and of the public Python API that `megarl` exports."""
