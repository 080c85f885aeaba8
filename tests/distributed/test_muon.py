"""Muon in every kind of layout against plain torch, with whole matrices and an exact singular value decomposition."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim._muon import _zeropower_via_newtonschulz

from megarl.config.schema import Config
from megarl.megatron.workers.actor import ActorWorker
from tests.closeness import Expected, expected
from tests.distributed.test_checkpoint import check_round_trip
from tests.distributed.test_host_copies import check as check_copies
from tests.distributed.test_offload import offload_and_reload, undisturbed
from tests.distributed.test_precision import rounded, whole_main_weights
from tests.distributed.test_transformer_engine import GROUPS
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
    assert_same_training,
    canonical,
    capture_gradients,
    config_of,
    own_batch,
    plain_outcome,
    random_groups,
    train,
)
from tests.tiny_model import SHARDED_VOCAB, write_tiny_experts, write_tiny_llama
from tests.transformer_engine_training import train_all

DECAY, MOMENTUM = 0.5, 0.9
MUON = f"actor.optimizer={{name: muon, weight_decay: {DECAY}, momentum: {MOMENTUM}}}"
# The momentum of the second update differs from its gradient.
UPDATES = [random_groups(seed, SHARDED_VOCAB) for seed in range(2)]
# With these sizes, Megatron pads its buffers between parameters, and ranges end within rows.
SIZES = dict(num_heads=4, num_kv_heads=2, hidden_size=72, intermediate_size=100, num_layers=4, vocab_size=SHARDED_VOCAB)

DENSE = {
    "1 process": "",
    "DP2": "dp: 2",
    "TP2, SP": "tp: 2, sequence_parallel: true",
    "PP2": "pp: 2",
    "PP2, TP2": "pp: 2, tp: 2",
    "DP2, PP2, TP2": "dp: 2, pp: 2, tp: 2",
}
EXPERTS = {"EP2": "dp: 2, ep: 2", "EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1"}


class PlainMuon:
    """Muon for the matrices in layers, and AdamW for all other parameters. Layers have no matrices besides projections
    and routers."""

    def __init__(self, model: torch.nn.Module):
        self._model, self._momenta = model, {}
        named = dict(model.named_parameters())
        self._matrices = [n for n in named if ".layers." in n and named[n].dim() > 1 and not n.endswith(".gate.weight")]
        others = [name for name in named if name not in self._matrices]
        undecayed = [named[name] for name in others if "norm" in name]
        decayed = [named[name] for name in others if "norm" not in name]
        self._adamw = torch.optim.AdamW(
            [{"params": undecayed, "weight_decay": 0.0}, {"params": decayed, "weight_decay": DECAY}], lr=LR, eps=EPS
        )

    def zero_grad(self) -> None:
        self._model.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self._adamw.step()
        for name, weight in self._model.named_parameters():
            if name in self._matrices:
                momentum = self._momenta[name] = MOMENTUM * self._momenta.get(name, 0) + weight.grad
                weight *= 1 - LR * DECAY
                parts = zip(matrices(name, weight), matrices(name, weight.grad + MOMENTUM * momentum), strict=True)
                for part, direction in parts:
                    part -= LR * 0.2 * max(part.shape) ** 0.5 * newton_schulz(direction)


def matrices(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the matrices in a parameter. transformers stacks experts, and their gate and up projections."""
    for matrix in tensor if tensor.dim() == 3 else [tensor]:
        yield from matrix.chunk(2 if name.endswith("gate_up_proj") else 1)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Apply five Newton-Schulz steps exactly, to the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / (values.norm() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense"), tied=False, **SIZES)


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory) -> Path:
    """The same model, stored in bfloat16. Its main weights start at random positions in their rounding cells."""
    return rounded(tmp_path_factory.mktemp("bfloat16"), torch.bfloat16, tied=False, **SIZES)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), vocab_size=SHARDED_VOCAB)


def plain_training(folder: Path, updates: list[list[Group]] = UPDATES) -> Expected[Outcome]:
    def trained() -> Outcome:
        reference = GrpoReference(folder, lr=LR, eps=EPS, temperature=TEMPERATURE)
        reference.optimizer = PlainMuon(reference.model)
        return plain_outcome(reference, updates, kl_coefficient=0.0)

    return expected(trained)


@pytest.fixture(scope="module")
def dense_outcome(dense: Path) -> Expected[Outcome]:
    return plain_training(dense)


@pytest.fixture(scope="module")
def expert_outcome(experts: Path) -> Expected[Outcome]:
    return plain_training(experts)


def muon_config(folder: Path, layout: str, *overrides: str) -> Config:
    return config_of(folder, MUON, "actor.tokens_per_microbatch=256", f"actor.layout={{{layout}}}", *overrides)


@pytest.mark.parametrize("layout", exhaustive_but(DENSE, "DP2", "PP2, TP2"))
def test_updates_equal_plain_torch(dense, dense_outcome, layout):
    config = muon_config(dense, DENSE[layout])
    ranks = run_ranks(config.actor.layout.world_size, train, config, dense, UPDATES)
    assert_same_training(dense, ranks, dense_outcome)


