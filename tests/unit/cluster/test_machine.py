"""Runs that do not fit the machine's devices are rejected with one line, before any process starts."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.cluster import machine
from megarl.cluster.machine import (
    check_engine_kernels,
    check_gpu_memory,
    check_host_memory,
    check_machine,
    fits,
    host_suffices,
)
from megarl.cluster.memory.reserves import ACTIVATIONS, CONTEXTS, GRAPHS, LOGITS, NCCL
from megarl.cluster.memory.shared_gpu import Load, fullest_phase
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core import device
from megarl.core.errors import UserError
from megarl.models.run_models import ModelFolders
from megarl.train import run
from tests.paths import BASE
from tests.published_models import CONFIGS
from tests.tiny_model import write_tiny_llama
from tests.unit.resharding.cases import config_of


def config(*overrides: str) -> Config:
    return load(BASE, ["model.path=no/such/folder", "data.source=arithmetic", *overrides])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the machine eight GPUs."""
    monkeypatch.setattr(device, "on_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_cuda", lambda: False)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    "overrides",
    [["actor.offload=[gradients]"], ["algorithm.advantage.estimator=gae", "critic.offload=[parameters]"]],
)
def test_supported_config_runs_on_a_cpu(overrides: list[str]) -> None:
    check_machine(config(*overrides))


@pytest.mark.usefixtures("no_cuda")
def test_cpu_actor_parameters_cannot_be_offloaded() -> None:
    message = (
        r"^actor.offload=.*: without a GPU, the actor's parameters are already in host memory, .* from actor.offload$"
    )
    with pytest.raises(ValueError, match=message):
        check_machine(config("actor.offload=[gradients, parameters]"))


