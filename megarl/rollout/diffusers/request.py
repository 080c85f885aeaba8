"""Requests for images."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.algorithms.transition import TransitionKind, sigma_schedule
from megarl.core.errors import UserError
from megarl.core.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoising:
    """The denoising settings, shared by all samples of a training step. Raise a UserError if a step in `sde_steps`
    cannot be trained.

    Attributes:
        height, width: size of the image in pixels.
        num_steps: N, the number of denoising steps.
        shift: see `sigma_schedule`.
        guidance: w, see `transition.guided`. 1 disables guidance.
        kind, noise_level: the transition of the SDE steps, see megarl.algorithms.transition.
        sde_steps: the denoising steps that the SDE samples and that are trained; all others follow the ODE.
    """

    height: int
    width: int
    num_steps: int
    shift: float
    guidance: float = 1.0
    kind: TransitionKind = "flow"
    noise_level: float = 0.7
    sde_steps: range = field(default=range(0))

    def __post_init__(self) -> None:
        steps, last = self.sde_steps, self.num_steps - 1
        if steps and (steps.step != 1 or steps.start < 0 or steps.stop > last):
            raise UserError(
                f"sde_steps={list(steps)}: with {self.num_steps} denoising steps, expected consecutive steps "
                f"from 0 to {last - 1}. The last step, {last}, cannot be trained: its small noise amplifies rounding "
                f"errors. Fix: choose steps below {last}"
            )
        if steps and self.noise_level <= 0:
            raise UserError(
                f"noise_level={self.noise_level}: without noise, a step has no log-prob. Fix: use a positive "
                "level, such as 0.7"
            )

    @property
    def sigmas(self) -> list[float]:
        """The noise levels, N + 1 values from 1 to 0."""
        return sigma_schedule(self.num_steps, self.shift)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """A request for one image. Equal ids, seeds, weights and prompts give equal noise, regardless of the batch.

    Attributes:
        prompt: its text is the caption.
        returns_final: whether the sample contains its latents at σ = 0.
        returns_image: whether the sample contains the decoded image.
    """

    sample_id: str
    prompt: Prompt
    seed: int
    denoising: Denoising
    returns_final: bool = False
    returns_image: bool = False
