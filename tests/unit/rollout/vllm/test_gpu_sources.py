"""Check the GPU-only parts of vLLM that engines depend on. CPU runs do not execute these parts, so the tests read the
sources of each supported release. Tests that call vLLM use the CPU build."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear import (
    CutlassFp8BlockScaledMMKernel,
    DeepGemmFp8BlockScaledMMKernel,
    FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
    TritonFp8BlockScaledMMKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, convert_to_fp8_moe_kernel_format
from vllm.model_executor.layers.quantization.utils.fp8_utils import process_fp8_weight_block_strategy
from vllm.usage.usage_lib import UsageContext
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from megarl.cluster.machine import MODEL_RUNNER
from megarl.config.load import load
from megarl.config.rules.actor import WITHOUT_ROUTES
from megarl.config.vllm_arguments import ADJUSTABLE, MANAGED, REFITTABLE
from megarl.core.errors import UserError
from megarl.models.eagle import ARCHITECTURES, LAYER_IDS, WITHOUT_HIDDEN_STATES
from megarl.rollout.vllm import draft_weights, worker_extension
from megarl.rollout.vllm.engine_arguments import rollout_arguments
from megarl.rollout.vllm.environment import environment
from megarl.rollout.vllm.part import part_arguments
from tests.paths import BASE, GPU_SOURCES, GPU_SOURCES_LOCK, ROOT
from tests.published_models import CONFIGS
from tests.tiny_model import write_tiny_experts, write_tiny_llama

INSTALLED = Path(importlib.util.find_spec("vllm").origin).parent
RELEASES = re.findall(r"^vllm==(\S+)", GPU_SOURCES_LOCK.read_text(), re.MULTILINE)
RUNNERS = ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py")
"""Files with vLLM's two model runners. Which one it uses depends on the model and the configuration."""

CALLS = {
    ("entrypoints/llm.py", "LLM", "collective_rpc"): ["method", "args"],
    ("entrypoints/llm.py", "LLM", "sleep"): ["level", "mode"],
    ("entrypoints/llm.py", "LLM", "wake_up"): ["tags"],
    ("entrypoints/llm.py", "LLM", "generate"): ["prompts", "sampling_params", "use_tqdm"],
    ("v1/engine/llm_engine.py", "LLMEngine", "add_request"): ["request_id", "prompt", "params"],
    ("v1/engine/llm_engine.py", "LLMEngine", "abort_request"): ["request_ids", "internal"],
    ("v1/engine/llm_engine.py", "LLMEngine", "reset_prefix_cache"): ["reset_running_requests"],
    ("v1/engine/llm_engine.py", "LLMEngine", "set_weight_version"): ["weight_version"],
    ("v1/engine/llm_engine.py", "LLMEngine", "step"): [],
    ("v1/executor/multiproc_executor.py", "MultiprocExecutor", "register_failure_callback"): ["callback"],
    ("engine/arg_utils.py", "EngineArgs", "create_engine_config"): ["usage_context", "headless"],
    ("model_executor/layers/fused_moe/router/base_router.py", "BaseRouter", "set_capture_fn"): ["capture_fn"],
}
"""(file, class, method) -> parameters that megarl passes."""


@pytest.fixture(params=RELEASES)
def vllm(request) -> Path:
    """Return the folder with the sources of a release for GPUs."""
    folder = GPU_SOURCES / f"vllm-{request.param}" / "vllm"
    assert folder.is_dir(), f"{folder} is missing. Fix: make .venv/gpu-sources/.installed"
    return folder


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def class_of(file: Path, name: str) -> ast.ClassDef:
    [node] = [node for node in tree(file).body if isinstance(node, ast.ClassDef) and node.name == name]
    return node


def parameters(file: Path, name: str, method: str) -> list[str]:
    [function] = [n for n in class_of(file, name).body if isinstance(n, ast.FunctionDef) and n.name == method]
    return [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]


def strings(file: Path, name: str) -> set[str]:
    """Return the strings in the value that a module assigns to this name."""
    assignments = [node for node in tree(file).body if isinstance(node, ast.Assign | ast.AnnAssign)]
    [value] = [node.value for node in assignments if ast.unparse(_target(node)) == name]
    return {node.value for node in ast.walk(value) if isinstance(node, ast.Constant)}


