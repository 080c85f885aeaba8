"""Refits, sleep, versions and requests of the image engine."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from megarl.core.completion import VersionRun
from megarl.core.errors import UserError
from megarl.core.latents import LatentSample, VelocityInput, canaries
from megarl.models.folder import read_config
from megarl.resharding.families import diffusers_holders, huggingface_holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.resharding.verification import regions, source_checksums
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.rollout.diffusers.sampler import Document
from megarl.rollout.engine import SyncedEngine
from tests.closeness import assert_matches
from tests.tiny_denoiser import TinyDenoiser
from tests.unit.rollout.diffusers.test_sampler import WINDOW, generate, requests_for


@dataclass(frozen=True)
class LocalChannel:
    """Delivers sources in this process's memory."""

    sources: Mapping[str, Mapping[str, torch.Tensor]]

    def open(self, member, parameters, plan, in_place=True) -> LocalMemory:
        return LocalMemory(self.sources)


class Trainer:
    """A trainer stand-in with random weights, connected to an engine."""

    def __init__(self, folder, engine: DiffusersEngine):
        config = read_config(folder / "transformer")
        self.holder = huggingface_holder(config, "float32")
        self.weights = {name: torch.empty(shape) for name, shape in self.holder.shapes.items()}
        self._engine, [self._destination] = engine, diffusers_holders(config, 1, "float32")
        plan = make_plan([self.holder], [self._destination])
        channel = LocalChannel({self.holder.name: self.weights})
        engine.connect(CompactPlan.of(plan), channel, [self._destination], by_loader=False)

    def update(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for weight in self.weights.values():
            weight.normal_(std=0.1, generator=generator)

    def checksums(self):
        export = make_plan([self.holder], [replace(self.holder, name="export")])
        return source_checksums(regions([self._destination]), export, self.holder.name, self.weights)

    def refit(self, version: int) -> None:
        self.update(version)
        [stats] = self._engine.refit(version, self.checksums())
        assert stats.num_bytes == sum(weight.nbytes for weight in self.weights.values())


def inputs_of(tiny: TinyDenoiser) -> list[VelocityInput]:
    shape = tiny.shape
    return canaries(shape.channels, shape.caption, shape.patch, shape.pooled)


def saved(tiny: TinyDenoiser, folder, trainer: Trainer, path) -> DiffusersEngine:
    """Return a fresh engine from a folder with the trainer's weights."""
    model = tiny.model_class.from_config(tiny.config)
    model.load_state_dict(trainer.weights)
    for part in folder.iterdir():
        (path / part.name).symlink_to(part)
    (path / "transformer").unlink()
    model.save_pretrained(path / "transformer")
    fresh = DiffusersEngine(path, "float32", max_batch=4, loads_weights=True)
    fresh.hold(2)
    return fresh


def test_engine_describes_its_parameters_as_the_family(folder, engine):
    [holder] = diffusers_holders(read_config(folder / "transformer"), 1, "float32")
    [parameters] = engine.parameters()
    assert holder.shard.mismatched_params(parameters) == [] and engine.repacking() == []


def test_two_refits_equal_a_fresh_engine_bit_for_bit(tiny, folder, tmp_path):
    engine: SyncedEngine = DiffusersEngine(folder, "float32", max_batch=4)
    assert isinstance(engine, DiffusersEngine) and engine.version is None
    trainer = Trainer(folder, engine)
    with pytest.raises(RuntimeError, match="no weights yet"):
        generate(engine, requests_for(WINDOW))
    trainer.refit(1)
    generate(engine, requests_for(WINDOW))
    trainer.refit(2)
    fresh = saved(tiny, folder, trainer, tmp_path)
    assert engine.checksums() == fresh.checksums()
    assert generate(engine, requests_for(WINDOW)) == generate(fresh, requests_for(WINDOW))
    inputs = inputs_of(tiny)
    for velocity, expected in zip(engine.velocities(inputs), fresh.velocities(inputs), strict=True):
        assert np.array_equal(velocity, expected)


def test_refit_with_wrong_weights_fails_and_clears_the_version(name, folder):
    engine = DiffusersEngine(folder, "float32", max_batch=4)
    trainer = Trainer(folder, engine)
    trainer.refit(1)
    expected = trainer.checksums()
    assert engine.differing(expected) == []
    changed = "layers.1.attention.to_k.weight" if name == "Z-Image" else "pos_embed.pos_embed"
    trainer.weights[changed][..., 3, 5] += 1e-6
    with pytest.raises(RuntimeError, match=rf"differ in 1 regions.*{re.escape(changed)}"):
        engine.refit(2, expected)
    assert engine.version is None
    [line] = engine.differing(expected)
    assert changed in line


def test_velocities_at_canaries_match_diffusers(tiny, folder, engine):
    inputs = inputs_of(tiny)

    @torch.no_grad()
    def plain() -> dict[str, torch.Tensor]:
        dtype, model = torch.get_default_dtype(), tiny.load(folder / "transformer")
        documents = [
            Document(torch.tensor(i.latents, dtype=dtype), i.sigma, i.caption.map(torch.tensor).to(dtype))
            for i in inputs
        ]
        return {f"{number}": v for number, v in enumerate(tiny.velocities(model, documents))}

    actual = {f"{number}": torch.tensor(v) for number, v in enumerate(engine.velocities(inputs))}
    assert_matches(actual, plain, "velocity")
    assert inputs == inputs_of(tiny)


@pytest.mark.parametrize("offload", [False, True])
def test_sleep_frees_the_weights_and_waking_restores_them(folder, offload):
    engine = DiffusersEngine(folder, "float32", max_batch=4, offload=offload)
    trainer = Trainer(folder, engine)
    trainer.refit(1)
    before, samples = engine.checksums(), generate(engine, requests_for(WINDOW))
    engine.sleep(keeps_weights=True)
    assert all(p.untyped_storage().nbytes() == 0 for p in engine._model.transformer.parameters())
    engine.sleep(keeps_weights=True)
    assert engine.version == 1 and generate(engine, requests_for(WINDOW)) == samples
    assert engine.checksums() == before
    engine.sleep(keeps_weights=False)
    assert engine.version is None
    trainer.refit(1)
    assert engine.checksums() == before


def test_unfinished_samples_continue_through_a_refit(folder):
    engine = DiffusersEngine(folder, "float32", max_batch=4)
    trainer = Trainer(folder, engine)
    trainer.refit(1)
    requests = requests_for(WINDOW)
    reported: list[list[LatentSample]] = []

    async def refit_in_between() -> list[LatentSample]:
        pending = asyncio.ensure_future(engine.generate(requests, reported.append))
        while engine.num_unfinished([request.sample_id for request in requests]) < 2 * len(requests):
            await asyncio.sleep(0)
        engine.pause()
        engine.sleep(keeps_weights=True)
        for _ in range(5):
            await asyncio.sleep(0)
        trainer.refit(2)
        engine.resume()
        return await pending

    samples = asyncio.run(refit_in_between())
    assert [sample.versions for sample in samples] == [(VersionRun(1, 2), VersionRun(2, 3))] * 4
    assert [sample.id for sample in samples] == [request.sample_id for request in requests]
    assert reported == [samples]
    seconds, num_steps = engine.take_work()
    assert num_steps == WINDOW.num_steps and seconds > 0 and engine.take_work() == (0.0, 0)


def test_canceled_requests_are_dropped(engine):
    requests = requests_for(WINDOW)

    async def cancel() -> list[LatentSample]:
        cancelled = asyncio.ensure_future(engine.generate(requests[:2]))
        kept = asyncio.ensure_future(engine.generate(requests[2:]))
        while not engine.num_unfinished([requests[0].sample_id]):
            await asyncio.sleep(0)
        cancelled.cancel()
        samples = await kept
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        return samples

    samples = asyncio.run(cancel())
    assert [sample.id for sample in samples] == [request.sample_id for request in requests[2:]]
    assert engine._pending == [] and engine._stepping is None


def test_error_in_a_step_reaches_every_caller(engine, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._model.transformer, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(engine, requests_for(WINDOW))
    monkeypatch.undo()
    assert len(generate(engine, requests_for(WINDOW))) == 4


@pytest.mark.parametrize(("size", "key"), [((18, 24), "height"), ((16, 0), "width"), ((16, 68), "width")])
def test_image_size_without_positions_is_refused(tiny, engine, size, key):
    denoising = replace(WINDOW, height=size[0], width=size[1])
    with pytest.raises(
        UserError, match=f"^rollout.denoising.{key}={dict(zip(('height', 'width'), size, strict=True))[key]}: "
    ):
        generate(engine, requests_for(denoising))
    largest = tiny.shape.image_limit[1] * 4
    fixed = {"height": 16, "width": {0: 4, 68: largest}.get(size[1], 24)}
    assert len(generate(engine, requests_for(replace(denoising, **fixed), count=1))) == 1


def test_info_has_token_ids_and_the_dtype_of_velocities(tiny, engine):
    info = engine.info(["cat", ""])
    assert info.head_dtype == "float32" and len(info.token_ids[0]) == 3 and info.token_ids[1] == ()
    assert tiny.config["_class_name"] in info.description
