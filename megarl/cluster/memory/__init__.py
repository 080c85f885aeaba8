"""The memory that models and engines need on GPUs and hosts, in closed form."""
