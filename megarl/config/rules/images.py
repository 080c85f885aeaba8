"""Rules for the algorithms of image models. They also reject options of these algorithms for language models."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from megarl.algorithms.kl import KL_ESTIMATORS, STEP_KLS
from megarl.algorithms.registry import OBJECTIVES
from megarl.algorithms.specs import ObjectiveSpec, PolicyObjective
from megarl.config.document import show
from megarl.config.schema import Config

IMAGES = "rollout.engine=diffusers"


def objective_supports_actions(config: Config) -> Iterator[str]:
    spec, name = config.algorithm.objective.spec, config.algorithm.objective.name
    action = "steps" if config.samples_images else "tokens"
    if action in spec.actions:
        return
    known = [other for other, entry in OBJECTIVES.items() if "steps" in entry.actions]
    supported = f"set algorithm.objective.name to {' or '.join(known)}"
    if config.samples_images:
        yield f"algorithm.objective.name={name}: {_why_not_steps(spec)}, but {IMAGES}. Fix: {supported}"
    else:
        yield (
            f"algorithm.objective.name={name}: trains on denoising steps, but rollout.engine={config.rollout.engine} "
            f"samples tokens. Fix: set {IMAGES}, or set algorithm.objective.name=clip"
        )


def _why_not_steps(spec: ObjectiveSpec) -> str:
    if not isinstance(spec, PolicyObjective):
        return "trains on text"
    if "samples" in spec.inputs:
        return "needs a sequence-level ratio, which denoising steps do not have"
    return "selects tokens" if spec.selects_tokens else "needs token probabilities"


def divergence_requires_trainer_velocities(config: Config) -> Iterator[str]:
    spec, old = config.algorithm.objective.spec, config.algorithm.correction.old
    if isinstance(spec, PolicyObjective) and "divergence" in spec.inputs and old == "rollout":
        yield (
            f"algorithm.correction.old={old}: algorithm.objective.name={config.algorithm.objective.name} needs the old "
            "policy's velocities, which the engines do not return. Fix: set algorithm.correction.old=trainer"
        )


def images_have_a_baseline(config: Config) -> Iterator[str]:
    advantage = config.algorithm.advantage
    reasons = {
        "values": "denoising steps have no critic",
        "greedy": "images have no greedy sample",
    }
    if config.samples_images and (reason := reasons.get(advantage.spec.comparison)) is not None:
        yield (
            f"algorithm.advantage.estimator={advantage.estimator}: {reason}, but {IMAGES}. Fix: set "
            "algorithm.advantage.estimator=grpo"
        )


def kl_estimator_supports_actions(config: Config) -> Iterator[str]:
    estimator, objective = config.algorithm.kl.estimator, config.algorithm.objective
    if config.samples_images and estimator == "gaussian" and objective.spec.adds_noise:
        yield (
            f"algorithm.kl.estimator={estimator}: it is the KL of SDE steps, but algorithm.objective.name="
            f"{objective.name} trains on images with new noise. Fix: set algorithm.kl.estimator=velocity"
        )
    if config.samples_images == (estimator in STEP_KLS):
        return
    if config.samples_images:
        yield (
            f"algorithm.kl.estimator={estimator}: estimates the KL from log-probs, but the KL of denoising steps is "
            "known exactly. Fix: set algorithm.kl.estimator=gaussian or velocity"
        )
    else:
        yield (
            f"algorithm.kl.estimator={estimator}: applies only to denoising steps, but rollout.engine="
            f"{config.rollout.engine} samples tokens. Fix: set algorithm.kl.estimator to "
            f"{' or '.join(KL_ESTIMATORS)}"
        )


NEEDED = {
    "algorithm.kl.placement": (("loss",), "the exact KL of denoising steps can only be part of the loss"),
    "algorithm.objective.entropy_coefficient": (
        (0.0,),
        "the entropy of a denoising step does not depend on the policy",
    ),
    "algorithm.objective.aggregation": (
        (
            "sequence_mean_of_token_means",
            "sequence_mean_of_token_sums",
            "prompt_mean_of_token_means",
            "token_mean",
            "token_sum",
        ),
        "images have no maximum length",
    ),
    "algorithm.correction.weight": ((None, "token"), "denoising steps have no sequence-level ratio"),
    "algorithm.correction.mask": ((None, "token"), "denoising steps have no sequence-level ratio"),
    "algorithm.trust_region.kl_limit": ((None,), "TRPO's divergence is defined for tokens"),
    "actor.optimizer.name": (("adamw",), "Muon is tested only with language models"),
    "logprob_check.mask": (("token",), "each denoising step is masked on its own"),
}
"""Key -> the values that image models support (error messages suggest the first one), and the reason."""


def options_support_images(config: Config) -> Iterator[str]:
    if not config.samples_images:
        return
    for key, (supported, reason) in NEEDED.items():
        if (value := attrgetter(key)(config)) not in supported:
            yield f"{key}={show(value)}: with {IMAGES}, {reason}. Fix: set {key}={show(supported[0])}"


def steps_stay_on_their_ranks(config: Config) -> Iterator[str]:
    if config.samples_images and config.moves_samples(config.actor):
        yield (
            f"batch.epochs={config.batch.epochs}: with actor.layout.dp={config.actor.layout.dp} and several updates "
            "per epoch, later epochs assign denoising steps to ranks that do not hold their old velocities. Fix: "
            "set batch.epochs=1, or set batch.prompts_per_update=batch.prompts_per_step"
        )


RULES = (
    objective_supports_actions,
    divergence_requires_trainer_velocities,
    images_have_a_baseline,
    kl_estimator_supports_actions,
    options_support_images,
    steps_stay_on_their_ranks,
)
