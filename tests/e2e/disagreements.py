"""Introduces faults into an engine one by one, and writes the results of the check on canary prompts.

messages.json in the run folder maps each fault to the error message, null if the check passes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import ray

from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.errors import RunFailure
from megarl.run.context import RunContext
from megarl.step.logprob_check import LogprobCheck


def perturb_a_weight(worker) -> None:
    worker.model_runner.get_model().model.layers[1].mlp.down_proj.weight.data[0] += 1.0


def change_an_epsilon(worker) -> None:
    """Change how one layer computes, which no checksum of the weights detects."""
    worker.model_runner.get_model().model.layers[1].post_attention_layernorm.variance_epsilon = 1.0


BROKEN = {"weights": perturb_a_weight, "kernels": change_an_epsilon}


def in_vllm(workers: Workers, function: Callable) -> None:
    """Run a function in the engine's vLLM workers."""
    for engine in workers.engines.actors.values():
        ray.get(engine.__ray_call__.remote(lambda actor: actor._worker._llm.collective_rpc(function) and None))


def check_message(config: Config, workers: Workers, loop: RunContext) -> str | None:
    """Return the check's error message, or None if it passes."""
    try:
        LogprobCheck(config, workers, loop.data).begin()
    except RunFailure as failure:
        return str(failure)
    return None


def check(config: Config, workers: Workers, loop: RunContext) -> None:
    other = config.rollout.model_copy(update={"temperature": 1 / config.rollout.temperature})
    messages: dict[str, str | None] = {}
    workers.refit.run(version=0)
    messages["nothing"] = check_message(config, workers, loop)
    messages["temperature"] = check_message(config.model_copy(update={"rollout": other}), workers, loop)
    for name, break_it in BROKEN.items():
        workers.refit.run(version=0)  # restores the weights that the previous case changed
        in_vllm(workers, break_it)
        messages[name] = check_message(config, workers, loop)
    workers.close()
    (loop.folder.path / "messages.json").write_text(json.dumps(messages))
