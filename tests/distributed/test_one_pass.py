"""One pass through the model yields a microbatch's loss, KL, entropy and metrics, and neither the head nor any
objective waits for the device.

Attention on CPU is exempt: it needs the lengths of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.algorithms.specs import LabelObjective
from megarl.cluster.groups.ranks import worker_class
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.data.local_batch import LocalBatch
from megarl.megatron import step
from megarl.megatron.losses import Loss
from megarl.megatron.model import head
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.critic import CriticWorker
from megarl.megatron.workers.implicit_reward import ImplicitRewardWorker
from megarl.megatron.workers.trainer import TrainerWorker
from megarl.ops import linear_head
from tests.forked import run_ranks
from tests.parity import config_of, labelled, local_batch, random_groups, rank_batches
from tests.tiny_model import write_tiny_llama

WAITING = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select)
"""Operators that make the host wait for the device: `.item()`, and operators whose output size depends on values."""

OBJECTIVES = (
    "{name: clip, dual_clip: 3.0, entropy_coefficient: 0.1, imitation_coefficient: 0.1}",
    *(f"{{name: {name}}}" for name in ("unclipped", "kl_penalty", "gspo", "gmpo", "cispo", "sapo")),
    *(f"{{name: {name}}}" for name in ("dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "dro")),
)


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else ()
        if func.overloadpacket in WAITING or any(x is not None and x.dtype is torch.bool for x in masks):
            self.operators.add(str(func))
        return func(*args, **(kwargs or {}))


def updates(store, rank: int, configs: Sequence[Config], folder: Path) -> list[tuple[set[str], int, int, set[str]]]:
    """Return, for each config, the operators of the update that wait, the number of model calls, the number of
    microbatches, and the metrics."""
    worker = ActorWorker(configs[0], folder, rank, store, threads=1)
    return [watch_update(worker, config) for config in configs]


def update_of_role(store, rank: int, config: Config, folder: Path, role: Role) -> tuple[set[str], int, int, set[str]]:
    worker = worker_class(config, role)(config, folder, rank, store, threads=1)
    worker.packing = replace(worker.packing, shares_prompts=False)  # so that even pairs fill several microbatches
    return watch_update(worker, config)


def watch_update(worker: TrainerWorker, config: Config) -> tuple[set[str], int, int, set[str]]:
    worker._config = config
    groups = (
        labelled(random_groups(0)) if isinstance(config.algorithm.objective.spec, LabelObjective) else random_groups(0)
    )
    batch = local_batch(rank_batches(config, worker.packing, groups, worker.role)[0])
    make_passes(worker, batch)
    batches = worker._training_batches(batch)
    waits, calls = Waits(), []

    def watched(function):
        def call(*args, **kwargs):
            with waits:
                return function(*args, **kwargs)

        return call

    hook = worker.chunks[0].register_forward_hook(lambda *_: calls.append(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "log_prob_and_entropy", watched(head.log_prob_and_entropy))
        patch.setattr(linear_head, "_add_gradients", watched(linear_head._add_gradients))
        loss = Loss(watched(worker.loss.terms), watched(worker.loss.metrics))
        parts = step.accumulate_gradients(worker.chunks, loss, batches)
    hook.remove()
    worker.end_step()
    return waits.operators, len(calls), len(batches), {name for part in parts for name in part}


def make_passes(worker: TrainerWorker, batch: LocalBatch) -> None:
    if isinstance(worker, CriticWorker | ImplicitRewardWorker):
        worker.score_tokens(batch)
    elif isinstance(worker, ActorWorker):
        for policy in ("old", "reference") if worker._config.has_reference else ("old",):
            worker.keep_log_probs(policy, batch)


def assert_never_waits(result: tuple[set[str], int, int, set[str]], name: str, metrics: set[str]) -> None:
    waits, calls, microbatches, operators = result
    assert not waits, name
    assert calls == microbatches > 1, name
    assert operators >= metrics, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def test_update_calls_the_model_once_per_microbatch(folder):
    common = ["algorithm.kl.coefficient=0.05", "algorithm.correction={weight: token, mask: sequence}"]
    common.append("actor.tokens_per_microbatch=64")
    configs = [config_of(folder, *common, f"algorithm.objective={objective}") for objective in OBJECTIVES]
    [results] = run_ranks(1, updates, configs, folder)
    policy_metrics = {
        "policy/loss",
        "policy/entropy",
        "policy/clip_low_frac",
        "correction/weight_max",
        "kl/coefficient",
    }
    for objective, result in zip(OBJECTIVES, results, strict=True):
        assert_never_waits(result, objective, policy_metrics)


GIVEN = "data={source: rows.jsonl, format: preferences}"
ROLES = {
    "SFT": ("actor", ["algorithm.objective.name=sft", "data={source: rows.jsonl, format: messages}"], "policy/nll"),
    "reward model": ("actor", ["algorithm.objective.name=reward_model", GIVEN], "preference/accuracy"),
    "process reward model": (
        "actor",
        ["algorithm.objective.name=process_reward_model", "data={source: rows.jsonl, format: labels}"],
        "label/accuracy",
    ),
    "DPO": ("actor", ["algorithm.objective={name: dpo, length_normalised: true}", GIVEN], "preference/accuracy"),
    "IPO, online": ("actor", ["algorithm.objective.name=ipo"], "mismatch/logprob_abs_max"),
    "SLiC, online": ("actor", ["algorithm.objective.name=slic"], "preference/margin"),
    "critic": ("critic", ["algorithm.value.clip=0.2"], "value/clip_frac"),
    "critic on the actor": ("actor", ["critic.shared_backbone=true", "algorithm.value.clip=0.2"], "value/clip_frac"),
    "implicit reward": ("implicit_reward", ["implicit_reward.coefficient=1.0"], "implicit_reward/accuracy"),
}


@pytest.mark.parametrize("name", ROLES)
def test_updates_of_all_roles_never_wait(folder, name):
    role, keys, metric = ROLES[name]
    estimator = ["algorithm.advantage.estimator=gae"] if "critic" in name or role != "actor" else []
    sections = ["actor", *([] if role == "actor" else ["critic"]), *([role] if role == "implicit_reward" else [])]
    budgets = [f"{section}.tokens_per_microbatch=128" for section in sections]
    config = config_of(folder, "rollout.temperature=1.0", *budgets, *estimator, *keys)
    [result] = run_ranks(1, update_of_role, config, folder, role)
    assert_never_waits(result, name, {metric})
