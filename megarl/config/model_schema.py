"""The schema of the model sections: paths, parallel layouts and training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from megarl.config.fields import Section, Text
from megarl.core.ranges import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from megarl.core.row_batch import TEACHER

Role = Literal["actor", "critic", "implicit_reward"]
"""Roles of trained models."""


MegatronRole = Literal[Role, "reward_model", "teachers"]
"""Roles of models that run in Megatron, each on its own ranks. Each teacher has its own ranks on the same devices."""


SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short dtype names -> full names."""


def _long_dtype(value: Any) -> Any:
    return SHORT_DTYPES.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[Literal["float32", "bfloat16", "float16"], BeforeValidator(_long_dtype)]


class Model(Section):
    path: Text
    revision: Text | None
    dtype: Dtype
    head_dtype: Literal["float32", "model"]
    vision: bool

    @property
    def logits_dtype(self) -> str:
        """The dtype of a language model's logits before temperature."""
        return self.dtype if self.head_dtype == "model" else "float32"


class Layout(Section):
    tp: PositiveInt
    pp: PositiveInt
    vpp: PositiveInt
    cp: PositiveInt
    ep: PositiveInt
    etp: PositiveInt | None
    dp: PositiveInt
    sequence_parallel: bool
    first_stage_layers: PositiveInt | None
    last_stage_layers: PositiveInt | None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def uneven_stages(self) -> dict[str, int | None]:
        """Keys that set the number of layers in the first or last pipeline stage -> their values."""
        return {"first_stage_layers": self.first_stage_layers, "last_stage_layers": self.last_stage_layers}

    @property
    def expert_tp(self) -> int:
        """The experts' tensor parallel size."""
        return self.tp if self.etp is None else self.etp


class OwnLayout(Layout):
    """The layout of a single teacher. Its defaults are here because base.yaml cannot hold defaults for list items."""

    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    cp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt | None = None
    dp: PositiveInt = 1
    sequence_parallel: bool = False
    first_stage_layers: PositiveInt | None = None
    last_stage_layers: PositiveInt | None = None


class Schedule(Section):
    name: Literal["constant", "linear", "cosine", "wsd"]
    warmup: NonNegativeFloat
    decay: PositiveFloat | None
    min_lr: NonNegativeFloat


class Optimizer(Section):
    name: Literal["adamw", "muon"]
    lr: PositiveFloat
    schedule: Schedule
    beta1: Annotated[float, Field(ge=0, lt=1)]
    beta2: Annotated[float, Field(ge=0, lt=1)]
    eps: PositiveFloat
    momentum: Annotated[float, Field(ge=0, lt=1)]
    weight_decay: NonNegativeFloat
    no_weight_decay: list[Text]
    clip_grad_norm: NonNegativeFloat
    nonfinite_limit: PositiveInt


ROUTERS = "*.gate.weight"
"""Pattern that matches the Hugging Face names of router weights in every mixture-of-experts family."""


class MegatronOverrides(Section):
    model: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]


class Lora(Section):
    """Low-rank adapters for a frozen model's linear layers."""

    rank: PositiveInt | None
    alpha: PositiveFloat
    targets: Literal["all_linear"]
    share_experts: bool
    path: Text | None
    export: Literal["merged", "adapters"]

    @property
    def scale(self) -> float:
        """The factor applied to the product of an adapter's two matrices."""
        assert self.rank is not None, "a model without adapters has no scale"
        return self.alpha / self.rank


class Trained(Section):
    """A model that is trained on its own ranks."""

    section: ClassVar[Role]
    """The name of the model's config section."""

    layout: Layout
    optimizer: Optimizer
    tokens_per_microbatch: PositiveInt
    overlap_communication: bool
    recompute: Literal["none", "selective", "full"]
    fp8: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None
    frozen: list[Text]
    offload: list[Literal["parameters", "gradients", "optimizer"]]
    threads: PositiveInt | None
    megatron_overrides: MegatronOverrides

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained instead of the model's weights; None if there are none."""
        return None

    @property
    def frozen_patterns(self) -> list[str]:
        """Name patterns for all tensors that are not trained."""
        return self.frozen


class Experts(Section):
    replay_routes: bool
    router: Literal["free", "frozen"]


class Mtp(Section):
    loss_coefficient: NonNegativeFloat | None

    @property
    def is_trained(self) -> bool:
        return bool(self.loss_coefficient)


class Actor(Trained):
    section = "actor"

    lora: Lora
    experts: Experts
    mtp: Mtp

    @property
    def has_mtp(self) -> bool:
        """Whether the model keeps its MTP layer."""
        return self.mtp.loss_coefficient is not None

    @property
    def adapters(self) -> Lora | None:
        return None if self.lora.rank is None else self.lora

    @property
    def frozen_patterns(self) -> list[str]:
        return [*self.frozen, *([ROUTERS] if self.experts.router == "frozen" else [])]


class Critic(Trained):
    section = "critic"

    shared_backbone: bool
    path: Text | None
    warmup_steps: NonNegativeInt


