"""Closed-form estimate of the memory usage of a GPU that models and an engine share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.cluster.memory.parameters import draft_parts, engine_holder
from megarl.cluster.memory.rank import RankMemory, RankParameters, item_bytes, rank_memory
from megarl.cluster.memory.reserves import GIB, awake_reserve, gpu_reserve, sampling_reserve
from megarl.config.device_spans import ENGINE, NAMES, device_spans
from megarl.config.model_schema import Placed, RewardModel, Role, Teachers, Trained
from megarl.config.rules.shared_gpu import weights_travel
from megarl.config.schema import Config
from megarl.models.denoiser import shape_of
from megarl.models.shape import ModelShape
from megarl.resharding.families import huggingface_holder


@dataclass(frozen=True, slots=True)
class Load:
    """A GPU's memory load in one phase of a step. `parts` maps each item's description to its bytes. `remedy` is the
    suggested fix if the load exceeds the memory."""

    phase: str
    parts: Mapping[str, float]
    remedy: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def arithmetic(self) -> str:
        """The parts and their sum in GiB."""
        parts = " + ".join(f"{size / GIB:.1f} ({name})" for name, size in self.parts.items())
        return f"{parts} = {self.total / GIB:.1f} GiB"


def fullest_phase(
    config: Config,
    hf_config: Mapping[str, Any],
    trained: Mapping[Role, Mapping[str, Any]],
    reward: Mapping[str, Any] | None,
    gpu: int,
    gpus_per_node: int,
    draft: Mapping[str, Any] | None = None,
    teachers: Mapping[str, Mapping[str, Any]] | None = None,
) -> Load:
    """Return the largest load of all phases in which the engine is awake. It sleeps during training; see rank_memory
    for that phase.

    Args:
        hf_config: the actor's config.json in the form that the engines load.
        trained: config.json of each trained model, including its head.
        reward: the reward model's config.json, None without a reward model.
        draft: config.json of the model that drafts tokens, None without one.
        teachers: config.json of each teacher by name.
    """
    models: dict[Role, Mapping[str, float]] = {
        role: _states(config, config.placed(role), model_config, gpu) for role, model_config in trained.items()
    }
    always = {} if reward is None else reward_model_parts(config, reward, gpu)
    weights, shape = _engine_weights(config, hf_config, gpu), shape_of(hf_config)
    always |= staging_parts(config, weights, gpus_per_node) | awake_reserve(config, shape)
    always |= draft_parts(config, draft) | teacher_parts(config, teachers or {}, gpu)
    if config.distills_exactly:
        with_heads = *(teachers or {}).values(), *[hf_config] * len(config.self_teachers)
        hidden_sizes = [ModelShape.of(teacher).hidden for teacher in with_heads]
        always |= teacher_head_parts(config, ModelShape.of(hf_config).vocab, hidden_sizes, gpu)
    always |= _reserve(config, shape, trained, reward, gpu, gpus_per_node, teachers or {})
    loads = engine_loads(config, models, weights, always, sampling_reserve(config, shape))
    return max(loads, key=lambda load: load.total)


def _reserve(
    config: Config,
    engine: ModelShape,
    trained: Mapping[Role, Mapping[str, Any]],
    reward: Mapping[str, Any] | None,
    gpu: int,
    gpus_per_node: int,
    teachers: Mapping[str, Mapping[str, Any]],
) -> dict[str, float]:
    """Return the bytes that processes hold on a GPU in addition to their tensors, by item."""
    spans = device_spans(config)
    held = {}
    for role, model_config in trained.items():
        settings, span = config.placed(role), spans[NAMES[role]]
        if gpu in span:
            copied = settings.fp8 is not None or (role == "actor" and config.rollout.quantization is not None)
            rank = RankParameters.of(model_config, settings.layout, gpu - span.start) if copied else None
            held[role] = shape_of(model_config), rank.matrices if rank else 0
    scorer = None if reward is None or gpu not in spans[NAMES["reward_model"]] else ModelShape.of(reward)
    shapes = {
        name: ModelShape.of(hf_config)
        for name, hf_config in teachers.items()
        if gpu - spans[NAMES["teachers"]].start in range(config.teacher_section(name).layout.world_size)
    }
    return gpu_reserve(config, held, engine, scorer, gpus_per_node, shapes)


def resident_states(config: Config, role: Role, states: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes of a model's state that stay on the GPU while a different model or an engine computes there.
    `states` maps each state's name in the key `offload` to its bytes."""
    return {part: size for part, size in states.items() if part not in config.placed(role).offload}


