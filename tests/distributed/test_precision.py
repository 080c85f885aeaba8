"""Two-byte parameters with float32 main weights and gradients track float32, and main weights start at the right
values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from megarl.config.schema import Config
from megarl.core.metrics import Metric
from megarl.megatron import main_weights
from megarl.megatron.model.build import named_parameters
from megarl.megatron.optimizer import parts_of
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import RankResult, canonical, config_of, local_batch, random_groups, rank_batches, train
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_llama

ULP = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff: maximum relative rounding error of a number."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2, vocab_size=SHARDED_VOCAB)


UNITS = {"bfloat16": 8, "float16": 16}
"""Bound on a gradient's relative rounding error, accumulated over all layers, in multiples of ULP. It is larger for
float16, because small factors lose digits.
"""


@pytest.mark.parametrize(("dtype", "dp"), [("bfloat16", 1), ("bfloat16", 2), ("float16", 2)])
def test_gradients_of_two_byte_models_track_float32(folder, dtype, dp):
    """Gradient accumulation does not round. With float16, the loss is scaled, and the gradients are compared
    unscaled."""
    updates = [random_groups(0, SHARDED_VOCAB)]
    scale = ["actor.megatron_overrides.optimizer.initial_loss_scale=1024.0"] if dtype == "float16" else []
    gradients = {}
    for name, overrides in (("float32", []), (dtype, scale)):
        config = config_of(folder, f"model.dtype={name}", f"actor.layout.dp={dp}", *overrides)
        gradients[name] = canonical(folder, run_ranks(dp, train, config, folder, updates), "gradients")
    for name, exact in gradients["float32"].items():
        rounded = gradients[dtype][name]
        assert rounded.dtype is torch.float32
        assert (rounded - exact).norm() <= UNITS[dtype] * ULP[dtype] * exact.norm(), name


@pytest.fixture(scope="module")
def rounded_folder(tmp_path_factory) -> Path:
    return rounded(tmp_path_factory.mktemp("rounded"), torch.bfloat16)


def rounded(folder: Path, dtype: torch.dtype, **sizes: Any) -> Path:
    """Write a tiny model in the dtype, with a few weights set to 0 and to powers of 2, below which the rounding cells
    are narrower. Return its folder.
    """
    write_tiny_llama(folder, **{"num_kv_heads": 2, "vocab_size": SHARDED_VOCAB, **sizes})
    weights = {name: weight.to(dtype) for name, weight in load_file(folder / "model.safetensors").items()}
    weights[MLP][:, :4] = torch.tensor([0.0, 0.25, -0.25, 2.0**-20])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


MLP = "model.layers.1.mlp.down_proj.weight"


def started(store, rank: int, config: Config, folder: Path) -> RankResult:
    """Return a rank's main weights before the first update, gathered over data-parallel ranks."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    return RankResult(worker.holder, {}, whole_main_weights(worker), {})


def whole_main_weights(worker: ActorWorker) -> dict[str, torch.Tensor]:
    """Return a rank's main weights, gathered over data-parallel ranks."""
    main = {name: torch.zeros(p.shape) for name, p in named_parameters(worker.chunks).items()}
    names = {p: name for name, p in named_parameters(worker.chunks).items()}
    for part in parts_of(worker.optimizer):
        for weight, parameter, own in main_weights._main_weights(part):
            main[names[parameter]].view(-1)[own] = weight
    groups = {
        True: parallel_state.get_data_parallel_group(),
        False: parallel_state.get_expert_data_parallel_group(),
    }
    for parameter, name in names.items():
        dist.all_reduce(main[name], group=groups[getattr(parameter, "allreduce", True)])  # False for sharded experts
    return main


