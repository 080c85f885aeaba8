"""Rollout: engines that sample from the current weights. The only room that imports vllm."""
