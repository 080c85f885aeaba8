"""Adapters in every layout: losses, gradients, updates and the weights sent to engines, against PEFT in one plain
process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.schema import Config
from megarl.core.checkpoint import Checkpoint
from megarl.core.errors import UserError
from megarl.data.local_batch import LocalBatch
from megarl.megatron.checkpoint.adapters import adapters_to_huggingface, adapters_to_peft
from megarl.megatron.checkpoint.conversion import Options, megatron_to_huggingface
from megarl.megatron.checkpoint.description import describe
from megarl.megatron.model.build import adapter_parameters
from megarl.megatron.workers.actor import ActorWorker
from megarl.models.folder import read_config
from megarl.models.peft import PEFT, WEIGHTS
from megarl.models.trained_model import policy_hf_config
from megarl.models.weights_hash import weights_hash
from megarl.resharding.execute import execute
from megarl.resharding.families import huggingface_holder
from megarl.resharding.families.adapters import expert_tensor_names, peft_holder
from megarl.resharding.folder import write_folder
from megarl.resharding.peft_folder import save_adapters
from megarl.resharding.piece import Holder
from megarl.resharding.planning.planner import make_plan
from megarl.resharding.transports.local import LocalMemory
from megarl.run.checkpoint_size import checkpoint_bytes
from megarl.run.checkpoints import Checkpoints
from tests.closeness import LOSS_FLOOR, TOLERANCE, TOLERANCES, assert_close, assert_matches, close_to, expected, load
from tests.distributed.test_families import GATED_DELTA as FAMILY_GATED_DELTA
from tests.distributed.test_families import GLM
from tests.forked import run_ranks
from tests.lora_reference import MergedReference, PeftReference, write_adapters
from tests.marks import exhaustive_but
from tests.parity import (
    EPS,
    LR,
    TEMPERATURE,
    branching_group,
    config_of,
    own_batch,
    random_groups,
    reduced_gradients,
    separate_experts,
    whole_tensors,
)
from tests.tiny_model import SHARDED_VOCAB, add_mtp_layer, write_tiny_experts, write_tiny_llama, write_tiny_model
from tests.unit.api.test_convert import convert

UPDATES = [[*random_groups(seed, SHARDED_VOCAB), branching_group(seed, SHARDED_VOCAB)] for seed in range(2)]
KL, RANK, ALPHA = 0.05, 3, 6
DENSE = {
    "one process": "dp: 1",
    "DP2": "dp: 2",
    "TP2": "tp: 2",
    "TP2, SP": "tp: 2, sequence_parallel: true",
    "PP2": "pp: 2",
    "TP2, PP2, VPP2, SP": "tp: 2, pp: 2, vpp: 2, sequence_parallel: true",
    "CP2, DP2": "cp: 2, dp: 2",
    "CP2, TP2, SP": "cp: 2, tp: 2, sequence_parallel: true",
}
EXPERTS = {
    "one process": "dp: 1",
    "EP2, TP2, ETP1": "tp: 2, sequence_parallel: true, ep: 2, etp: 1",
    "EP2, TP2, ETP2": "tp: 2, sequence_parallel: true, dp: 2, ep: 2, etp: 2",
    "TP2, SP": "tp: 2, sequence_parallel: true",
    "EP2, CP2": "cp: 2, ep: 2",
    "EP2, PP2, VPP2": "dp: 2, pp: 2, vpp: 2, ep: 2",
    "EP2, DP4, ETP2": "dp: 4, ep: 2, etp: 2",
}


@dataclass(frozen=True)
class AdapterResult:
    """A rank's state after its updates, with the gradients of the last one."""

    holder: Holder
    adapter_holder: Holder
    whole: Holder
    gradients: dict[str, torch.Tensor]
    factors: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    reported: dict[str, float]


def train_adapters(store, rank: int, config: Config, folder: Path, updates: list) -> AdapterResult:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    return take_steps(worker, [own_batch(config, worker, groups, None) for groups in updates])


