"""Memory of models and engines on GPUs and hosts, in closed form."""
