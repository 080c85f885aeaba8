"""Rollout engines, which sample from the current weights. The only package that imports vllm."""
