"""Updates of an image model against plain diffusers and torch, in every layout and packing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from megarl.algorithms.baselines import MovingAverage
from megarl.algorithms.transition import noised_steps, sigma_schedule
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.metrics import Metric
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.data.local_batch import LocalBatch
from megarl.megatron.workers.denoiser import DenoiserWorker
from megarl.models.denoiser import DenoiserShape
from megarl.step.baselines import attach_baselines
from megarl.step.dispatch import dispatch
from tests.closeness import LOSS_FLOOR, Expected, assert_close, close_to, expected
from tests.distributed.test_lora import AdapterResult, assert_same, take_steps
from tests.flow_grpo_reference import DiffusionNftReference, FlowGrpoReference, Groups
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import EPS, LR, Outcome, RankResult, canonical, capture_gradients, local_batch
from tests.paths import BASE
from tests.tiny_denoiser import MODELS, TinyDenoiser, write_denoiser_adapters

GUIDANCE, NOISE_LEVEL, CLIP, KL = 1.5, 0.6, 1e-4, 0.5
RANK, ALPHA = 3, 6
MIXTURE, ADVANTAGE_LIMIT = 0.4, 0.8
FLOW_GRPO = (
    f"algorithm.objective={{clip_low: {CLIP}, clip_high: {CLIP}}}",
    f"rollout.denoising.noise_level={NOISE_LEVEL}",
)
SIZE = (8, 12)
LAYOUTS = (
    *("dp=1", "tp=2", "tp=2 sequence_parallel=true", "pp=2", "pp=2 vpp=2", "cp=2", "dp=2"),
    "tp=2 pp=2 sequence_parallel=true",
)


def random_groups(shape: DenoiserShape = MODELS["Z-Image"].shape, is_noised: bool = False) -> Groups:
    """Return two prompts with three images each, whose captions have different lengths. `is_noised`: whether the
    trainer adds the noise, at three noise levels that differ between images."""
    random = np.random.Generator(np.random.Philox(3))
    sigmas, groups = np.array(sigma_schedule(6, 3.0)), []

    def caption(length: int) -> Conditioning:
        tokens = random.standard_normal((length, shape.caption), np.float32)
        return Conditioning(tokens, None if shape.pooled is None else random.standard_normal(shape.pooled, np.float32))

    empty, size = caption(4), (shape.channels, *SIZE)
    image = shape.padded(math.prod(SIZE) // shape.patch**2)
    for i, length in enumerate((7, 40)):
        embedding, group = caption(length), []
        for k in range(3):
            latents = random.standard_normal(size, np.float32) + np.cumsum(
                0.3 * random.standard_normal((4, *size), np.float32), 0
            )
            sample = LatentSample(
                id=f"1.{i}.{k}",
                prompt=Prompt(f"{i}", "", ()),
                sigmas=sigmas,
                steps=noised_steps(3, range(6), 0, f"1.{i}.{k}") if is_noised else [0, 1, 2],
                latents=latents[:0] if is_noised else latents,
                logprobs=[] if is_noised else [-1.0] * 3,
                final=latents[-1] if is_noised else None,
                versions=(VersionRun(0, 6),),
                embedding=embedding,
                empty_embedding=empty,
                num_tokens=2 * image + shape.padded(4) + shape.padded(length),
            )
            group.append((sample, float(random.standard_normal())))
        groups.append(group)
    return groups


def config_of(folder: Path, *overrides: str) -> Config:
    return load(
        BASE,
        [
            f"model.path={folder}",
            "model.dtype=float32",
            "data.source=captions.jsonl",
            f"actor.optimizer.lr={LR}",
            f"actor.optimizer.eps={EPS}",
            "rollout.engine=diffusers",
            f"rollout.denoising.guidance={GUIDANCE}",
            "rollout.denoising.num_steps=6",
            "actor.tokens_per_microbatch=600",
            f"algorithm.kl.coefficient={KL}",
            "batch.samples_per_prompt=3",
            "batch.prompts_per_step=2",
            "batch.prompts_per_update=1",
            *overrides,
        ],
    )


def train(store, rank: int, folder: Path, config: Config) -> RankResult:
    """Take one step with an update for each prompt on one rank."""
    worker = DenoiserWorker(config, folder, rank, store, threads=1)
    batches = own_batches(config, worker)
    for batch in batches:
        worker.keep_log_probs("old", batch)
        worker.keep_log_probs("reference", batch)
    metrics = worker.update(batches[0])
    gradients = capture_gradients(worker)
    metrics = worker.update(batches[1])
    worker.end_step()
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    return RankResult(worker.holder, gradients, weights, metrics)


def train_adapters(store, rank: int, folder: Path, config: Config) -> AdapterResult:
    """Take one step on one rank, with one update per prompt."""
    worker = DenoiserWorker(config, folder, rank, store, threads=1)
    return take_steps(worker, own_batches(config, worker))


def own_batches(config: Config, worker: DenoiserWorker) -> list[LocalBatch]:
    groups = random_groups(worker._shape, config.algorithm.objective.spec.adds_noise)
    return [own_batch(config, worker, group) for group in groups]


def own_batch(config: Config, worker: DenoiserWorker, group) -> LocalBatch:
    scored = [[replace(SampleRef.of(sample, sample), outcome=reward) for sample, reward in group]]
    samples = attach_baselines(config, scored, {}, {}, MovingAverage(0.0, 1.0))
    return local_batch(dispatch(config, samples, worker.packing)[worker.data_parallel_rank])


@pytest.fixture(scope="module")
def tiny(request) -> TinyDenoiser:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny) -> Path:
    return tiny.write(tmp_path_factory.mktemp("denoiser"))


@pytest.fixture(scope="module")
def reference(tiny, folder) -> Expected[Outcome]:
    def trained() -> Outcome:
        groups = random_groups(tiny.shape)
        model = FlowGrpoReference(tiny, folder, lr=LR, eps=EPS, guidance=GUIDANCE, noise_level=NOISE_LEVEL)
        old = model.old(groups)
        for group in groups:
            loss, gradients, norm = model.update([group], old, CLIP, KL)
        return Outcome(loss, norm, gradients, model.model.state_dict())

    return expected(trained)


@pytest.fixture(scope="module")
def nft_reference(tiny, folder) -> Expected[Outcome]:
    def trained() -> Outcome:
        groups = random_groups(tiny.shape, is_noised=True)
        model = DiffusionNftReference(tiny, folder, lr=LR, eps=EPS, guidance=GUIDANCE)
        old = model.old(groups)
        for group in groups:
            loss, gradients, norm = model.update([group], old, MIXTURE, ADVANTAGE_LIMIT, KL)
        return Outcome(loss, norm, gradients, model.model.state_dict())

    return expected(trained)


def in_layouts(*kept: tuple[str, str]) -> pytest.MarkDecorator:
    """Parametrize a test with all models and layouts. All pairs but `kept` are exhaustive cases."""
    cases = exhaustive_but(product(MODELS, LAYOUTS), *kept)
    return pytest.mark.parametrize(("tiny", "layout"), cases, indirect=["tiny"])


def in_layout(folder: Path, layout: str, *overrides: str) -> Config:
    items = [f"actor.layout.{item}" for item in layout.split()]
    if "dp=2" in layout:  # one denoising step per microbatch, so a rank with fewer steps has an empty microbatch
        items.append("actor.tokens_per_microbatch=300")
    return config_of(folder, *overrides, *items)


def trained_in(folder: Path, layout: str, outcome: Expected[Outcome], *overrides: str) -> list[dict[str, Metric]]:
    """Train in a layout, compare with the reference, and return the ranks' metrics."""
    exact, plain = outcome
    config = in_layout(folder, layout, *overrides)
    ranks = run_ranks(config.actor.layout.world_size, train, folder, config)
    reported = [rank.metrics for rank in ranks if rank.metrics]
    loss = sum(metrics["policy/loss"].value for metrics in reported)
    assert loss == close_to(exact.loss, plain.loss, LOSS_FLOOR)
    assert reported[0]["policy/grad_norm"].value == close_to(exact.norm, plain.norm)
    assert_close(canonical(folder, ranks, "gradients"), exact.gradients, plain.gradients, "gradient")
    assert_close(canonical(folder, ranks, "weights"), exact.weights, plain.weights, "weight")
    return reported


