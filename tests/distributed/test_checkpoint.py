"""A run resumes bit for bit from a checkpoint under the same layout, and correctly under any other layout."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import resource
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megarl.cluster.groups.ranks import worker_class
from megarl.config.model_schema import Role
from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint, FileRecord, noted_files, seal
from megarl.megatron.checkpoint import sharded
from megarl.megatron.checkpoint.conversion import reshape
from megarl.megatron.checkpoint.description import describe
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.models.run_models import ModelFolders
from megarl.models.trained_model import trained_hf_config
from megarl.resharding.transports.torch_dist import TorchDistFolder
from megarl.run.checkpoint_size import checkpoint_bytes
from megarl.run.checkpoints import Checkpoints
from tests import parity, tiny_vision
from tests.closeness import Expected
from tests.distributed.test_families import DEEPSEEK, GATED_DELTA, GATED_DELTA_EXPERTS
from tests.distributed.test_vision import groups_of
from tests.forked import run_ranks
from tests.marks import exhaustive_but
from tests.parity import (
    Group,
    Outcome,
    RankResult,
    assert_same_training,
    capture_gradients,
    local_batch,
    plain_training,
    random_groups,
    rank_batches,
)
from tests.tiny_model import SHARDED_VOCAB, add_mtp_layer, write_tiny_llama, write_tiny_model

UPDATES = [random_groups(seed, SHARDED_VOCAB) for seed in range(3)]
SAVED_AFTER = 2
# With these sizes, Megatron pads its buffers between parameters and at the end.
SIZES = dict(num_heads=4, num_kv_heads=2, hidden_size=72, intermediate_size=100, num_layers=4, vocab_size=SHARDED_VOCAB)
PAIRS = {
    "PP2 and 1 process": ("pp: 2", ""),
    "TP2 and 1 process": ("tp: 2", ""),
    "DP2 and 1 process": ("dp: 2", ""),
    "CP2 and TP2": ("cp: 2", "tp: 2"),
    "PP2, VPP2 and TP2, SP": ("pp: 2, vpp: 2", "tp: 2, sequence_parallel: true"),
}
PAIRS_WITH_EXPERTS = {
    "EP2 and 1 process": ("dp: 2, ep: 2", ""),
    "EP2, TP2, ETP2 and DP2": ("tp: 2, sequence_parallel: true, dp: 2, ep: 2, etp: 2", "dp: 2"),
    "EP2, TP2, ETP1 and PP2": ("tp: 2, sequence_parallel: true, ep: 2, etp: 1", "pp: 2"),
}
PAIRS_WITH_LATENT_ATTENTION = {
    "TP2, EP2, ETP1 and PP2": ("tp: 2, sequence_parallel: true, ep: 2, etp: 1", "pp: 2, first_stage_layers: 2"),
    "CP2 and 1 process": ("cp: 2", ""),
}

PAIRS_WITH_DELTA_NETS = {
    "TP2, SP and CP2": ("tp: 2, sequence_parallel: true", "cp: 2"),
    "PP2, EP2 and TP2, SP": ("pp: 2, dp: 2, ep: 2", "tp: 2, sequence_parallel: true"),
}


@dataclass(frozen=True)
class Saved:
    """The files that a rank wrote, and its state one update later."""

    files: list[FileRecord]
    result: RankResult


def config_of(folder: Path, *overrides: str) -> Config:
    """Return a config with few microbatches, which take less time."""
    return parity.config_of(folder, "actor.tokens_per_microbatch=256", *overrides)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def reference(model: Path) -> Expected[Outcome]:
    return plain_training(model, UPDATES, kl_coefficient=0.0)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("experts"),
        "qwen3_moe",
        vocab_size=SHARDED_VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="module")
def experts_reference(experts: Path) -> Expected[Outcome]:
    return plain_training(experts, UPDATES, kl_coefficient=0.0)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3: latent attention, one dense layer before two expert layers, and routers with a bias."""
    return write_tiny_model(tmp_path_factory.mktemp("latent"), "deepseek_v3", **DEEPSEEK)