def _target(node: ast.Assign | ast.AnnAssign) -> ast.expr:
    return node.target if isinstance(node, ast.AnnAssign) else node.targets[0]


@cache
def imported() -> set[tuple[str, str | None]]:
    """Return the modules of vLLM that megarl imports, each with an imported name or None."""
    files = [file for file in (ROOT / "megarl").rglob("*.py") if "vllm" in file.read_text(encoding="utf-8")]
    nodes = [node for file in files for node in ast.walk(tree(file))]
    modules = {(alias.name, None) for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names = {
        (n.module, alias.name) for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 0 for alias in n.names
    }
    return {(module, name) for module, name in modules | names if f"{module}.".startswith("vllm.")}


def defined(module: ast.Module) -> set[str]:
    """Return the names that a module defines or imports, including those that vllm/__init__.py imports lazily."""
    names: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                names.add(node.name)
            case ast.Assign() | ast.AnnAssign():
                names.add(ast.unparse(_target(node)))
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Dict():
                names |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return names


def test_there_are_sources_of_each_supported_release() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [supported] = [r.specifier for r in map(Requirement, extras["gpu"]) if r.name == "vllm"]
    assert [release for release in (f"0.{minor}.0" for minor in range(100)) if release in supported] == RELEASES


def test_releases_define_the_names_that_megarl_imports(vllm: Path) -> None:
    names = imported()
    assert ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor") in names and len(names) > 25
    missing = []
    for module, name in sorted(names, key=str):
        place = vllm.parent / module.replace(".", "/")
        files = [file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()]
        if not files or not (name is None or name in defined(tree(files[0]))):
            missing.append(f"{module}.{name}")
    assert not missing


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[1]}.{call[2]}")
def test_releases_accept_the_arguments_that_megarl_passes(vllm: Path, call: tuple[str, str, str]) -> None:
    file, name, method = call
    assert set(CALLS[call]) <= {*parameters(vllm / file, name, method)}


def test_releases_have_the_engine_arguments_that_megarl_sets(vllm: Path) -> None:
    fields = {
        ast.unparse(node.target)
        for node in class_of(vllm / "engine/arg_utils.py", "EngineArgs").body
        if isinstance(node, ast.AnnAssign)
    }
    assert {name for given in MANAGED.values() for name in given} | ADJUSTABLE | REFITTABLE.keys() <= fields


def test_releases_read_the_environment_variables_that_megarl_sets(vllm: Path) -> None:
    variables = environment(1, 1, 0) | environment(1, 1, 0, on_gpu=True, batch_invariant=True)
    own = {name for name in (*variables, MODEL_RUNNER) if name.startswith("VLLM_")}
    assert len(own) > 5
    assert own <= strings(vllm / "envs.py", "environment_variables")


def test_engines_on_several_nodes_use_the_multiprocessing_executor(vllm: Path) -> None:
    """Parts run without Ray's executors, which differ between releases."""
    [get_class] = [
        node
        for node in class_of(vllm / "v1/executor/abstract.py", "Executor").body
        if isinstance(node, ast.FunctionDef) and node.name == "get_class"
    ]
    assert part_arguments(0, 2, "host", 1)["distributed_executor_backend"] == "mp"
    branches = re.findall(r"backend == .(\w+).:\s+from vllm.v1.executor.\w+ import (\w+)", ast.unparse(get_class))
    assert dict(branches)["mp"] == "MultiprocExecutor"


def test_route_replay_rules_are_the_conditions_of_vllm(vllm: Path) -> None:
    [verify] = [
        node
        for node in class_of(vllm / "config/vllm.py", "VllmConfig").body
        if isinstance(node, ast.FunctionDef) and node.name == "_verify_aux_output_compatibility"
    ]
    conditions = [ast.unparse(node.test) for node in ast.walk(verify) if isinstance(node, ast.If)]
    assert len(conditions) == 10
    for part in (
        *("use_v2_model_runner", "cache_config.enable_prefix_caching", "pipeline_parallel_size > 1"),
        *("decode_context_parallel_size > 1", "prefill_context_parallel_size > 1", "kv_transfer_config is not None"),
        *("runner_type != 'generate'", "is_moe", "enable_adaptive_verification"),
    ):
        assert any(part in condition for condition in conditions), part
    assert {"pipeline_parallel_size", "prefill_context_parallel_size"} <= MANAGED["rollout"].keys()
    assert {"enable_prefix_caching", "decode_context_parallel_size", "kv_transfer_config"} <= WITHOUT_ROUTES.keys()
    [ubatching] = [
        node
        for node in class_of(vllm / "config/parallel.py", "ParallelConfig").body
        if isinstance(node, ast.FunctionDef) and node.name == "use_ubatching"
    ]
    assert ast.unparse(ubatching.body[-1]) == "return self.enable_dbo or self.ubatch_size > 1"


