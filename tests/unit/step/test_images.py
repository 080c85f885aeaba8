"""Denoising steps between the engine and the trainer: requests, dispatch, microbatches and metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megarl.algorithms.transition import sigma_schedule
from megarl.cluster.rank_batch import RankBatch
from megarl.config.load import load
from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.latents import Conditioning, LatentSample
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.core.score import Baseline
from megarl.core.timing import Stopwatch
from megarl.data.collate_steps import collate_noised_steps, collate_steps
from megarl.data.noise import standard_normal
from megarl.data.packing import Packing
from megarl.models.token_cost import TokenCost
from megarl.step.dispatch import dispatch
from megarl.step.metrics import step_metrics
from megarl.step.requests import requests
from tests.closeness import assert_matches
from tests.paths import BASE

KEYS = ("model.path=m", "data.source=rows.jsonl", "rollout.engine=diffusers")
CONFIG = load(BASE, [*KEYS, "rollout.denoising={num_steps: 6, sde_steps: 2, guidance: 2.5}"])
NFT = load(BASE, [*KEYS, "rollout.denoising={num_steps: 6, sde_steps: 2}", "algorithm.objective={name: diffusion_nft}"])
PROMPTS = [Prompt(str(number), f"{number} cats", ()) for number in range(3)]


def packing(token_budget: int, num_ranks: int = 1) -> Packing:
    return Packing(token_budget, num_ranks, False, 1, 1, 1, TokenCost(1e-4, 0.0))


def image(name: str, steps: range = range(1, 3), num_tokens: int = 128) -> LatentSample:
    random = np.random.Generator(np.random.Philox(len(name)))
    return LatentSample(
        id=name,
        prompt=PROMPTS[0],
        sigmas=np.array(sigma_schedule(6, 3.0)),
        steps=np.array(steps),
        latents=random.standard_normal((len(steps) + 1, 2, 4, 6)),
        logprobs=random.standard_normal(len(steps)),
        versions=(VersionRun(4, 6),),
        embedding=Conditioning(random.standard_normal((5, 3)), random.standard_normal(4)),
        empty_embedding=Conditioning(np.ones((2, 3)), np.zeros(4)),
        num_tokens=num_tokens,
    )


def noised(name: str, steps: list[int]) -> LatentSample:
    """Return an image to which the trainer adds the noise."""
    sampled = image(name)
    return replace(sampled, steps=np.array(steps), latents=sampled.latents[:0], logprobs=[], final=sampled.latents[-1])


def ref(sample: LatentSample, **fields) -> SampleRef:
    return replace(SampleRef.of(sample, sample), **fields)


def test_requests_of_a_step_share_their_window():
    groups = requests(CONFIG, 3, PROMPTS, [2, 3, 4])
    assert [[request.sample_id for request in group] for group in groups] == [
        [f"3.{i}.{k}" for k in range(CONFIG.batch.samples_per_prompt)] for i in (2, 3, 4)
    ]
    every = [request for group in groups for request in group]
    assert {request.denoising.sde_steps for request in every} == {CONFIG.rollout.denoising.sde_window(0, 3)}
    assert len({request.seed for request in every}) == len(every)
    assert all(request.returns_image and request.denoising.guidance == 2.5 for request in every)
    later = {requests(CONFIG, step, PROMPTS)[0][0].denoising.sde_steps for step in range(1, 30)}
    assert later == {range(2), range(1, 3)}


def test_noised_requests_follow_the_ode_and_draw_their_noise_levels():
    groups = requests(NFT, 3, PROMPTS)
    every = [request for group in groups for request in group]
    assert all(request.returns_final and request.returns_image for request in every)
    assert {request.denoising.sde_steps for request in every} == {range(0)}
    drawn = {request.sample_id: request.noised_steps for request in every}
    assert {len({*steps}) for steps in drawn.values()} == {2}
    assert {step for steps in drawn.values() for step in steps} == {*range(6)}
    assert len({*drawn.values()}) > 1
    assert [[request.seed for request in group] for group in groups] == [
        [request.seed for request in group] for group in requests(CONFIG, 3, PROMPTS)
    ]


def test_denoising_steps_are_packed_separately():
    """Each image has two steps of 128 tokens, and a microbatch holds three of them."""
    samples = [ref(image(name), outcome=float(number)) for number, name in enumerate(("1.0.0", "1.0.1", "1.1.0"))]
    [batch] = dispatch(CONFIG, samples, packing(400))
    assert sorted((item.id, item.step) for item in batch.samples) == [(s.id, step) for s in samples for step in (0, 1)]
    assert sorted(map(len, batch.microbatches)) == [3, 3]
    # The default aggregation is a mean over the steps of each image, then over the images.
    assert {item.weight for item in batch.samples} == {1 / 3 / 2}
    halves = dispatch(CONFIG, samples, packing(400, num_ranks=2))
    assert [len(half.samples) for half in halves] == [3, 3]
    with pytest.raises(UserError, match=r"^tokens_per_microbatch: .*has 128 tokens"):
        dispatch(CONFIG, samples, packing(100))


def test_microbatch_has_the_steps_of_its_images():
    first, second = image("1.0.0"), image("1.0.11", range(4))
    items = [
        ref(first, step=1, weight=0.25, scalar_reward=2.0, baseline=Baseline(0.5, 3.0)),
        ref(second, step=3, weight=0.5, is_stale=True),
        ref(second, step=0, weight=0.5, is_stale=True),
    ]
    batch = collate_steps(items, {0: 1.0, 2: 1.5, 3: 2.0})
    assert np.array_equal(batch.latents, np.stack([first.latents[1], second.latents[3], second.latents[0]]))
    assert np.array_equal(batch.next_latents, np.stack([first.latents[2], second.latents[4], second.latents[1]]))
    sigmas = first.sigmas
    assert batch.sigma.tolist() == [sigmas[2], sigmas[3], sigmas[0]]
    assert batch.sigma_next.tolist() == [sigmas[3], sigmas[4], sigmas[1]]
    assert batch.second_sigma.tolist() == [sigmas[1]] * 3
    assert batch.rollout_logprobs.tolist() == [first.logprobs[1], second.logprobs[3], second.logprobs[0]]
    assert batch.step_weight.tolist() == [1.5, 2.0, 1.0]
    assert batch.weight.tolist() == [0.25, 0.5, 0.5] and batch.stale.tolist() == [False, True, True]
    assert (batch.reward[0].item(), batch.baseline[0].item(), batch.scale[0].item()) == (2.0, 0.5, 3.0)
    for caption, expected in ((batch.captions[0], first.embedding), (batch.unconditional, first.empty_embedding)):
        assert caption.map(np.asarray) == expected


def test_noised_microbatch_adds_noise_to_the_final_latents():
    first, second = noised("1.0.0", [0, 3]), noised("1.0.11", [3, 5])
    items = [
        ref(first, step=1, weight=0.25, scalar_reward=2.0, baseline=Baseline(0.5, 3.0)),
        ref(second, step=0, weight=0.5),
        ref(second, step=1, weight=0.5),
    ]
    batch = collate_noised_steps(items, seed=7)
    sigma = first.sigmas[[3, 3, 5]]
    assert batch.sigma.tolist() == sigma.tolist() and not batch.sigma_next.any() and batch.step_weight is None
    assert np.array_equal(batch.next_latents, np.stack([first.final, second.final, second.final]))
    noise = [standard_normal(7, item.id, step, (2, 4, 6)) for item, step in ((first, 3), (second, 3), (second, 5))]
    assert len({row.numpy().tobytes() for row in noise}) == 3

    def interpolated() -> dict[str, torch.Tensor]:
        dtype = torch.get_default_dtype()
        scale = torch.tensor(sigma, dtype=dtype)[:, None, None, None]
        x0, x1 = batch.next_latents.to(dtype), torch.stack(noise).to(dtype)
        return {"latents": (1 - scale) * x0 + scale * x1}

    assert_matches({"latents": batch.latents}, interpolated, "latents")
    assert batch.rollout_logprobs.tolist() == [0.0] * 3 and batch.weight.tolist() == [0.25, 0.5, 0.5]
    assert (batch.reward[0].item(), batch.baseline[0].item(), batch.scale[0].item()) == (2.0, 0.5, 3.0)
    assert batch.captions[1].map(np.asarray) == second.embedding
    assert batch.unconditional.map(np.asarray) == second.empty_embedding


def test_noised_rows_do_not_depend_on_the_microbatch():
    items = [ref(noised(f"1.0.{k}", [1, 4]), step=step) for k in range(3) for step in (0, 1)]
    whole = collate_noised_steps(items, seed=7)
    for number, item in enumerate(items):
        assert np.array_equal(collate_noised_steps([item], seed=7).latents[0], whole.latents[number])
    assert not np.array_equal(collate_noised_steps(items, seed=8).latents, whole.latents)


@pytest.mark.parametrize("collate", [lambda: collate_steps([], {}), lambda: collate_noised_steps([], 7)])
def test_empty_microbatch_has_no_steps(collate):
    batch = collate()
    assert len(batch.row_sample) == len(batch.latents) == len(batch.captions) == 0 and batch.unconditional is None


def test_noised_images_are_dispatched_by_noise_level():
    [batch] = dispatch(NFT, [ref(noised(name, [1, 4])) for name in ("1.0.0", "1.0.1")], packing(400))
    assert sorted((item.id, item.step) for item in batch.samples) == [
        (f"1.0.{k}", step) for k in (0, 1) for step in (0, 1)
    ]
    assert {item.weight for item in batch.samples} == {1 / 2 / 2}


def test_batches_of_images_are_fetched_once_per_image():
    sample = image("1.0.0")
    [batch] = dispatch(CONFIG, [ref(sample)], packing(128))
    assert isinstance(batch, RankBatch) and {item.sample.id for item in batch.samples} == {sample.id}


def test_step_counts_images_instead_of_tokens():
    watch = Stopwatch()
    with watch.phase("rollout"):
        pass
    found = step_metrics(CONFIG, [[ref(image("1.0.0")), ref(image("1.0.1"))]], watch, 5)
    assert found["throughput/images_per_second"] == pytest.approx(2 / found["time/step"])
    assert not [name for name in found if name.startswith("response/") or "token" in name]
    assert found["weights/staleness_max"] == 0
