"""Divergences from teachers as a loss, both exact and over the teacher's most probable tokens, in every layout,
compared with full logits of transformers models."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from megarl.cluster.rank_batch import RankBatch, join_by_sample, with_prompt
from megarl.config.schema import Config
from megarl.core.metrics import merge
from megarl.core.sample import Sample, SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.megatron.workers.actor import ActorWorker
from megarl.megatron.workers.teacher import TeacherWorker
from megarl.ops.top_tokens import TopTokens
from megarl.step.dispatch import dispatch
from tests.closeness import Expected, assert_close, close_to, expected, load
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    TEMPERATURE,
    RankResult,
    canonical,
    capture_gradients,
    config_of,
    local_batch,
    own_batch,
    random_groups,
    separate_experts,
)
from tests.tiny_model import write_tiny_experts, write_tiny_llama

LAYOUTS = {
    "1 process": "{}",
    "TP3": "{tp: 3}",
    "TP3, sequence parallel": "{tp: 3, sequence_parallel: true}",
    "PP2": "{pp: 2}",
    "CP2": "{cp: 2}",
    "DP2": "{dp: 2}",
    "PP2, TP3": "{pp: 2, tp: 3}",
}
EXPERT_LAYOUTS = {"EP2": "{dp: 2, ep: 2}"}
GROUPS = [
    [(replace(sample, response_ids=tuple(3 * i for i in sample.response_ids)), 0.0) for sample, _ in group]
    for group in random_groups(0)
]
"""Groups without rewards. Their tokens are below 100, or in responses below 300."""
SAMPLES = [sample for group in GROUPS for sample, _ in group]
COEFFICIENT, VOCAB = 0.7, 300
"""With TP3, Megatron pads the vocabulary to 384 rows, so that each rank has tokens, and one of them also padding."""
SHORT_VOCAB = 295
"""Number of tokens of the teacher "short". It has those of all samples."""
MIXED = {"idle": 2.0, "large": 1.0, "small": 0.5}
"""Teacher -> weight. No sample belongs to the idle teacher's sources."""
SCORED_BY_SMALL = {sample.id for sample in SAMPLES if sample.prompt.id != "1"}
"""Ids of the samples that the small teacher scores. The large teacher scores all samples."""

TOP_K = 5
IMPOSSIBLE = -80.0
"""Log-prob of a token that the student's vocabulary lacks. Its probability is negligible, but not 0, so that the
logarithm of the mixture is finite."""

States = dict[str, dict[str, torch.Tensor]]
"""Teacher -> sample id -> final hidden state for each response token, [R, h], or most probable tokens."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Students, dense and with experts, teachers of the same size, one of them with fewer embedding rows, and a larger
    teacher with more embedding rows."""
    sizes = dict(num_heads=3, num_kv_heads=3, hidden_size=96, intermediate_size=96, vocab_size=VOCAB)
    larger = dict(num_heads=6, num_kv_heads=3, hidden_size=192, intermediate_size=144, num_layers=4)
    kinds = {
        "tied": sizes | {"seed": 0},
        "untied": sizes | {"seed": 0, "tied": False},
        "small": sizes | {"seed": 1},
        "short": sizes | {"seed": 3, "vocab_size": SHORT_VOCAB},
        "large": larger | {"seed": 2, "tied": False, "vocab_size": 2 * VOCAB},
    }
    folders = {name: write_tiny_llama(tmp_path_factory.mktemp(name), **keys) for name, keys in kinds.items()}
    experts = write_tiny_experts(tmp_path_factory.mktemp("experts"), vocab_size=VOCAB)
    return folders | {"idle": folders["small"], "experts": experts}


def recipe(folders: dict[str, Path], student: str, weights: Mapping[str, float], *overrides: str) -> Config:
    models = ", ".join(f"{{name: {name}, path: {folders[name]}, weight: {w}}}" for name, w in weights.items())
    return config_of(
        folders[student],
        *(f"teachers.models=[{models}]", "teachers.tokens_per_microbatch=80", "rewards.functions=[]"),
        *(f"algorithm.distillation.coefficient={COEFFICIENT}", "algorithm.distillation.placement=loss"),
        *("algorithm.advantage.estimator=policy_gradient", *overrides),
    )