class ImplicitReward(Trained):
    section = "implicit_reward"

    path: Text | None
    coefficient: NonNegativeFloat
    beta: PositiveFloat
    success_above: FiniteFloat


class Judge(Section):
    template: Text | None
    scale: Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
    max_new_tokens: PositiveInt


class Untrained(Section):
    """Models that only run forward passes. Settings that only trained models can configure are constants here."""

    overlap_communication: ClassVar[bool] = False
    recompute: ClassVar[Literal["none"]] = "none"
    fp8: ClassVar[None] = None
    adapters: ClassVar[None] = None
    megatron_overrides: ClassVar[MegatronOverrides] = MegatronOverrides(model={}, optimizer={}, ddp={})


class RewardModel(Untrained):
    section: ClassVar[MegatronRole] = "reward_model"

    engine: Literal["megatron", "vllm"]
    path: Text | None
    input_format: Literal["ids", "text", "chat", "question"]
    judge: Judge
    context_length: PositiveInt | None
    weight: FiniteFloat
    step_end: Text | None
    aggregation: Literal["mean", "sum", "min", "last"] | None
    layout: Layout
    tokens_per_microbatch: PositiveInt
    offload: list[Literal["parameters"]]
    threads: PositiveInt | None
    kv_cache_gib: PositiveFloat
    vllm_overrides: dict[str, Any]

    @property
    def judges(self) -> bool:
        """Whether the model is a language model that rates samples, rather than a classifier."""
        return self.input_format == "question"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def teacher_key(name: str) -> str:
    """Return the name of a teacher's path in errors and manifests."""
    return f"teachers.models: {name}: path"


class Teacher(Section):
    """A model whose next-token distribution the actor learns to match. Without a path, it is the policy or the
    reference (`weights`), given the prompts in `prompt_column` or the `feedback` on each sample."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    engine: Literal["megatron", "vllm"] = "megatron"
    path: Text | None = None
    revision: Text | None = None
    prompt_column: Text | None = None
    feedback: Annotated[list[Text], Field(min_length=1), BeforeValidator(_as_list)] | None = None
    weights: Literal["policy", "reference"] = "policy"
    weight: PositiveFloat = 1.0
    sources: list[Text] | None = None
    layout: OwnLayout | None = None

    def applies_to(self, source: Any) -> bool:
        """Return whether the actor learns from the teacher on rows from this source."""
        return self.sources is None or source in self.sources

    @property
    def path_key(self) -> str:
        return teacher_key(self.name)

    @property
    def scores(self) -> str:
        """The name of its log-probs among a sample's scores."""
        return f"{TEACHER}{self.name}"


class Teachers(Untrained):
    """All teachers. Those with a path take turns on the same devices. Each uses its own layout or, by default,
    `layout`."""

    section: ClassVar[MegatronRole] = "teachers"

    models: list[Teacher]
    layout: Layout
    tokens_per_microbatch: PositiveInt
    offload: list[Literal["parameters"]]
    threads: PositiveInt | None
    kv_cache_gib: PositiveFloat
    vllm_overrides: dict[str, Any]

    @property
    def engine(self) -> Literal["megatron", "vllm"]:
        """The engine of the section's single teacher; see `only`."""
        [teacher] = self.models
        return teacher.engine

    def layout_of(self, teacher: Teacher) -> Layout:
        return teacher.layout or self.layout

    def only(self, teacher: Teacher) -> Teachers:
        """Return the section with only this teacher, and with the teacher's layout."""
        return self.model_copy(update={"models": [teacher], "layout": self.layout_of(teacher)})

    def for_ranks_of(self, teacher: Teacher) -> Teachers:
        """Return the section with this teacher's layout as `layout`. The layouts of all teachers remain the same."""
        models = [model.model_copy(update={"layout": self.layout_of(model)}) for model in self.models]
        return self.model_copy(update={"models": models, "layout": self.layout_of(teacher)})

    def in_folders(self, folders: Mapping[str, Path]) -> Teachers:
        """Return the section with each teacher's path replaced by its local folder."""
        models = [
            teacher
            if teacher.path is None
            else teacher.model_copy(update={"path": str(folders[teacher.name]), "revision": None})
            for teacher in self.models
        ]
        return self.model_copy(update={"models": models})


Placed = Trained | RewardModel | Teachers
"""A section for models with their own ranks, in Megatron or, for a reward model, in vLLM."""


def layout_key(placed: Placed) -> str:
    """Return the key of the layout for errors, where it follows `entry_prefix`."""
    return "layout" if _own_layout_of(placed) else f"{placed.section}.layout"


def entry_prefix(placed: Placed) -> str:
    """Return the prefix of errors about a teacher with its own layout; empty for all other models."""
    return f"teachers.models: {name}: " if (name := _own_layout_of(placed)) else ""


def _own_layout_of(placed: Placed) -> str | None:
    """Return the teacher's name if the section is the result of `Teachers.only` for a teacher with its own layout."""
    if not isinstance(placed, Teachers) or len(placed.models) != 1 or placed.models[0].layout is None:
        return None
    return placed.models[0].name
