"""Run GRPO updates in any layout, and compare the ranks' merged tensors with a plain reference."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from transformers.core_model_loading import revert_weight_conversion

from megarl.algorithms.baselines import MovingAverage
from megarl.cluster.rank_batch import RankBatch
from megarl.config.load import load
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.metrics import Metric
from megarl.core.prompt import Prompt
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import TokenTotals
from megarl.data.local_batch import LocalBatch
from megarl.data.packing import Packing
from megarl.megatron.model.build import named_parameters, named_weights
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder
from megarl.resharding.piece import Holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.rewards.process import turn_ends
from megarl.step.baselines import attach_baselines, step_normalization
from megarl.step.dispatch import dispatch
from tests.closeness import LOSS_FLOOR, Expected, assert_close, close_to, expected
from tests.grpo_reference import GrpoReference
from tests.paths import BASE

LR, EPS, TEMPERATURE = 1e-3, 1e-5, 0.8  # a large eps, so that Adam does not amplify noise in near-zero gradients

Group = list[tuple[Sample, float]]
"""The samples of one prompt with their rewards."""

TokenScores = Mapping[str, Mapping[str, torch.Tensor]]
"""TokenBatch field -> sample id -> one number per response token."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The reference's loss, gradient norm, gradients and weights after its last update."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class RankResult:
    """A rank's holder, with the gradients and metrics of its last update and the weights after it."""

    holder: Holder
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    metrics: dict[str, Metric]


def config_of(folder: Path, *overrides: str) -> Config:
    return load(
        BASE,
        [
            f"model.path={folder}",
            "model.dtype=float32",
            "data.source=arithmetic",
            f"actor.optimizer.lr={LR}",
            f"actor.optimizer.eps={EPS}",
            "actor.tokens_per_microbatch=128",
            "rollout.max_new_tokens=16",
            "rollout.context_length=64",
            f"rollout.temperature={TEMPERATURE}",
            "batch.prompts_per_step=3",
            "batch.prompts_per_update=3",
            "batch.samples_per_prompt=4",
            *overrides,
        ],
    )


def random_groups(seed: int, vocab: int = 100) -> list[Group]:
    """Return groups with lengths from 1 to the maximum (48 + 16), masks with holes, and one empty mask. Token ids are
    below `vocab`."""
    source = random.Random(seed)
    groups = []
    for i in range(3):
        prompt = Prompt(f"{i}", "", tuple(source.randrange(6, vocab) for _ in range(source.choice([1, 5, 48]))))
        group = []
        for k in range(4):
            n = [1, 16, 7, source.randrange(2, 16)][k]
            mask = tuple(source.random() < 0.8 for _ in range(n)) if k else (True,)
            mask = (False,) * n if (i, k) == (1, 2) else mask
            # Exclude the padding token, for whose embedding transformers computes no gradient.
            ids = tuple(source.randrange(1, vocab) for _ in range(n))
            sample = Sample(f"{i}.{k}", prompt, ids, (-1.0,) * n, mask, (VersionRun(0, n),), "stop", "")
            group.append((sample, source.choice([0.0, 0.5, 1.0]) if k else 1.0 + i))
        groups.append(group)
    return groups


def in_environment(sample: Sample, source: random.Random) -> Sample:
    """Return the sample as a rollout whose turns, the runs of trained tokens, have random states and rewards."""
    num_turns = len(turn_ends(sample.response_mask))
    turns = tuple((number, source.randrange(3)) for number in range(num_turns))
    rewards = tuple(source.choice([0.0, 0.25, -0.5]) for _ in turns)
    info = RolloutInfo("done", num_turns, 1, {}, 0, 0)
    episode = Episode(info, rewards, {}, None, (), first_turn=0, is_last=True, turns=turns)
    return dataclasses.replace(sample, episode=episode)


def labelled(groups: list[Group]) -> list[Group]:
    """Return the same samples with a label for each token."""
    return [
        [(dataclasses.replace(sample, labels=[0.25] * len(sample.response_ids)), reward) for sample, reward in group]
        for group in groups
    ]


