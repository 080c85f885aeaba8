"""The memory of a GPU that models and an engine share, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.cluster.memory.parameters import engine_holder
from megarl.cluster.memory.rank import RankMemory, RankParameters, item_bytes, rank_memory
from megarl.cluster.memory.reserves import GIB, awake_reserve, gpu_reserve, sampling_reserve
from megarl.config.device_spans import ENGINE, NAMES, device_spans
from megarl.config.rules.shared_gpu import weights_travel
from megarl.models.shape import ModelShape
from megarl.resharding.families import huggingface_holder

if TYPE_CHECKING:
    from megarl.config.model_schema import Placed, Role, Trained
    from megarl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a GPU in one phase of a step.

    phase    the phase, in words
    parts    what is there at once -> bytes
    remedy   what to do if it is too much
    """

    phase: str
    parts: Mapping[str, float]
    remedy: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def arithmetic(self) -> str:
        """The parts and their sum in GiB."""
        parts = " + ".join(f"{size / GIB:.1f} ({what})" for what, size in self.parts.items())
        return f"{parts} = {self.total / GIB:.1f} GiB"


def fullest_phase(
    config: Config,
    hf_config: Mapping[str, Any],
    trained: Mapping[Role, Mapping[str, Any]],
    reward: Mapping[str, Any] | None,
    gpu: int,
    gpus_per_node: int,
) -> Load:
    """Return the fullest of the phases in which the engine is awake. For training, when it sleeps, see rank_memory.

    hf_config   config.json of the actor, as its engines have it
    trained     config.json of each model that the run trains, with its head
    reward      config.json of the reward model, if there is one
    """
    models = {role: _states(config, config.placed(role), model_config, gpu) for role, model_config in trained.items()}
    always = {} if reward is None else reward_model_parts(config, reward, gpu)
    weights, shape = _engine_weights(config, hf_config, gpu), ModelShape.of(hf_config)
    always |= staging_parts(config, weights, gpus_per_node) | awake_reserve(config, shape)
    always |= _reserve(config, shape, trained, reward, gpu, gpus_per_node)
    loads = engine_loads(config, models, weights, always, sampling_reserve(config, shape))
    return max(loads, key=lambda load: load.total)


def _reserve(
    config: Config,
    engine: ModelShape,
    trained: Mapping[Role, Mapping[str, Any]],
    reward: Mapping[str, Any] | None,
    gpu: int,
    gpus_per_node: int,
) -> dict[str, float]:
    """Return what the processes with a rank on a GPU hold there beside tensors."""
    spans = device_spans(config)
    held = {}
    for role, model_config in trained.items():
        settings, span = config.placed(role), spans[NAMES[role]]
        if gpu in span:
            copied = settings.fp8 is not None or (role == "actor" and config.rollout.quantization is not None)
            rank = RankParameters.of(model_config, settings.layout, gpu - span.start) if copied else None
            held[role] = ModelShape.of(model_config), rank.matrices if rank else 0
    scores = reward is not None and gpu in spans[NAMES["reward_model"]]
    return gpu_reserve(config, held, engine, ModelShape.of(reward) if scores else None, gpus_per_node)


def staying(config: Config, role: Role, states: Mapping[str, float]) -> dict[str, float]:
    """Return what of a model's states is on the GPU while another model or an engine computes there. states: bytes by
    the names that the key `offload` has for them."""
    return {part: size for part, size in states.items() if part not in config.placed(role).offload}


