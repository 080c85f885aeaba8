"""Teachers give the log-probs of transformers, and the actor learns from them as plain torch does, in every layout."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.cluster.rank_batch import RankBatch, with_prompt
from megarl.config.schema import Config
from megarl.core.metrics import merge
from megarl.core.sample import Sample, SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.teacher import TeacherWorker
from tests.closeness import Expected, assert_close, expected, load
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    TEMPERATURE,
    Group,
    RankResult,
    canonical,
    capture_gradients,
    config_of,
    local_batch,
    own_batch,
    random_groups,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_llama

LAYOUTS = {
    "1 process": "{}",
    "TP3, sequence parallel": "{tp: 3, sequence_parallel: true}",
    "PP2": "{pp: 2}",
    "DP2": "{dp: 2}",
    "CP2": "{cp: 2}",
}
GROUPS = random_groups(0, SHARDED_VOCAB)
SAMPLES = [sample for group in GROUPS for sample, _ in group]
COEFFICIENT, WEIGHTS = 0.7, {"idle": 2.0, "large": 1.0, "small": 0.5}
"""The idle teacher has no sample of its sources."""
SCORED_BY_SMALL = {sample.id for sample in SAMPLES if sample.prompt.id != "1"}
"""The samples of the small teacher's sources. The large teacher scores all samples."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A student, a teacher of the same size, and a larger one with other hidden size, depth and heads."""
    sizes = dict(num_heads=3, num_kv_heads=3, hidden_size=96, intermediate_size=96)
    larger = dict(num_heads=6, num_kv_heads=3, hidden_size=192, intermediate_size=144, num_layers=4, tied=False)
    kinds = {"student": sizes | {"seed": 0}, "small": sizes | {"seed": 1}, "large": larger | {"seed": 2}}
    folders = {
        name: write_tiny_llama(tmp_path_factory.mktemp(name), **keys, vocab_size=SHARDED_VOCAB)
        for name, keys in kinds.items()
    }
    return folders | {"idle": folders["small"]}


def recipe(folders: dict[str, Path], *overrides: str) -> Config:
    models = ", ".join(f"{{name: {name}, path: {folders[name]}, weight: {w}}}" for name, w in WEIGHTS.items())
    distillation = f"algorithm.distillation={{coefficient: {2 * COEFFICIENT}, anneal_steps: 4}}"
    keys = (f"teachers.models=[{models}]", "teachers.tokens_per_microbatch=80", distillation, "run.steps=4", *overrides)
    return config_of(folders["student"], *keys)


def log_probs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Return the log-probs of the response tokens at the sampling temperature [R]."""
    ids = torch.tensor(sample.token_ids[None]).long()
    first = len(sample.prompt.token_ids)
    logits = model(ids).logits[0, first - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, ids[0, first:, None])[:, 0]


def plain_log_probs(folder: Path) -> Expected[dict[str, torch.Tensor]]:
    def compute() -> dict[str, torch.Tensor]:
        model = load(AutoModelForCausalLM, folder)
        with torch.no_grad():
            return {sample.id: log_probs(model, sample) for sample in SAMPLES}

    return expected(compute)


def score(store, rank: int, config: Config, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Return the scores of two passes. With offloading, the weights are on the device only during a pass."""
    worker = TeacherWorker(config, folder, rank, store, threads=1)
    refs = [SampleRef.of(sample, sample) for sample in SAMPLES]
    batch = local_batch(RankBatch.split(refs, worker.packing)[worker.data_parallel_rank])
    scores = []
    for _ in range(2):
        away = [not parameter.untyped_storage().nbytes() for parameter in worker.parameters().values()]
        assert all(away) if config.teachers.offload else not any(away)
        scores.append(worker.score_tokens(batch))
    assert not any(parameter.requires_grad for parameter in worker.parameters().values())
    return scores


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "TP3, sequence parallel", "PP2"))
def test_log_probs_match_transformers(folders, layout):
    """The teacher is larger than the student, and its layout differs from the student's."""
    offload = "[parameters]" if layout == "PP2" else "[]"
    config = recipe(folders, f"teachers.layout={LAYOUTS[layout]}", f"teachers.offload={offload}")
    ranks = run_ranks(config.teachers.layout.world_size, score, config, folders["large"])
    exact, plain = plain_log_probs(folders["large"])
    for number in range(2):
        reported = [scores[number] for scores in ranks]
        assert sorted(name for scores in reported for name in scores) == sorted(exact)
        actual = {name: next(scores[name] for scores in reported if name in scores) for name in exact}
        assert_close(actual, exact, plain, "log-probs")


SOURCE = random.Random(7)
PRIVILEGED = {
    name: np.array([SOURCE.randrange(6, SHARDED_VOCAB) for _ in range(length)], np.int32)
    for name, length in (("0", 30), ("2", 9))
}
HINTED = [with_prompt(sample, PRIVILEGED[sample.prompt.id]) for sample in SAMPLES if sample.prompt.id in PRIVILEGED]
"""The samples with their privileged prompts, one longer and one shorter than the original. One prompt has none."""


