"""A program that starts engine and trainer, breaks one thing after the other between them, and prints what the gate on
canary prompts says: a JSON object, name of what is broken -> message, null where the gate lets it pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import ray
import torch

from megarl.cluster.failure import RunFailure
from megarl.cluster.session import Session
from megarl.cluster.supervision.supervisor import supervised
from megarl.cluster.workers import Workers, launch_workers
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.prompts import load_prompts
from megarl.models.run_models import find_models
from megarl.run.context import RunContext
from megarl.step.logprob_check import LogprobCheck


def perturb_a_weight(worker) -> None:
    worker.model_runner.get_model().model.layers[1].mlp.down_proj.weight.data[0] += 1.0


def change_an_epsilon(worker) -> None:
    """Changes what no checksum sees, in one layer: the way in which it computes."""
    worker.model_runner.get_model().model.layers[1].post_attention_layernorm.variance_epsilon = 1.0


BROKEN = {"weights": perturb_a_weight, "kernels": change_an_epsilon}


def in_vllm(workers: Workers, function: Callable) -> None:
    """Runs a function in the workers of the engine."""
    for engine in workers.engines.actors.values():
        ray.get(engine.__ray_call__.remote(lambda actor: actor._worker._llm.collective_rpc(function) and None))


def said(config: Config, workers: Workers, loop: RunContext) -> str | None:
    """Returns what the gate says."""
    try:
        LogprobCheck(config, workers, loop.data).begin()
    except RunFailure as failure:
        return str(failure)
    return None


def main(recipe: Path, overrides: list[str]) -> None:
    config = load(recipe, overrides)
    other = config.rollout.model_copy(update={"temperature": 1 / config.rollout.temperature})
    found: dict[str, str | None] = {}
    with supervised() as scratch:
        models = find_models(config)
        with (
            RunContext.prepare(config, models, load_prompts(config, models.actor)) as loop,
            Session(config, loop.folder.logs, scratch) as session,
        ):
            workers = launch_workers(session, config, models, loop.placement, None)
            workers.refit.run(version=0)
            found["nothing"] = said(config, workers, loop)
            found["temperature"] = said(config.model_copy(update={"rollout": other}), workers, loop)
            for name, break_it in BROKEN.items():
                workers.refit.run(version=0)  # which mends the weight
                in_vllm(workers, break_it)
                found[name] = said(config, workers, loop)
            workers.close()
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2:])