@pytest.mark.parametrize("runner", RUNNERS)
def test_runners_have_the_attributes_that_refits_use(vllm: Path, runner: str) -> None:
    assert parameters(vllm / runner, "GPUModelRunner", "get_model") == ["self"]
    runner_class = class_of(vllm / runner, "GPUModelRunner")
    assigned = {ast.unparse(n.targets[0]) for n in ast.walk(runner_class) if isinstance(n, ast.Assign)}
    assert {"self.vllm_config", "self.model_config"} <= assigned


def test_workers_sleep_by_level_and_wake_by_tag(vllm: Path) -> None:
    worker = vllm / "v1/worker/gpu_worker.py"
    assert parameters(worker, "Worker", "sleep") == ["self", "level"]
    assert parameters(worker, "Worker", "wake_up") == ["self", "tags"]
    calls = [node for node in ast.walk(tree(worker)) if isinstance(node, ast.Call)]
    pools = {
        ast.literal_eval(call.keywords[0].value)
        for call in calls
        if ast.unparse(call.func).endswith("_maybe_get_memory_pool_context") and call.keywords
    }
    assert {"weights", "kv_cache"} <= pools  # VllmEngine wakes these tags separately
    # If there were other tags, their memory would never be woken.
    assert strings(vllm / "v1/executor/abstract.py", "SLEEP_TAGS") == {"weights", "kv_cache"}


def test_other_memory_is_woken_with_weights_or_cache(vllm: Path) -> None:
    """Graphs and buffers of a worker must be woken with the weights; they have no tag of their own."""
    assert strings(vllm / "device_allocator/__init__.py", "DEFERRABLE_TAGS") == {"weights", "kv_cache"}


def test_moe_backend_without_repacking_exists(vllm: Path) -> None:
    assert "triton" in strings(vllm / "config/kernel.py", "MoEBackend")


def test_float32_head_multiplies_bfloat16_on_cuda(vllm: Path) -> None:
    """Otherwise each step would copy the head's weight."""
    [apply] = [
        node
        for node in class_of(vllm / "model_executor/layers/logits_processor.py", "LogitsProcessor").body
        if isinstance(node, ast.FunctionDef) and node.name == "_apply_head"
    ]
    assert "torch.mm(flat, lm_head.weight.t(), out_dtype=self.head_dtype)" in ast.unparse(apply)


@pytest.mark.parametrize(("head_dtype", "dtype"), [("float32", "float32"), ("model", "bfloat16")])
def test_engines_use_the_head_dtype_of_the_recipe(tmp_path: Path, head_dtype, dtype) -> None:
    folder = write_tiny_llama(tmp_path)
    keys = [f"model.path={folder}", "data.source=arithmetic", "rollout.context_length=64", "rollout.max_new_tokens=32"]
    config = load(BASE, [*keys, "model.dtype=bfloat16", f"model.head_dtype={head_dtype}"])
    arguments = rollout_arguments(
        config.rollout, folder, config.model.dtype, seed=0, head_dtype=config.model.head_dtype
    )
    engine_config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    assert str(engine_config.model_config.head_dtype) == f"torch.{dtype}" == f"torch.{config.model.logits_dtype}"


def test_request_seeds_are_stored_in_a_tensor(vllm: Path) -> None:
    """The V2 runner samples all requests in one kernel. The V1 runner, vLLM's fallback for unsupported features, loops
    over one generator per seed in every step."""
    states = ast.unparse(class_of(vllm / "v1/worker/gpu/sample/states.py", "SamplingStates"))
    assert "self.seeds = UvaBackedTensor(max_num_reqs, dtype=torch.int64)" in states
    sampler = (vllm / "v1/worker/gpu/sample").glob("*.py")
    assert not [file.name for file in sampler if "Generator" in file.read_text(encoding="utf-8")]