REWARD_ENGINE = ("reward_model.path=r", "reward_model.engine=vllm", "reward_model.layout.tp=4")


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("overrides", "refused", "keys"),
    [
        (("rollout.tp=3",), None, None),
        (("rollout={replicas: 8, tp: 2}",), None, None),
        (("rollout.tp=4",), "rollout.tp=4", "rollout.tp"),
        (REWARD_ENGINE, "reward_model.layout.tp=4", "reward_model.layout.tp"),
        (
            (*REWARD_ENGINE, "rollout.tp=8"),
            "rollout.tp=8, reward_model.layout.tp=4",
            "rollout.tp and reward_model.layout.tp",
        ),
    ],
)
def test_engine_ranks_require_cores(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple, refused: str | None, keys: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    if refused is None:
        return check_machine(config(*overrides))
    with pytest.raises(ValueError) as error:
        check_machine(config(*overrides))
    assert str(error.value) == (
        f"{refused}: without a GPU, each rank of a vLLM engine needs its own core, but this machine has 3 for the run. "
        f"Fix: set {keys} to at most 3"
    )


def test_cpu_engine_over_nodes_has_a_rank_on_each() -> None:
    nodes = ("cluster.nodes=2", "actor.layout.dp=2")
    check_machine(config(*nodes, "rollout.tp=2"))
    with pytest.raises(
        UserError, match=r"^rollout.tp=4: .*cluster.nodes=2 each node has 2 ranks of a role\. Fix: set rollout.tp to at"
    ):
        check_machine(config(*nodes, "actor.layout.dp=4", "rollout.tp=4", "rollout.threads=1"))


@pytest.mark.usefixtures("cuda")
def test_gpu_rules_are_checked_before_the_model_is_resolved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^rollout.sleep=false: colocated engines would keep their weights"):
        run(config(f"run.folder={tmp_path}"), tmp_path)
    assert not list(tmp_path.iterdir())


SHARING = ("rollout.sleep=true", "actor.layout={tp: 2, dp: 2}", "rollout={replicas: 2, tp: 2}")


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    "overrides",
    [
        (*SHARING, "actor.offload=[parameters, gradients, optimizer]"),
        (*SHARING, "rollout.transport=shared_memory"),
        (*SHARING, "algorithm.advantage.estimator=gae", "critic.layout.dp=8"),
        ("cluster.placement=disaggregated", "actor.layout.dp=7"),
        ("cluster.placement=disaggregated", "rollout={replicas: 3, tp: 2}", "actor.layout.dp=2"),
        ("cluster.placement=disaggregated", "rollout.transport=shared_memory"),
        ("data.format=messages", "algorithm.objective.name=sft", "actor.layout.dp=8"),
    ],
)
def test_supported_config_runs_on_eight_gpus(overrides: tuple[str, ...]) -> None:
    check_machine(config(*overrides))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.kv_cache_gib=12.5",),
            "rollout.sleep=false: colocated engines would keep their weights and 12.5 GiB of KV cache in memory while "
            "models train on the same GPUs. Fix: set rollout.sleep=true or cluster.placement=disaggregated",
        ),
        (
            ("rollout.sleep=true", "rollout.transport=p2p"),
            "rollout.transport=p2p: NCCL cannot send from a GPU to itself, but with cluster.placement=colocated the "
            "trainer and the engines share GPUs. Fix: set rollout.transport=auto",
        ),
        (
            ("rollout.sleep=true", "actor.layout={tp: 2, dp: 4}", "rollout={replicas: 3, tp: 2}"),
            "rollout.replicas=3: with cluster.placement=colocated each GPU has one actor rank and one engine rank, "
            "but actor.layout has 8 ranks and the engines have 3 x rollout.tp=2 = 6. Fix: set rollout.replicas=4, or "
            "cluster.placement=disaggregated",
        ),
        (
            ("rollout.sleep=true", "actor.layout.dp=6", "rollout={replicas: 2, tp: 4}"),
            "6 ranks and the engines have 2 x rollout.tp=4 = 8. Fix: set rollout.tp to one of 1, 2, 3, 6, or",
        ),
        (
            (*SHARING, "algorithm.advantage.estimator=gae", "critic.layout.dp=9"),
            "cluster.placement=colocated: the roles share GPUs and need max(4 trainer, 9 critic, 4 engine) = 9, but "
            "this machine has 8. Fix: lower dp in the layouts",
        ),
        (
            ("cluster.placement=disaggregated", "actor.layout.dp=4", "rollout={replicas: 3, tp: 2}"),
            "cluster.placement=disaggregated: 4 trainer + 6 engine = 10 ranks need a GPU each, but this machine has 8. "
            "Fix: set cluster.placement=colocated, or lower dp in the layouts",
        ),
        (
            ("data.format=messages", "algorithm.objective.name=sft", "actor.layout.dp=16"),
            "max(16 trainer) = 16, but this machine has 8",
        ),
    ],
)
def test_unsupported_config_on_eight_gpus_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_machine(config(*overrides))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("value", "refused"), [("0", True), ("1", False), (None, False)])
def test_gpu_engines_return_routes_with_the_v2_runner_only(monkeypatch, value: str | None, refused: bool) -> None:
    if value is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    check_machine(config(*SHARING))
    message = "^actor.experts.replay_routes=true: only vLLM's Model Runner V2 .* VLLM_USE_V2_MODEL_RUNNER=0 selects V1"
    with pytest.raises(UserError, match=message) if refused else nullcontext():
        check_machine(config(*SHARING, "actor.experts.replay_routes=true"))


def test_overfull_gpu_error_shows_the_sum() -> None:
    load = Load(
        "while the engine samples", {"actor: parameters": 30 * 2**30, "engine: weights": 1.5 * 2**30}, "do this"
    )
    assert fits(3, 32 * 2**30, load) is None
    assert fits(3, 31 * 2**30, load) == (
        "cluster.placement=colocated: while the engine samples, GPU 3 would hold 30.0 (actor: parameters) + 1.5 "
        "(engine: weights) = 31.5 GiB, but it has 31.0 GiB of memory. Fix: do this"
    )


