"""`megarl evaluate`: evaluates a model on a recipe's evaluation sets without starting trainers."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.algorithms.evaluation import Estimate
from megarl.cluster.groups.engines import engine_group
from megarl.cluster.groups.environments import EnvironmentGroup
from megarl.cluster.groups.rewards import RewardGroup
from megarl.cluster.machine import check_machine, place_here
from megarl.cluster.object_store import added_image_bytes, evaluation_image_bytes
from megarl.cluster.pending import join
from megarl.cluster.session import Session
from megarl.config.cluster_schema import Roles
from megarl.config.evaluation_schema import SetEnvironment
from megarl.config.load import dump
from megarl.config.schema import Config
from megarl.core.errors import RunFailure, UserError
from megarl.core.files import replace_text
from megarl.core.timing import ElapsedTime
from megarl.models.folder import resolve
from megarl.models.run_models import ModelFolders
from megarl.models.weights_hash import weights_hash
from megarl.resharding.selection import ONE_PROCESS
from megarl.run.context import exit_status
from megarl.run.preflight import load_evaluation_sets
from megarl.step.evaluation import SetResult, evaluate_sets

VERSION = 0
"""Weight version of the engines. It never changes because nothing is trained."""


def main(config: Config, out: Path, scratch: Path) -> int:
    """Evaluate config.model, write samples and results to a new folder at `out`, and return the exit code."""
    return exit_status(lambda config, scratch: run(config, out, scratch), config, scratch)


def run(config: Config, out: Path, scratch: Path) -> None:
    """Evaluate config.model and write samples and results to `out`. Raise UserError before processes start if the
    recipe, the model or the folder is invalid, and RunFailure after writing the results if a set has no score."""
    if not config.evaluation.sets:
        raise UserError("evaluation.sets=[]: the recipe has no evaluation sets. Fix: add sets to evaluation.sets")
    if config.cluster.nodes > 1:
        raise UserError(
            f"cluster.nodes={config.cluster.nodes}: megarl evaluate runs on a single machine. Fix: set cluster.nodes=1 "
            "and set rollout.replicas to the number of engines that fit on it"
        )
    if out.exists():
        raise UserError(f"--out {out}: the folder already exists. Fix: pass a path that does not exist yet")
    if config.actor.lora.path is not None:
        print(
            f"megarl: warning: actor.lora.path={config.actor.lora.path}: the model is evaluated without these "
            "adapters. Fix: merge a checkpoint with megarl convert adapters-to-hf, and evaluate the result",
            flush=True,
        )
    config = with_engines_only(config)
    check_machine(config)
    folder = resolve(config.model.path, revision=config.model.revision)
    prompts = load_evaluation_sets(config, folder)
    logs = out / "logs"
    logs.mkdir(parents=True)
    (out / "config.resolved.yaml").write_text(dump(config), encoding="utf-8")
    print(f"model: {folder}", flush=True)
    with ExitStack() as stack:
        encoded = added_image_bytes(config) + evaluation_image_bytes(prompts.values())
        session = stack.enter_context(Session(config, logs, scratch, encoded=encoded))
        models, placement = ModelFolders(folder, None, None, None), place_here(config)
        elapsed = ElapsedTime()
        engines = engine_group(config)(session, config, folder, placement.engines)
        rewards = RewardGroup(session, config, placement.rewards, None, models)
        starting, environments = [engines.start_loaded(VERSION), rewards.start()], None
        if placement.environments:
            environments = EnvironmentGroup(session, config, folder, placement.environments, engines)
            starting.append(environments.start())
        join(starting).result()
        elapsed.print("engines: started")
        groups = engines, environments, rewards
        results = evaluate_sets(
            config, config.evaluation.sets, *groups, VERSION, prompts, lambda name, _: out / f"{name}.jsonl"
        )
    replace_text(out / "results.json", json.dumps(as_json(results, folder), indent=2) + "\n")
    print(table(results))
    print(f"samples and results: {out}", flush=True)
    if unscored := [result for result in results if not result.estimates]:
        raise RunFailure("\n".join(f"evaluation: {result.describe()}" for result in unscored))


def with_engines_only(config: Config) -> Config:
    """Return a recipe that only runs engines. They use the first devices and load the model's weights themselves.
    Evaluation sets that inherit the training run's reward functions or environment keep them."""
    training = {
        "functions": config.rewards.functions,
        "environment": SetEnvironment(**{"class": config.environment.name, "options": config.environment.options}),
    }
    sets = [
        settings.model_copy(update={name: value for name, value in training.items() if getattr(settings, name) is None})
        for settings in config.evaluation.sets
    ]
    rollout = {
        "sleep": False,
        "max_staleness": 0,
        "on_stale": "wait",
        "kv_cache_on_update": "keep",
        "quantization": None,
        "vllm_overrides": config.rollout.vllm_overrides | {"load_format": "auto"},
    }
    one_rank = config.actor.layout.model_copy(update=ONE_PROCESS | {"sequence_parallel": False})
    changes: dict[str, dict[str, Any]] = {
        "evaluation": {"sets": sets},
        "batch": {"oversampling": None},
        "rewards": {"functions": [], "judge": None},
        "environment": {"class": None, "options": {}},
        "rollout": rollout,
        "reward_model": {"path": None},
        "implicit_reward": {"coefficient": 0.0},
        "teachers": {"models": []},
        "actor": {
            "layout": one_rank,
            "offload": [],
            "lora": config.actor.lora.model_copy(update={"rank": None}),
            "experts": config.actor.experts.model_copy(update={"replay_routes": False}),
        },
        "critic": {"layout": one_rank, "offload": []},
        "cluster": {"placement": "colocated", "roles": Roles(**dict.fromkeys(Roles.model_fields))},
    }
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changes.items()}
    return config.model_copy(update=sections)


def as_json(results: list[SetResult], folder: Path) -> dict[str, Any]:
    """Return the evaluation results for the model in `folder` as JSON values."""
    return {
        "model": {"folder": str(folder), "hash": weights_hash(folder)},
        "sets": {
            result.settings.name: {
                "settings": result.settings.model_dump(),
                "prompts": result.num_prompts,
                "estimates": {name: _finite(estimate) for name, estimate in result.estimates.items()},
                **result.shares,
            }
            for result in results
        },
    }


def _finite(estimate: Estimate) -> dict[str, float | None]:
    """Return the estimate's fields. Infinite interval bounds are replaced with None, because JSON has no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(estimate).items()}


def table(results: list[SetResult]) -> str:
    """Return a table with one row per estimate, including its 95 % confidence interval."""
    rows: list[tuple[str, ...]] = [("set", "samples", "failed", "", "value", "95 % interval")]
    for result in results:
        size = f"{result.num_prompts} × {result.settings.samples_per_prompt}"
        first = (result.settings.name, size, f"{result.shares['failed_frac']:.1%}")
        estimates = [(name, f"{e.value:.4f}", f"{e.low:.4f} – {e.high:.4f}") for name, e in result.estimates.items()]
        for number, estimate in enumerate(estimates or [("no scores", "", "")]):
            rows.append((*(first if number == 0 else ("", "", "")), *estimate))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
