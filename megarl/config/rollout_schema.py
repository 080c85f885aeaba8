"""The schema of section `rollout`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.algorithms.transition import TransitionKind, noised_steps, sde_window
from megarl.config.fields import Section, Text
from megarl.core.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Temperature

MAX_DRAFT_TOKENS = 128
"""Maximum number of draft tokens that vLLM verifies at once (MAX_SPEC_LEN in v1/sample/rejection_sampler.py)."""


class DenoisingSettings(Section):
    height: PositiveInt
    width: PositiveInt
    num_steps: Annotated[int, Field(ge=2)]
    shift: PositiveFloat | None
    guidance: PositiveFloat
    kind: TransitionKind
    noise_level: PositiveFloat
    logprob: Literal["mean", "sum"]
    sde_steps: PositiveInt | None
    sde_within: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)] | None
    max_batch: PositiveInt
    offload: bool

    @property
    def within(self) -> range:
        """The denoising steps that `sde_steps` are drawn from. The last step is not trained: its small noise amplifies
        rounding errors in the log-prob."""
        if self.sde_within is not None:
            return range(*self.sde_within)
        return range(self.num_steps - 1 if self.sde_steps is None else max(1, self.num_steps // 2))

    @property
    def noised_within(self) -> range:
        """The denoising steps from which an objective that adds noise draws `sde_steps` noise levels."""
        return range(self.num_steps) if self.sde_within is None else self.within

    def noised_steps(self, seed: int, sample_id: str) -> list[int]:
        """Return the denoising steps whose noise levels an objective that adds noise uses to train on an image."""
        return noised_steps(self.num_trained, self.noised_within, seed, sample_id)

    def sde_window(self, seed: int, step: int) -> range:
        """Return the denoising steps that training step `step` samples with the SDE and trains on."""
        return sde_window(self.num_trained, self.within, seed, step)

    @property
    def num_trained(self) -> int:
        """The number of trained denoising steps per image."""
        return len(self.within) if self.sde_steps is None else self.sde_steps


class Speculative(Section):
    method: Literal["ngram", "draft_model", "eagle3", "mtp"] | None
    tokens: Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
    path: Text | None


class Rollout(Section):
    engine: Literal["vllm", "diffusers"]
    replicas: PositiveInt
    tp: PositiveInt
    max_staleness: NonNegativeInt
    on_stale: Literal["wait", "drop"]
    kv_cache_on_update: Literal["keep", "recompute"]
    prefix_share: Annotated[float, Field(ge=0, le=1)]
    longest_first: bool
    temperature: Annotated[Temperature, Field(gt=0)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    top_k: PositiveInt | None
    max_new_tokens: PositiveInt
    stop: list[Text]
    context_length: PositiveInt
    kv_cache_gib: PositiveFloat
    sleep: bool
    transport: Literal["auto", "shared_memory", "p2p"]
    refit_bucket_mib: PositiveInt | None
    refit_timeout_s: PositiveFloat
    verify_refit: Literal["off", "first", "always"]
    quantization: Literal["fp8_block"] | None
    batch_invariant: bool
    speculative: Speculative
    threads: PositiveInt | None
    vllm_overrides: dict[str, Any]
    denoising: DenoisingSettings

    @property
    def has_draft_model(self) -> bool:
        """Whether each engine has a second model that drafts tokens, including EAGLE-3 drafts."""
        return self.speculative.method in ("draft_model", "eagle3")

    @property
    def drafts_with_eagle(self) -> bool:
        """Whether engines draft tokens with an EAGLE-3 draft."""
        return self.speculative.method == "eagle3"

    @property
    def drafts_with_mtp(self) -> bool:
        """Whether engines draft tokens with the policy's MTP layer."""
        return self.speculative.method == "mtp"

    @property
    def has_whole_experts(self) -> bool:
        """Whether each engine rank holds whole experts rather than a slice of every expert."""
        return bool(self.vllm_overrides.get("enable_expert_parallel"))
