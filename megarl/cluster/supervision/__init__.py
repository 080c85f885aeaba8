"""The operating system's view of a run: its processes, their logs, memory and shared memory, and their end."""
