"""The environments that megarl brings, which a config names without a file."""
