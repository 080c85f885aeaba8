"""Closed-form estimate of the rollout time in a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from megarl.cluster.memory.parameters import ModelParameters
from megarl.cluster.memory.rank import FLOAT32, item_bytes
from megarl.cluster.memory.reserves import max_sequences
from megarl.config.schema import Config
from megarl.models.flops import forward_flops, mean_context, pairs_outside_window, vision_flops
from megarl.models.shape import ModelShape
from megarl.planner.hardware import DENSE_SHARE, GIB, MEMORY_SHARE, Cluster
from megarl.planner.workload import TextWorkload

STEP_SECONDS = 1.5e-3
"""Overhead of an engine step in addition to its kernels: scheduling and kernel launches. This value is an
assumption."""

SEQUENCE_SECONDS = 2.6e-3 / 1024
"""Overhead of an engine step per sequence. vLLM's output processing took 2.6 ms for 1,024 sequences on a CPU."""

LAYER_SECONDS, EXPERTS_SECONDS = 40e-6, 40e-6
"""Minimum latency of a layer's kernels and of its experts' kernels: about eight kernels of 5 µs each. These values are
assumptions."""

REDUCE_SECONDS = {True: 15e-6, False: 100e-6}
"""Latency of an all-reduce over an engine's ranks, keyed by whether all ranks are on one node. These values are
assumptions."""

POINTS = 48
"""Number of batch sizes at which the engine step time is evaluated while the batch shrinks."""


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """Time of a rollout.

    Attributes:
        parts: seconds by cause.
        full: seconds if the engines always run full batches. This requires that prompts of the next step may start
            before the last response has finished.
        concurrent: number of average-length sequences that fit into an engine's KV cache at once, or number of images
            that it denoises at once.
        guaranteed: number of maximum-length sequences that fit into an engine's KV cache at once.
    """

    parts: dict[str, float]
    full: float
    concurrent: int
    guaranteed: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def kv_bytes(model: ModelParameters, tp: int, num_bytes: int) -> float:
    """Return the number of KV cache bytes per token on an engine rank. Gated delta nets have a state per sequence
    instead: see `state_bytes`. All other layers are counted in full. Layers with a sliding window cache only the
    window's tokens; `mean_context` accounts for this."""
    return model.shape.softmax_layers * layer_kv_bytes(model.shape, tp, num_bytes)


def layer_kv_bytes(shape: ModelShape, tp: int, num_bytes: int) -> float:
    """Return the number of KV cache bytes per token in one layer on an engine rank. KV heads are split over the ranks,
    and replicated if there are more ranks than heads. With latent attention, every rank holds the full latent
    vector."""
    if shape.latent is not None:
        return shape.latent_and_position * num_bytes
    return 2 * max(1, shape.kv_heads / tp) * shape.head_dim * num_bytes


def state_bytes(shape: ModelShape, tp: int, num_bytes: int, drafts: int = 0) -> float:
    """Return the number of bytes that the gated delta nets of an engine rank keep for a sequence, in its KV cache: the
    state [keys, values] of each head in float32, and the inputs of the convolution. With draft tokens, vLLM keeps an
    additional block of both per draft token, and each block also has room for the inputs of all draft tokens."""
    linear = shape.linear
    if linear is None:
        return 0
    states = linear.key_dim * linear.values * FLOAT32
    block = states + (linear.width - 1 + drafts) * linear.channels * num_bytes
    return sum(linear.layers) * (1 + drafts) * block / tp


def engine_kv_bytes(config: Config, model: ModelParameters, draft: ModelParameters | None, num_tokens: float) -> float:
    """Return the KV cache's bytes for a sequence in all models of an engine. A draft model has its own keys and values.
    Layers with a sliding window cache only the window's tokens."""
    models, tp, num_bytes = [model] if draft is None else [model, draft], config.rollout.tp, item_bytes(config)
    speculative = config.rollout.speculative
    drafts = 0 if speculative.method is None else speculative.tokens
    layers = model.shape.mtp_layers if config.rollout.drafts_with_mtp else 0
    return layers * layer_kv_bytes(model.shape, tp, num_bytes) * num_tokens + sum(
        kv_bytes(each, tp, num_bytes) * mean_context(each.shape.windows, num_tokens)
        + state_bytes(each.shape, tp, num_bytes, drafts)
        for each in models
    )