@pytest.fixture(scope="module")
def latent_reference(latent: Path) -> Expected[Outcome]:
    return plain_training(latent, UPDATES, kl_coefficient=0.0)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next: gated delta nets, gated attention and shared experts."""
    sizes = GATED_DELTA | GATED_DELTA_EXPERTS | dict(intermediate_size=72)
    return write_tiny_model(tmp_path_factory.mktemp("recurrent"), "qwen3_next", **sizes)


def update(worker: ActorWorker, config: Config, number: int, groups: list[Group] | None = None) -> RankResult:
    """Run a step of one update. groups: the samples; None: those of this number in UPDATES."""
    groups = UPDATES[number] if groups is None else groups
    batch = local_batch(rank_batches(config, worker.packing, groups)[worker.data_parallel_rank])
    gradients = capture_gradients(worker)
    if config.algorithm.kl.coefficient:
        worker.keep_log_probs("reference", batch)
    metrics = worker.update(batch)
    worker.end_step()
    if config.algorithm.kl.adaptive_target is not None:
        worker.adapt_kl(divergence=1.0, num_samples=12)
    if config.algorithm.kl.renews_after(number + 1):
        worker.renew_reference()
    weights = {name: p.clone() for name, p in worker.parameters().items()}
    return RankResult(worker.holder, gradients, weights, metrics)


def draw() -> list[float]:
    """Draw a number from each random generator of the rank."""
    with get_cuda_rng_tracker().fork():
        regional = float(torch.rand(()))
    return [random.random(), float(torch.rand(())), regional]


def save(
    store,
    rank: int,
    config: Config,
    model: Path,
    folder: Path,
    before: Checkpoint | None = None,
    groups: list[Group] | None = None,
) -> Saved:
    """Save on one rank and run the last update while the files are being written. Before that, the rank resumes from
    `before` if given; otherwise it runs the first updates. groups: as in `update`.
    """
    worker = ActorWorker(config, model, rank, store, threads=1)
    if before is None:
        for number in range(SAVED_AFTER):
            update(worker, config, number, groups)
    else:
        worker.load_checkpoint(before)
    worker.save_checkpoint(folder)
    result = update(worker, config, SAVED_AFTER, groups)
    return Saved(worker.finish_checkpoint(folder), result)


def resume(
    store, rank: int, config: Config, model: Path, checkpoint: Checkpoint, groups: list[Group] | None = None
) -> RankResult:
    worker = ActorWorker(config, model, rank, store, threads=1)
    worker.check_checkpoint(checkpoint)
    worker.load_checkpoint(checkpoint)
    assert worker.num_updates == SAVED_AFTER
    return update(worker, config, SAVED_AFTER, groups)


def saved_by(
    config: Config, model: Path, folder: Path, *arguments: Any, function: Callable[..., Saved] = save
) -> tuple[list[RankResult], Checkpoint]:
    """Run a function that saves on all ranks. Return the ranks' results and the checkpoint."""
    checkpoints = Checkpoints(folder)
    hidden = checkpoints.begin(SAVED_AFTER)
    (hidden / "actor").mkdir()
    ranks = run_ranks(config.actor.layout.world_size, function, config, model, hidden, *arguments)
    files = [record for rank in ranks for record in rank.files]
    assert noted_files(hidden, "actor", len(ranks)) == files
    checkpoint = checkpoints.commit(SAVED_AFTER, {"config": config.model_dump()}, files)
    expected = checkpoint_bytes(config, {"actor": trained_hf_config(config, "actor", read_config(model))})
    assert sum(record.num_bytes for record in files) == pytest.approx(expected, rel=0.04)
    assert {record.path for record in files} == {f"actor/{file.name}" for file in (checkpoint.path / "actor").iterdir()}
    return [rank.result for rank in ranks], checkpoint


def assert_same_weights(some: list[RankResult], others: list[RankResult]) -> None:
    for one, other in zip(some, others, strict=True):
        differing = [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]
        assert not differing