def engine_loads(
    config: Config,
    models: Mapping[Role, Mapping[str, float]],
    engine: float,
    always: Mapping[str, float],
    sampling: Mapping[str, float],
) -> list[Load]:
    """Return the load in each phase in which the engine is awake.

    These phases are the refit, the checkpoint save of each model except the actor, and sampling. For a refit or a save,
    only the model's weights return from host memory (TrainedModels.stage_actor_for_sync, Saver.save). They are
    offloaded again before the KV cache wakes.

    Args:
        models: bytes of each state in each trained model with a rank on the GPU, by the state's name in the key
            `offload`.
        engine: bytes of the engine's weights.
        always: bytes on the GPU in all of these phases, by description.
        sampling: additional bytes while the engine samples, by description.
    """

    def resident_with(loaded: Role) -> dict[str, float]:
        """Return the bytes on the GPU while this model's weights are loaded."""
        resident = {}
        for role, states in models.items():
            kept = resident_states(config, role, states)
            parts = [part for part in states if part in kept or (role == loaded and part == "parameters")]
            if parts:
                names = ", ".join(parts).replace("parameters", "weights")
                resident[f"{role}: {names}"] = sum(states[part] for part in parts)
        return {**resident, "engine: weights": engine, **always}

    offload = " and ".join(f"{role}.offload" for role in models)
    smaller = "set rollout.denoising.offload=true" if config.samples_images else "lower rollout.kv_cache_gib"
    remedy = f"increase tp, pp or ep in the layouts, or add gradients and optimizer to {offload}"
    phases: dict[Role, str] = {"actor": "while the engine receives weights"}
    if config.checkpoint.may_be_saved:
        phases |= {role: f"while the {role} is saved" for role in models if role != "actor"}
    stay = {role: resident_states(config, role, states) for role, states in models.items()}
    kept = {f"{role}: {part}": size for role, parts in stay.items() for part, size in parts.items()}
    cache = {} if config.samples_images else {"engine: KV cache": config.rollout.kv_cache_gib * GIB}
    rollout = {**kept, "engine: weights": engine, **cache}
    return [
        *(Load(phase, resident_with(role), remedy) for role, phase in phases.items()),
        Load(
            "while the engine samples",
            {**rollout, **always, **sampling},
            f"{smaller}, or add parameters, gradients or optimizer to actor.offload",
        ),
    ]


def staging_parts(config: Config, engine_bytes: float, gpus_per_node: int) -> dict[str, float]:
    """Return the bytes of a refit's message buckets (rollout.refit_bucket_mib) by their name, or an empty dict if the
    refit sends nothing. Each process holds two buckets. A colocated GPU holds the sender's and the receiver's."""
    if not weights_travel(config, gpus_per_node):
        return {}
    bucket_mib = config.rollout.refit_bucket_mib
    bucket = min(engine_bytes / 64, 256 * 2**20) if bucket_mib is None else bucket_mib * 2**20
    return {"refit: buckets": bucket * (4 if config.is_colocated else 2)}


