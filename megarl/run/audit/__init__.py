"""Proves from a run's files which step trained on which rows, and with which weights."""
