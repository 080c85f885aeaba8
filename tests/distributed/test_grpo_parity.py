"""GRPO through Megatron in several layouts against plain Hugging Face and torch: loss, gradients, updated weights."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.groups import group_statistics
from megarl.batch import Prompt, Sample, SampleInfo, VersionRun
from megarl.cluster.engine_group import RemoteSample
from megarl.cluster.trainer_group import Share
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.data.model_folder import read_config
from megarl.data.packing import Packing
from megarl.megatron.model import named_parameters
from megarl.megatron.worker import TrainerWorker
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder
from megarl.resharding.plan import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.train import ScoredSample, share_out
from tests.closeness import relative_error
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.tiny_model import write_tiny_llama

BASE = Path(__file__).parents[2] / "configs" / "base.yaml"
TOLERANCE = 1e-5
LAYOUTS = {
    "1 process": [],
    "PP2": ["actor.layout.pp=2"],
    "PP2, uneven": ["actor.layout.pp=2", "actor.layout.last_stage_layers=1"],
    "TP3": ["actor.layout.tp=3"],
    "TP3, sequence parallel": ["actor.layout.tp=3", "actor.layout.sequence_parallel=true"],
    "DP2": ["actor.layout.dp=2"],
    "PP2, DP2": ["actor.layout.pp=2", "actor.layout.dp=2"],
    "PP2, VPP2": ["actor.layout.pp=2", "actor.layout.vpp=2"],
    "CP2": ["actor.layout.cp=2"],
    "CP2, TP3, sequence parallel": [
        "actor.layout.cp=2",
        "actor.layout.tp=3",
        "actor.layout.sequence_parallel=true",
    ],
    "CP2, PP2, VPP2": ["actor.layout.cp=2", "actor.layout.pp=2", "actor.layout.vpp=2"],
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory) -> Path:
    """3 heads and 3 KV heads, so that tensor parallelism of 3 divides them, and 3 layers for an uneven pipeline."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model"),
        num_heads=3,
        num_kv_heads=3,
        hidden_size=96,
        num_layers=4,
        intermediate_size=96,
        tied=request.param == "tied",
    )


def config_of(folder: Path, *overrides: str) -> Config:
    return load(
        BASE,
        [
            f"model.path={folder}",
            "model.dtype=float32",
            "data.source=arithmetic",
            "actor.optimizer.lr=1e-3",
            "actor.optimizer.eps=1e-5",  # near-zero gradients do not amplify noise
            "actor.tokens_per_microbatch=64",
            "rollout.max_new_tokens=16",
            "rollout.context_length=64",
            "rollout.temperature=0.8",
            "batch.prompts_per_step=3",
            "batch.prompts_per_update=3",
            "batch.samples_per_prompt=4",
            *overrides,
        ],
    )


def random_groups(seed: int) -> list[list[tuple[Sample, float]]]:
    """Lengths from 1 to the longest, masks with holes and an empty one."""
    source = random.Random(seed)
    groups = []
    for i in range(3):
        prompt = Prompt(f"{i}", "", tuple(source.randrange(6, 100) for _ in range(source.choice([1, 5, 23]))))
        group = []
        for k in range(4):
            n = [1, 16, 7, source.randrange(2, 16)][k]
            mask = tuple(source.random() < 0.8 for _ in range(n)) if k else (True,)
            mask = (False,) * n if (i, k) == (1, 2) else mask
            # Not the padding token: transformers gives its embedding no gradient.
            ids = tuple(source.randrange(1, 100) for _ in range(n))
            sample = Sample(f"{i}.{k}", prompt, ids, (-1.0,) * n, mask, (VersionRun(0, n),), "stop", "")
            group.append((sample, source.choice([0.0, 0.5, 1.0]) if k else 1.0 + i))
        groups.append(group)
    return groups


def shares(config: Config, packing: Packing, groups: list[list[tuple[Sample, float]]]) -> list[Share]:
    scored = []
    for group in groups:
        statistics = group_statistics([reward for _, reward in group], config.algorithm.advantage.std)
        scored += [ScoredSample(RemoteSample(SampleInfo.of(s), s), reward, statistics) for s, reward in group]
    return share_out(config, scored, packing)