@pytest.mark.parametrize("quantization", ["null", "fp8_block"])
def test_engines_use_the_v2_model_runner(tmp_path: Path, quantization: str) -> None:
    folder = write_tiny_llama(tmp_path)
    keys = [f"model.path={folder}", "data.source=arithmetic", "rollout.context_length=64", "rollout.max_new_tokens=32"]
    keys += ["model.dtype=bfloat16", f"rollout.quantization={quantization}"]
    arguments = rollout_arguments(load(BASE, keys).rollout, folder, "bfloat16", seed=0)
    config = EngineArgs(**arguments).create_engine_config(UsageContext.LLM_CLASS)
    assert config._get_v2_model_runner_unsupported_features() == []


def test_in_place_fp8_kernels_do_not_change_weights() -> None:
    """Linear kernels do not override post-processing, and the MoE kernel returns the given weights unchanged."""
    default = Fp8BlockScaledMMLinearKernel.process_weights_after_loading
    for kernel in (CutlassFp8BlockScaledMMKernel, TritonFp8BlockScaledMMKernel):
        assert kernel in worker_extension.CHECKPOINT_LAYOUT_KERNELS and kernel.process_weights_after_loading is default
    parameters = [torch.empty(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)]
    layer = SimpleNamespace(weight=parameters[0], weight_scale_inv=parameters[1], weight_scale=None)
    processed = process_fp8_weight_block_strategy(*parameters)
    assert [a.data_ptr() for a in processed] == [b.data_ptr() for b in parameters]
    experts = [torch.empty(2, 4, 4).to(torch.float8_e4m3fn) for _ in range(2)] + [torch.ones(2, 1, 1) for _ in range(2)]
    converted = convert_to_fp8_moe_kernel_format(Fp8MoeBackend.TRITON, layer, *experts, None, None)
    assert all(a is b for a, b in zip(converted, experts, strict=True))


def test_deepgemm_packs_weights_only_with_rounded_scales() -> None:
    for rounds_scales in (False, True):
        kernel = object.__new__(DeepGemmFp8BlockScaledMMKernel)
        kernel.use_deep_gemm_e8m0 = rounds_scales
        wrapper = object.__new__(FlashInferFp8DeepGEMMDynamicBlockScaledKernel)
        wrapper.fallback = kernel
        for each in (kernel, wrapper):
            assert worker_extension._reads_checkpoint_layout(each) == (not rounds_scales)


def test_experts_in_fp8_blocks_need_a_gpu(tmp_path: Path) -> None:
    folder = write_tiny_experts(tmp_path)
    keys = [f"model.path={folder}", "data.source=arithmetic", "rollout.quantization=fp8_block"]
    with pytest.raises(
        UserError, match="has experts, but vLLM's CPU kernels for quantized experts do not support refits"
    ):
        rollout_arguments(load(BASE, keys).rollout, folder, "bfloat16", seed=0)


@pytest.mark.parametrize("capability", [(0, 0), (8, 9), (9, 0)])
def test_batch_invariant_engines_need_a_supported_gpu(monkeypatch, tmp_path: Path, capability) -> None:
    [needed] = re.findall(
        r"Requires NVIDIA GPU with compute capability >= (\d)\.(\d)", (INSTALLED / "envs.py").read_text()
    )
    folder = write_tiny_llama(tmp_path)
    keys = [f"model.path={folder}", "data.source=arithmetic", "rollout.context_length=64", "rollout.max_new_tokens=32"]
    rollout = load(BASE, [*keys, "rollout.batch_invariant=true"]).rollout
    monkeypatch.setattr("megarl.rollout.vllm.engine_arguments.device.capability", lambda: capability)
    refusal = pytest.raises(
        UserError, match=r"rollout.batch_invariant=true: vLLM's batch-invariant kernels require .* 9\.0 or higher"
    )
    with nullcontext() if capability >= tuple(map(int, needed)) else refusal:
        assert rollout_arguments(rollout, folder, "bfloat16", seed=0)["model"] == str(folder)


DRAFTERS = [
    ("v1/spec_decode/llm_base_proposer.py", "SpecDecodeBaseProposer"),
    ("v1/spec_decode/draft_model.py", "DraftModelProposer"),
    ("v1/worker/gpu/spec_decode/eagle/utils.py", None),
    ("v1/worker/gpu/spec_decode/standalone_ar/speculator.py", "StandaloneARSpeculator"),
]