def _states(config: Config, settings: Trained, hf_config: Mapping[str, Any], gpu: int) -> dict[str, int]:
    """Return the bytes of each state of known size, by its name in `offload`, or an empty dict if the GPU has no rank
    of the model."""
    span = device_spans(config)[NAMES[settings.section]]
    if gpu not in span:
        return {}
    memory, extra = _memory(config, settings, hf_config, gpu - span.start), settings.megatron_overrides
    if settings.frozen or extra.optimizer or extra.ddp:  # each can shrink gradients and optimizer state
        return {"parameters": memory.weights}
    return {"parameters": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}


def reward_model_parts(config: Config, hf_config: Mapping[str, Any], gpu: int) -> dict[str, float]:
    """Return the bytes that the reward model always occupies on the GPU, by their name. The dict is empty if the GPU
    has no rank of the model, or if its parameters are offloaded while it does not score."""
    settings, span = config.reward_model, device_spans(config)[NAMES["reward_model"]]
    if gpu not in span or settings.offload:
        return {}
    if settings.engine == "megatron":
        return {"reward model: weights": _memory(config, settings, hf_config, gpu - span.start).weights}
    return scoring_engine_parts(config, "reward model", settings, hf_config)


def teacher_parts(config: Config, teachers: Mapping[str, Mapping[str, Any]], gpu: int) -> dict[str, float]:
    """Return the bytes that teachers keep on a GPU while other models or engines compute there, by part.

    Args:
        teachers: config.json of each teacher by name.
    """
    parts: dict[str, float] = {}
    for name, hf_config in teachers.items():
        settings = config.teacher_section(name)
        rank = gpu - device_spans(config)[NAMES["teachers"]].start
        if rank not in range(settings.layout.world_size):
            continue
        if settings.engine == "vllm":
            parts |= scoring_engine_parts(config, f"teacher {name}", settings, hf_config)
        elif not settings.offload:
            parts[f"teacher {name}: weights"] = _memory(config, settings, hf_config, rank).weights
    return parts


def scoring_engine_parts(
    config: Config, name: str, settings: RewardModel | Teachers, hf_config: Mapping[str, Any]
) -> dict[str, float]:
    """Return the bytes of an engine's weights and KV cache, which it always keeps on its GPUs. `name`: the model's
    name."""
    weights = huggingface_holder(hf_config, config.model.dtype).shard.num_bytes / settings.layout.tp
    return {f"{name}: weights": weights, f"{name}: KV cache": settings.kv_cache_gib * GIB}


def teacher_head_parts(
    config: Config, vocab: int, hidden_sizes: Sequence[int], gpu: int | None = None
) -> dict[str, float]:
    """Return the size in bytes of the teachers' output weights on a GPU of the actor's last stage; empty unless the
    divergence is exact.

    Args:
        vocab: size of the actor's vocabulary.
        hidden_sizes: hidden size of each teacher.
        gpu: the GPU, which may be on another stage; None: one on the last stage.
    """
    layout, span = config.actor.layout, device_spans(config)[NAMES["actor"]]
    last_stage = span[-layout.world_size // layout.pp :]
    if not config.distills_exactly or (gpu is not None and gpu not in last_stage):
        return {}
    return {"actor: teachers' output layers": -(-vocab // layout.tp) * sum(hidden_sizes) * item_bytes(config)}


def _engine_weights(config: Config, hf_config: Mapping[str, Any], gpu: int) -> int:
    """Return the size of the engine's weights in bytes, or 0 if it is unknown because vLLM quantizes them."""
    rollout = config.rollout
    if rollout.vllm_overrides.get("quantization") is not None:
        return 0
    rank = (gpu - device_spans(config)[ENGINE].start) % rollout.tp
    return engine_holder(config, hf_config, rank).shard.num_bytes


def _memory(config: Config, settings: Placed, hf_config: Mapping[str, Any], rank: int) -> RankMemory:
    """Return the memory of a rank between two steps, without activations."""
    num_bytes, muon = item_bytes(config), settings.section in config.muon_roles
    return rank_memory(hf_config, settings.layout, rank, num_bytes, 0, 0, 1, lora=settings.adapters, uses_muon=muon)