@pytest.mark.usefixtures("cuda")
def test_memory_of_every_shared_gpu_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The last GPU has 1 MiB less than the others, which have just enough."""
    settings = config(*SHARING, "model.dtype=float32", "rollout.kv_cache_gib=1")
    folder = write_tiny_llama(tmp_path, num_kv_heads=2)
    models = ModelFolders(folder, None, None, None)
    needed = sum(
        fullest_phase(settings, models.hf_config, models.trained(settings), None, gpu=0, gpus_per_node=8).parts.values()
    )
    sizes = [needed, needed, needed, needed - 2**20]
    monkeypatch.setattr(device, "memory_bytes", lambda gpu: sizes[gpu])
    with pytest.raises(ValueError, match=r"^cluster.placement=colocated: while the engine samples, GPU 3 would hold"):
        check_gpu_memory(settings, models)
    check_gpu_memory(config(*SHARING, "cluster.placement=disaggregated"), models)
    sizes[3] = sizes[0]
    check_gpu_memory(settings, models)


@pytest.mark.usefixtures("cuda")
def test_gpu_without_room_for_reserves_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = config(*SHARING, "rollout.kv_cache_gib=1")
    models = ModelFolders(write_tiny_llama(tmp_path, num_kv_heads=2), None, None, None)
    load = fullest_phase(settings, models.hf_config, models.trained(settings), None, gpu=0, gpus_per_node=8)
    items = [CONTEXTS, NCCL, GRAPHS, ACTIVATIONS, LOGITS]
    monkeypatch.setattr(device, "memory_bytes", lambda gpu: load.total - sum(load.parts[item] for item in items))
    with pytest.raises(
        UserError, match=r"^cluster.placement=colocated: while the engine samples, GPU 0 would"
    ) as error:
        check_gpu_memory(settings, models)
    assert all(f"({item})" in str(error.value) for item in items)


EXPERTS = dict(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=40)
HEAD = dict(head_dim=64)


def model_folders(folder: Path, **sizes: Any) -> ModelFolders:
    (folder / "config.json").write_text(json.dumps(config_of(**sizes)))
    return ModelFolders(folder, None, None, None)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(("sizes", "refused"), [({}, False), (EXPERTS, True), (EXPERTS | dict(hidden_size=64), False)])
def test_expert_sizes_that_vllm_cannot_compute_are_refused(tmp_path: Path, sizes: dict, refused: bool) -> None:
    """The intermediate size does not matter, because vLLM pads it."""
    models = model_folders(tmp_path, **dict(hidden_size=48) | HEAD | sizes)
    with pytest.raises(UserError, match=r"hidden_size=48, .* require a multiple of 32") if refused else nullcontext():
        check_engine_kernels(config(), models)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("size", [*range(2, 300, 2), 512])
def test_head_dimensions_that_vllm_cannot_compute_are_refused(tmp_path: Path, size: int) -> None:
    """The engine's own list decides."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    models, supported = model_folders(tmp_path, head_dim=size), CPUAttentionBackend.supports_head_size(size)
    with nullcontext() if supported else pytest.raises(UserError, match=rf"head_dim={size}, but vLLM's CPU build only"):
        check_engine_kernels(config(), models)


@pytest.mark.usefixtures("no_cuda")
def test_reward_model_in_the_engine_is_checked(tmp_path: Path) -> None:
    for name, size in (("actor", 64), ("reward", 18)):
        (tmp_path / name).mkdir()
        model_folders(tmp_path / name, head_dim=size)
    models = ModelFolders(tmp_path / "actor", None, tmp_path / "reward", None)
    check_engine_kernels(config("reward_model.path=m"), models)
    with pytest.raises(UserError, match=r"reward: head_dim=18, but"):
        check_engine_kernels(config("reward_model.path=m", "reward_model.engine=vllm"), models)


@pytest.mark.usefixtures("no_cuda")
def test_mtp_with_mrope_is_refused_on_cpu(tmp_path: Path) -> None:
    """The config.json of every published Qwen3.5 has an mrope_section, for its vision encoder."""
    mtp = config("rollout.speculative.method=mtp", "actor.mtp.loss_coefficient=0.0")
    plain = CONFIGS["Qwen3.5-9B"] | dict(mtp_num_hidden_layers=1)
    rope = plain["rope_parameters"] | dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
    outer = dict(model_type="qwen3_5", text_config=plain | dict(rope_parameters=rope), vision_config={})
    (tmp_path / "config.json").write_text(json.dumps(outer))
    folders = ModelFolders(tmp_path, None, None, None)
    with pytest.raises(UserError, match=r"^rollout.speculative.method=mtp: .* mrope_section.*method=null, or run"):
        check_engine_kernels(mtp, folders)
    for settings in (config("actor.mtp.loss_coefficient=0.0"), config("rollout.speculative.method=ngram")):
        check_engine_kernels(settings, folders)
    (tmp_path / "config.json").write_text(json.dumps(plain))
    check_engine_kernels(mtp, folders)