def take_steps(worker: ActorWorker, batches: Sequence[LocalBatch]) -> AdapterResult:
    """Take one step, with one update per batch."""
    gradients: dict[str, torch.Tensor] = {}
    step = worker.optimizer.step

    def step_and_copy():
        reduced_gradients(worker.chunks)
        gradients.update({n: p.main_grad.clone() for n, p in adapter_parameters(worker.chunks).items()})
        return step()

    worker.optimizer.step = step_and_copy
    metrics = {}
    for batch in batches:
        worker.keep_log_probs("reference", batch)
        metrics = worker.update(batch)
        worker.end_step()
    worker.prepare_refit()
    return AdapterResult(
        worker.holder,
        worker.adapters.holder,
        worker.adapters.whole,
        gradients,
        {name: p.detach().clone() for name, p in adapter_parameters(worker.chunks).items()},
        {name: p.clone() for name, p in worker.parameters().items()},
        {name: p.clone() for name, p in worker._refit_weights.items()},
        {name: metric.value for name, metric in metrics.items()},
    )


def whole_factors(ranks: list[AdapterResult], what: str) -> dict[str, torch.Tensor]:
    """Assemble the ranks' "gradients" or "factors" into whole tensors under PEFT's names."""
    target = ranks[0].whole
    plan = make_plan([rank.adapter_holder for rank in ranks], [target])
    whole = {name: torch.full(shape, torch.nan) for name, shape in target.shapes.items()}
    transport = LocalMemory({rank.adapter_holder.name: getattr(rank, what) for rank in ranks})
    execute(plan.into(target.name), whole, transport)
    return whole


def write_dense(folder: Path) -> Path:
    return write_tiny_llama(folder, num_heads=4, num_kv_heads=2, num_layers=4, tied=False, vocab_size=SHARDED_VOCAB)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return write_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def dense_adapters(tmp_path_factory, dense: Path) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), dense, RANK, ALPHA)


@pytest.fixture(scope="module")
def dense_outcome(dense: Path, dense_adapters: Path):
    return expected(lambda: outcome_of(dense_reference(dense, dense_adapters)))


def dense_reference(folder: Path, adapters: Path) -> PeftReference:
    return PeftReference(folder, adapters, LR, EPS, TEMPERATURE)


def keys_of(adapters: Path, shares: bool = False) -> list[str]:
    lora = f"{{rank: {RANK}, alpha: {ALPHA}, path: {adapters}, share_experts: {str(shares).lower()}}}"
    return [f"actor.lora={lora}", f"algorithm.kl.coefficient={KL}"]


def config_with(folder: Path, keys: list[str], layout: str, *overrides: str) -> Config:
    return config_of(folder, *keys, f"actor.layout={{{layout}}}", *overrides)


@pytest.mark.parametrize("layout", exhaustive_but(DENSE, "TP2, PP2, VPP2, SP"))
def test_dense_model(dense, dense_adapters, dense_outcome, layout):
    check(dense, config_with(dense, keys_of(dense_adapters), DENSE[layout]), dense_outcome)


GATED_DELTA = {"one process": "dp: 1", "TP2, PP2, SP": "tp: 2, pp: 2, sequence_parallel: true", "CP2": "cp: 2"}


@pytest.fixture(scope="module")
def gated_delta(tmp_path_factory) -> Path:
    return write_gated_delta(tmp_path_factory.mktemp("gated"))


def write_gated_delta(folder: Path) -> Path:
    return write_tiny_model(
        folder,
        "qwen3_5_text",
        vocab_size=SHARDED_VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    )


@pytest.fixture(scope="module")
def gated_delta_outcome(tmp_path_factory, gated_delta: Path):
    adapters = write_adapters(tmp_path_factory.mktemp("adapters"), gated_delta, RANK, ALPHA)
    return adapters, expected(lambda: outcome_of(dense_reference(gated_delta, adapters), UPDATES[:1]))


