"""The imports of an engine, which take vLLM ten seconds: a fork server makes them once, and engines start in its forks.

Imported by that server only, as vLLM reads the environment when it is imported.
"""

import os

from megarl.rollout.vllm.environment import environment

os.environ.update(environment(ranks=1, threads=1, index=0))

import megarl.rollout.vllm.classifier
import megarl.rollout.vllm.engine
import megarl.rollout.vllm.judge  # noqa: F401