@pytest.mark.parametrize(("file", "name"), DRAFTERS)
def test_draft_weights_load_by_their_runner_type(vllm: Path, file: str, name: str | None) -> None:
    """Both runners load drafts in the engine's load format, and only the model config's runner distinguishes them from
    the policy."""
    source = tree(vllm / file) if name is None else class_of(vllm / file, name)
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call_of(source, "get_model").keywords}
    assert arguments.get("load_config") in (None, "get_draft_load_config(draft_vllm_config)")
    assert "draft_model_config" in arguments.get("model_config", ast.unparse(source))
    settings = class_of(vllm / "config/speculative.py", "SpeculativeConfig")
    [runner] = [word.value for word in call_of(settings, "ModelConfig").keywords if word.arg == "runner"]
    assert ast.unparse(runner) == repr(draft_weights.RUNNER)


def call_of(source: ast.AST, function: str) -> ast.Call:
    [call] = [n for n in ast.walk(source) if isinstance(n, ast.Call) and ast.unparse(n.func) == function]
    return call


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_eagle_drafts_have_vllms_architectures(vllm: Path, model_type: str) -> None:
    module = {"llama": "llama_eagle3", "qwen3": "qwen3_eagle3"}[model_type]
    for architecture in ARCHITECTURES[model_type]:
        assert implementation(vllm, architecture) == (module, ARCHITECTURES[model_type][0])


@pytest.mark.parametrize("name", {config["model_type"]: name for name, config in CONFIGS.items()}.values())
def test_policies_of_eagle_drafts_return_hidden_states(vllm: Path, name: str) -> None:
    config = CONFIGS[name]
    module, model = implementation(vllm, config["architectures"][0])
    has_interface = "SupportsEagle3" in bases(vllm, module, model)
    assert has_interface == (config["model_type"] not in WITHOUT_HIDDEN_STATES)


def implementation(vllm: Path, architecture: str) -> tuple[str, str]:
    """Return the module and the class of a model in vLLM."""
    registry = (vllm / "model_executor/models/registry.py").read_text("utf-8")
    found = re.search(rf'"{architecture}": \(\s*"(\w+)",\s*"(\w+)"', registry)
    assert found is not None, architecture
    return found[1], found[2]


def bases(vllm: Path, module: str, name: str) -> set[str]:
    """Return the names of a model's base classes, including those in other modules of the folder."""
    file = vllm / f"model_executor/models/{module}.py"
    imports = [node for node in tree(file).body if isinstance(node, ast.ImportFrom)]
    origins = {alias.name: (node.module or "").rpartition(".")[2] for node in imports for alias in node.names}
    defined_here = {node.name for node in tree(file).body if isinstance(node, ast.ClassDef)}
    names = {ast.unparse(base) for base in class_of(file, name).bases}
    further = {base: module if base in defined_here else origins.get(base) for base in names}
    files = {path.stem for path in file.parent.glob("*.py")} - {"interfaces", "utils"}
    inner = (bases(vllm, where, base) for base, where in further.items() if where in files)
    return names.union(*inner)


def test_eagle_drafts_share_the_policys_weights(vllm: Path) -> None:
    """A refit writes the policy's embedding and output layer in place, so a draft without its own reads them."""
    for file in ("v1/spec_decode/llm_base_proposer.py", "v1/worker/gpu/spec_decode/eagle/utils.py"):
        source = ast.unparse(tree(vllm / file))
        assert re.search(r"\.embed_tokens = target_embed(_tokens)?\n", source), file
        assert re.search(r"\.lm_head = (target_language_model\.lm_head|target_lm_head|draft_head)\n", source), file


