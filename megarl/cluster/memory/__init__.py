"""Closed-form estimates of the memory that models and engines need on GPUs and hosts."""
