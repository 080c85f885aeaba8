"""Experiment trackers. Each tracker runs in a separate process, so that it can neither block nor stop the run."""
