"""The examination of a machine: what is installed, what is there, and what to do where that will not do."""