def check_round_trip(
    model: Path,
    reference: Expected[Outcome] | None,
    tmp_path: Path,
    layouts: tuple[str, str],
    *overrides: str,
    groups: list[Group] | None = None,
) -> None:
    first, second = (config_of(model, f"actor.layout={{{layout}}}", *overrides) for layout in layouts)
    uninterrupted, checkpoint = saved_by(first, model, tmp_path / "first", None, groups)
    elsewhere, converted = saved_by(second, model, tmp_path / "second", checkpoint, groups)
    if reference is not None:
        assert_same_training(model, elsewhere, reference)
    # Weights, moments and counts have passed through the other layout, and the next update is bit-identical.
    round_trip = run_ranks(first.actor.layout.world_size, resume, first, model, converted, groups)
    assert_same_weights(round_trip, uninterrupted)


@pytest.mark.parametrize("pair", exhaustive_but(PAIRS, "PP2, VPP2 and TP2, SP"))
def test_checkpoints_survive_a_round_trip_of_layouts(model, reference, tmp_path, pair):
    check_round_trip(model, reference, tmp_path, PAIRS[pair])


# test_renewed_reference_resumes_and_changes_layout also takes experts through another layout.
@pytest.mark.parametrize("pair", exhaustive_but(PAIRS_WITH_EXPERTS))
def test_expert_checkpoints_survive_a_round_trip(experts, experts_reference, tmp_path, pair):
    check_round_trip(experts, experts_reference, tmp_path, PAIRS_WITH_EXPERTS[pair])


@pytest.mark.parametrize("pair", exhaustive_but(PAIRS_WITH_LATENT_ATTENTION, "CP2 and 1 process"))
def test_latent_attention_checkpoints_survive_a_round_trip(latent, latent_reference, tmp_path, pair):
    check_round_trip(latent, latent_reference, tmp_path, PAIRS_WITH_LATENT_ATTENTION[pair])


@pytest.mark.parametrize("pair", exhaustive_but(PAIRS_WITH_DELTA_NETS))
def test_delta_net_checkpoints_survive_a_round_trip(recurrent, tmp_path, pair):
    """There is no reference: after an update of this model, transformers' own gradients differ by 1e-2 between float32
    and float64."""
    check_round_trip(recurrent, None, tmp_path, PAIRS_WITH_DELTA_NETS[pair])


@pytest.mark.exhaustive
def test_vision_tower_survives_a_round_trip(tmp_path):
    model = tiny_vision.build(tmp_path / "model", "qwen2_5_vl")
    keys = "model.vision=true", "batch={prompts_per_step: 4, prompts_per_update: 4}"
    check_round_trip(model, None, tmp_path, PAIRS["PP2, VPP2 and TP2, SP"], *keys, groups=groups_of(model))


KEPT, TRAINED = "actor.mtp.loss_coefficient=0.0", "actor.mtp.loss_coefficient=0.3"


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", [KEPT, TRAINED])
def test_mtp_layer_survives_a_round_trip(latent, latent_reference, tmp_path, key):
    model = add_mtp_layer(shutil.copytree(latent, tmp_path / "model"))
    check_round_trip(model, latent_reference, tmp_path, PAIRS_WITH_LATENT_ATTENTION["TP2, EP2, ETP1 and PP2"], key)


@pytest.mark.exhaustive
@pytest.mark.parametrize("key", [KEPT, TRAINED])
def test_separate_mtp_layer_survives_a_round_trip(recurrent, tmp_path, key):
    model = add_mtp_layer(shutil.copytree(recurrent, tmp_path / "model"))
    check_round_trip(model, None, tmp_path, PAIRS_WITH_DELTA_NETS["PP2, EP2 and TP2, SP"], key)


