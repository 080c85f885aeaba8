"""An engine's imports, which take ten seconds. A fork server runs them once, and engines start in its forks.

Only that server may import this module, because vLLM reads the environment on import.
"""

import os

from megarl.rollout.vllm.environment import environment

os.environ.update(environment(ranks=1, threads=1, index=0))

import megarl.rollout.vllm.engine
import megarl.rollout.vllm.reward_model  # noqa: F401