def engine_loads(
    config: Config,
    models: Mapping[Role, Mapping[str, float]],
    engine: float,
    always: Mapping[str, float],
    sampling: Mapping[str, float],
) -> list[Load]:
    """Return the loads of the phases in which the engine is awake: while it takes weights, while each model but the
    actor is saved, and last while it samples. In the first, and in a save, nothing but a model's weights is back that
    may leave (TrainedModels.stage_actor_for_sync, Saver.save); they leave before the KV cache wakes.

    models     the states of each trained model with a rank on the GPU, by the names that the key `offload` has for them
    engine     bytes of the engine's weights
    always     parts -> bytes of what is there in all of them
    sampling   parts -> bytes of what is there beside while it samples
    """

    def beside(present: Role) -> dict[str, float]:
        """Return what is there while this model's weights are."""
        there = {}
        for role, states in models.items():
            kept = staying(config, role, states)
            parts = [part for part in states if part in kept or (role == present and part == "parameters")]
            if parts:
                names = ", ".join(parts).replace("parameters", "weights")
                there[f"{role}: {names}"] = sum(states[part] for part in parts)
        return {**there, "engine: weights": engine, **always}

    remedy = "give the layouts more tp, pp or ep, or offload gradients and optimizer"
    phases: dict[Role, str] = {"actor": "while the engine takes weights"}
    if config.checkpoint.may_be_saved:
        phases |= {role: f"while the {role} is saved" for role in models if role != "actor"}
    stay = {
        f"{role}: {part}": size
        for role, states in models.items()
        for part, size in staying(config, role, states).items()
    }
    rollout = {**stay, "engine: weights": engine, "engine: KV cache": config.rollout.kv_cache_gib * GIB}
    return [
        *(Load(phase, beside(role), remedy) for role, phase in phases.items()),
        Load(
            "while the engine samples",
            rollout | always | sampling,
            "lower rollout.kv_cache_gib, or move more by actor.offload",
        ),
    ]


def staging_parts(config: Config, engine_bytes: float, gpus_per_node: int) -> dict[str, float]:
    """Return the bytes of the messages of a refit that sends something, of which each process holds two
    (rollout.refit_bucket_mib). Colocated, a GPU has those of a rank that sends and of one that receives."""
    if not weights_travel(config, gpus_per_node):
        return {}
    given = config.rollout.refit_bucket_mib
    bucket = min(engine_bytes / 64, 256 * 2**20) if given is None else given * 2**20
    return {"refit: buckets": bucket * (4 if config.is_colocated else 2)}


def _states(config: Config, settings: Trained, hf_config: Mapping[str, Any], gpu: int) -> dict[str, int]:
    """Return the bytes of a model's states by the names that the key `offload` has for them, as far as they are
    certain; none where no rank of the model is on the GPU."""
    span = device_spans(config)[NAMES[settings.section]]
    if gpu not in span:
        return {}
    memory, extra = _memory(config, settings, hf_config, gpu - span.start), settings.megatron_overrides
    if settings.frozen or extra.optimizer or extra.ddp:  # all of which can make the others smaller
        return {"parameters": memory.weights}
    return {"parameters": memory.weights, "gradients": memory.gradients, "optimizer": memory.optimizer}


def reward_model_parts(config: Config, hf_config: Mapping[str, Any], gpu: int) -> dict[str, float]:
    """Return the bytes of the reward model, none if its parameters are offloaded: it is away while it does not
    score."""
    settings, span = config.reward_model, device_spans(config)[NAMES["reward_model"]]
    if gpu not in span or settings.offload:
        return {}
    if settings.engine == "megatron":
        return {"reward model: weights": _memory(config, settings, hf_config, gpu - span.start).weights}
    weights = huggingface_holder(hf_config, config.model.dtype).shard.num_bytes / settings.layout.tp
    return {"reward model: weights": weights, "reward model: KV cache": settings.kv_cache_gib * GIB}


def _engine_weights(config: Config, hf_config: Mapping[str, Any], gpu: int) -> int:
    """Return the bytes of the engine's weights, 0 for one that quantises: it is not known here how."""
    rollout = config.rollout
    if rollout.vllm_overrides.get("quantization") is not None:
        return 0
    rank = (gpu - device_spans(config)[ENGINE].start) % rollout.tp
    return engine_holder(config, hf_config, rank).shard.num_bytes


def _memory(config: Config, settings: Placed, hf_config: Mapping[str, Any], rank: int) -> RankMemory:
    """Return the memory of a rank between two steps, when there are no activations."""
    num_bytes = item_bytes(config)
    return rank_memory(hf_config, settings.layout, rank, num_bytes, 0, 0, 1, lora=settings.adapters)
