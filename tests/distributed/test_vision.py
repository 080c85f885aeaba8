"""Vision-language models in Megatron against transformers: loss, gradients and weights of a GRPO update, and log-probs.

Prompts have no, one or two images. One response contains the placeholder token, which is an ordinary token there.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from megarl.config.schema import Config
from megarl.core.completion import VersionRun
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.data.images import ImageProcessor
from megarl.megatron.model.inputs import ModelInput
from megarl.megatron.model.vision import vision_tower
from megarl.megatron.routes import model_of
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.models.vision import add_vision
from tests import tiny_vision
from tests.closeness import FACTOR, LOSS_FLOOR, Expected, assert_close, close_to, expected
from tests.forked import run_ranks
from tests.grpo_reference import GrpoReference
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    Group,
    Outcome,
    RankResult,
    config_of,
    local_batch,
    rank_batches,
    train,
    whole_tensors,
)

UNUSED_ID = 300
"""An id without a token, which stands for placeholders in the reference: transformers compares ids."""

IMAGE_SIZES = [[(56, 40)], [], [(30, 70), (64, 64)], [(64, 32)]]
"""Width and height of each prompt's images, in pixels."""


def image_file(size: tuple[int, int], source: np.random.Generator) -> bytes:
    """Return a PNG file with random pixels."""
    file = io.BytesIO()
    Image.fromarray(source.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(file, "png")
    return file.getvalue()


def groups_of(folder: Path, sizes: list[list[tuple[int, int]]] = IMAGE_SIZES) -> list[Group]:
    source, pixels, processor = random.Random(0), np.random.default_rng(0), ImageProcessor.of(folder)
    groups = []
    for i, image_sizes in enumerate(sizes):
        ids, images = random_ids(source, 3 + i), []
        for k, size in enumerate(image_sizes):
            grid = processor.grid(*size)
            ids.append(tiny_vision.IDS["<|vision_start|>"])
            count = processor.num_tokens(grid)
            images.append(PromptImage(len(ids), count, grid, f"{i}.{k}", image_file(size, pixels)))
            ids += [tiny_vision.IMAGE_ID] * count + [tiny_vision.IDS["<|vision_end|>"]]
        ids += random_ids(source, 2)
        prompt = Prompt(f"{i}", "", tuple(ids), images=tuple(images))
        groups.append([(sample_of(prompt, k, source), source.choice([0.0, 0.5]) if k else 1.0 + i) for k in range(4)])
    return groups


def random_ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1, tiny_vision.NUM_BYTES) for _ in range(count)]


def sample_of(prompt: Prompt, number: int, source: random.Random) -> Sample:
    ids = random_ids(source, [1, 16, 7, 9][number])
    if number == 2:
        ids[3] = tiny_vision.IMAGE_ID
    mask = tuple(source.random() < 0.8 for _ in ids) if number else (True,)
    n = len(ids)
    return Sample(f"{prompt.id}.{number}", prompt, tuple(ids), (-1.0,) * n, mask, (VersionRun(0, n),), "stop", "")


class VisionReference(GrpoReference):
    """GrpoReference for prompts with images."""

    def __init__(self, folder: Path):
        super().__init__(folder, LR, EPS, TEMPERATURE, AutoModelForImageTextToText)
        self._processor = ImageProcessor.of(folder)
        for model in (self.model, self.start):
            model.config.image_token_id = UNUSED_ID

    def logits(self, model: torch.nn.Module, sample: Sample) -> torch.Tensor:
        ids, types = torch.tensor(sample.token_ids[None]).long(), torch.zeros(1, len(sample.token_ids)).int()
        images = sample.images
        inputs: dict[str, Any] = {}
        for image in images:
            ids[0, image.start : image.stop] = UNUSED_ID
            types[0, image.start : image.stop] = 1
        if images:
            pixels = torch.from_numpy(self._processor.patches([image.file for image in images]))
            grids = torch.tensor([image.grid for image in images])
            inputs = dict(pixel_values=pixels.to(torch.get_default_dtype()), image_grid_thw=grids)
        logits = model(ids, mm_token_type_ids=types, **inputs).logits
        return logits[0, len(sample.prompt.token_ids) - 1 : -1] / self.temperature

    def outcome(self, updates: list[list[Group]], frozen: str | None = None) -> Outcome:
        """Run the updates. `frozen`: prefix of the names of frozen parameters."""
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(frozen is None or not name.startswith(frozen))
        for groups in updates:
            self.optimizer.zero_grad()
            loss = self.loss(groups, 0.0, {})
            loss.backward()
            gradients = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                for name, p in self.model.named_parameters()
            }
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        weights = dict(self.model.named_parameters())
        return Outcome(
            float(loss.detach()), float(norm), tiny_vision.canonical(gradients), tiny_vision.canonical(weights)
        )