@pytest.mark.exhaustive
def test_decays_stay_float32_in_a_bfloat16_run(recurrent, tmp_path):
    """In memory, in the optimizer and in checkpoints; the model has weights of both dtypes."""
    config = config_of(recurrent, "model.dtype=bfloat16", "actor.layout.dp=2")
    uninterrupted, checkpoint = saved_by(config, recurrent, tmp_path)
    assert_same_weights(run_ranks(2, resume, config, recurrent, checkpoint), uninterrupted)
    for rank in uninterrupted:
        decays = {name for name in rank.weights if name.endswith("A_log")}
        assert len(decays) == 3
        assert decays == {name for name, weight in rank.weights.items() if weight.dtype is torch.float32}
        assert all((rank.weights[name] != rank.weights[name].bfloat16()).any() for name in decays)
        assert {name for name, dtype in rank.holder.dtypes.items() if dtype == "float32"} == decays
    tensors = describe(checkpoint.path / "actor").tensors
    assert {dtype for name, (_, dtype, _) in tensors.items() if name.endswith("A_log")} == {"float32"}


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(["model.layers.1.*"], marks=pytest.mark.exhaustive),
        ["model.embed_tokens.*", "model.layers.[01].*"],
    ],
)
def test_frozen_layers_resume_and_change_layout(model, tmp_path, frozen):
    """Freeze a single layer, then the whole first stage, whose rank has no optimizer state."""
    first, second = (config_of(model, f"actor.frozen={frozen}", f"actor.layout.pp={pp}") for pp in (2, 1))
    uninterrupted, checkpoint = saved_by(first, model, tmp_path / "first")
    assert_same_weights(run_ranks(2, resume, first, model, checkpoint), uninterrupted)
    _, converted = saved_by(second, model, tmp_path / "second", checkpoint)
    assert_same_weights(run_ranks(2, resume, first, model, converted), uninterrupted)


def bytes_read(store, rank: int, config: Config, model: Path, checkpoint: Checkpoint) -> tuple[int, set[str]]:
    """Return how many bytes of trained parameters and optimizer state a rank reads, and from which files."""
    num_bytes, files, read, commit = 0, set(), TorchDistFolder.read, MCoreLoadPlanner.commit_tensor

    def counted(self: TorchDistFolder, *place: Any) -> torch.Tensor:
        nonlocal num_bytes
        part = read(self, *place)
        num_bytes += part.nbytes
        files.update(self._maps)
        return part

    def counted_by_megatron(self: MCoreLoadPlanner, item: ReadItem, part: torch.Tensor) -> None:
        nonlocal num_bytes
        num_bytes += part.nbytes
        commit(self, item, part)

    TorchDistFolder.read, MCoreLoadPlanner.commit_tensor = counted, counted_by_megatron
    load(store, rank, config, model, checkpoint)
    return num_bytes, files


def bytes_in_files(folder: Path) -> dict[tuple[str, str], int]:
    """Return the bytes of weight and optimizer elements in a checkpoint's files, as torch reads them."""
    metadata = FileSystemReader(folder).read_metadata()
    sizes_by_file: dict[tuple[str, str], int] = defaultdict(int)
    for index, info in metadata.storage_data.items():
        tensor = metadata.state_dict_metadata[index.fqn]
        if isinstance(tensor, TensorStorageMetadata):
            [chunk] = [chunk for chunk in tensor.chunks if chunk.offsets == index.offset]
            kind = "optimizer" if index.fqn.startswith("optimizer.") else "weights"
            sizes_by_file[info.relative_path, kind] += chunk.sizes.numel() * tensor.properties.dtype.itemsize
    return sizes_by_file