@pytest.mark.parametrize("layout", exhaustive_but(GATED_DELTA, "TP2, PP2, SP"))
def test_gated_delta_nets(gated_delta, gated_delta_outcome, layout):
    """After one update: in the second one, transformers itself loses 1e-4 of the gradients in float32."""
    adapters, outcome = gated_delta_outcome
    check(gated_delta, config_with(gated_delta, keys_of(adapters), GATED_DELTA[layout]), outcome, UPDATES[:1])


@pytest.mark.parametrize(
    "override",
    exhaustive_but(["actor.recompute=full", "actor.overlap_communication=false"], "actor.recompute=full"),
)
def test_recompute_and_communication_variants(dense, dense_adapters, dense_outcome, override):
    check(dense, config_with(dense, keys_of(dense_adapters), DENSE["TP2, SP"], override), dense_outcome)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), num_layers=4, vocab_size=SHARDED_VOCAB)


FACTORS = {"own factors": False, "shared factors": True}


@pytest.fixture(scope="module")
def expert_case(tmp_path_factory, request, experts: Path):
    """Return whether experts share factors, the folder with the adapters, and the expected outcome in plain torch."""
    shares = FACTORS[request.param]
    factors = random_factors(experts, shares)
    folder = write_factors(tmp_path_factory.mktemp("adapters") / "peft", experts, factors, shares)
    return shares, folder, expected(lambda: outcome_of(merged_reference(experts, factors)))


def random_factors(experts: Path, shares: bool) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    whole = peft_holder(read_config(experts), RANK, shares)
    return {
        name: torch.randn(shape, generator=random) * (0.1 if "lora_A" in name else 0.05)
        for name, shape in whole.shapes.items()
    }


def write_factors(folder: Path, experts: Path, factors: dict[str, torch.Tensor], shares: bool) -> Path:
    save_adapters(factors, config_of(experts, *keys_of(folder, shares)).actor.lora, "base", 4, folder, PEFT)
    return folder


def merged_reference(experts: Path, factors: dict[str, torch.Tensor]) -> MergedReference:
    return MergedReference(experts, factors, ALPHA / RANK, LR, EPS, TEMPERATURE)


def expert_pairs() -> Iterator[ParameterSet]:
    """Yield the pairs of factors and layouts. `make test` runs one pair for each kind of factors."""
    for factors, layout in product(FACTORS, EXPERTS):
        is_in_test = (factors, layout) in (("own factors", "EP2, TP2, ETP2"), ("shared factors", "EP2, CP2"))
        yield pytest.param(factors, layout, marks=() if is_in_test else pytest.mark.exhaustive)


@pytest.mark.parametrize(("expert_case", "layout"), [*expert_pairs()], indirect=["expert_case"])
def test_mixture_of_experts(experts, expert_case, layout):
    shares, adapters, outcome = expert_case
    check(experts, config_with(experts, keys_of(adapters, shares), EXPERTS[layout]), outcome)


@pytest.mark.exhaustive
@pytest.mark.parametrize("factors", FACTORS)
def test_experts_with_biases(tmp_path, factors):
    shares = FACTORS[factors]
    folder = write_tiny_model(
        tmp_path / "model",
        "gpt_oss",
        vocab_size=SHARDED_VOCAB,
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        intermediate_size=40,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
    )
    random = random_factors(folder, shares)
    adapters = write_factors(tmp_path / "peft", folder, random, shares)
    outcome = expected(lambda: outcome_of(merged_reference(folder, random)))
    check(folder, config_with(folder, keys_of(adapters, shares), EXPERTS["EP2, TP2, ETP1"]), outcome)


def outcome_of(reference: PeftReference | MergedReference, updates: Sequence[list] = UPDATES):
    for groups in updates:
        loss, gradients, norm = reference.update(groups, KL, clip_norm=1.0)
    return loss, norm, gradients, reference.factors(), reference.merged()


