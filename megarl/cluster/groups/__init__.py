"""Groups of the ranks or engines of a role, called together: one Ray actor for each process."""
