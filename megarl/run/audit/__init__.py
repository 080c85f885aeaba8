"""Proof from a run's files of which step trained on which rows and with which weights."""