def check(folder: Path, config: Config, outcome, updates: Sequence[list] = UPDATES) -> None:
    """Train, and compare the ranks with the outcome of one plain process."""
    assert_same(folder, run_ranks(config.actor.layout.world_size, train_adapters, config, folder, updates), outcome)


def assert_same(folder: Path, ranks: list[AdapterResult], outcome) -> None:
    """Compare the ranks with the outcome of one plain process. The base weights must be those in the folder."""
    reported = [rank.reported for rank in ranks if rank.reported]
    loss, norm, gradients, factors, merged = zip(*outcome, strict=True)
    assert sum(metrics["policy/loss"] for metrics in reported) == close_to(*loss, LOSS_FLOOR)
    assert reported[0]["policy/grad_norm"] == close_to(*norm)
    assert_close(whole_factors(ranks, "gradients"), *gradients, "gradient")
    assert_close(whole_factors(ranks, "factors"), *factors, "factor")
    [weights] = folder.glob("*.safetensors")
    hf_config, start = read_config(folder), separate_experts(load_file(weights))
    assert all(torch.equal(weight, start[name]) for name, weight in whole_tensors(hf_config, ranks, "base").items())
    assert_close(whole_tensors(hf_config, ranks, "weights"), *merged, "merged weight")


def resumed_update(worker: ActorWorker, config: Config) -> dict[str, torch.Tensor]:
    """Run a third update. Return the factors after it and the weights that engines would receive."""
    batch = own_batch(config, worker, random_groups(2, SHARDED_VOCAB), None)
    worker.keep_log_probs("reference", batch)
    worker.update(batch)
    worker.end_step()
    worker.prepare_refit()
    factors = {name: p.detach().clone() for name, p in adapter_parameters(worker.chunks).items()}
    return factors | {name: p.clone() for name, p in worker._refit_weights.items()}


def save_adapters_of(store, rank: int, config: Config, folder: Path, hidden: Path, before: Checkpoint | None):
    worker = ActorWorker(config, folder, rank, store, threads=1)
    if before is not None:
        worker.load_checkpoint(before)
    else:
        for groups in UPDATES:
            worker.update(own_batch(config, worker, groups, None))
            worker.end_step()
    worker.save_checkpoint(hidden)
    later = resumed_update(worker, config)
    return worker.finish_checkpoint(hidden), later


