"""Bounded, killable processes for user code and third-party libraries."""
