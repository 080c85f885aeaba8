"""A denoiser in bfloat16 against float64: gradients, main weights, memory, and the engine's velocities."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from megarl.cluster.memory.rank import rank_memory
from megarl.config.schema import Config
from megarl.core.latents import canaries
from megarl.megatron.model.build import named_parameters
from megarl.megatron.offload import Offload
from megarl.megatron.workers.denoiser import DenoiserWorker
from megarl.models.folder import read_config
from megarl.resharding.piece import Holder
from megarl.rollout.diffusers.engine import DiffusersEngine
from megarl.step.image_canaries import LIMITS, largest_difference
from tests.closeness import float64
from tests.distributed import test_image_updates as images
from tests.distributed.test_image_engine import connect
from tests.flow_grpo_reference import FlowGrpoReference
from tests.forked import run_ranks
from tests.parity import whole_tensors
from tests.tiny_denoiser import CONFIG, MODELS
from tests.tiny_image_model import write_tiny_image_model

NUM_UPDATES = 3
EPS = 1.0
"""Far above the gradients, so that Adam's updates are proportional to gradients and have the same relative error."""
RATE = 0.1
"""With EPS, three updates move most weights by less than a tenth of the distance to their neighbor in bfloat16."""
FACTOR = 2
"""Maximum error relative to that of diffusers' class in bfloat16."""

Tensors = dict[str, torch.Tensor]


class Trained(NamedTuple):
    """A rank's state before and after its updates, the gradients of the first one, and the bytes of each part."""

    holder: Holder
    gradients: Tensors
    before: Tensors
    main_before: Tensors
    after: Tensors
    main_after: Tensors
    num_bytes: dict[str, int]


def config_of(folder: Path, *overrides: str) -> Config:
    optimizer = f"actor.optimizer={{eps: {EPS}, lr: {RATE}}}"
    return images.config_of(folder, *images.FLOW_GRPO, "model.dtype=bfloat16", optimizer, *overrides)


