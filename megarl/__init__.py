"""megarl: reinforcement learning of language models, trained in Megatron-core and sampled in vLLM."""

__version__ = "0.1.0"