def branching_group(seed: int, vocab: int = 100) -> Group:
    """Return a group whose samples extend each other or branch off, as the turns of a rollout do.

    Observed tokens, which the policy did not sample, lie between turns. One sample is a prefix of another, and one
    shares only a few tokens. Token ids are below `vocab`.
    """
    source = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(6, vocab) for _ in range(count))

    prompt, first, observed, second = Prompt(f"branching {seed}", "", ids(5)), ids(18), ids(4), ids(12)
    responses = [
        first,
        first + observed + second,
        first + observed + second + ids(9),
        first + observed + ids(3),
        first[:17] + ids(6),
        first[:3] + ids(8),
    ]
    group = []
    for k, response in enumerate(responses):
        mask = tuple(not len(first) <= i < len(first) + len(observed) for i in range(len(response)))
        runs, logprobs = (VersionRun(0, len(response)),), (-1.0,) * len(response)
        sample = Sample(f"{prompt.id}.{k}", prompt, response, logprobs, mask, runs, "stop", "")
        group.append((sample, float(k % 3)))
    return group


def rank_batches(
    config: Config,
    packing: Packing,
    groups: list[Group],
    role: Role = "actor",
    scores: TokenScores | None = None,
    greedy: Mapping[str, float] | None = None,
    average: float = 0.0,
) -> list[RankBatch]:
    """Dispatch groups to ranks. The batches contain the samples themselves in place of object references.

    Args:
        scores: per-token scores, of which token and KL rewards enter the baselines.
        greedy: reward of each prompt's greedy response, by prompt id.
        average: mean reward of earlier steps.
    """
    token_reward_totals, kl_reward_totals = (
        amounts(groups, (scores or {}).get(name, {})) for name in ("implicit_reward", "kl_reward")
    )
    scored = [
        [
            replace(
                SampleRef.of(s, s),
                outcome=reward,
                turn_rewards=() if s.episode is None else s.episode.rewards,
                greedy=(greedy or {}).get(s.prompt.id, 0.0),
            )
            for s, reward in group
        ]
        for group in groups
    ]
    totals = token_reward_totals, kl_reward_totals
    over_step = step_normalization(config, scored, *totals)
    samples = attach_baselines(config, scored, *totals, MovingAverage(average, 1.0), over_step)
    return dispatch(config, samples, packing, role, scores)


def amounts(groups: list[Group], scores: Mapping[str, torch.Tensor]) -> dict[str, TokenTotals]:
    """Return the totals of the scores over each sample's trained tokens, by sample id."""
    members = [sample for group in groups for sample, _ in group if sample.id in scores]
    return {s.id: TokenTotals.of(scores[s.id][torch.tensor(s.response_mask)].tolist()) for s in members}


def train(
    store,
    rank: int,
    config: Config,
    folder: Path,
    updates: list[list[Group]],
    given: TokenScores | None = None,
    **packing,
) -> RankResult:
    """Run the updates on one rank. Return the rank's result.

    Args:
        given: per-token scores from other models.
        packing: overrides of the layout's Packing.
    """
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.packing = dataclasses.replace(worker.packing, **packing)
    for groups in updates:
        batch = own_batch(config, worker, groups, given)
        if config.algorithm.kl.coefficient:
            worker.keep_log_probs("reference", batch)
        if config.kl_in_reward:
            worker.keep_log_probs("old", batch)
            rank_scores: list = [None] * config.actor.layout.world_size
            dist.all_gather_object(rank_scores, worker.score_tokens(batch))
            kl = {name: values for scores in rank_scores for name, values in scores.items()}
            batch = own_batch(config, worker, groups, (given or {}) | {"kl_reward": kl})
        gradients = capture_gradients(worker)
        metrics = worker.update(batch)
        worker.end_step()
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    return RankResult(worker.holder, gradients, weights, metrics)


def own_batch(config: Config, worker: ActorWorker, groups: list[Group], scores: TokenScores | None) -> LocalBatch:
    return local_batch(rank_batches(config, worker.packing, groups, scores=scores)[worker.data_parallel_rank])