def test_ranks_write_and_read_only_their_own_range(model, tmp_path):
    """A parameter takes 2 bytes as a weight and 12 in the optimizer. Under another layout, a rank reads only the ranges
    that it needs."""
    config = config_of(model, "model.dtype=bfloat16", "actor.layout.dp=2")
    [held, _], checkpoint = saved_by(config, model, tmp_path)
    count = sum(weight.numel() for weight in held.weights.values())
    written, own = bytes_in_files(checkpoint.path / "actor"), [f"__{rank}_0.distcp" for rank in range(2)]
    assert written.keys() == {(file, kind) for file in own for kind in ("weights", "optimizer")}
    for kind, each in (("weights", 2), ("optimizer", 12)):
        shares = [written[file, kind] for file in own]
        assert sum(shares) == each * count and min(shares) > 0.49 * each * count
    read = run_ranks(2, bytes_read, config, model, checkpoint)
    assert read == [(written[file, "weights"] + written[file, "optimizer"], {file}) for file in own]
    elsewhere = config_of(model, "model.dtype=bfloat16", "actor.layout.tp=2")
    sizes = [num_bytes for num_bytes, _ in run_ranks(2, bytes_read, elsewhere, model, checkpoint)]
    assert sum(sizes) == 14 * (count + 9 * SIZES["hidden_size"])  # norms are read by both ranks


@pytest.mark.parametrize("optimizer", exhaustive_but(["adamw", "muon"], "muon"))
def test_optimizer_saved_in_whole_tensors_resumes(model, tmp_path, optimizer):
    """Conversion writes whole tensors, and so did earlier versions on the first data-parallel rank."""
    keys = ("model.dtype=bfloat16", f"actor.optimizer.name={optimizer}")
    config, other = (config_of(model, *keys, f"actor.layout.dp={dp}") for dp in (2, 1))
    uninterrupted, checkpoint = saved_by(config, model, tmp_path / "first")
    checkpoints = Checkpoints(tmp_path / "second")
    hidden = checkpoints.begin(SAVED_AFTER)
    reshape(checkpoint.path, hidden / "actor", other.actor.layout)
    shape_and_parts = [(shape, parts) for shape, _, parts in describe(hidden / "actor").tensors.values()]
    assert all(parts == 1 for shape, parts in shape_and_parts if shape[0] != 2 * SIZES["intermediate_size"])
    files = [seal(file, hidden) for file in (hidden / "actor").rglob("*") if file.is_file()]
    converted = checkpoints.commit(SAVED_AFTER, {"config": other.model_dump()}, files)
    assert_same_weights(run_ranks(2, resume, config, model, converted), uninterrupted)


def test_float16_resumes_its_main_weights_and_loss_scale(model, tmp_path):
    """The update after the save completes the window, so it doubles the scale."""
    scale = f"actor.megatron_overrides.optimizer={{initial_loss_scale: 1024.0, loss_scale_window: {SAVED_AFTER + 1}}}"
    config = config_of(model, "model.dtype=float16", "actor.layout.dp=2", scale)
    uninterrupted, checkpoint = saved_by(config, model, tmp_path)
    resumed = run_ranks(2, resume, config, model, checkpoint)
    assert_same_weights(resumed, uninterrupted)
    for ranks in (resumed, uninterrupted):
        assert {rank.metrics["policy/loss_scale"].value for rank in ranks} == {2048}


@pytest.mark.exhaustive
def test_bfloat16_resumes_its_main_weights(model, tmp_path):
    config = config_of(model, "model.dtype=bfloat16", "actor.layout.dp=2")
    uninterrupted, checkpoint = saved_by(config, model, tmp_path)
    assert_same_weights(run_ranks(2, resume, config, model, checkpoint), uninterrupted)


@pytest.mark.parametrize(
    "renewal",
    exhaustive_but(["renew_steps: 2", "renew_steps: 1, renew_share: 0.3"]),
)
def test_renewed_reference_resumes_and_changes_layout(experts, tmp_path, renewal):
    """After the save, the gradient depends on the reference. The tied embedding exists on both stages with PP2."""
    kl = f"algorithm.kl={{coefficient: 10.0, {renewal}}}"
    layouts = "{dp: 2, ep: 2, pp: 2}", "{tp: 2, sequence_parallel: true}"
    first, second = (config_of(experts, "model.dtype=bfloat16", kl, f"actor.layout={layout}") for layout in layouts)
    uninterrupted, checkpoint = saved_by(first, experts, tmp_path / "first")
    assert_same_weights(run_ranks(4, resume, first, experts, checkpoint), uninterrupted)
    _, converted = saved_by(second, experts, tmp_path / "second", checkpoint)
    assert_same_weights(run_ranks(4, resume, first, experts, converted), uninterrupted)


