"""megarl: reinforcement learning for language models, with training in Megatron-core and rollouts in vLLM."""

__version__ = "0.1.0"