def score_as_teacher(store, rank: int, config: Config, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the log-probs of the policy, whose weights are half the initial ones, and of the reference."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    for weight in worker.parameters().values():
        weight.detach().mul_(0.5)
    refs = [SampleRef.of(sample, sample) for sample in SAMPLES if sample.prompt.id in PRIVILEGED]
    privileged = {item.id: PRIVILEGED[item.prompt_id] for item in refs}
    batch = RankBatch.split_privileged(refs, worker.packing, privileged)[worker.data_parallel_rank]
    samples = [replace(item, sample=with_prompt(item.sample, privileged[item.id])) for item in batch.samples]
    local = LocalBatch(samples, batch.microbatches)
    return {teacher.name: worker.score_as_teacher(teacher.name, local) for teacher in config.self_teachers}


def hinted_log_probs(folder: Path, factor: float) -> Expected[dict[str, torch.Tensor]]:
    def compute() -> dict[str, torch.Tensor]:
        model = load(AutoModelForCausalLM, folder)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(factor)
            return {sample.id: log_probs(model, sample) for sample in HINTED}

    return expected(compute)


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "TP3, sequence parallel", "PP2", "CP2"))
def test_self_teacher_sees_privileged_prompts(folders, layout):
    models = "{name: policy, prompt_column: hint}, {name: reference, prompt_column: hint, weights: reference}"
    models = f"teachers.models=[{models}]"
    config = config_of(folders["student"], models, "data.source=rows.jsonl", f"actor.layout={LAYOUTS[layout]}")
    ranks = run_ranks(config.actor.layout.world_size, score_as_teacher, config, folders["student"])
    for policy, factor in {"policy": 0.5, "reference": 1.0}.items():
        exact, plain = hinted_log_probs(folders["student"], factor)
        reported = [scores[policy] for scores in ranks]
        assert sorted(name for scores in reported for name in scores) == sorted(exact)
        actual = {name: next(scores[name] for scores in reported if name in scores) for name in exact}
        assert_close(actual, exact, plain, f"log-probs of the {policy}")


def distill(
    store, rank: int, config: Config, folder: Path, groups: list[Group], scores: dict[str, dict[str, torch.Tensor]]
) -> RankResult:
    """Run one update on one rank."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.set_distillation_coefficient(
        config.algorithm.distillation.coefficient_in(3)
    )  # half of the initial coefficient
    batch = own_batch(config, worker, groups, scores)
    if config.distills_by_advantage:
        worker.keep_log_probs("old", batch)
    gradients = capture_gradients(worker)
    metrics = worker.update(batch)
    return RankResult(worker.holder, gradients, {}, metrics)


def plain_gradients(folder: Path, scores: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean over samples of the mean over trained tokens of c·Σ_k w_k·d_k·log π, one sample
    at a time, with d_k = log π − log π_k as a constant: reverse KL by sampled tokens."""
    model = load(AutoModelForCausalLM, folder)
    losses = []
    for sample in SAMPLES:
        own, mask = log_probs(model, sample), torch.tensor(sample.response_mask)
        of_sample = [(w, scores[f"teacher/{name}"].get(sample.id)) for name, w in WEIGHTS.items()]
        divergence = sum(w * (own.detach() - given) for w, given in of_sample if given is not None)
        losses.append((COEFFICIENT * divergence * own)[mask].mean() if mask.any() else own.sum() * 0)
    torch.stack(losses).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert norm > 0.01, "the gradient is too small to compare"
    return gradients


@pytest.mark.parametrize("placement", ["advantage", "loss"])
@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "PP2", "CP2"))
def test_distillation_alone_has_the_plain_gradient(folders, layout, placement):
    """All rewards are equal, so that the gradient comes from two teachers with different weights, and whitening has no
    effect on it. In the loss, k2 has the same gradient as k1 in the advantage. Masked tokens have no part."""
    keys = (f"actor.layout={LAYOUTS[layout]}", f"algorithm.distillation.placement={placement}")
    advantage = "algorithm.advantage={estimator: policy_gradient, whiten: true}"
    config = recipe(folders, *keys, "rewards.functions=[]", advantage)
    groups = [[(sample, 0.0) for sample, _ in group] for group in GROUPS]
    by_teacher = {name: plain_log_probs(folders[name]) for name in ("large", "small")}
    exact, plain = ({f"teacher/{name}": found[i] for name, found in by_teacher.items()} for i in range(2))
    for scores in (exact, plain):
        own = scores["teacher/small"]
        scores["teacher/small"] = {name: values for name, values in own.items() if name in SCORED_BY_SMALL}
        scores["teacher/idle"] = {}
    given = {name: {i: values.float() for i, values in of_teacher.items()} for name, of_teacher in exact.items()}
    ranks = run_ranks(config.actor.layout.world_size, distill, config, folders["student"], groups, given)
    reference = expected(lambda: plain_gradients(folders["student"], exact if _is_double() else plain))
    assert_close(canonical(folders["student"], ranks, "gradients"), *reference, "gradient")
    metrics = merge([rank.metrics for rank in ranks if rank.metrics])
    assert {name for name in metrics if name.startswith("kl/")} == {"kl/teacher_large", "kl/teacher_small"}


def _is_double() -> bool:
    return torch.get_default_dtype() == torch.float64
