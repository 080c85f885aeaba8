"""Runs as Slurm jobs: checked and written on the login node, looked after on the job's nodes."""
