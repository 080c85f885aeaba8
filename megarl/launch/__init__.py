"""Runs as Slurm jobs: checks and submission on the login node, supervision on the job's nodes."""
