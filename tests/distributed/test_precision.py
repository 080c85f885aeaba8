"""bfloat16 parameters with float32 main weights and gradients, against float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.config.schema import Config
from megarl.megatron.model.build import named_parameters
from megarl.megatron.workers.actor import ActorWorker
from tests.forked import run_ranks
from tests.parity import canonical, config_of, local_batch, random_groups, rank_batches, train
from tests.tiny_model import write_tiny_llama

pytestmark = pytest.mark.newest

ULP = 2.0**-8
"""The unit in the last place of bfloat16, as a share of the number above which it holds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), num_kv_heads=2)


@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_in_bfloat16_track_float32(folder, dp):
    """The passes round at every layer, which adds up to a few units in the last place; sums of gradients do not."""
    updates = [random_groups(0)]
    gradients = {}
    for dtype in ("float32", "bfloat16"):
        config = config_of(folder, f"model.dtype={dtype}", f"actor.layout.dp={dp}")
        gradients[dtype] = canonical(folder, run_ranks(dp, train, config, folder, updates), "gradients")
    for name, exact in gradients["float32"].items():
        rounded = gradients["bfloat16"][name]
        assert rounded.dtype is torch.float32
        assert (rounded - exact).norm() <= 8 * ULP * exact.norm(), name


def small_updates(store, rank: int, config: Config, folder: Path, num_updates: int) -> dict[str, torch.Tensor]:
    """The main weights after the first update and after all, as whole tensors, and the model's own after all."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    start = {name: p.detach().clone() for name, p in named_parameters(worker.chunks).items()}
    batch = local_batch(rank_batches(config, worker.packing, random_groups(0))[0])
    for _ in range(num_updates):
        worker.update(batch)
    live = named_parameters(worker.chunks)
    main = {name: p.main_param.detach().view_as(p) for name, p in live.items()}
    return {"start": start, "main": main, "live": {name: p.detach() for name, p in live.items()}}


def test_main_weights_add_up_what_a_parameter_would_round_away(folder):
    """Eight updates of a rate that is a 40th of a unit in the last place of weights near 0.1."""
    rate = 0.1 * ULP / 40
    config = config_of(folder, "model.dtype=bfloat16", f"actor.optimizer.lr={rate}", "run.steps=8")
    [after] = run_ranks(1, small_updates, config, folder, 8)
    name = "chunk0.decoder.layers.1.mlp.linear_fc2.weight"
    start, main, live = (after[which][name] for which in ("start", "main", "live"))
    assert main.dtype is torch.float32
    assert torch.equal(live, main.bfloat16())
    moved = (main - start.float()).abs()
    large = start.abs() > 0.1  # their neighbours in bfloat16 are at least 0.1 · ULP / 2 away
    assert 6 * rate < moved[large].median() < 9 * rate  # the same batch each time: Adam moves by the rate
    assert (live == start)[large].float().mean() > 0.5
