"""Tensor operations that training spends its time in, each beside a plain twin that says what it computes."""
