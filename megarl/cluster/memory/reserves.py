"""GPU memory besides model tensors and KV cache. Each item has one cause and cites the source of its size.

This memory cannot be measured before a run, and vLLM does not measure it if the KV cache size is given (gpu_worker.py:
kv_cache_memory_bytes). Without room for it, a run fails in the middle of a rollout. Items are computed from the NCCL
and vLLM source code where possible, or measured (see core/measured.py). Assumptions are marked as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.cluster.memory.rank import FLOAT32, item_bytes
from megarl.cluster.memory.vision import tower_pass_bytes
from megarl.config.device_spans import num_devices
from megarl.config.model_schema import Layout, Placed, RewardModel, Role, Teachers
from megarl.config.rollout_schema import Rollout
from megarl.config.rules.shared_gpu import weights_travel
from megarl.config.schema import Config
from megarl.config.vllm_arguments import batched_tokens
from megarl.core import measured
from megarl.models.denoiser import DenoiserShape
from megarl.models.huggingface import FP8_BLOCK
from megarl.models.shape import ModelShape
from megarl.resharding.planning.communicators import CONNECTION, EXCHANGE_CHANNELS, NETWORK_BUFFERS, buffer_bytes

MIB, GIB = 2**20, 2**30

MAX_SEQUENCES = 1024
"""vLLM's default for the maximum number of concurrent sequences on GPUs with 70 GiB or more."""

PROMPT_CHUNK = 1024
"""Number of prompt tokens whose log-probs vLLM computes at once on GPUs (worker/gpu/sample/prompt_logprob.py)."""

CONTEXTS, NCCL, FP8, FRAGMENTS = "CUDA contexts", "NCCL", "fp8 copies of weights", "fragments"
GRAPHS, ACTIVATIONS, LOGITS = "CUDA graphs", "engine: activations", "engine: logits"
WORKSPACE = "engine: experts' workspace"
FROZEN = "engine: text encoder and VAE"
TOWER, FEATURES = "engine: vision tower", "engine: image features"
SENT = "actor: fp8 copy for the engines"
"""Names of the items in a GPU's memory estimate."""

CONTEXT, TRAINER_KERNELS, FRAGMENT_BYTES = (
    each.value for each in (measured.CUDA_CONTEXT, measured.TRAINER_KERNELS, measured.FRAGMENTS)
)

ENGINE_KERNELS = 0.25 * GIB
"""Growth of an engine's CUDA context as it loads kernels lazily and allocates cuBLAS workspaces. An assumption."""

CHANNELS, CHANNELS_OVER_NODES = 24, 16
"""Number of rings in a communicator within a node, and across nodes. NCCL issue 1453 shows 16 rings across H100 nodes.
24 rings within a node are an assumption: they take the 0.5 GiB that issue 964 reports for two A100s, if the same number
of tree connections is added. NCCL now creates tree connections lazily."""

EXCHANGE_CHANNELS_OVER_NODES = 2
"""Number of channels between two ranks on a node if the communicator also spans other nodes (NCCL issue 1189)."""

MULTICAST = 16 * 2 * 8 * 128 * 1024
"""Bytes of NVLink SHARP buffers for each rank on the node: 16 channels in both directions, with 8 steps of
NCCL_NVLS_CHUNKSIZE (nvls.cc: ncclNvlsBufferSetup)."""

CAPTURED = 512
"""Largest batch size of the CUDA graphs that vLLM captures by default on GPUs before Blackwell (config/vllm.py)."""

GRAPH_SETS = 2
"""Number of CUDA graph sets: full graphs for decoding steps, and graphs split at attention for steps with prompts."""

DECODER_CHANNELS = 768
"""Channels at full resolution that exist at once while Z-Image's VAE decodes an image: the input, the output and the
upsampled output of its last block with 256 channels. An estimate."""

LAYER_GRAPH = 0.38 * MIB
"""Bytes per layer in a captured graph: vLLM logged 0.21 GiB for 35 graphs of Llama-3.2-1B (16 layers)
(vllm-project/vllm, pull request 11349). An estimate, because the size also depends on kernels and driver; totals are
within vLLM's documented range of 1 to 3 GiB."""


