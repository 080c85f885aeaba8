"""An engine's imports, which take ten seconds. A fork server runs them once, and engines start in its forks.

Only that server may import this module, because vLLM reads the environment on import.
"""

import gc
import os

from megarl.rollout.vllm.environment import environment

os.environ.update(environment(ranks=1, threads=1, index=0))

import vllm.distributed.elastic_ep.elastic_execute
import vllm.v1.worker.cpu_worker  # noqa: F401  a worker would import both when it starts

import megarl.rollout.vllm.engine
import megarl.rollout.vllm.reward_model  # noqa: F401

gc.freeze()  # vLLM collects garbage several times as it starts, which takes 0.3 seconds with all imported objects
