"""Rollout engines, which sample from the current weights. No other package imports vllm."""
