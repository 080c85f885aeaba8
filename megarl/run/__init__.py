"""The lifecycle of a run: training loop, run folder, lock, checkpoints, resume, loggers and startup summary."""