def start(folder: Path, *overrides: str, dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    config = config_of(folder, f"model.dtype={dtype}", *overrides)
    return canonical(folder, run_ranks(config.actor.layout.world_size, started, config, folder), "weights")


def test_main_weights_start_at_a_float32_checkpoint(folder):
    main = start(folder)
    for name, weight in load_file(folder / "model.safetensors").items():
        assert torch.equal(main[name], weight), name


@pytest.mark.parametrize("dtype", ULP)
def test_main_weights_start_uniformly_in_rounding_cells(tmp_path, dtype):
    """A cell extends halfway to the neighbors that torch returns. Each position inside it is equally likely. Powers of
    two have a different distribution, which tests/unit/megatron/test_main_weights.py checks."""
    rounded(tmp_path, getattr(torch, dtype))
    main, weights = start(tmp_path, dtype=dtype), load_file(tmp_path / "model.safetensors")
    places = []
    for name, weight in weights.items():
        assert torch.equal(main[name].to(weight.dtype), weight), name
        assert torch.equal(main[name] == 0, weight == 0), name
        is_even = (weight != 0) & (weight.float().frexp().mantissa.abs() != 0.5)
        infinity = torch.tensor(torch.inf, dtype=weight.dtype)
        above, below = (torch.nextafter(weight, end).double() for end in (infinity, -infinity))
        distance = main[name].double() - weight.double()
        gap = torch.where(distance > 0, above - weight.double(), weight.double() - below)
        places.append((distance / gap)[is_even])
    places = torch.cat(places)
    assert places.abs().max() < 0.5
    share = torch.histc(places, 20, -0.5, 0.5) / len(places)
    assert (share - 0.05).abs().max() < 5 * (0.05 / len(places)) ** 0.5  # five standard deviations
    neighbors = torch.corrcoef(torch.stack((places[1:], places[:-1])))[0, 1]
    assert neighbors.abs() < 5 / len(places) ** 0.5


@pytest.mark.parametrize("layout", ["{tp: 2}", "{pp: 2}", "{dp: 2}"])
def test_initial_main_weights_are_equal_in_every_layout(rounded_folder, layout):
    alone, main = start(rounded_folder), start(rounded_folder, f"actor.layout={layout}")
    for name, weight in alone.items():
        assert torch.equal(main[name], weight), name


def test_initial_main_weights_are_equal_with_experts_or_frozen(tmp_path):
    """Experts have a separate optimizer under EP, and frozen parameters have no main weights."""
    folder = write_tiny_experts(tmp_path, num_layers=4, vocab_size=SHARDED_VOCAB)
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    frozen = "actor.frozen=['*embed_tokens*', 'model.layers.1.*']"
    alone = start(folder, frozen)
    for layout in ("{dp: 2, ep: 2}", "{pp: 2, vpp: 2}"):
        main = start(folder, frozen, f"actor.layout={layout}")
        for name, weight in alone.items():
            assert torch.equal(main[name], weight), (layout, name)
    for name, weight in weights.items():
        is_frozen = "embed_tokens" in name or name.startswith("model.layers.1.")
        assert torch.equal(alone[name].bfloat16(), weight * (not is_frozen)), name
        assert is_frozen or not torch.equal(alone[name], weight.float()), name


@dataclass(frozen=True)
class Updated:
    """A rank's parameters and main weights before the first and after the last update, and the metrics of each
    update."""

    before: dict[str, torch.Tensor]
    main_before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    main_after: dict[str, torch.Tensor]
    metrics: list[dict[str, Metric]]


def small_updates(store, rank: int, config: Config, folder: Path, num_updates: int) -> Updated:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    live = named_parameters(worker.chunks)

    def parameters() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in live.items()}

    def main() -> dict[str, torch.Tensor]:
        return {name: p.main_param.detach().view_as(p).clone() for name, p in live.items()}

    before, main_before = parameters(), main()
    batch = local_batch(rank_batches(config, worker.packing, random_groups(0, SHARDED_VOCAB))[0])
    metrics = [worker.update(batch) for _ in range(num_updates)]
    return Updated(before, main_before, parameters(), main(), metrics)


FC2 = "chunk0.decoder.layers.1.mlp.linear_fc2.weight"


def test_main_weights_accumulate_small_updates(folder):
    """Eight updates with a learning rate of about 1/50 of the distance between bfloat16 values near 0.1."""
    rate = 0.1 * ULP["bfloat16"] / 40
    config = config_of(folder, "model.dtype=bfloat16", f"actor.optimizer.lr={rate}", "run.steps=8")
    [ran] = run_ranks(1, small_updates, config, folder, 8)
    before, after, main = ran.before[FC2], ran.after[FC2], ran.main_after[FC2]
    assert main.dtype is torch.float32
    assert torch.equal(after, main.bfloat16())
    moved = (main - ran.main_before[FC2]).abs()
    large = before.abs() > 0.1  # their neighbors in bfloat16 are at least 0.1 · 2⁻⁹ away
    assert 6 * rate < moved[large].median() < 9 * rate  # one batch: Adam moves by the learning rate
    assert (after == before)[large].float().mean() > 0.5


def test_small_update_moves_weights_by_the_rate_on_average(rounded_folder):
    """The update is smaller than a cell: each weight stays or moves by a whole cell, and the mean move is the learning
    rate."""
    rate = 0.1 * ULP["bfloat16"] / 40
    config = config_of(rounded_folder, "model.dtype=bfloat16", f"actor.optimizer.lr={rate}", "run.steps=8")
    [ran] = run_ranks(1, small_updates, config, rounded_folder, 1)
    before, after = ran.before[FC2].double(), ran.after[FC2].double()
    step = ran.main_after[FC2].double() - ran.main_before[FC2].double()
    large = (before.abs() > 0.1) & (step.abs() > 0.9 * rate)
    arrived = ((after - before) * step.sign())[large]
    error = arrived.std() / len(arrived) ** 0.5
    assert abs(arrived.mean() - rate) < 5 * error < rate
    changed = sum(int((ran.after[name] != weight).sum()) for name, weight in ran.before.items())
    num_elements = sum(weight.numel() for weight in ran.before.values())
    assert ran.metrics[0]["update/changed_frac"].value == pytest.approx(changed / num_elements, rel=1e-9)