class Case(NamedTuple):
    """A model, its samples and the reference's result."""

    folder: Path
    groups: list[Group]
    reference: Expected[Outcome]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory) -> Callable[..., Case]:
    """Return a function that returns a Case, given the family, the prefix of frozen parameters and the number of the
    text model's layers. It computes each reference once."""

    @cache
    def made(kind: tiny_vision.Kind, frozen: str | None = None, num_layers: int = 4) -> Case:
        folder = tiny_vision.build(tmp_path_factory.mktemp(kind) / "model", kind, num_hidden_layers=num_layers)
        groups = groups_of(folder)
        return Case(folder, groups, expected(lambda: VisionReference(folder).outcome([groups, groups], frozen)))

    return made


def config_with_vision(folder: Path, *overrides: str) -> Config:
    return config_of(
        folder,
        "model.vision=true",
        "batch={prompts_per_step: 4, prompts_per_update: 4}",
        "actor.tokens_per_microbatch=72",
        *overrides,
    )


def assert_trains_like(case: Case, *overrides: str) -> None:
    """Run two updates in Megatron, and compare the second with the reference's."""
    config = config_with_vision(case.folder, *overrides)
    ranks = run_ranks(config.actor.layout.world_size, train, config, case.folder, [case.groups, case.groups])
    assert_same_outcome(case.folder, ranks, case.reference)


def assert_same_outcome(folder: Path, ranks: Sequence[RankResult], reference: Expected[Outcome]) -> None:
    exact, plain = reference
    reported = [rank.metrics for rank in ranks if rank.metrics]
    loss = sum(metrics["policy/loss"].value for metrics in reported)
    assert loss == close_to(exact.loss, plain.loss, LOSS_FLOOR)
    assert reported[0]["policy/grad_norm"].value == close_to(exact.norm, plain.norm)
    hf_config = add_vision(read_config(folder))
    for what in ("gradients", "weights"):
        actual = whole_tensors(hf_config, ranks, what)
        assert actual.keys() == getattr(exact, what).keys()
        assert_close(actual, getattr(exact, what), getattr(plain, what), what)


SP = "tp: 2, sequence_parallel: true"
CASES = {
    "qwen2_5_vl": "",
    "qwen3_vl": "",
    "qwen3_vl_moe": "",
    "qwen3_5": "",
    "qwen2_5_vl: TP2": "tp: 2",
    "qwen2_5_vl: TP2, SP": SP,
    "qwen2_5_vl: PP2": "pp: 2",
    "qwen2_5_vl: PP2, VPP2": "pp: 2, vpp: 2",
    "qwen2_5_vl: CP2": "cp: 2",
    "qwen2_5_vl: DP2": "dp: 2",
    "qwen3_vl: TP2": "tp: 2",
    "qwen3_vl: TP2, SP": SP,
    "qwen3_vl: PP2": "pp: 2",
    "qwen3_vl: CP2": "cp: 2",
    "qwen3_vl: DP2": "dp: 2",
    "qwen3_vl: CP2, TP2, SP": f"cp: 2, {SP}",
    "qwen3_vl: PP2, DP2": "pp: 2, dp: 2",
    "qwen3_vl_moe: EP2": "dp: 2, ep: 2",
    "qwen3_vl_moe: EP2, TP2, SP, ETP1": f"{SP}, ep: 2, etp: 1",
    "qwen3_vl_moe: EP2, PP2": "pp: 2, dp: 2, ep: 2",
    "qwen3_5: TP2, SP": SP,
    "qwen3_5: PP2": "pp: 2",
    "qwen3_5: PP2, VPP2": "pp: 2, vpp: 2",
    "qwen3_5: CP2": "cp: 2",
    "qwen3_5: DP2": "dp: 2",
    "qwen3_5_moe: EP2": "dp: 2, ep: 2",
}
"""Family and name of a layout -> layout. Deepstack layers must be in the first chunk, which excludes VPP2 with four
layers; see `test_deepstack_in_virtual_stages`. Gradient reduction overlaps with the backward pass, so ranks and
microbatches without images must still produce gradients for the tower."""


@pytest.mark.parametrize(
    "name",
    exhaustive_but(
        CASES,
        *("qwen2_5_vl: PP2, VPP2", "qwen2_5_vl: DP2", "qwen3_vl: TP2, SP"),
        *("qwen3_vl_moe: EP2", "qwen3_5: CP2"),
    ),
)
def test_training_matches_transformers(case_of, name):
    assert_trains_like(case_of(name.partition(":")[0]), f"actor.layout={{{CASES[name]}}}")


