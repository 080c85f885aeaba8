"""Trackers of experiments: each a process beside the run, which can neither stall nor stop it."""