def test_eagle_drafts_read_the_layers_in_their_eagle_config() -> None:
    """The model runner for GPUs reads the key only at the top level."""
    draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_config={LAYER_IDS: [1, 17, 32]}))
    settings = SimpleNamespace(draft_model_config=draft)
    assert get_eagle3_aux_layers_from_config(settings) is None
    draft_weights._copy_layer_ids(draft)
    assert get_eagle3_aux_layers_from_config(settings) == (1, 17, 32)
    draft.hf_config.eagle_config = {LAYER_IDS: [2, 3, 4]}
    draft_weights._copy_layer_ids(draft)
    assert get_eagle3_aux_layers_from_config(settings) == (1, 17, 32)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("glm4_moe_mtp.py", "Glm4MoeMultiTokenPredictorLayer"),
        ("deepseek_mtp.py", "DeepSeekMultiTokenPredictorLayer"),
    ],
)
def test_drafting_layers_have_the_parameters_of_a_refit(vllm: Path, file: str, name: str) -> None:
    """Every rank has the whole projection."""
    source = ast.unparse(class_of(vllm / "model_executor/models" / file, name))
    assert "self.eh_proj = nn.Linear(config.hidden_size * 2, config.hidden_size, bias=False)" in source
    for attribute in ("enorm", "hnorm", "shared_head", "mtp_block"):
        assert f"self.{attribute} = " in source


@pytest.mark.parametrize(
    ("file", "model", "block", "count"),
    [
        ("qwen3_next_mtp.py", "Qwen3NextMTP", "Qwen3NextMultiTokenPredictor", "num_nextn_predict_layers"),
        ("qwen3_5_mtp.py", "Qwen3_5MTP", "Qwen3_5MultiTokenPredictor", "mtp_num_hidden_layers"),
    ],
)
def test_separate_drafting_layers_have_the_parameters_of_a_refit(vllm, file, model, block, count) -> None:
    """Each rank has a share of the projection's rows. The decoder layer has full attention, and index 0, which decides
    whether it has experts. Norms are zero-centered."""
    path = vllm / "model_executor/models" / file
    source = ast.unparse(class_of(path, block))
    sizes = "self.config.hidden_size * 2, self.config.hidden_size"
    assert f"self.fc = ColumnParallelLinear({sizes}, gather_output=True, bias=False" in source
    assert f"getattr(config, '{count}', 1)" in source
    assert "layer_type='full_attention', prefix=f'{prefix}.layers.{idx}'" in source
    norms = re.findall(r"self\.(\w*norm\w*) = Qwen3_?(?:5|Next)RMSNorm\(", source)
    assert sorted(norms) == ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    loader = ast.unparse(class_of(path, model))
    assert "name = name.replace('mtp.', 'model.')" in loader and "self.model = " in loader


def test_drafting_layers_are_quantized_as_the_policy(vllm: Path) -> None:
    """The MTP draft model has the quantization of the engine's config, not of the draft's config."""
    for file, name in (("glm4_moe_mtp.py", "Glm4MoeMultiTokenPredictor"), ("deepseek_mtp.py", "DeepSeekMTP")):
        assert "vllm_config.quant_config" in ast.unparse(class_of(vllm / "model_executor/models" / file, name))
    eagle = (vllm / "v1/worker/gpu/spec_decode/eagle/utils.py").read_text("utf-8")
    assert "vllm_config=vllm_config, model_config=draft_model_config" in eagle and "quant_config" not in eagle


def test_runners_have_the_drafter_that_refits_write(vllm: Path) -> None:
    assert "self.drafter.load_model(self.model)" in (vllm / "v1/worker/gpu_model_runner.py").read_text("utf-8")
    runner = (vllm / "v1/worker/gpu/model_runner.py").read_text("utf-8")
    assert "self.speculator.load_model(self.model)" in runner and "self.drafter" not in runner
    speculators = vllm / "v1/worker/gpu/spec_decode"
    assert "self.model = self.load_draft_model(" in (speculators / "speculator.py").read_text("utf-8")
    assert "draft_model = load_eagle_model(" in (speculators / "mtp/speculator.py").read_text("utf-8")


def test_steps_pass_through_the_removal_of_placeholder_drafts(vllm: Path) -> None:
    """Both schedulers pass a complete step to the patched method, and return it afterwards."""
    folder, call = vllm / "v1/core/sched", "_update_after_schedule(scheduler_output)"
    scheduler = re.sub(r"\s+", " ", (folder / "scheduler.py").read_text("utf-8"))
    assert f"self.{call} return scheduler_output" in scheduler and "= [ -1 ] * self.num_spec_tokens" in scheduler
    [method] = [
        node
        for node in class_of(folder / "async_scheduler.py", "AsyncScheduler").body
        if isinstance(node, ast.FunctionDef) and call.startswith(node.name)
    ]
    assert ast.unparse(method.body[0]) == f"super().{call}"