OPTIONS = {
    "qwen2_5_vl: late reduction": ("actor.layout={dp: 2}", "actor.overlap_communication=false"),
    "qwen3_vl: recomputed": ("actor.layout={pp: 2}", "actor.recompute=full"),
    "qwen3_vl: recomputed in sequence": (f"actor.layout={{{SP}}}", "actor.recompute=full"),
    "qwen2_5_vl: recomputed": ("actor.recompute=full",),
    "qwen3_vl_moe: recomputed partly": ("actor.recompute=selective",),
}


@pytest.mark.parametrize("name", exhaustive_but(OPTIONS, "qwen3_vl: recomputed"))
def test_options_do_not_change_training(case_of, name):
    assert_trains_like(case_of(name.partition(":")[0]), *OPTIONS[name])


def test_frozen_tower_keeps_its_weights(case_of):
    case = case_of("qwen3_vl", "model.visual.")
    assert_trains_like(case, "actor.frozen=[model.visual.*]", "actor.layout={dp: 2}", "actor.recompute=full")


def log_probs(store, rank: int, config: Config, folder: Path, groups: list[Group]) -> dict[str, torch.Tensor]:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    batch = local_batch(rank_batches(config, worker.packing, groups)[worker.data_parallel_rank])
    return {name: values[:, 0] for name, values in worker._forward(batch).items()}


def test_log_probs_match_transformers(case_of):
    assert_log_probs_match(case_of("qwen3_vl"), "actor.layout={cp: 2}")


def assert_log_probs_match(case: Case, *overrides: str) -> None:
    """Compare the log-probs of the last rank with the reference's."""
    folder, groups, _ = case
    config = config_with_vision(folder, *overrides)
    actual = run_ranks(config.actor.layout.world_size, log_probs, config, folder, groups)[-1]

    @torch.no_grad()
    def reference() -> dict[str, torch.Tensor]:
        plain = VisionReference(folder)
        return {sample.id: plain.log_probs(plain.model, sample) for group in groups for sample, _ in group}

    assert_close(actual, *expected(reference), "log-probs")


def test_deepstack_in_virtual_stages(case_of):
    """Both layers of the first of four chunks add features."""
    case, layout = case_of("qwen3_vl", num_layers=8), "actor.layout={pp: 2, vpp: 2}"
    assert_log_probs_match(case, layout)
    assert_trains_like(case, layout)


def prepare_on_meta(store, rank: int, config: Config, folder: Path, groups: list[Group]) -> list[int]:
    """Prepare the microbatches for a device whose values cannot be read. Return the number of patches in each."""
    worker, meta = ActorWorker(config, folder, rank, store, threads=1), torch.device("meta")
    tower = vision_tower(model_of(worker.chunks[0]))
    assert tower is not None
    batches = worker._collate(local_batch(rank_batches(config, worker.packing, groups)[worker.data_parallel_rank]))
    options = (config.actor.layout.sequence_parallel, False, None, False, False, tower, True)
    inputs = [ModelInput.of(batch.to(meta), *options) for batch in batches]
    assert all(item.images is not None and item.images.pixels.device == meta for item in inputs)
    return [len(item.images.pixels) for item in inputs if item.images is not None]


def test_inputs_are_prepared_without_reading_the_device(case_of):
    """Microbatches without images contain a dummy image of four patches, so that the tower receives a zero
    gradient."""
    folder, groups, _ = case_of("qwen3_vl")
    config = config_with_vision(folder, f"actor.layout={{{SP}}}")
    first, second = run_ranks(2, prepare_on_meta, config, folder, groups)
    assert first == second and min(first) == 4 < max(first)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_bfloat16_log_probs_are_as_exact_as_transformers(case_of, kind):
    folder, groups, _ = case_of(kind)
    config = config_with_vision(folder, "model.dtype=bfloat16")
    [actual] = run_ranks(1, log_probs, config, folder, groups)

    @torch.no_grad()
    def reference() -> torch.Tensor:
        samples, plain = {sample.id: sample for group in groups for sample, _ in group}, VisionReference(folder)
        return torch.cat([plain.log_probs(plain.model, samples[name]) for name in actual])

    exact, in_bfloat16 = expected(reference, torch.bfloat16)
    theirs, ours = (values - exact for values in (in_bfloat16, torch.cat([*actual.values()])))
    assert 0 < ours.norm() < FACTOR * theirs.norm()