def sum_by_name(*items: Mapping[str, float]) -> dict[str, float]:
    """Add up the items of several processes by name. Omit items of size 0."""
    names = dict.fromkeys(name for each in items for name in each)
    sums = {name: sum(each.get(name, 0.0) for each in items) for name in names}
    return {name: size for name, size in sums.items() if size}


def gpu_reserve(
    config: Config,
    held: Mapping[Role, tuple[ModelShape, int]],
    engine: ModelShape | None,
    reward: ModelShape | None,
    gpus_per_node: int,
    teachers: Mapping[str, ModelShape] | None = None,
) -> dict[str, float]:
    """Return the items that are always on a GPU, for its own processes and for processes on other GPUs that read its
    weights.

    Args:
        held: for each trained model with a rank on the GPU, its shape and the rank's matrices (see RankParameters).
        engine: model shape of the engine with a rank on the GPU; None without an engine.
        reward: shape of the reward model with a rank on the GPU; None without a reward model.
        teachers: shapes of the teachers with a rank on the GPU, by name.
    """
    sends = not config.is_offline and weights_travel(config, gpus_per_node)
    items = [
        trainer_reserve(config.placed(role), shape, matrices, gpus_per_node) for role, (shape, matrices) in held.items()
    ]
    if sends and ("actor" in held or engine is not None):
        items.append({NCCL: _refit_buffers(config, engine is not None, gpus_per_node)})
    if "actor" in held and config.rollout.quantization is not None and not config.is_offline:
        items.append({SENT: held["actor"][1] * (1 + 4 / FP8_BLOCK**2)})
    if "actor" in held and not config.is_offline:
        # Engine ranks on other GPUs that read the actor's weights have CUDA contexts on this GPU (cuda_memory.py).
        items.append({} if config.sends_weights else {CONTEXTS: CONTEXT * _num_readers(config, gpus_per_node)})
    if engine is not None:
        items.append(engine_reserve(config, engine, gpus_per_node))
    if reward is not None:
        items.append(_reward_model_reserve(config, reward, gpus_per_node))
    items += [_teacher_reserve(config, name, shape, gpus_per_node) for name, shape in (teachers or {}).items()]
    return sum_by_name(*items)


def trainer_reserve(settings: Placed, shape: ModelShape, matrices: int, gpus_per_node: int) -> dict[str, float]:
    """Return the items of a Megatron rank that stay on the GPU when the rank's parameters are offloaded."""
    nccl = _trainer_communicators(settings.layout, shape, gpus_per_node)
    return {
        CONTEXTS: CONTEXT + measured.FIRST_COMMUNICATOR.value + TRAINER_KERNELS,
        NCCL: nccl,
        FP8: _fp8_copies(settings, matrices),
    }


def _trainer_communicators(layout: Layout, shape: ModelShape, gpus_per_node: int) -> float:
    """Return the size of the communicators that every step uses, in bytes. NCCL creates a communicator, and the
    connections for an algorithm, on first use (NCCL_RUNTIME_CONNECT). Two communicators span all ranks, for errors and
    for the gradient norm, and carry only scalars. Each expert-parallel rank exchanges tokens with all other
    expert-parallel ranks; neighboring pipeline stages exchange activations."""
    groups = parallel_groups(layout, has_experts=shape.experts is not None)
    exchanged = {"ep": layout.ep, "pp": 2}
    total = 2.0 * _rings(layout.world_size, 1, gpus_per_node)
    for name, group in groups.items():
        peers = exchanged.get(name)
        total += _exchange(*group, gpus_per_node, peers) if peers else _collective(*group, gpus_per_node)
    return total