def train(store, rank: int, config: Config, folder: Path) -> Trained:
    worker = DenoiserWorker(config, folder / "transformer", rank, store, threads=1)
    live = named_parameters(worker.chunks)

    def parameters() -> Tensors:
        return {name: p.detach().clone() for name, p in live.items()}

    def main() -> Tensors:
        return {name: p.main_param.detach().view_as(p).clone() for name, p in live.items()}

    before, main_before = parameters(), main()
    gradients = images.capture_gradients(worker)
    batch = images.own_batches(config, worker)[0]
    for _ in range(NUM_UPDATES):
        worker.keep_log_probs("reference", batch)
        worker.update(batch)
        worker.end_step()
    after, main_after = parameters(), main()
    offload = Offload(worker.chunks, worker.optimizer)
    names = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}
    num_bytes = {name: offload.move_out(part) for part, name in names.items()}
    return Trained(worker.holder, gradients, before, main_before, after, main_after, num_bytes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An image model whose transformer is stored in bfloat16."""
    folder = write_tiny_image_model(tmp_path_factory.mktemp("model"))
    transformer = ZImageTransformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.bfloat16)
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def trained(folder) -> list[Trained]:
    return run_ranks(2, train, config_of(folder, "actor.layout={tp: 2, sequence_parallel: true}"), folder)


class Exact(NamedTuple):
    """The reference's first gradients and total moves in float64, and the limit for a tensor's relative error."""

    gradients: Tensors
    moves: Tensors
    limit: float


@pytest.fixture(scope="module")
def exact(folder) -> Exact:
    group = images.random_groups()[0]

    def updated(num_updates: int, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
        keys = dict(lr=RATE, eps=EPS, guidance=images.GUIDANCE, noise_level=images.NOISE_LEVEL, dtype=dtype)
        reference = FlowGrpoReference(MODELS["Z-Image"], folder / "transformer", **keys)
        start = {name: p.detach().clone() for name, p in reference.trained.items()}
        updates = [
            reference.update([group], reference.old([group]), images.CLIP, images.KL) for _ in range(num_updates)
        ]
        return updates[0][1], {name: p.detach() - start[name] for name, p in reference.trained.items()}

    with float64():
        gradients, moves = updated(NUM_UPDATES, torch.float64)
    rounded, _ = updated(1, torch.bfloat16)
    return Exact(gradients, moves, FACTOR * max(errors(rounded, gradients).values()))


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Return the norm of each tensor's error, relative to the tensor's norm."""
    return {name: float((found[name] - tensor).norm() / tensor.norm()) for name, tensor in expected.items()}


def whole(folder: Path, ranks: list[Trained], what: str) -> Tensors:
    return whole_tensors(read_config(folder / "transformer"), ranks, what)


def test_gradients_in_bfloat16_track_float64(folder, trained, exact):
    found = errors(whole(folder, trained, "gradients"), exact.gradients)
    assert max(found.values()) < exact.limit < 0.3, (max(found, key=found.get), max(found.values()), exact.limit)


def test_main_weights_accumulate_updates_below_the_rounding(folder, trained, exact):
    before, after = whole(folder, trained, "main_before"), whole(folder, trained, "main_after")
    found = errors({name: after[name] - weight for name, weight in before.items()}, exact.moves)
    assert max(found.values()) < exact.limit, (max(found, key=found.get), max(found.values()), exact.limit)


def test_rounded_weights_move_by_the_update_on_average(folder, trained):
    """Main weights start at random positions in their rounding cells, so a few weights move by a whole cell."""
    before, after, start, end = (
        torch.cat([tensor.double().flatten() for tensor in whole(folder, trained, what).values()])
        for what in ("before", "after", "main_before", "main_after")
    )
    assert torch.equal(start.bfloat16().double(), before) and not torch.equal(start, before)
    step = end - start
    difference = (after - before - step) * step.sign()
    error = difference.std() / len(difference) ** 0.5
    assert difference.mean().abs() < 5 * error < step.abs().mean() / 4
    assert (after == before).double().mean() > 0.7


def test_state_has_the_planned_size(trained):
    layout = images.config_of(Path("m"), "actor.layout={tp: 2, sequence_parallel: true}").actor.layout
    for rank, result in enumerate(trained):
        form = rank_memory(CONFIG, layout, rank, 2, 0, 0, 1)
        for part, num_bytes in result.num_bytes.items():
            assert getattr(form, part) == pytest.approx(num_bytes, rel=0.05), part


def canary_differences(store, rank: int, config: Config, folder: Path) -> list[float]:
    """Return the engine's difference from the trainer after refits before and after an update, and its difference from
    a trainer that has moved on."""
    transformer = folder / "transformer"
    worker = DenoiserWorker(config, transformer, rank, store, threads=1)
    engine = DiffusersEngine(folder, config.model.dtype, max_batch=3)
    published = {name: torch.empty_like(weight) for name, weight in worker._refit_weights.items()}
    refit = connect(engine, read_config(transformer), worker.holder, published, config.model.dtype)
    inputs = canaries(CONFIG["in_channels"], CONFIG["cap_feat_dim"], patch=2)
    differences = []
    for version, batch in enumerate(images.own_batches(config, worker)):
        worker.prepare_refit()
        refit(version, worker._refit_weights)
        differences.append(largest_difference(engine.velocities(inputs), worker.velocities(inputs)))
        worker.update(batch)
        worker.end_step()
    return [*differences, largest_difference(engine.velocities(inputs), worker.velocities(inputs))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "rate"), [("bfloat16", 100), ("float16", 0.1)])
def test_engine_in_half_precision_passes_the_canaries(folder, dtype, rate):
    """Unless its weights are stale."""
    config = config_of(folder, f"model.dtype={dtype}", f"actor.optimizer.lr={rate}")
    [(*refitted, stale)] = run_ranks(1, canary_differences, config, folder)
    assert 0 < max(refitted) < LIMITS[dtype] < stale, (refitted, stale)
