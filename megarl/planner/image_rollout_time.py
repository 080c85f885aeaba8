"""Closed-form estimate of the time that image engines take to sample a step's images."""

from __future__ import annotations

from megarl.cluster.memory.reserves import frozen_bytes
from megarl.config.schema import Config
from megarl.models.denoiser import DenoiserShape
from megarl.models.flops import velocity_flops
from megarl.planner.hardware import DENSE_SHARE, HOST_LINK_SHARE, Cluster
from megarl.planner.rollout_time import LAYER_SECONDS, RolloutTime
from megarl.planner.workload import ImageWorkload

DECODER_FLOPS = 1e7
"""Operations per pixel of Z-Image's VAE decoder: 9.6e6 at 512 x 512 pixels and 10.0e6 at 1024 x 1024."""


def image_rollout_time(config: Config, shape: DenoiserShape, workload: ImageWorkload, cluster: Cluster) -> RolloutTime:
    """Return the time until all images are sampled. Each denoising step takes one forward pass per guidance branch. The
    transformer, the text encoder and the VAE are assumed to achieve the same fraction of the nominal throughput as
    updates, DENSE_SHARE. Every engine encodes the captions of its own samples."""
    denoising, replicas = config.rollout.denoising, config.rollout.replicas
    flops_per_second = cluster.gpu.tflops * 1e12 * DENSE_SHARE
    samples = workload.samples / replicas
    velocities = samples * workload.num_steps
    flops = sum(velocity_flops(shape, document.image, document.caption) for document in workload.documents)
    height, width = workload.size
    passes = -(-velocities * len(workload.documents) // denoising.max_batch)
    captions = min(samples, workload.prompts)
    parts = {
        "denoising": velocities * flops / flops_per_second,
        "kernel latency": passes * (shape.num_layers + 2 * shape.refiners) * LAYER_SECONDS,
        "text encoder": captions * 2 * shape.text_encoder_parameters * workload.prompt_tokens / flops_per_second,
        "VAE": samples * height * width * DECODER_FLOPS / flops_per_second,
    }
    if denoising.offload or config.rollout.sleep:
        parts["moving the text encoder and the VAE"] = (
            2 * frozen_bytes(config, shape) / (cluster.gpu.host_gb_s * 1e9 * HOST_LINK_SHARE)
        )
    seconds = sum(parts.values())
    return RolloutTime(parts, full=seconds, concurrent=denoising.max_batch, guaranteed=denoising.max_batch)
