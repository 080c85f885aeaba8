"""The memory of a GPU beside tensors of models and the KV cache: an item for each cause, with its source.

None of it can be asked for before a run, and vLLM does not measure it either where the size of the KV cache is given
(gpu_worker.py: kv_cache_memory_bytes): without room for it, a run fails in the middle of a rollout. Where NCCL's and
vLLM's sources give sizes, the items are computed from them; what is measured elsewhere, or an assumption, says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.cluster.memory.rank import FLOAT32, item_bytes
from megarl.config.device_spans import num_devices
from megarl.config.model_schema import Layout, Placed, Role
from megarl.config.rules.shared_gpu import weights_travel
from megarl.config.schema import Config, Rollout
from megarl.config.vllm_arguments import batched_tokens
from megarl.models.huggingface import FP8_BLOCK
from megarl.models.shape import ModelShape
from megarl.resharding.planning.communicators import CONNECTION, EXCHANGE_CHANNELS, NETWORK_BUFFERS, buffer_bytes

MIB, GIB = 2**20, 2**30

MOST_SEQUENCES = 1024
"""The sequences that vLLM samples for at once by default on GPUs with 70 GiB or more."""

CONTEXTS, NCCL, FP8, FRAGMENTS = "CUDA contexts", "NCCL", "fp8 copies of weights", "fragments"
GRAPHS, ACTIVATIONS, LOGITS = "CUDA graphs", "engine: activations", "engine: logits"
WORKSPACE = "engine: experts' workspace"
SENT = "actor: fp8 copy for the engines"
"""The names of the items."""

CONTEXT = 426 * MIB
"""A process's CUDA context on a GPU, before it has computed anything: measured by others with torch 2.10 for CUDA 13 on
an RTX 6000 Ada, which has about as many multiprocessors as an H100 (unslothai/unsloth-zoo, pull request 1053)."""

KERNELS = 0.25 * GIB
"""The bytes that a process that computes adds to its context: kernels, which load when they are first used, and the
workspaces of cuBLAS. An assumption."""

FRAGMENT_BYTES = GIB
"""The bytes that a trainer's allocator holds at the peak beyond its tensors. An assumption."""

CHANNELS, CHANNELS_OVER_NODES = 24, 16
"""The rings of a communicator, inside a node and over several. Issue 1453 shows 16 over nodes of H100s. 24 inside one
are an assumption: with as many connections of trees, which are no longer made unless they are used, they come to the
0.5 GiB that issue 964 measured of two A100s."""

EXCHANGE_CHANNELS_OVER_NODES = 2
"""The channels between two ranks of a node that send to each other, if the communicator has ranks elsewhere (issue
1189)."""

MULTICAST = 16 * 2 * 8 * 128 * 1024
"""NVLink SHARP's buffers for each rank of the node: 16 channels, both ways, 8 steps of NCCL_NVLS_CHUNKSIZE (nvls.cc:
ncclNvlsBufferSetup)."""

CAPTURED = 512
"""The largest batch that vLLM captures graphs for by default, below Blackwell (config/vllm.py)."""

GRAPH_SETS = 2
"""The sets of graphs: of whole steps that decode, and of the pieces between attention, for steps with prompts."""

LAYER_GRAPH = 0.38 * MIB
"""The bytes of a captured graph for each layer: vLLM logged 0.21 GiB for 35 graphs of the 16 layers of Llama-3.2-1B
(vllm-project/vllm, pull request 11349). What graphs take also depends on kernels and driver: an estimate, in the 1 to
3 GiB that vLLM has warned of."""