@pytest.mark.parametrize("layout", exhaustive_but(EXPERTS, "EP2, TP2, ETP1"))
def test_updates_of_experts_equal_plain_torch(experts, expert_outcome, layout):
    config = muon_config(experts, EXPERTS[layout])
    ranks = run_ranks(config.actor.layout.world_size, train, config, experts, UPDATES)
    assert_same_training(experts, ranks, expert_outcome)


@pytest.mark.exhaustive
def test_transformer_engine_updates_other_parameters(dense, experts, tmp_path):
    """Transformer Engine's Adam skips the matrices."""
    cases = {name: (str(folder), [MUON], {}) for name, folder in (("dense", dense), ("experts", experts))}
    trained = train_all(tmp_path, cases)
    for name, folder in (("dense", dense), ("experts", experts)):
        assert "Transformer Engine's FusedAdam" in trained[name].kernels
        plain = plain_training(folder, [GROUPS])
        assert_same_training(folder, [trained[name].rank], plain)


def update_once(store, rank: int, config: Config, folder: Path) -> tuple[RankResult, RankResult, RankResult]:
    """Return a rank's main weights before and after an update, and its parameters after it, all float32. The second
    result also has the update's gradients."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    start = whole_main_weights(worker)
    batch, gradients = own_batch(config, worker, UPDATES[0], None), capture_gradients(worker)
    worker.update(batch)
    worker.end_step()
    end, weights = whole_main_weights(worker), {name: p.float() for name, p in worker.parameters().items()}
    return (
        RankResult(worker.holder, {}, start, {}),
        RankResult(worker.holder, gradients, end, {}),
        RankResult(worker.holder, {}, weights, {}),
    )


@pytest.mark.parametrize("layout", exhaustive_but(["DP2", "PP2, TP2"], "DP2"))
def test_bfloat16_updates_move_the_main_weights_in_their_cells(bfloat16, layout):
    """The limit is twice the largest error of torch's iterations in bfloat16, which round as often as ours."""
    config = muon_config(bfloat16, DENSE[layout], "model.dtype=bfloat16")
    ranks = run_ranks(config.actor.layout.world_size, update_once, config, bfloat16)
    before, after, parameters = zip(*ranks, strict=True)
    start, end, weights = (canonical(bfloat16, results, "weights") for results in (before, after, parameters))
    gradients = canonical(bfloat16, after, "gradients")
    for name, stored in load_file(bfloat16 / "model.safetensors").items():
        assert torch.equal(start[name].bfloat16(), stored) and not torch.equal(start[name], stored.float()), name
        assert torch.equal(end[name].bfloat16().float(), weights[name]), name
        if ".layers." in name and stored.dim() > 1:
            move = end[name].double() - (1 - LR * DECAY) * start[name].double()
            exact, in_bfloat16 = first_update(gradients[name])
            limit = 2 * max((update - exact).norm() for update in in_bfloat16)
            assert (move - exact).norm() <= limit, name
            assert (start[name] - stored).norm() > limit, f"{name}: an update of the stored weights would pass"


def first_update(gradient: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return Muon's first update without the weight decay, exactly and with torch's iterations in bfloat16, all
    float64. Momentum multiplies the gradient by a factor, which the orthogonalization removes. Different factors give
    different roundings."""
    scale = -LR * 0.2 * max(gradient.shape) ** 0.5
    factors = [1 + i / 8 for i in range(8)]
    in_bfloat16 = [_zeropower_via_newtonschulz(f * gradient, (3.4445, -4.7750, 2.0315), 5, 1e-7) for f in factors]
    return scale * newton_schulz(gradient.double()), [scale * update.double() for update in in_bfloat16]


CHECKPOINTS = {"float32": ("dense", "float32"), "rounded": ("dense", "bfloat16"), "dithered": ("bfloat16", "bfloat16")}
"""Name -> fixture of the folder and model.dtype. Main weights of a bfloat16 model are copies of a float32 checkpoint,
and dithered copies of a bfloat16 checkpoint."""


@pytest.mark.parametrize("case", exhaustive_but(CHECKPOINTS, "dithered"))
def test_checkpoints_survive_a_round_trip_of_layouts(request, tmp_path, case):
    folder, dtype = CHECKPOINTS[case]
    check_round_trip(request.getfixturevalue(folder), None, tmp_path, ("pp: 2", "tp: 2"), MUON, f"model.dtype={dtype}")


@pytest.mark.exhaustive
def test_expert_checkpoints_survive_a_round_trip(experts, tmp_path):
    check_round_trip(experts, None, tmp_path, ("dp: 2, ep: 2", ""), MUON, "model.dtype=bfloat16")


def test_restored_ranks_continue_bit_for_bit(dense, tmp_path):
    check_copies(muon_config(dense, "dp: 2", "model.dtype=bfloat16"), dense, tmp_path)


def test_optimizer_is_offloaded_with_one_moment_per_matrix(dense):
    config = muon_config(dense, "dp: 2", "model.dtype=bfloat16")
    reference = run_ranks(2, undisturbed, config, dense)
    for (freed, num_parameters, weights), other in zip(
        run_ranks(2, offload_and_reload, config, dense), reference, strict=True
    ):
        vocabulary = 2 * SHARDED_VOCAB * SIZES["hidden_size"]
        size = (8 * num_parameters + 4 * vocabulary) / 2  # norms are negligible
        assert size * 0.98 <= freed["optimizer"] <= size * 1.1
        assert weights == other
