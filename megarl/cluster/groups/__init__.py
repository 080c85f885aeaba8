"""Worker groups: the processes of one role, each with its Ray actor."""