def hidden_states(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Return the final hidden state that predicts each response token, [R, h]."""
    first = len(sample.prompt.token_ids)
    return model.model(torch.tensor(sample.token_ids[None]).long()).last_hidden_state[0, first - 1 : -1]


def log_probs(
    model: torch.nn.Module, hidden: torch.Tensor, temperature: float = TEMPERATURE, vocab_size: int = VOCAB
) -> torch.Tensor:
    """Return the log-probs over the first `vocab_size` tokens, [R, V]."""
    return (model.lm_head(hidden)[:, :vocab_size] / temperature).log_softmax(-1)


def teacher_states(
    folders: dict[str, Path], weights: Mapping[str, float], top_k: int | None = None
) -> Expected[States]:
    def state(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
        hidden = hidden_states(model, sample)
        if top_k is None:
            return hidden
        log_q = (model.lm_head(hidden) / TEMPERATURE).log_softmax(-1)
        top = log_q.topk(top_k)
        rest = log_q.scatter(1, top.indices, -torch.inf).logsumexp(-1)
        return TopTokens(top.indices, top.values, rest).packed

    def compute() -> States:
        with torch.no_grad():
            models = {name: load(AutoModelForCausalLM, folders[name]) for name in weights}
            return {
                name: {s.id: state(model, s) for s in SAMPLES if is_scored(name, s, len(weights))}
                for name, model in models.items()
            }

    return expected(compute)


def over_top(log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both distributions over the teacher's most probable tokens and all others, [R, k + 1]. Tokens that the
    student's vocabulary lacks count as others."""
    ids = log_q.topk(TOP_K).indices
    is_known = ids < log_p.shape[1]
    assert log_q.shape[1] <= log_p.shape[1] or not is_known.all(), "the teacher has no token beyond the student's"

    def classes(log_probs: torch.Tensor) -> torch.Tensor:
        columns = ids.where(is_known, 0)
        in_top = torch.zeros_like(log_probs).scatter_add_(1, columns, is_known.to(log_probs.dtype)) > 0
        listed = log_probs.gather(1, columns).where(is_known, IMPOSSIBLE)
        return torch.cat((listed, log_probs.masked_fill(in_top, -torch.inf).logsumexp(-1, keepdim=True)), -1)

    return classes(log_p), classes(log_q)


def is_scored(teacher: str, sample: Sample, num_teachers: int) -> bool:
    return num_teachers == 1 or teacher in ("large", "short") or (teacher == "small" and sample.id in SCORED_BY_SMALL)


def plain_divergence(kind: str, beta: float, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the divergence between the student's p and the teacher's q by its definition, [R]."""
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return (q * (log_q - log_p)).sum(-1)
    if kind == "reverse_kl":
        return (p * (log_p - log_q)).sum(-1)
    log_m = (beta * q + (1 - beta) * p).log()
    return beta * (q * (log_q - log_m)).sum(-1) + (1 - beta) * (p * (log_p - log_m)).sum(-1)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by their names in a checkpoint, which has a tensor for each expert."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert torch.stack([gradient.norm() for gradient in gradients.values()]).norm() > 0.01
    return separate_experts(revert_weight_conversion(model, gradients))


class Distilled(NamedTuple):
    """The loss of an update, its gradients, and the mean divergence from each teacher over the tokens that it
    scores."""

    loss: float
    gradients: dict[str, torch.Tensor]
    means: dict[str, float]


def plain_update(
    folders: dict[str, Path],
    student: str,
    weights: Mapping[str, float],
    kind: str,
    beta: float,
    top_k: int | None,
):
    """Return the expected result. The loss averages c·Σ_k w_k·D_k over the trained tokens of each sample, then over
    samples."""

    def compute() -> Distilled:
        model = load(AutoModelForCausalLM, folders[student])
        teachers = {name: load(AutoModelForCausalLM, folders[name]) for name in weights}
        losses, values = [], {name: [] for name in weights}
        for sample in SAMPLES:
            mask = torch.tensor(sample.response_mask)
            own = hidden_states(model, sample)
            log_p = log_probs(model, own)
            loss = log_p.sum() * 0
            for name, teacher in teachers.items():
                if is_scored(name, sample, len(weights)) and mask.any():
                    with torch.no_grad():
                        hidden = hidden_states(teacher, sample)
                        log_q = (teacher.lm_head(hidden) / TEMPERATURE).log_softmax(-1)
                    if top_k is None:
                        size = min(VOCAB, log_q.shape[1])
                        distributions = [log_probs(*of, vocab_size=size) for of in ((model, own), (teacher, hidden))]
                    else:
                        distributions = over_top(log_p, log_q)
                    divergence = plain_divergence(kind, beta, *distributions)[mask]
                    values[name] += divergence.tolist()
                    loss = loss + COEFFICIENT * weights[name] * divergence.mean()
            losses.append(loss)
        total = torch.stack(losses).mean()
        total.backward()
        means = {name: sum(found) / len(found) for name, found in values.items() if found}
        return Distilled(total.item(), gradients_of(model), means)

    return expected(compute)


def distill(store, rank: int, config: Config, folder: Path, states: States) -> RankResult:
    """Run one update on one rank."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batch = own_batch(config, worker, GROUPS, {f"teacher/{name}": found for name, found in states.items()})
    worker.keep_log_probs("old", batch)  # a forward-only pass returns no divergence
    gradients = capture_gradients(worker)
    metrics = worker.update(batch)
    return RankResult(worker.holder, gradients, {}, metrics)


def assert_distills(folders, student, weights, layout, kind, beta=0.5, top_k=None):
    keys = (f"algorithm.distillation.divergence={kind}", f"algorithm.distillation.beta={beta}")
    keys += () if top_k is None else (f"algorithm.distillation.top_k={top_k}",)
    config = recipe(folders, student, weights, f"actor.layout={(LAYOUTS | EXPERT_LAYOUTS)[layout]}", *keys)
    exact_states, _ = teacher_states(folders, weights, top_k)
    states = {name: {i: x.float() for i, x in found.items()} for name, found in exact_states.items()}
    ranks = run_ranks(config.actor.layout.world_size, distill, config, folders[student], states)
    exact, plain = plain_update(folders, student, weights, kind, beta, top_k)
    assert_close(canonical(folders[student], ranks, "gradients"), exact.gradients, plain.gradients, "gradient")
    metrics = merge([rank.metrics for rank in ranks if rank.metrics])
    names = {f"kl/teacher_{name}": name for name in exact.means}
    assert {name for name in metrics if name.startswith("kl/")} == names.keys()
    for metric, name in names.items():
        assert metrics[metric].value == close_to(exact.means[name], plain.means[name]), metric
    loss = sum(rank.metrics["policy/loss"].value for rank in ranks if rank.metrics)
    assert loss == close_to(exact.loss, plain.loss)
    return metrics


@pytest.mark.parametrize(
    ("student", "layout", "kind", "beta"),
    [
        ("tied", "1 process", "jsd", 0.1),
        ("untied", "TP3, sequence parallel", "forward_kl", 0.5),
        ("tied", "PP2", "reverse_kl", 0.5),
        ("untied", "CP2", "jsd", 0.5),
        pytest.param("tied", "TP3", "forward_kl", 0.5, marks=pytest.mark.exhaustive),
        pytest.param("tied", "DP2", "jsd", 0.9, marks=pytest.mark.exhaustive),
        pytest.param("untied", "DP2", "reverse_kl", 0.5, marks=pytest.mark.exhaustive),
        pytest.param("tied", "PP2, TP3", "jsd", 0.5, marks=pytest.mark.exhaustive),
        pytest.param("experts", "EP2", "reverse_kl", 0.5, marks=pytest.mark.exhaustive),
    ],
)
def test_divergence_from_several_teachers_matches_full_logits(folders, student, layout, kind, beta):
    assert_distills(folders, student, MIXED, layout, kind, beta)


@pytest.mark.parametrize(
    ("student", "layout", "kind"),
    [
        ("tied", "TP3, sequence parallel", "reverse_kl"),
        ("untied", "DP2", "jsd"),
        pytest.param("tied", "1 process", "forward_kl", marks=pytest.mark.exhaustive),
        pytest.param("tied", "CP2", "forward_kl", marks=pytest.mark.exhaustive),
        pytest.param("untied", "PP2", "reverse_kl", marks=pytest.mark.exhaustive),
        pytest.param("untied", "TP3", "jsd", marks=pytest.mark.exhaustive),
        pytest.param("untied", "PP2, TP3", "forward_kl", marks=pytest.mark.exhaustive),
        pytest.param("experts", "EP2", "jsd", marks=pytest.mark.exhaustive),
    ],
)
def test_divergence_from_one_teacher_is_the_plain_one(folders, student, layout, kind):
    """A single call computes log-probs, entropies and the divergence."""
    assert_distills(folders, student, {"large": 1.0}, layout, kind)


@pytest.mark.parametrize(
    ("student", "weights", "layout", "kind", "top_k"),
    [
        ("tied", {"short": 1.0}, "TP3", "reverse_kl", None),
        pytest.param("untied", {"large": 1.0, "short": 0.5}, "CP2", "jsd", None, marks=pytest.mark.exhaustive),
        pytest.param("untied", {"short": 1.0}, "PP2", "forward_kl", None, marks=pytest.mark.exhaustive),
        pytest.param("tied", {"short": 1.0}, "TP3, sequence parallel", "jsd", TOP_K, marks=pytest.mark.exhaustive),
    ],
)
def test_teacher_may_have_fewer_embedding_rows(folders, student, weights, layout, kind, top_k):
    """An exact divergence is over the teacher's rows, and the policy's log-probs are over the actor's."""
    metrics = assert_distills(folders, student, weights, layout, kind, top_k=top_k)
    assert metrics["policy/ratio_mean"].value == close_to(1, 1)


class FineTuned(NamedTuple):
    """The gradients of an update on given data, and the means over its tokens."""

    gradients: dict[str, torch.Tensor]
    loss: float
    nll: float
    means: dict[str, float]


def fine_tune(store, rank: int, config: Config, folder: Path, states: States) -> RankResult:
    """Run one update on given data on one rank."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    refs = [SampleRef.of(sample, sample) for sample in SAMPLES]
    scores = {f"teacher/{name}": found for name, found in states.items()}
    batch = local_batch(dispatch(config, refs, worker.packing, scores=scores)[worker.data_parallel_rank])
    gradients = capture_gradients(worker)
    metrics = worker.update(batch)
    return RankResult(worker.holder, gradients, {}, metrics)


def plain_fine_tuning(
    folders, student: str, weights: Mapping[str, float], kind: str, nll_coefficient: float
) -> Expected[FineTuned]:
    """Return the expected result. The loss is the mean of −nll_coefficient·log π + c·Σ_k w_k·D_k over the trained
    tokens."""

    def compute() -> FineTuned:
        model = load(AutoModelForCausalLM, folders[student])
        teachers = {name: load(AutoModelForCausalLM, folders[name]) for name in weights}
        losses, nlls, values = [], [], {name: [] for name in weights}
        for sample in SAMPLES:
            mask = torch.tensor(sample.response_mask)
            log_p = log_probs(model, hidden_states(model, sample), temperature=1.0)
            nll = -log_p.gather(1, torch.tensor(sample.response_ids).long()[:, None])[:, 0]
            loss = nll_coefficient * nll
            for name, teacher in teachers.items():
                if is_scored(name, sample, len(weights)):
                    with torch.no_grad():
                        log_q = log_probs(teacher, hidden_states(teacher, sample), temperature=1.0)
                    divergence = plain_divergence(kind, 0.5, log_p, log_q)
                    values[name] += divergence[mask].tolist()
                    loss = loss + COEFFICIENT * weights[name] * divergence
            losses.append(loss[mask])
            nlls += nll[mask].tolist()
        loss = torch.cat(losses).mean()
        loss.backward()
        means = {name: sum(found) / len(found) for name, found in values.items()}
        return FineTuned(gradients_of(model), loss.item(), sum(nlls) / len(nlls), means)

    return expected(compute)


@pytest.mark.parametrize(
    ("student", "weights", "layout", "kind", "nll_coefficient"),
    [
        ("tied", {"large": 1.0}, "PP2", "jsd", 1.0),
        ("tied", {"large": 1.0}, "1 process", "forward_kl", 0.0),
        pytest.param(
            *("untied", {"large": 1.0, "small": 0.5}, "TP3, sequence parallel", "forward_kl", 0.5),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_fine_tuning_adds_the_divergence_to_its_loss(folders, student, weights, layout, kind, nll_coefficient):
    models = ", ".join(f"{{name: {name}, path: {folders[name]}, weight: {w}}}" for name, w in weights.items())
    config = config_of(
        folders[student],
        *(f"teachers.models=[{models}]", "data={source: rows.jsonl, format: messages}", "rollout.temperature=1.0"),
        f"algorithm.distillation={{divergence: {kind}, placement: loss, coefficient: {COEFFICIENT}}}",
        f"algorithm.objective={{name: sft, aggregation: token_mean, nll_coefficient: {nll_coefficient}}}",
        f"actor.layout={LAYOUTS[layout]}",
    )
    exact_states, _ = teacher_states(folders, weights)
    states = {name: {i: x.float() for i, x in found.items()} for name, found in exact_states.items()}
    ranks = run_ranks(config.actor.layout.world_size, fine_tune, config, folders[student], states)
    exact, plain = plain_fine_tuning(folders, student, weights, kind, nll_coefficient)
    assert_close(canonical(folders[student], ranks, "gradients"), exact.gradients, plain.gradients, "gradient")
    reported = [rank.metrics for rank in ranks if rank.metrics]
    assert sum(metrics["policy/loss"].value for metrics in reported) == close_to(exact.loss, plain.loss)
    metrics = merge(reported)
    assert metrics["policy/nll"].value == close_to(exact.nll, plain.nll)
    for name in weights:
        assert metrics[f"kl/teacher_{name}"].value == close_to(exact.means[name], plain.means[name])


SOURCE = random.Random(7)
PRIVILEGED = {
    name: np.array([SOURCE.randrange(6, 100) for _ in range(length)], np.int32)
    for name, length in (("0", 30), ("2", 9))
}
"""Privileged prompts, one longer and one shorter than the row's own. One prompt has none."""
SCALES = {"policy": 0.8, "average": 1.0}
"""Factor of each self-teacher's weights relative to the initial ones. The average is the reference."""
SELF_WEIGHTS = {"policy": 1.0, "average": 0.5}
MOVED = 0.9
"""Factor by which earlier updates of the step have multiplied the policy's weights since the teachers' passes."""


def distill_itself(store, rank: int, config: Config, folder: Path) -> RankResult:
    """Run the self-teachers' passes and one update on one rank."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    scale(worker.parameters().values(), SCALES["policy"])
    refs = [SampleRef.of(sample, sample) for sample in SAMPLES if sample.prompt.id in PRIVILEGED]
    privileged = {item.id: PRIVILEGED[item.prompt_id] for item in refs}
    part = RankBatch.split_privileged(refs, worker.packing, privileged)[worker.data_parallel_rank]
    samples = [replace(item, sample=with_prompt(item.sample, privileged[item.id])) for item in part.samples]
    found = {name: worker.score_as_teacher(name, LocalBatch(samples, part.microbatches)) for name in SCALES}
    gathered: list[States] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    scores = {f"teacher/{name}": join_by_sample([states[name] for states in gathered]) for name in SCALES}
    scale(worker.parameters().values(), MOVED)
    gradients = capture_gradients(worker)
    metrics = worker.update(own_batch(config, worker, GROUPS, scores))
    return RankResult(worker.holder, gradients, {}, metrics)


def scale(weights: Iterable[torch.Tensor], factor: float) -> None:
    with torch.no_grad():
        for weight in weights:
            weight.mul_(factor)


def plain_update_from_itself(folder: Path, kind: str) -> Expected[Distilled]:
    """Return the expected result, with one model per teacher. The rows of a sample are its response tokens, after
    either prompt."""

    def compute() -> Distilled:
        model, *teachers = (load(AutoModelForCausalLM, folder) for _ in range(3))
        for own, factor in zip((model, *teachers), (SCALES["policy"] * MOVED, *SCALES.values()), strict=True):
            scale(own.parameters(), factor)
        losses, values = [], {name: [] for name in SCALES}
        for sample in SAMPLES:
            mask = torch.tensor(sample.response_mask)
            log_p = log_probs(model, hidden_states(model, sample))
            loss = log_p.sum() * 0
            for name, teacher in zip(SCALES, teachers, strict=True):
                if sample.prompt.id in PRIVILEGED and mask.any():
                    with torch.no_grad():
                        log_q = log_probs(
                            teacher, hidden_states(teacher, with_prompt(sample, PRIVILEGED[sample.prompt.id]))
                        )
                    divergence = plain_divergence(kind, 0.5, log_p, log_q)[mask]
                    values[name] += divergence.tolist()
                    loss = loss + COEFFICIENT * SELF_WEIGHTS[name] * divergence.mean()
            losses.append(loss)
        total = torch.stack(losses).mean()
        total.backward()
        means = {name: sum(found) / len(found) for name, found in values.items()}
        return Distilled(total.item(), gradients_of(model), means)

    return expected(compute)


@pytest.mark.parametrize(
    ("student", "layout", "kind"),
    [
        ("tied", "PP2", "reverse_kl"),
        ("untied", "TP3, sequence parallel", "jsd"),
        pytest.param("untied", "DP2", "forward_kl", marks=pytest.mark.exhaustive),
        pytest.param("tied", "CP2", "forward_kl", marks=pytest.mark.exhaustive),
    ],
)
def test_divergence_from_the_policy_itself_matches_full_logits(folders, student, layout, kind):
    """Both self-teachers see privileged prompts, and use the weights at the start of the step."""
    models = [
        "{name: policy, prompt_column: hint}",
        "{name: average, prompt_column: hint, weights: reference, weight: 0.5}",
    ]
    config = config_of(
        folders[student],
        *(f"teachers.models=[{', '.join(models)}]", "data.source=rows.jsonl", "rewards.functions=[]"),
        f"algorithm.distillation={{divergence: {kind}, placement: loss, coefficient: {COEFFICIENT}}}",
        *("algorithm.advantage.estimator=policy_gradient", f"actor.layout={LAYOUTS[layout]}"),
    )
    ranks = run_ranks(config.actor.layout.world_size, distill_itself, config, folders[student])
    exact, plain = plain_update_from_itself(folders[student], kind)
    assert_close(canonical(folders[student], ranks, "gradients"), exact.gradients, plain.gradients, "gradient")
    metrics = merge([rank.metrics for rank in ranks if rank.metrics])
    for name in SCALES:
        assert metrics[f"kl/teacher_{name}"].value == close_to(exact.means[name], plain.means[name])


@pytest.mark.parametrize(
    ("student", "weights", "layout", "kind"),
    [
        ("tied", MIXED, "TP3, sequence parallel", "reverse_kl"),
        pytest.param("untied", {"large": 1.0}, "TP3", "forward_kl", marks=pytest.mark.exhaustive),
        pytest.param("untied", MIXED, "CP2", "forward_kl", marks=pytest.mark.exhaustive),
        pytest.param("tied", {"large": 1.0}, "PP2", "jsd", marks=pytest.mark.exhaustive),
    ],
)
def test_divergence_over_top_tokens_matches_full_logits(folders, student, weights, layout, kind):
    assert_distills(folders, student, weights, layout, kind, top_k=TOP_K)


def score(store, rank: int, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    worker = TeacherWorker(config, folder, rank, store, threads=1)
    refs = [SampleRef.of(sample, sample) for sample in SAMPLES]
    return worker.score_tokens(local_batch(RankBatch.split(refs, worker.packing)[worker.data_parallel_rank]))


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "TP3, sequence parallel", "CP2"))
def test_teacher_returns_the_final_hidden_states(folders, layout):
    keys = (f"teachers.layout={LAYOUTS[layout]}", "algorithm.distillation.divergence=jsd")
    config = recipe(folders, "tied", {"large": 1.0}, *keys)
    ranks = run_ranks(config.teachers.layout.world_size, score, config, folders["large"])
    exact, plain = (found["large"] for found in teacher_states(folders, {"large": 1.0}))
    assert sorted(name for states in ranks for name in states) == sorted(exact)
    actual = {name: next(states[name] for states in ranks if name in states) for name in exact}
    assert_close(actual, exact, plain, "hidden states")


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "TP3, sequence parallel"))
def test_teacher_returns_its_most_probable_tokens(folders, layout):
    keys = (f"teachers.layout={LAYOUTS[layout]}", "algorithm.distillation={divergence: reverse_kl, top_k: 5}")
    config = recipe(folders, "tied", {"large": 1.0}, *keys)
    ranks = run_ranks(config.teachers.layout.world_size, score, config, folders["large"])
    exact, plain = (found["large"] for found in teacher_states(folders, {"large": 1.0}, TOP_K))
    assert sorted(name for found in ranks for name in found) == sorted(exact)
    actual = {name: next(found[name] for found in ranks if name in found) for name in exact}
    assert all(torch.equal(actual[name][:, :TOP_K], exact[name][:, :TOP_K]) for name in exact)
    assert_close(*({name: x[:, TOP_K:] for name, x in found.items()} for found in (actual, exact, plain)), "log-probs")


def score_as_self(store, rank: int, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    refs = [SampleRef.of(sample, sample) for sample in SAMPLES]
    return worker.score_as_teacher("large", local_batch(RankBatch.split(refs, worker.packing)[0]))


def test_policy_as_a_teacher_returns_its_most_probable_tokens(folders):
    keys = "algorithm.distillation={divergence: reverse_kl, top_k: 5}"
    [actual] = run_ranks(1, score_as_self, recipe(folders, "tied", {"large": 1.0}, keys), folders["tied"])
    exact, plain = (found["tied"] for found in teacher_states(folders, {"tied": 1.0}, TOP_K))
    assert all(torch.equal(actual[name][:, :TOP_K], exact[name][:, :TOP_K]) for name in exact)
    assert_close(*({name: x[:, TOP_K:] for name, x in found.items()} for found in (actual, exact, plain)), "log-probs")


def test_value_head_has_the_column_before_the_divergences(folders):
    keys = ("algorithm.advantage={estimator: gae}", "critic.shared_backbone=true")
    config = recipe(folders, "untied", {"large": 1.0}, *keys, "algorithm.distillation.divergence=jsd")
    exact_states, _ = teacher_states(folders, {"large": 1.0})
    states = {name: {i: x.float() for i, x in found.items()} for name, found in exact_states.items()}
    [rank] = run_ranks(1, distill, config, folders["untied"], states)
    exact, plain = plain_update(folders, "untied", {"large": 1.0}, "jsd", 0.5, None)
    assert rank.metrics["kl/teacher_large"].value == close_to(exact.means["large"], plain.means["large"])
    assert rank.metrics["value/mean"].value == 0, "the new value head does not return zeros"