def test_adapted_kl_coefficient_resumes(model, tmp_path):
    """The coefficient has grown by a fifth after each step before the save."""
    kl = "algorithm.kl={coefficient: 10.0, adaptive_target: 0.5, adaptive_horizon: 12}"
    config = config_of(model, kl, "actor.layout.pp=2")
    uninterrupted, checkpoint = saved_by(config, model, tmp_path)
    resumed = run_ranks(2, resume, config, model, checkpoint)
    assert resumed[1].metrics["kl/coefficient"].value == pytest.approx(10 * 1.2**SAVED_AFTER)
    assert_same_weights(resumed, uninterrupted)


def save_late(store, rank: int, config: Config, model: Path, folder: Path) -> Saved:
    """Delay all writes until the weights have changed. Return the rank's state at the time of the save."""
    release, write = threading.Event(), sharded.save_state
    sharded.save_state = lambda *args, **kwargs: release.wait() and write(*args, **kwargs)
    worker = ActorWorker(config, model, rank, store, threads=1)
    held = update(worker, config, 0)
    worker.save_checkpoint(folder)
    update(worker, config, 1)
    assert not worker.checkpoint_written()
    release.set()
    return Saved(worker.finish_checkpoint(folder), held)


def load(store, rank: int, config: Config, model: Path, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    worker = ActorWorker(config, model, rank, store, threads=1)
    worker.load_checkpoint(checkpoint)
    return {name: p.clone() for name, p in worker.parameters().items()}


def test_checkpoint_holds_the_weights_at_the_time_of_the_save(model, tmp_path):
    # In bfloat16, the model's weights differ from the optimizer's main weights. Each rank reads half of the main
    # weights.
    config = config_of(model, "model.dtype=bfloat16", "actor.layout.dp=2")
    held, checkpoint = saved_by(config, model, tmp_path, function=save_late)
    for loaded, result in zip(run_ranks(2, load, config, model, checkpoint), held, strict=True):
        assert all(torch.equal(loaded[name], result.weights[name]) for name in loaded)


OFFLOADED = ("gradients", "optimizer")


def save_offloaded(store, rank: int, config: Config, model: Path, folder: Path, begun: Path) -> Saved:
    """Save with all state offloaded, before and after the updates that create the optimizer's moments. Saving leaves
    the state offloaded."""
    worker = ActorWorker(config, model, rank, store, threads=1)
    worker.offload(OFFLOADED)
    worker.save_checkpoint(begun)
    assert not _optimizer_bytes(worker)
    worker.finish_checkpoint(begun)
    for number in range(SAVED_AFTER):
        worker.onload(OFFLOADED)
        update(worker, config, number)
        worker.offload(OFFLOADED)
    worker.save_checkpoint(folder)
    assert not _optimizer_bytes(worker)
    worker.onload(OFFLOADED)
    result = update(worker, config, SAVED_AFTER)
    return Saved(worker.finish_checkpoint(folder), result)


def _optimizer_bytes(worker: ActorWorker) -> int:
    """Return the bytes of optimizer state on the device."""
    return sum(tensor.untyped_storage().nbytes() for tensor in worker._offload._optimizer_tensors())


def test_offloaded_optimizer_is_saved_while_offloaded(model, tmp_path):
    """With bfloat16, the optimizer includes main weights. The run used for comparison offloads nothing."""
    keys = ("model.dtype=bfloat16", "actor.layout.dp=2")
    resident, offloading = (config_of(model, *keys, f"actor.offload=[{parts}]") for parts in ("", ", ".join(OFFLOADED)))
    (tmp_path / "begun" / "actor").mkdir(parents=True)
    offloaded, checkpoint = saved_by(
        offloading, model, tmp_path / "offloaded", tmp_path / "begun", function=save_offloaded
    )
    uninterrupted, _ = saved_by(resident, model, tmp_path / "resident")
    assert_same_weights(offloaded, uninterrupted)
    assert_same_weights(run_ranks(2, resume, resident, model, checkpoint), uninterrupted)


def save_and_draw(store, rank: int, config: Config, model: Path, folder: Path) -> tuple[list[FileRecord], list[float]]:
    """Save before any update, after the generators have advanced, and draw from them again."""
    worker = ActorWorker(config, model, rank, store, threads=1)
    draw()
    worker.save_checkpoint(folder)
    return worker.finish_checkpoint(folder), draw()


def load_and_draw(store, rank: int, config: Config, model: Path, checkpoint: Checkpoint) -> list[float]:
    worker = ActorWorker(config, model, rank, store, threads=1)
    worker.load_checkpoint(checkpoint)
    assert worker.num_updates == 0
    return draw()


def save_skipped(store, rank: int, config: Config, model: Path, folder: Path) -> Saved:
    """Save after five skipped updates, the last two of them in a row."""
    worker = ActorWorker(config, model, rank, store, threads=1)
    for is_skipped in (True, True, True, False, True, True):
        worker._skipped.add(is_skipped)
    worker.save_checkpoint(folder)
    return Saved(worker.finish_checkpoint(folder), RankResult(worker.holder, {}, {}, {}))


def load_skipped(store, rank: int, config: Config, model: Path, checkpoint: Checkpoint) -> tuple[float, float]:
    worker = ActorWorker(config, model, rank, store, threads=1)
    worker.load_checkpoint(checkpoint)
    return worker._skipped.total, worker._skipped.consecutive


def test_count_of_skipped_updates_resumes(model, tmp_path):
    """Without the saved count, a restarted run with NaN gradients would stop later or never."""
    config = config_of(model)
    _, checkpoint = saved_by(config, model, tmp_path, function=save_skipped)
    assert run_ranks(1, load_skipped, config, model, checkpoint) == [(5, 2)]


def start_and_draw(store, rank: int, config: Config, model: Path) -> list[float]:
    ActorWorker(config, model, rank, store, threads=1)
    return draw()


def test_random_generators_resume(model, tmp_path):
    config = config_of(model, "actor.layout.tp=2")
    checkpoints = Checkpoints(tmp_path)
    folder = checkpoints.begin(0)
    (folder / "actor").mkdir()
    saved = run_ranks(2, save_and_draw, config, model, folder)
    files = [record for records, _ in saved for record in records]
    checkpoint = checkpoints.commit(0, {"config": config.model_dump()}, files)
    loaded = run_ranks(2, load_and_draw, config, model, checkpoint)
    assert loaded == [drawn for _, drawn in saved]
    other = config_of(model, "actor.layout.pp=2")
    elsewhere = run_ranks(2, load_and_draw, other, model, checkpoint)
    assert elsewhere == run_ranks(2, load_and_draw, other, model, checkpoint)
    assert elsewhere not in (loaded, run_ranks(2, start_and_draw, other, model))


def rejection(store, rank: int, config: Config, model: Path, checkpoint: Checkpoint) -> str:
    worker = ActorWorker(config, model, rank, store, threads=1)
    try:
        worker.load_checkpoint(checkpoint)
    except ValueError as error:
        return str(error)
    return ""


def test_checkpoint_of_another_model_is_rejected(model, tmp_path):
    _, checkpoint = saved_by(config_of(model), model, tmp_path / "checkpoints")
    untied = write_tiny_llama(tmp_path / "untied", **SIZES, tied=False)
    [message] = run_ranks(1, rejection, config_of(untied), untied, checkpoint)
    assert message.startswith(f"{checkpoint.path}/actor: checkpoint of a different model: ")
    assert "only one of the two models has" in message and "output_layer.weight. Fix: resume" in message
    wider = write_tiny_llama(tmp_path / "wider", **SIZES | {"intermediate_size": 2 * SIZES["intermediate_size"]})
    messages = run_ranks(2, rejection, config_of(wider, "actor.layout.dp=2"), wider, checkpoint)
    assert all("decoder.layers.0.mlp.linear_fc1.weight has shape (200, 72) instead of (400, 72)" in m for m in messages)


def save_at_start(store, rank: int, config: Config, model: Path, folder: Path, role: Role) -> list[FileRecord]:
    worker = worker_class(config, role)(config, model, rank, store, threads=1)
    worker.save_checkpoint(folder)
    return worker.finish_checkpoint(folder)


@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        ("critic", ["critic.frozen=['model.layers.[01].*']", "critic.layout.tp=2"]),
        ("actor", ["critic.shared_backbone=true", "model.dtype=bfloat16"]),
        ("implicit_reward", ["implicit_reward.coefficient=1.0", "implicit_reward.frozen=['model.layers.[0-2].*']"]),
    ],
)
def test_predicted_checkpoint_size_matches_for_every_role(tmp_path, role, overrides):
    """The LM head is untied, so a critic does not have it."""
    model = write_tiny_llama(tmp_path / "model", **SIZES, tied=False)
    config = config_of(model, "algorithm.advantage.estimator=gae", *overrides)
    folder = tmp_path / "checkpoint"
    (folder / role).mkdir(parents=True)
    ranks = run_ranks(config.placed(role).layout.world_size, save_at_start, config, model, folder, role)
    hf_config = ModelFolders(model, model, None, model).trained(config)[role]
    written = sum(record.num_bytes for records in ranks for record in records)
    assert written == pytest.approx(checkpoint_bytes(config, {role: hf_config}), rel=0.04)