def parallel_groups(layout: Layout, has_experts: bool) -> dict[str, tuple[int, int]]:
    """Return (number of ranks, stride) for the process groups of several ranks that every step uses, by name."""
    tp, cp, dp, ep, etp = layout.tp, layout.cp, layout.dp, layout.ep, layout.expert_tp
    stage = tp * cp * dp
    groups = {"tp": (tp, 1), "cp": (cp, tp), "dp_cp": (dp * cp, tp), "pp": (layout.pp, stage)}
    if has_experts:
        groups |= {"etp": (etp, 1), "ep": (ep, etp), "tp_ep": (etp * ep, 1), "ep_dp": (stage // (etp * ep), etp * ep)}
    return {name: group for name, group in groups.items() if group[0] > 1}


def _collective(ranks: int, stride: int, gpus_per_node: int) -> float:
    """Return the size of a communicator for collectives, in bytes. stride: distance between neighboring ranks."""
    local = _in_node(ranks, stride, gpus_per_node)
    return _rings(ranks, stride, gpus_per_node) + (MULTICAST * local if local > 2 else 0)


def _rings(ranks: int, stride: int, gpus_per_node: int) -> float:
    if ranks == 1:
        return 0.0
    return (CHANNELS if _in_node(ranks, stride, gpus_per_node) == ranks else CHANNELS_OVER_NODES) * CONNECTION


def _exchange(ranks: int, stride: int, gpus_per_node: int, peers: int) -> float:
    """Return the size of a communicator for point-to-point sends, in bytes. `stride` is the distance between
    neighboring ranks, and each rank sends to `peers` ranks."""
    local = _in_node(ranks, stride, gpus_per_node)
    if local == ranks:
        return min(peers, local) * EXCHANGE_CHANNELS * CONNECTION
    near = min(peers, local) if local > 1 else 0
    return near * EXCHANGE_CHANNELS_OVER_NODES * CONNECTION + NETWORK_BUFFERS


def _in_node(ranks: int, stride: int, gpus_per_node: int) -> int:
    """Return how many of the communicator's ranks are on one node."""
    return min(ranks, max(1, gpus_per_node // stride))


def _fp8_copies(settings: Placed, matrices: int) -> float:
    """Return the size of the fp8 weight copies that Transformer Engine caches, in bytes (module/base.py:
    _fp8_workspaces). It caches a row-wise and a column-wise copy and, with mxfp8, a scale per 32 elements. The copies
    are not parameters, so offloading does not move them. With disable_parameter_transpose_cache they are not cached."""
    if settings.fp8 is None or settings.megatron_overrides.model.get("disable_parameter_transpose_cache"):
        return 0
    return 2 * matrices * (33 / 32 if settings.fp8 == "mxfp8" else 1)


def _num_readers(config: Config, gpus_per_node: int) -> int:
    """Return the maximum number of engine ranks that read an actor rank's weights from other GPUs on its node.

    It is 0 if each actor rank holds all parameters, and the number of pipeline stages if actor and engines shard
    tensors in the same way (apart from vocabulary padding). Otherwise an engine rank needs several of the node's
    shards, and each shard is read by the same number of ranks on average. Replicas take turns as sources, so some serve
    twice that number. GPUs without an engine may be read by all engine ranks on the node.
    """
    layout, tp = config.actor.layout, config.rollout.tp
    on_node = min(gpus_per_node, config.rollout.replicas * tp)
    if not config.is_colocated:
        return on_node
    if layout.tp * layout.pp * layout.ep == 1:
        return 0
    stages = min(layout.pp, max(1, gpus_per_node // (layout.tp * layout.cp * layout.dp)))
    experts = min(layout.ep, gpus_per_node) * -(-layout.expert_tp // tp) if layout.ep > 1 else 1
    needed = stages * max(-(-layout.tp // tp), experts)
    return min(on_node - 1, needed if layout.tp == tp else 2 * needed + (layout.tp < tp))


def engine_reserve(config: Config, shape: ModelShape, gpus_per_node: int) -> dict[str, float]:
    """Return an engine rank's memory, by item, that stays on the GPU while the engine sleeps. vLLM's sleep mode
    releases the weights and KV cache in its own allocator. It releases CUDA graphs only with
    sleep_mode_offload_cudagraph."""
    rollout = config.rollout
    if config.samples_images:
        return {CONTEXTS: CONTEXT + ENGINE_KERNELS}
    return _engine_process(rollout.vllm_overrides, shape, rollout.tp, batched_tokens(rollout), gpus_per_node)


def frozen_bytes(config: Config, shape: DenoiserShape) -> int:
    """Return the size of an image engine's text encoders and VAE in bytes, assuming the published models."""
    return (shape.text_encoder_parameters + shape.decoder_parameters) * item_bytes(config)


def _refit_buffers(config: Config, is_engine: bool, gpus_per_node: int) -> float:
    """Return the size in bytes of the communicators that an actor rank uses to send weights, or an engine rank to
    receive and forward them. A shard that several ranks on a node need is sent to one of them and forwarded by it.
    `megarl reshard` counts the communicators in a plan."""
    engines, nodes = config.rollout.replicas * config.rollout.tp, -(-num_devices(config) // gpus_per_node)
    if nodes == 1:
        others = engines - 1 + config.actor.layout.world_size if is_engine else engines
        return buffer_bytes(between=0, near=others)
    near = min(gpus_per_node, engines) - 1 if is_engine else 0
    if config.is_colocated:  # a trainer and an engine rank, each with a peer per bit of the node index
        return buffer_bytes(2 * (nodes - 1).bit_length(), near)
    return buffer_bytes(1, near)


def _reward_model_reserve(config: Config, shape: ModelShape, gpus_per_node: int) -> dict[str, float]:
    settings = config.reward_model
    if settings.engine == "megatron":
        return trainer_reserve(settings, shape, 0, gpus_per_node)
    sequences = min(settings.vllm_overrides.get("max_num_seqs", MAX_SEQUENCES), settings.tokens_per_microbatch)
    rows = sequences if settings.judges else 0
    return _scoring_engine_reserve(config, "reward model", settings, shape, rows, gpus_per_node)


def _teacher_reserve(config: Config, name: str, shape: ModelShape, gpus_per_node: int) -> dict[str, float]:
    settings = config.teacher_section(name)
    if settings.engine == "megatron":
        return trainer_reserve(settings, shape, 0, gpus_per_node)
    rows = min(PROMPT_CHUNK, settings.tokens_per_microbatch)
    return _scoring_engine_reserve(config, f"teacher {name}", settings, shape, rows, gpus_per_node)


def _scoring_engine_reserve(
    config: Config, name: str, settings: RewardModel | Teachers, shape: ModelShape, rows: int, gpus_per_node: int
) -> dict[str, float]:
    """Return the items of an engine that scores samples. rows: number of tokens whose logits exist at once."""
    tp, tokens = settings.layout.tp, settings.tokens_per_microbatch
    items = _engine_process(settings.vllm_overrides, shape, tp, tokens, gpus_per_node)
    activations = _activations(shape, tp, tokens) + _workspace(settings.vllm_overrides, shape, tp, tokens)
    logits = rows * shape.vocab * FLOAT32 * _copies_of_logits(tp, changed=True)
    return {**items, f"{name}: activations": activations * item_bytes(config)} | (
        {f"{name}: logits": logits} if rows else {}
    )


def _engine_process(
    overrides: Mapping[str, Any], shape: ModelShape, tp: int, tokens: int, gpus_per_node: int
) -> dict[str, float]:
    return {
        CONTEXTS: CONTEXT + ENGINE_KERNELS,
        NCCL: _collective(tp, 1, gpus_per_node),
        GRAPHS: LAYER_GRAPH * shape.num_layers * _num_graphs(overrides, tokens),
    }


def _num_graphs(overrides: Mapping[str, Any], tokens: int) -> int:
    """Return the number of CUDA graphs that vLLM captures. By default, it captures batch sizes 1, 2 and 4, multiples of
    8 below 256, and multiples of 16 from 256 upwards."""
    compilation = overrides.get("compilation_config")
    compilation = compilation if isinstance(compilation, Mapping) else {}
    if overrides.get("enforce_eager") or str(compilation.get("cudagraph_mode", "")).upper() == "NONE":
        return 0
    sizes = compilation.get("cudagraph_capture_sizes") or overrides.get("cudagraph_capture_sizes")
    if sizes is None:
        largest = min(CAPTURED, 2 * overrides.get("max_num_seqs", MAX_SEQUENCES), tokens)
        sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, CAPTURED + 1, 16)) if size <= largest]
    return GRAPH_SETS * len(sizes)


def awake_reserve(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return the additional memory of an awake engine rank, in bytes: vLLM's expert workspace (worker/workspace.py), or
    an image engine's frozen models. These are not counted if they are offloaded, or if the engine sleeps between steps
    and moves them to the GPU only after a refit."""
    rollout = config.rollout
    if isinstance(shape, DenoiserShape):
        return {} if rollout.sleep or rollout.denoising.offload else {FROZEN: frozen_bytes(config, shape)}
    size = _workspace(rollout.vllm_overrides, shape, rollout.tp, batched_tokens(rollout)) * item_bytes(config)
    return {WORKSPACE: size} if size else {}


def sampling_reserve(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return the additional memory of an engine rank while it samples its largest batch, by item, in bytes."""
    rollout = config.rollout
    if isinstance(shape, DenoiserShape):
        return _denoising_reserve(config, shape)
    tokens = batched_tokens(rollout)
    changed = rollout.temperature != 1 or rollout.top_k is not None or rollout.top_p < 1
    return {
        ACTIVATIONS: _activations(shape, rollout.tp, tokens) * item_bytes(config),
        LOGITS: max_sequences(rollout) * shape.vocab * FLOAT32 * _copies_of_logits(rollout.tp, changed),
    } | _image_reserve(config, shape, tokens)


def _image_reserve(config: Config, shape: ModelShape, tokens: int) -> dict[str, float]:
    """Return the memory that images need in an engine's largest batch, by item. In one step, vLLM encodes at most as
    many features as the batch has tokens, and it caches the same number (v1/core/encoder_cache_manager.py). Qwen3-VL
    copies its deepstack features to a separate buffer (qwen3_vl.py: deepstack_input_embeds)."""
    vision, num_bytes = shape.vision, item_bytes(config)
    if vision is None or not config.trains_on_images:
        return {}
    rows = tokens * (1 + 2 * len(vision.deepstack))
    return {TOWER: tower_pass_bytes(vision, tokens, num_bytes), FEATURES: rows * vision.out_hidden * num_bytes}


def _denoising_reserve(config: Config, shape: DenoiserShape) -> dict[str, float]:
    """Return `sampling_reserve` for an image engine. If the text encoder and the VAE are offloaded, they are never on
    the GPU while the transformer runs, so their weights do not add to its activations."""
    denoising, num_bytes = config.rollout.denoising, item_bytes(config)
    tokens = denoising.max_batch * (shape.image_tokens(denoising.height, denoising.width) + shape.max_caption_tokens)
    pixels = DECODER_CHANNELS * denoising.height * denoising.width
    activations = _activations(shape, 1, tokens) * num_bytes, pixels * num_bytes
    frozen = frozen_bytes(config, shape)
    if denoising.offload:
        return {ACTIVATIONS: max(activations[0], frozen + activations[1])}
    return {FROZEN: frozen, ACTIVATIONS: max(activations)}


def max_sequences(rollout: Rollout) -> int:
    """Return the maximum number of sequences that an engine samples concurrently."""
    return min(rollout.vllm_overrides.get("max_num_seqs", MAX_SEQUENCES), batched_tokens(rollout))


def _activations(shape: ModelShape, tp: int, tokens: int) -> float:
    """Return the maximum number of activation elements that exist at once in vLLM's largest layer, for a batch of
    prompts.

    For each token, with hidden size h:

        2h                  the residual and the layer's input
        h + (2q + 2k) / tp  attention: query, key, value, the kernel's output and the output projection's; in latent
                            attention keys have q rows and values v: (3q + 2v) / tp
        h + 3f / tp         an MLP with f rows: gate and up, the activation, and the output
    """
    attention = 2 * (shape.query + shape.key) if shape.latent is None else 3 * shape.query + 2 * shape.value
    return tokens * (3 * shape.hidden + max(attention, 3 * shape.intermediate) / tp)


def _workspace(overrides: Mapping[str, Any], shape: ModelShape, tp: int, tokens: int) -> float:
    """Return the number of elements in a rank's expert workspaces. With hidden size h and k active experts per token,
    each with f rows, a token needs k · (max(h, 2f) + max(h, f)) elements: the outputs of both matrix products and the
    activation between them (experts/triton_moe.py: workspace_shapes)."""
    if shape.experts is None:
        return 0
    rows = shape.experts.intermediate / (1 if overrides.get("enable_expert_parallel") else tp)
    return tokens * shape.experts.active * (max(shape.hidden, 2 * rows) + max(shape.hidden, rows))


def _copies_of_logits(tp: int, changed: bool) -> float:
    """Return the maximum number of full-vocabulary float32 rows that exist at once per sequence. The all-gather needs
    the rank's shard, the gathered shards, and their reordered copy (cuda_communicator.py: all_gather). Sampling needs
    the logits and, if it changes them (temperature other than 1, top-k or top-p), a copy
    (worker/gpu/sample/sampler.py). Log-probs are computed from the logits without a copy (logprob.py)."""
    gathering = 1.0 if tp == 1 else 2 + 1 / tp
    return max(gathering, 2.0 if changed else 1.0)
