"""Models' folders and prompt data sets: everything that a run reads before its first step, and in which order."""
