"""Start an engine and a trainer, introduce faults one by one, and print the results of the check on canary prompts.

The output is a JSON object of fault -> error message, null if the check passes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import ray
import torch

from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import RunFailure
from megarl.data.prompts import load_prompts
from megarl.models.run_models import find_models
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


def main(recipe: Path, overrides: list[str]) -> None:
    config = load(recipe, overrides)
    other = config.rollout.model_copy(update={"temperature": 1 / config.rollout.temperature})
    messages: dict[str, str | None] = {}
    with supervised() as scratch:
        models = find_models(config)
        with (
            RunContext.prepare(config, models, load_prompts(config, models.actor)) as loop,
            Session(config, loop.folder.logs, scratch) as session,
        ):
            workers = launch_workers(session, config, models, loop.placement, None)
            workers.refit.run(version=0)
            messages["nothing"] = check_message(config, workers, loop)
            messages["temperature"] = check_message(config.model_copy(update={"rollout": other}), workers, loop)
            for name, break_it in BROKEN.items():
                workers.refit.run(version=0)  # restores the weights that the previous case changed
                in_vllm(workers, break_it)
                messages[name] = check_message(config, workers, loop)
            workers.close()
    print(json.dumps(messages))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
