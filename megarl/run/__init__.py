"""A run from its first step to its last: its loop, folder, lock, checkpoints, resume, loggers and summary."""