@in_layouts(("Z-Image", "pp=2 vpp=2"), ("SD3.5", "tp=2 sequence_parallel=true"))
def test_updates_match_plain_torch(folder, reference, layout):
    reported = trained_in(folder, layout, reference, *FLOW_GRPO)
    assert any(metrics["policy/clip_low_frac"].value + metrics["policy/clip_high_frac"].value for metrics in reported)


@in_layouts(("SD3.5", "dp=2"))
def test_diffusion_nft_matches_plain_torch(folder, nft_reference, layout):
    options = f"name: diffusion_nft, mixture: {MIXTURE}, advantage_limit: {ADVANTAGE_LIMIT}"
    reported = trained_in(folder, layout, nft_reference, f"algorithm.objective={{{options}}}")
    assert all(metrics["policy/velocity_change"].value > 0 for metrics in reported)


@pytest.fixture(scope="module")
def z_image(tmp_path_factory) -> Path:
    return MODELS["Z-Image"].write(tmp_path_factory.mktemp("denoiser"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, z_image) -> Path:
    return write_denoiser_adapters(tmp_path_factory.mktemp("adapters"), z_image, RANK, ALPHA)


@pytest.fixture(scope="module")
def adapter_reference(z_image, adapters):
    def trained():
        keys = dict(lr=LR, eps=EPS, guidance=GUIDANCE, noise_level=NOISE_LEVEL)
        model = FlowGrpoReference(MODELS["Z-Image"], z_image, **keys, adapters=adapters)
        for group in random_groups():
            loss, gradients, norm = model.update([group], model.old([group]), CLIP, KL)
        factors = {name: p.detach().clone() for name, p in model.trained.items()}
        return loss, norm, gradients, factors, model.model.merge_and_unload().state_dict()

    return expected(trained)


@pytest.mark.parametrize("layout", exhaustive_but(LAYOUTS, "cp=2"))
def test_adapter_updates_match_peft(z_image, adapters, adapter_reference, layout):
    """The KL's reference is the model without adapters."""
    lora = f"actor.lora={{rank: {RANK}, alpha: {ALPHA}, path: {adapters}}}"
    config = in_layout(z_image, layout, *FLOW_GRPO, lora)
    ranks = run_ranks(config.actor.layout.world_size, train_adapters, z_image, config)
    assert_same(z_image, ranks, adapter_reference)