@pytest.mark.usefixtures("no_cuda")
def test_eagle_with_latent_attention_is_refused_on_cpu(tmp_path: Path) -> None:
    """vLLM's CPU build has no block size that both kinds of attention support."""
    for name, content in (("policy", CONFIGS["DeepSeek-V3"]), ("draft", CONFIGS["Llama-3.1-8B"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    folders = ModelFolders(tmp_path / "policy", None, None, None, draft=tmp_path / "draft")
    eagle = config("rollout.speculative={method: eagle3, path: m}")
    with pytest.raises(UserError, match=r"^rollout.speculative.method=eagle3: .* latent attention.*path=null, or run"):
        check_engine_kernels(eagle, folders)
    check_engine_kernels(eagle, replace(folders, actor=tmp_path / "draft"))
    check_engine_kernels(config(), folders)


@pytest.mark.usefixtures("no_cuda")
def test_draft_model_in_the_engine_is_checked(tmp_path: Path) -> None:
    for name, size in (("actor", 64), ("draft", 18)):
        (tmp_path / name).mkdir()
        model_folders(tmp_path / name, head_dim=size)
    models = ModelFolders(tmp_path / "actor", None, None, None, draft=tmp_path / "draft")
    with pytest.raises(UserError, match="draft: head_dim=18, but"):
        check_engine_kernels(config("rollout.speculative={method: draft_model, path: m}"), models)


@pytest.mark.usefixtures("cuda")
def test_mtp_with_mrope_is_allowed_on_gpus(tmp_path: Path) -> None:
    rope = CONFIGS["Qwen3.5-9B"]["rope_parameters"] | dict(mrope_section=[11, 11, 10])
    hf_config = CONFIGS["Qwen3.5-9B"] | dict(mtp_num_hidden_layers=1, rope_parameters=rope)
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    mtp = config("rollout.speculative.method=mtp", "actor.mtp.loss_coefficient=0.0")
    check_engine_kernels(mtp, ModelFolders(tmp_path, None, None, None))


@pytest.mark.usefixtures("cuda")
def test_gpus_support_any_size(tmp_path: Path) -> None:
    check_engine_kernels(config(), model_folders(tmp_path, **EXPERTS | dict(hidden_size=48, head_dim=18)))


def test_too_little_host_memory_is_refused_with_the_sum():
    parts = {"actor: weights, gradients, optimizer": 3 * 2**30, "engines: weights": 2**30}
    assert host_suffices(4 * 2**30, parts) is None
    line = host_suffices(4 * 2**30 - 1, parts)
    assert "3.0 (actor: weights, gradients, optimizer) + 1.0 (engines: weights) = 4.0 GiB" in line
    assert "only 4.0 GiB is installed. Fix: use a smaller model" in line


def test_host_memory_of_several_nodes_is_named_as_a_sum():
    parts = {"engines: weights": 7 * 2**30}
    assert host_suffices(4 * 2**30, parts, 2) is None
    line = host_suffices(3 * 2**30, parts, 2)
    assert (
        "only 2 x 3.0 = 6.0 GiB is installed in total on cluster.nodes=2 nodes like this one. Fix: use a smaller"
        in line
    )


@pytest.mark.usefixtures("no_cuda")
def test_host_memory_is_checked_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_parts", lambda *_: {"engines: weights": 2**60})
    with pytest.raises(UserError, match=r"only 2 x .* nodes like this one"):
        check_host_memory(config("cluster.nodes=2", "rollout.replicas=2", "actor.layout={pp: 1, dp: 2}"), None)
