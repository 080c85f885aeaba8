"""Groups of the processes of a role, one Ray actor for each process."""
