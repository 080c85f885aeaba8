"""Performance-critical tensor operations, each with a plain reference implementation."""