def train(store, rank: int, config: Config, folder: Path, updates: list, old_pass: bool = False) -> tuple:
    """On one rank: the updates. Returns what it holds, its last gradients, its weights, its last metrics."""
    worker = TrainerWorker(config, folder, rank, store, threads=1)
    for groups in updates:
        share = shares(config, worker.packing, groups)[worker.data_parallel_rank]
        samples = [item.training_sample(item.sample) for item in share.samples]
        if config.algorithm.kl.coefficient:
            worker.score("reference", samples, share.microbatches)
        if old_pass:
            worker.score("old", samples, share.microbatches)
        gradients = capture_gradients(worker)
        metrics = worker.update(samples, share.microbatches)
        worker.end_step()
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    return worker.holder, gradients, weights, metrics


def capture_gradients(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """Fills a dictionary with the reduced gradients when the optimizer is about to step."""
    captured: dict[str, torch.Tensor] = {}
    inner = worker.optimizer.step

    def step_and_copy():
        for buffer in (buffer for chunk in worker.chunks for buffer in chunk.buffers):
            for bucket in buffer.buckets:  # after the reduce-scatter each rank has its own shard of the bucket
                shards = bucket.grad_data.chunk(dist.get_world_size(buffer.data_parallel_group))
                mine = shards[dist.get_rank(buffer.data_parallel_group)].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=buffer.data_parallel_group)
        captured.update((name, p.main_grad.clone()) for name, p in named_parameters(worker.chunks).items())
        worker.optimizer.step = inner
        return inner()

    worker.optimizer.step = step_and_copy
    return captured


def canonical(folder: Path, ranks: list[tuple], which: int) -> dict[str, torch.Tensor]:
    """Whole tensors under their Hugging Face names, from the shards of all ranks."""
    target = huggingface_holder(read_config(folder))
    plan = make_plan([rank[0] for rank in ranks], [target])
    whole = {name: torch.full(shape, torch.nan) for name, shape in target.shapes.items()}
    transport = LocalMemory({rank[0].name: rank[which] for rank in ranks})
    execute(plan.for_destination(target.name), whole, transport)
    return whole


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], what: str) -> None:
    missing = set(theirs) - set(ours) - {"lm_head.weight"}
    assert not missing, missing
    worst = {name: relative_error(ours[name], theirs[name].detach()) for name in ours}
    name = max(worst, key=worst.get)
    assert worst[name] <= TOLERANCE, f"{what} of {name}: {worst[name]:.2e}"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kl_coefficient", [0.0, 0.05])
def test_step_equals_plain_torch(folder, layout, kl_coefficient):
    config = config_of(folder, f"algorithm.kl.coefficient={kl_coefficient}", *LAYOUTS[layout])
    updates = [random_groups(seed) for seed in range(2)]
    ranks = run_ranks(config.actor.layout.world_size, train, config, folder, updates)

    reference = GrpoReference(folder, lr=1e-3, eps=1e-5, temperature=0.8)
    for groups in updates:
        loss, gradients, norm = reference.update(groups, kl_coefficient, clip_norm=1.0)

    reported = [metrics for *_, metrics in ranks if metrics]
    assert len(reported) == config.actor.layout.dp * config.actor.layout.cp
    ours = sum(metrics["policy/loss"].value for metrics in reported)
    assert ours == pytest.approx(loss, rel=TOLERANCE, abs=1e-7)
    assert reported[0]["policy/grad_norm"].value == pytest.approx(norm, rel=TOLERANCE)
    assert_equal(canonical(folder, ranks, 1), gradients, "gradient")
    assert_equal(canonical(folder, ranks, 2), dict(reference.model.named_parameters()), "weight")


def test_leaving_out_the_old_pass_changes_nothing(folder):
    """With one update per step the old policy is the current one."""
    config = config_of(folder)
    updates = [random_groups(0)]
    [(_, _, without, _)] = run_ranks(1, train, config, folder, updates)
    [(_, _, with_pass, _)] = run_ranks(1, train, config, folder, updates, True)
    assert all(torch.equal(without[name], with_pass[name]) for name in without)