def rollout_time(
    config: Config,
    model: ModelParameters,
    workload: TextWorkload,
    cluster: Cluster,
    draft: ModelParameters | None = None,
) -> RolloutTime:
    """Return the time until the longest response has finished. The fraction of responses longer than t is assumed to be
    (1 − t / L)^(L / r − 1). L is the maximum length and r the mean length. An engine whose samples do not all fit at
    once runs full batches until its last sample has started. Its batch then shrinks according to this formula. The time
    that draft tokens save depends on their acceptance and is not estimated."""
    step = _Step(config, model, cluster)
    windows, samples = model.shape.windows, workload.samples / config.rollout.replicas
    mean, longest = workload.response_tokens, workload.longest_response
    cache = config.rollout.kv_cache_gib * GIB
    concurrent = int(cache / engine_kv_bytes(config, model, draft, workload.prompt_tokens + mean / 2))
    batch = max(1, min(samples, concurrent, max_sequences(config.rollout)))
    parts: dict[str, float] = defaultdict(float)
    full_steps = (samples - batch) * mean / batch
    _add(parts, step.parts(batch, workload.prompt_tokens + mean / 2), full_steps)
    power = longest / mean - 1
    for point in range(POINTS):
        done = (point + 0.5) / POINTS
        active = max(1.0, batch * (1 - done) ** power)
        _add(parts, step.parts(active, workload.prompt_tokens + done * longest), longest / POINTS)
    prompts = workload.prompts * workload.prompt_tokens
    pairs = prompts * workload.prompt_tokens / 2
    pairs -= workload.prompts * pairs_outside_window(windows, workload.prompt_tokens)
    engines = config.rollout.replicas * config.rollout.tp
    prefill_flops = forward_flops(model.shape, prompts, 0, pairs)
    if model.shape.vision is not None:  # the ranks of an engine share the images
        features = workload.prompts * workload.image_features
        prefill_flops += vision_flops(model.shape.vision, features, workload.image_features)
    prefill = prefill_flops / (engines * step.flops_per_second)
    parts["prompts"] = prefill
    always_full = sum(step.parts(batch, workload.prompt_tokens + mean / 2).values()) * samples * mean / batch + prefill
    guaranteed = int(cache / engine_kv_bytes(config, model, draft, config.rollout.context_length))
    return RolloutTime(dict(parts), min(always_full, sum(parts.values())), concurrent, guaranteed)


def engine_step_seconds(
    config: Config, model: ModelParameters, cluster: Cluster, context: float
) -> Callable[[int], float]:
    """Return a function that maps a batch size to the duration of an engine step in seconds. context: number of tokens
    in each sequence."""
    step = _Step(config, model, cluster)
    return cache(lambda batch: sum(step.parts(batch, context).values()))


def recompute_seconds(
    config: Config, model: ModelParameters, cluster: Cluster, prompt_tokens: float
) -> Callable[[float], float]:
    """Return a function that maps a response's length in tokens to the seconds for recomputing the KV cache of its
    prompt and response."""
    flops_per_second = _Step(config, model, cluster).flops_per_second * config.rollout.tp

    def seconds(response_tokens: float) -> float:
        tokens = prompt_tokens + response_tokens
        pairs = tokens * tokens / 2 - pairs_outside_window(model.shape.windows, tokens)
        return forward_flops(model.shape, tokens, 0, pairs) / flops_per_second

    return seconds


def _add(parts: dict[str, float], step: dict[str, float], steps: float) -> None:
    for name, seconds in step.items():
        parts[name] += seconds * steps


class _Step:
    """One decoding step of an engine. It generates one token for each sequence in the batch."""

    def __init__(self, config: Config, model: ModelParameters, cluster: Cluster):
        rollout, shape = config.rollout, model.shape
        self.num_bytes = item_bytes(config)
        self.tp, self.shape = rollout.tp, shape
        self.token = kv_bytes(model, rollout.tp, self.num_bytes)
        self.state = state_bytes(shape, rollout.tp, self.num_bytes)
        weights = model.engine_bytes(config)
        self.experts = 0.0
        self.kernel_latency = shape.num_layers * LAYER_SECONDS
        if shape.experts is not None:
            matrices = 3 * shape.hidden * shape.experts.intermediate * shape.experts.count * sum(shape.experts.layers)
            self.kernel_latency += sum(shape.experts.layers) * EXPERTS_SECONDS
            self.experts = matrices * (self.num_bytes if rollout.quantization is None else 1) / rollout.tp
        # Decoding does not read the tower, which each engine rank holds as a whole.
        self.dense = weights - self.experts - model.tower_count * self.num_bytes
        self.bandwidth = cluster.gpu.memory_gb_s * 1e9 * MEMORY_SHARE
        self.flops_per_second = cluster.gpu.tflops * 1e12 * DENSE_SHARE
        self.link = cluster.link_bytes_per_second(rollout.tp)
        self.latency = REDUCE_SECONDS[rollout.tp <= cluster.gpus_per_node]

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """Return the duration of a step in seconds, split by cause. The step reads all weights except for experts to
        which no token in the batch is routed. If a of E experts are active per token, the step reads E (1 − (1 − a /
        E)^batch) experts per layer. context: number of tokens in each sequence."""
        experts = self.shape.experts
        touched = 1 - (1 - experts.active / experts.count) ** batch if experts else 0.0
        reading = (self.dense + self.experts * touched) / self.bandwidth
        attended = batch * mean_context(self.shape.windows, context)
        products = forward_flops(self.shape, batch, batch, attended) / self.tp / self.flops_per_second
        caching = (attended * self.token + 2 * batch * self.state) / self.bandwidth  # states are read and written
        parts = {
            "engine loop": STEP_SECONDS + SEQUENCE_SECONDS * batch,
            "kernel latency": self.kernel_latency,
            "reading the KV cache": caching,
        }
        if products > reading:
            parts["matrix products"] = products
        else:
            parts["reading weights"] = reading
        if self.tp > 1:
            moved = 2 * batch * self.shape.hidden * self.num_bytes * (self.tp - 1) / self.tp
            parts["all-reduces"] = 2 * self.shape.num_layers * (self.latency + moved / self.link)
        return parts