def local_batch(rank_batch: RankBatch) -> LocalBatch:
    """Return a rank's LocalBatch from a rank batch that contains the samples themselves."""
    return LocalBatch(rank_batch.samples, rank_batch.microbatches)


def capture_gradients(worker: ActorWorker) -> dict[str, torch.Tensor]:
    """Return a dictionary that receives the reduced gradients when the optimizer steps."""
    captured: dict[str, torch.Tensor] = {}
    inner = worker.optimizer.step

    def step_and_copy():
        captured.update(reduced_gradients(worker.chunks))
        worker.optimizer.step = inner
        return inner()

    worker.optimizer.step = step_and_copy
    return captured


def reduced_gradients(chunks: Sequence[DistributedDataParallel]) -> dict[str, torch.Tensor]:
    """Return the reduced gradients by parameter name, zeros for frozen parameters."""
    for buffer in [b for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]:
        for bucket in buffer.buckets:  # after the reduce-scatter each rank holds one shard of the bucket
            shards = bucket.grad_data.chunk(dist.get_world_size(buffer.data_parallel_group))
            shard = shards[dist.get_rank(buffer.data_parallel_group)].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=buffer.data_parallel_group)
    trained = {name: p for name, p in named_parameters(chunks).items() if p.requires_grad}
    zeros = {name: torch.zeros_like(weight) for name, weight in named_weights(chunks).items()}
    return zeros | {name: p.main_grad.clone() for name, p in trained.items()}


def canonical(folder: Path, ranks: Sequence[RankResult], what: str) -> dict[str, torch.Tensor]:
    """Return the "gradients" or "weights" of all ranks as whole tensors under their Hugging Face names."""
    return whole_tensors(read_config(folder), ranks, what)


def whole_tensors(hf_config: Mapping[str, Any], ranks: Sequence[RankResult], what: str) -> dict[str, torch.Tensor]:
    target = huggingface_holder(hf_config)
    plan = make_plan([rank.holder for rank in ranks], [target])
    whole = {name: torch.full(shape, torch.nan) for name, shape in target.shapes.items()}
    transport = LocalMemory({rank.holder.name: getattr(rank, what) for rank in ranks})
    execute(plan.into(target.name), whole, transport)
    return whole


def assert_same_training(folder: Path, ranks: Sequence[RankResult], reference: Expected[Outcome]) -> None:
    """Compare the ranks' loss, gradient norm, gradients and weights with the reference's."""
    exact, plain = reference
    reported = [rank.metrics for rank in ranks if rank.metrics]
    loss = sum(metrics["policy/loss"].value for metrics in reported)
    assert loss == close_to(exact.loss, plain.loss, LOSS_FLOOR)
    assert reported[0]["policy/grad_norm"].value == close_to(exact.norm, plain.norm)
    assert_close(canonical(folder, ranks, "gradients"), exact.gradients, plain.gradients, "gradient")
    assert_close(canonical(folder, ranks, "weights"), exact.weights, plain.weights, "weight")


def plain_training(folder: Path, updates: list[list[Group]], kl_coefficient: float) -> Expected[Outcome]:
    """Run the same updates in plain Hugging Face and torch."""

    def trained() -> Outcome:
        reference = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
        return plain_outcome(reference, updates, kl_coefficient)

    return expected(trained)


def plain_outcome(reference: GrpoReference, updates: list[list[Group]], kl_coefficient: float) -> Outcome:
    for groups in updates:
        loss, gradients, norm = reference.update(groups, kl_coefficient, clip_norm=1.0)
    weights = reference.model.state_dict()
    # Separate the experts as in a checkpoint, because transformers stacks them.
    gradients, weights = (
        separate_experts(revert_weight_conversion(reference.model, tensors)) for tensors in (gradients, weights)
    )
    return Outcome(loss, norm, gradients, weights)


def separate_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with gpt-oss's stacks, [experts, columns, rows], as separate experts with [rows, columns]."""
    found = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\w+?_proj)(_bias)?", name)
        kind = "bias" if match and match[3] else "weight"
        parts = {f"{match[1]}.{i}.{match[2]}.{kind}": part.t() for i, part in enumerate(tensor)} if match else {}
        found |= parts or {name: tensor}
    return found