def together(*items: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of items of several processes, by their names; none for what nobody has."""
    names = dict.fromkeys(name for each in items for name in each)
    sums = {name: sum(each.get(name, 0.0) for each in items) for name in names}
    return {name: size for name, size in sums.items() if size}


def gpu_reserve(
    config: Config,
    held: Mapping[Role, tuple[ModelShape, int]],
    engine: ModelShape | None,
    reward: ModelShape | None,
    gpus_per_node: int,
) -> dict[str, float]:
    """Return the items that a GPU has all the time: of its processes, and of those that read its weights from other
    GPUs.

    held     each trained model with a rank on the GPU, and the rank's matrices, see RankParameters
    engine   the model of the engine with a rank there, None without one
    reward   likewise of the reward model
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
        items.append(_readers_reserve(config, gpus_per_node))
    if engine is not None:
        items.append(engine_reserve(config, engine, gpus_per_node))
    if reward is not None:
        items.append(_reward_model_reserve(config, reward, gpus_per_node))
    return together(*items)


def trainer_reserve(settings: Placed, shape: ModelShape, matrices: int, gpus_per_node: int) -> dict[str, float]:
    """Return the items of a rank of a model in Megatron. They stay when its parameters are moved away."""
    nccl = _trainer_communicators(settings.layout, shape, gpus_per_node)
    return {CONTEXTS: CONTEXT + KERNELS, NCCL: nccl, FP8: _fp8_copies(settings, matrices)}


def _trainer_communicators(layout: Layout, shape: ModelShape, gpus_per_node: int) -> float:
    """Return the bytes of the communicators that every step uses: one is made when it is first used, and the
    connections of an algorithm when that is (NCCL_RUNTIME_CONNECT).

    Of all ranks there are two, for errors and for the norm of gradients, which carry numbers only. Expert-parallel
    ranks exchange tokens, each with each; neighbouring pipeline stages exchange activations.
    """
    groups = parallel_groups(layout, has_experts=shape.experts is not None)
    exchanged = {"ep": layout.ep, "pp": 2}
    total = 2.0 * _rings(layout.world_size, 1, gpus_per_node)
    for name, group in groups.items():
        peers = exchanged.get(name)
        total += _exchange(*group, gpus_per_node, peers) if peers else _collective(*group, gpus_per_node)
    return total


def parallel_groups(layout: Layout, has_experts: bool) -> dict[str, tuple[int, int]]:
    """Return Megatron's groups of more than one rank that every step uses, by their names there: ranks, and how far
    they lie apart."""
    tp, cp, dp, ep, etp = layout.tp, layout.cp, layout.dp, layout.ep, layout.expert_tp
    stage = tp * cp * dp
    groups = {"tp": (tp, 1), "cp": (cp, tp), "dp_cp": (dp * cp, tp), "pp": (layout.pp, stage)}
    if has_experts:
        groups |= {"etp": (etp, 1), "ep": (ep, etp), "tp_ep": (etp * ep, 1), "ep_dp": (stage // (etp * ep), etp * ep)}
    return {name: group for name, group in groups.items() if group[0] > 1}


def _collective(ranks: int, stride: int, gpus_per_node: int) -> float:
    """Return the bytes of a communicator of ranks that lie `stride` apart, by which tensors are gathered and
    reduced."""
    here = _in_node(ranks, stride, gpus_per_node)
    return _rings(ranks, stride, gpus_per_node) + (MULTICAST * here if here > 2 else 0)


def _rings(ranks: int, stride: int, gpus_per_node: int) -> float:
    if ranks == 1:
        return 0.0
    return (CHANNELS if _in_node(ranks, stride, gpus_per_node) == ranks else CHANNELS_OVER_NODES) * CONNECTION


def _exchange(ranks: int, stride: int, gpus_per_node: int, peers: int) -> float:
    """Return the bytes that a communicator of ranks that lie `stride` apart has for what they send to each other.
    peers: how many of them a rank sends to."""
    here = _in_node(ranks, stride, gpus_per_node)
    if here == ranks:
        return min(peers, here) * EXCHANGE_CHANNELS * CONNECTION
    near = min(peers, here) if here > 1 else 0
    return near * EXCHANGE_CHANNELS_OVER_NODES * CONNECTION + NETWORK_BUFFERS


def _in_node(ranks: int, stride: int, gpus_per_node: int) -> int:
    """Return how many of the ranks are on a node."""
    return min(ranks, max(1, gpus_per_node // stride))


def _fp8_copies(settings: Placed, matrices: int) -> float:
    """Return the bytes of the copies that Transformer Engine casts weights into and keeps (module/base.py:
    _fp8_workspaces), one for products in rows and one in columns, with mxfp8 a scale for each 32 elements. They are no
    parameters, and stay when those are moved away. disable_parameter_transpose_cache makes them anew each time."""
    if settings.fp8 is None or settings.megatron_overrides.model.get("disable_parameter_transpose_cache"):
        return 0
    return 2 * matrices * (33 / 32 if settings.fp8 == "mxfp8" else 1)


def _readers_reserve(config: Config, gpus_per_node: int) -> dict[str, float]:
    """Return the contexts of engines' ranks on other GPUs that read the actor's weights on a GPU (cuda_memory.py)."""
    return {} if config.sends_weights else {CONTEXTS: CONTEXT * _num_readers(config, gpus_per_node)}


def _num_readers(config: Config, gpus_per_node: int) -> int:
    """Return how many ranks of engines read a rank of the actor from other GPUs of its node, at most: none where each
    rank has all parameters; one for each stage where tensors are cut alike, but for the vocabulary's padding.

    Otherwise a rank needs so many of the node's slices of the model, and each is read by as many ranks on average;
    replicas take turns, and some give to twice as many. GPUs that are no engine's may be read by all of the node.
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
    """Return the items of an engine's rank that stay while it sleeps: vLLM's sleep mode releases what its own
    allocator has, weights and KV cache, and graphs only by sleep_mode_offload_cudagraph."""
    rollout = config.rollout
    return _engine_process(rollout.vllm_overrides, shape, rollout.tp, batched_tokens(rollout), gpus_per_node)


def _refit_buffers(config: Config, is_engine: bool, gpus_per_node: int) -> float:
    """Return the bytes of the communicators over which a rank of the actor sends weights, or one of an engine has them
    and hands them on: on each node, what several ranks want is sent to one of them. `megarl reshard` counts those of a
    plan."""
    engines, nodes = config.rollout.replicas * config.rollout.tp, -(-num_devices(config) // gpus_per_node)
    if nodes == 1:
        others = engines - 1 + config.actor.layout.world_size if is_engine else engines
        return buffer_bytes(between=0, near=others)
    near = min(gpus_per_node, engines) - 1 if is_engine else 0
    if config.is_colocated:  # one for each bit of a node's number, of the trainer's rank and of the engine's
        return buffer_bytes(2 * (nodes - 1).bit_length(), near)
    return buffer_bytes(1, near)


def _reward_model_reserve(config: Config, shape: ModelShape, gpus_per_node: int) -> dict[str, float]:
    settings = config.reward_model
    if settings.engine == "megatron":
        return trainer_reserve(settings, shape, 0, gpus_per_node)
    tokens = settings.tokens_per_microbatch
    items = _engine_process(settings.vllm_overrides, shape, settings.layout.tp, tokens, gpus_per_node)
    activations = _activations(shape, settings.layout.tp, tokens)
    activations += _workspace(settings.vllm_overrides, shape, settings.layout.tp, tokens)
    held = {**items, "reward model: activations": activations * item_bytes(config)}
    if settings.judges:
        sequences = min(settings.vllm_overrides.get("max_num_seqs", MOST_SEQUENCES), tokens)
        copies = _copies_of_logits(settings.layout.tp, changed=True)
        held["reward model: logits"] = sequences * shape.vocab * FLOAT32 * copies
    return held


def _engine_process(
    overrides: Mapping[str, Any], shape: ModelShape, tp: int, tokens: int, gpus_per_node: int
) -> dict[str, float]:
    return {
        CONTEXTS: CONTEXT + KERNELS,
        NCCL: _collective(tp, 1, gpus_per_node),
        GRAPHS: LAYER_GRAPH * shape.num_layers * _num_graphs(overrides, tokens),
    }


def _num_graphs(overrides: Mapping[str, Any], tokens: int) -> int:
    """Return how many graphs vLLM captures: of batches of 1, 2, 4, then of multiples of 8, from 256 on of 16."""
    compilation = overrides.get("compilation_config")
    compilation = compilation if isinstance(compilation, Mapping) else {}
    if overrides.get("enforce_eager") or str(compilation.get("cudagraph_mode", "")).upper() == "NONE":
        return 0
    sizes = compilation.get("cudagraph_capture_sizes") or overrides.get("cudagraph_capture_sizes")
    if sizes is None:
        largest = min(CAPTURED, 2 * overrides.get("max_num_seqs", MOST_SEQUENCES), tokens)
        sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, CAPTURED + 1, 16)) if size <= largest]
    return GRAPH_SETS * len(sizes)


def awake_reserve(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return what an engine's rank has beside from when it wakes, to take weights, until it sleeps: what vLLM has set
    aside at its start for experts (worker/workspace.py)."""
    rollout = config.rollout
    size = _workspace(rollout.vllm_overrides, shape, rollout.tp, batched_tokens(rollout)) * item_bytes(config)
    return {WORKSPACE: size} if size else {}


def sampling_reserve(config: Config, shape: ModelShape) -> dict[str, float]:
    """Return what an engine's rank has beside, for its largest batch, while it samples."""
    rollout = config.rollout
    tokens = batched_tokens(rollout)
    changed = rollout.temperature != 1 or rollout.top_k is not None or rollout.top_p < 1
    return {
        ACTIVATIONS: _activations(shape, rollout.tp, tokens) * item_bytes(config),
        LOGITS: most_sequences(rollout) * shape.vocab * FLOAT32 * _copies_of_logits(rollout.tp, changed),
    }


def most_sequences(rollout: Rollout) -> int:
    """Return the sequences that an engine samples for at once, at most."""
    return min(rollout.vllm_overrides.get("max_num_seqs", MOST_SEQUENCES), batched_tokens(rollout))


def _activations(shape: ModelShape, tp: int, tokens: int) -> float:
    """Return the numbers that a batch of prompts has at once in the layer with most; layers take turns. For each
    token, with h hidden, in vLLM's layers:

        2h                  the residual and the layer's input
        h + (2q + 2k) / tp  attention: query, key, value and the kernel's output, and the output layer's; latent
                            attention has keys as wide as queries, q, and values of v: (3q + 2v) / tp
        h + 3f / tp         an MLP of f rows: gate and up, the activation, and its output
    """
    attention = 2 * (shape.query + shape.key) if shape.latent is None else 3 * shape.query + 2 * shape.value
    return tokens * (3 * shape.hidden + max(attention, 3 * shape.intermediate) / tp)


def _workspace(overrides: Mapping[str, Any], shape: ModelShape, tp: int, tokens: int) -> float:
    """Return the numbers of the workspaces of a active experts, of f rows on a rank: for each token a · (max(h, 2f) +
    max(h, f)), the outputs of both products, and the activation between them (experts/triton_moe.py:
    workspace_shapes)."""
    if shape.experts is None:
        return 0
    rows = shape.experts.intermediate / (1 if overrides.get("enable_expert_parallel") else tp)
    return tokens * shape.experts.active * (max(shape.hidden, 2 * rows) + max(shape.hidden, rows))


def _copies_of_logits(tp: int, changed: bool) -> float:
    """Return how many float32 rows of the whole vocabulary there are for each sequence at once.

    Gathering has the rank's own part, what is gathered, and that in the order of the vocabulary
    (cuda_communicator.py: all_gather); sampling has the logits, and a copy where they are changed: where the
    temperature is not 1 or candidates are cut (worker/gpu/sample/sampler.py). Log-probs are read from these without a
    copy (logprob.py).
    """
    gathering = 1.0 if tp == 1 else 2 + 1 / tp
    return max(gathering, 2.0 if changed else 1.0)
