"""Requests for images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megarl.algorithms.transition import TransitionKind
from megarl.core.prompt import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """The denoising settings, shared by all samples of a training step.

    Attributes:
        height, width: size of the image in pixels.
        num_steps: N, the number of denoising steps.
        shift: see `sigma_schedule`; None means the model's own.
        guidance: w, see `transition.guided`. 1 disables guidance.
        kind, noise_level: the transition of the SDE steps, see megarl.algorithms.transition.
        reduction: how a step's log-prob combines the elements of the latents.
        sde_steps: the denoising steps that are sampled with the SDE and trained on; all others follow the ODE.
    """

    height: int
    width: int
    num_steps: int
    shift: float | None
    guidance: float = 1.0
    kind: TransitionKind = "flow"
    noise_level: float = 0.7
    reduction: Literal["mean", "sum"] = "mean"
    sde_steps: range = field(default=range(0))

    def __post_init__(self) -> None:
        steps = self.sde_steps
        assert not steps or (0 <= steps.start < steps.stop < self.num_steps and steps.step == 1), (
            f"{steps}: the last step is not trained, because its small noise amplifies rounding errors"
        )
        assert not steps or self.noise_level > 0, "without noise, a step has no log-prob"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """A request for one image. Requests with equal ids and seeds draw equal noise, regardless of the batch.

    Attributes:
        prompt: its text is the caption.
        noised_steps: the denoising steps at whose noise levels the trainer adds new noise to the sampled image. They
            require returns_final and exclude SDE steps.
        returns_final: whether the sample contains its latents at σ = 0.
        returns_image: whether the sample contains the decoded image.
    """

    sample_id: str
    prompt: Prompt
    seed: int
    denoising: Denoising
    noised_steps: Sequence[int] = ()
    returns_final: bool = False
    returns_image: bool = False

    def __post_init__(self) -> None:
        assert not self.noised_steps or (self.returns_final and not self.denoising.sde_steps), (
            f"{self.sample_id}: noised steps require the final latents and exclude SDE steps"
        )

    @property
    def trained_steps(self) -> Sequence[int]:
        return self.noised_steps or self.denoising.sde_steps