def save_forever(store: Path, config: Config, model: Path, folder: Path) -> None:
    """Resume from the newest checkpoint and keep saving, in one process."""
    torch.set_num_threads(1)
    worker, checkpoints = ActorWorker(config, model, 0, dist.FileStore(str(store), 1), threads=1), Checkpoints(folder)
    first = 1
    if path := checkpoints.latest():
        checkpoint = Checkpoint.open(path)
        worker.check_checkpoint(checkpoint)
        worker.load_checkpoint(checkpoint)
        first = checkpoint.step + 1
    for step in itertools.count(first):
        assert worker.num_updates == step - 1
        update(worker, config, step % len(UPDATES))
        hidden = checkpoints.begin(step)
        (hidden / "actor").mkdir()
        worker.save_checkpoint(hidden)
        checkpoints.commit(step, {"config": config.model_dump()}, worker.finish_checkpoint(hidden))
        checkpoints.keep(1)


def test_previous_checkpoint_loads_after_a_kill_during_a_save(model, tmp_path):
    config, checkpoints = config_of(model), Checkpoints(tmp_path / "checkpoints")
    for attempt in range(6):
        before = checkpoints.latest()
        arguments = (tmp_path / f"store{attempt}", config, model, checkpoints.path)
        process = multiprocessing.get_context("fork").Process(target=save_forever, args=arguments)
        process.start()
        while checkpoints.latest() == before:
            assert process.is_alive(), "the process failed to resume"
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3))  # a save takes about 0.3 s
        process.kill()
        process.join()
    run_ranks(1, load, config, model, Checkpoint.open(checkpoints.latest()))


def save_without_space(store, rank: int, config: Config, model: Path, folder: Path) -> str:
    worker = ActorWorker(config, model, rank, store, threads=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    worker.save_checkpoint(folder)
    try:
        worker.finish_checkpoint(folder)
    except RuntimeError as error:
        return str(error)
    return ""


def test_write_errors_name_the_path_and_the_cause(model, tmp_path):
    hidden = Checkpoints(tmp_path).begin(1)
    (hidden / "actor").mkdir()
    config = config_of(model, "actor.layout.pp=2")
    messages = run_ranks(2, save_without_space, config, model, hidden)
    assert all(message.startswith(f"{hidden}/actor: writing failed with ") for message in messages)