def resume(store, rank: int, config: Config, folder: Path, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.check_checkpoint(checkpoint)
    worker.load_checkpoint(checkpoint)
    return resumed_update(worker, config)


def saved(config: Config, folder: Path, runs: Path, before: Checkpoint | None = None):
    """Save on all ranks. Return each rank's state one update later, and the checkpoint."""
    checkpoints = Checkpoints(runs)
    hidden = checkpoints.begin(2)
    (hidden / "actor").mkdir()
    ranks = run_ranks(config.actor.layout.world_size, save_adapters_of, config, folder, hidden, before)
    files = [record for records, _ in ranks for record in records]
    models = {"model.path": {"folder": str(folder), "hash": weights_hash(folder)}}
    checkpoint = checkpoints.commit(2, {"config": config.model_dump(), "models": models}, files)
    predicted = checkpoint_bytes(config, {"actor": policy_hf_config(config, read_config(folder))})
    assert sum(record.num_bytes for record in files) == pytest.approx(predicted, rel=0.05)
    return [later for _, later in ranks], checkpoint


PAIRS = {
    "dense": [("tp: 2, pp: 2, sequence_parallel: true", "dp: 2", "false")],
    "experts": [
        ("tp: 2, sequence_parallel: true, dp: 2, ep: 2, etp: 2", "dp: 2", "false"),
        ("tp: 2, sequence_parallel: true, ep: 2, etp: 1", "dp: 2, ep: 2", "true"),
    ],
}


@pytest.mark.parametrize(
    ("model", "pair"),
    [
        pytest.param(model, pair, marks=() if model == "dense" else pytest.mark.exhaustive)
        for model, pairs in PAIRS.items()
        for pair in pairs
    ],
)
def test_adapters_resume_bit_for_bit_and_change_layout(request, tmp_path, model, pair):
    *layouts, shares = pair
    folder = request.getfixturevalue(model)
    lora = f"actor.lora={{rank: {RANK}, share_experts: {shares}}}"
    settings = ("model.dtype=bfloat16", "algorithm.kl.coefficient=1", "actor.tokens_per_microbatch=256")
    first, second = (config_of(folder, lora, *settings, f"actor.layout={{{layout}}}") for layout in layouts)
    uninterrupted, checkpoint = saved(first, folder, tmp_path / "first")
    tensors = describe(checkpoint.path / "actor").tensors
    assert all("lora_" in name for name in tensors if not name.startswith(("random", "common")))
    _, converted = saved(second, folder, tmp_path / "second", checkpoint)
    folders = []
    for name, source in (("a", checkpoint), ("b", converted)):
        adapters_to_peft(source.path, tmp_path / name)
        folders.append(load_file(tmp_path / name / WEIGHTS))
    assert folders[0].keys() == folders[1].keys()
    assert all(torch.equal(factor, folders[1][name]) for name, factor in folders[0].items())
    loading = config_of(folder, lora.replace("}", f", path: {tmp_path / 'a'}}}"), "model.dtype=bfloat16")
    ranks = run_ranks(1, train_adapters, loading, folder, [])
    check_merged_folders(checkpoint, converted, ranks, folder, tmp_path)
    loaded = whole_factors(ranks, "factors")
    assert all(torch.equal(factor, folders[0][expert_tensor_names(name, 4)[-1]]) for name, factor in loaded.items())
    for source in (checkpoint, converted):
        resumed = run_ranks(first.actor.layout.world_size, resume, first, folder, source)
        for one, other in zip(uninterrupted, resumed, strict=True):
            assert one.keys() == other.keys()
            assert not [name for name in one if not torch.equal(one[name], other[name])]


def check_merged_folders(
    checkpoint: Checkpoint, converted: Checkpoint, ranks: list[AdapterResult], folder: Path, out: Path
) -> None:
    """Check that a checkpoint's adapters are merged correctly by the converters and by the ranks of a run.

    Args:
        ranks: ranks of a run that started with the checkpoint's adapters.
        out: folder that contains the adapters as a PEFT folder, `a`.
    """
    convert("adapters-to-hf", "--checkpoint", checkpoint.path, "--out", out / "float32", "--dtype", "float32")
    adapters_to_huggingface(converted.path, out / "bfloat16", Options())
    merged, rounded = (load_file(out / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert_close(merged, *expected(lambda: merged_with_peft(folder, out / "a")), "merged weight")
    assert merged.keys() == rounded.keys()
    assert all(torch.equal(weight.bfloat16(), rounded[name]) for name, weight in merged.items())
    for name, weight in whole_tensors(read_config(folder), ranks, "weights").items():
        # The float32 sums may differ in the last bits and round to neighboring bfloat16 values.
        sums = dict(rtol=TOLERANCES[torch.bfloat16], atol=TOLERANCE * float(weight.abs().max()))
        torch.testing.assert_close(weight.bfloat16(), rounded[name], **sums)


def merged_with_peft(folder: Path, adapters: Path) -> dict[str, torch.Tensor]:
    """Merge adapters, in the default dtype, into a model that was loaded in bfloat16. PEFT does the merge, except where
    individual experts have adapters, which it does not support: plain torch merges those.
    """
    stored = load_file(adapters / WEIGHTS)
    if not any(".experts." in name for name in stored):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
        return PeftModel.from_pretrained(model, adapters).merge_and_unload().state_dict()
    reference = MergedReference(folder, stored, 32 / RANK, LR, EPS, TEMPERATURE)
    reference.stored = {name: weight.bfloat16().float() for name, weight in reference.stored.items()}
    return {name: weight.detach() for name, weight in reference.merged().items()}


def test_initial_adapters_are_equal_in_every_layout(dense, tmp_path):
    """As in PEFT, A is uniform within 1/√columns and B is zero."""
    begun = []
    for layout in ("dp: 1", "tp: 2, pp: 2"):
        config = config_of(dense, f"actor.lora.rank={RANK}", f"actor.layout={{{layout}}}")
        begun.append(
            whole_factors(run_ranks(config.actor.layout.world_size, train_adapters, config, dense, []), "factors")
        )
    for name, one in begun[0].items():
        assert torch.equal(one, begun[1][name])
        bound = one.shape[1] ** -0.5
        assert one.abs().max() <= bound if "lora_A" in name else not one.any()
        assert one.abs().max() > 0.9 * bound or "lora_B" in name


def exported(store, rank: int, config: Config, folder: Path) -> tuple[Holder, dict[str, torch.Tensor]]:
    """Run an update. Return the rank's holder and tensors for an export."""
    worker = ActorWorker(config, folder, rank, store, threads=1)
    worker.update(own_batch(config, worker, random_groups(0, SHARDED_VOCAB), None))
    worker.end_step()
    is_whole = config.actor.lora.export == "merged"
    holder = worker.holder if is_whole else worker.adapters.holder
    return holder, {name: tensor.clone() for name, tensor in worker._exported_weights().items()}


def export(config: Config, folder: Path, out: Path) -> Path:
    """Write a run's export after one update."""
    ranks = run_ranks(config.actor.layout.world_size, exported, config, folder)
    transport = LocalMemory({holder.name: tensors for holder, tensors in ranks})
    holders, lora, hf_config = [holder for holder, _ in ranks], config.actor.lora, read_config(folder)
    if lora.export == "merged":
        plan = make_plan(holders, [huggingface_holder(hf_config, "float32")])
        write_folder(plan, transport, hf_config, folder, out)
    else:
        whole = peft_holder(hf_config, lora.rank, lora.share_experts)
        tensors = {name: torch.empty(shape) for name, shape in whole.shapes.items()}
        execute(make_plan(holders, [whole]).into(whole.name), tensors, transport)
        save_adapters(tensors, lora, str(folder), 4, out, PEFT)
    return out


@pytest.fixture(scope="module")
def experts_alone(tmp_path_factory) -> Path:
    """Experts in every layer, because PEFT ignores the adapters of dense layers in a model with experts."""
    return write_tiny_experts(tmp_path_factory.mktemp("experts"), dense_layers=(), vocab_size=SHARDED_VOCAB)


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        pytest.param("dense", "", marks=pytest.mark.exhaustive),
        pytest.param("experts_alone", "", marks=pytest.mark.exhaustive),
        ("experts_alone", "share_experts: true, "),
    ],
)
def test_peft_with_exported_adapters_equals_the_merged_model(request, tmp_path, model, shares):
    folder, ids = request.getfixturevalue(model), torch.arange(6, 40)[None]
    layout = "actor.layout={tp: 2, sequence_parallel: true}"
    lora = f"actor.lora={{rank: {RANK}, {shares}export: EXPORT}}"
    merged, adapters = (
        export(config_of(folder, lora.replace("EXPORT", kind), layout), folder, tmp_path / kind)
        for kind in ("merged", "adapters")
    )
    base = load(AutoModelForCausalLM, folder)
    unadapted = base(ids).logits
    adapted = PeftModel.from_pretrained(base, adapters)(ids).logits
    assert_matches({"logits": adapted}, lambda: {"logits": load(AutoModelForCausalLM, merged)(ids).logits}, "adapted")
    assert (adapted - unadapted).abs().max() > 1e-2

    again = config_of(folder, lora.replace("EXPORT", "adapters"), layout, f"actor.lora.path={adapters}")
    loaded = whole_factors(run_ranks(2, train_adapters, again, folder, []), "factors")
    stored = load_file(adapters / WEIGHTS)
    assert loaded
    for name, factor in loaded.items():
        assert all(torch.equal(factor, stored[each]) for each in expert_tensor_names(name, 4))


MULTI_TOKEN = {
    "GLM-4.6: TP2, SP, EP2, ETP1": ("glm4_moe", GLM, "tp: 2, sequence_parallel: true, ep: 2, etp: 1"),
    "Qwen3.5: PP2": ("qwen3_5_text", FAMILY_GATED_DELTA | dict(intermediate_size=72), "pp: 2"),
}


@pytest.mark.parametrize("case", exhaustive_but(MULTI_TOKEN, "Qwen3.5: PP2"))
def test_mtp_layer_is_kept_with_adapters(tmp_path, case):
    """The MTP layer has no adapters, and the other layers are bit-identical to a run without it. After a resume, in
    engines and in the merged folder, the layer is the same as in the base model."""
    family, sizes, layout = MULTI_TOKEN[case]
    folder = add_mtp_layer(write_tiny_model(tmp_path / "model", family, **sizes))
    base, outcomes = load_file(folder / "model.safetensors"), []
    for name, keys in (("without", ()), ("kept", ("actor.mtp.loss_coefficient=0.0",))):
        config = config_with(folder, [f"actor.lora.rank={RANK}", "actor.tokens_per_microbatch=256"], layout, *keys)
        uninterrupted, checkpoint = saved(config, folder, tmp_path / name)
        tensors = describe(checkpoint.path / "actor").tensors
        stored = {key: shape for key, (shape, *_) in tensors.items() if key.startswith("base_model")}
        ranks = run_ranks(config.actor.layout.world_size, resume, config, folder, checkpoint)
        adapters_to_huggingface(checkpoint.path, tmp_path / name / "merged", Options())
        outcomes.append((stored, uninterrupted, ranks, load_file(tmp_path / name / "merged/model.safetensors")))
    (before, _, without, exported), (after, uninterrupted, kept, whole) = outcomes
    assert before == after and before
    for one, other, resumed in zip(without, uninterrupted, kept, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        assert other.keys() == resumed.keys()
        assert all(torch.equal(tensor, resumed[name]) for name, tensor in other.items())
    assert sum(".mtp." in name for name in kept[-1]) >= 10 and not any(".mtp." in name for name in without[-1])
    assert whole.keys() == base.keys() and len(whole.keys() - exported.keys()) >= 15
    assert all(torch.equal(whole[name], exported.get(name, base[name])) for name in whole)


def test_adapters_merge_only_into_their_base_model(dense, tmp_path):
    _, checkpoint = saved(config_of(dense, f"actor.lora.rank={RANK}"), dense, tmp_path / "run")
    other = write_tiny_llama(
        tmp_path / "other", num_heads=4, num_kv_heads=2, num_layers=4, tied=False, seed=1, vocab_size=SHARDED_VOCAB
    )
    with pytest.raises(
        UserError,
        match=rf"^{other}: the adapters in .* were trained on different base weights.* pass --hf .* base model$",
    ):
        adapters_to_huggingface(checkpoint.path, tmp_path / "merged", Options(), other)
    with pytest.raises(UserError, match="merge them with adapters-to-hf, or export"):
        megatron_to_huggingface(checkpoint.path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_adapters_of_some_layers_leave_the_others_initial(dense, tmp_path):
    adapters = write_adapters(tmp_path / "some", dense, RANK, ALPHA, ["q_proj", "down_proj"])
    begun, loaded = (
        whole_factors(run_ranks(1, train_adapters, config_of(dense, lora), dense, []), "factors")
        for lora in (
            f"actor.lora={{rank: {RANK}, alpha: {ALPHA}}}",
            f"actor.lora={{rank: {RANK}, alpha: {ALPHA}, path: {adapters}}}",
        )
    )
    stored = load_file(adapters / WEIGHTS)
    assert all(torch.equal(factor, stored.get(name, begun[name])) for name, factor in loaded.items())
    assert stored.keys() < loaded.keys()
