"""Proof from a run's files that it trained on every row once, with weights in an unbroken chain."""
