"""Possible causes of log-prob differences between trainer and engines, ranked by evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Verdict(IntEnum):
    """Verdicts on a cause, in increasing order of likelihood."""

    EXCLUDED = 0
    UNKNOWN = 1
    LEFT_OVER = 2
    FOUND = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """A possible cause, and a description of the evidence for or against it."""

    name: str
    verdict: Verdict
    evidence: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Results of the checks on one engine, which has responded to each canary prompt twice: greedily, where temperature
    and truncation have no effect, and with the run's sampling settings. Differences are absolute differences between
    the trainer's and the engine's log-prob of a token, in nats.

    Attributes:
        limit: largest mean difference that rounding can explain.
        greedy: mean difference in the greedy responses.
        sampled: mean difference in the sampled responses.
        rescored: mean difference in the sampled responses under alternative scorings by the trainer, by description.
        differing: one line for each weight region that differs from the trainer's; None: not comparable.
        num_regions: number of compared weight regions.
        head_dtypes: dtype of the head's logits in the trainer, and in the engine.
        other_tokens: prompts that the engine's tokenizer tokenizes differently, out of num_texts compared prompts.
        other_routes: mean difference if the trainer computes expert routes itself; None: routes are not replayed.
        has_experts: whether the model has experts.
        kernels: descriptions of the kernels in the trainer, and in the engine.
        overrides: names of the engine arguments in rollout.vllm_overrides.
    """

    limit: float
    greedy: float
    sampled: float
    rescored: Mapping[str, float] = field(default_factory=dict)
    differing: Sequence[str] | None = None
    num_regions: int = 0
    head_dtypes: tuple[str, str] = ("float32", "float32")
    other_tokens: Sequence[str] = ()
    num_texts: int = 0
    other_routes: float | None = None
    has_experts: bool = False
    kernels: tuple[str, str] = ("", "")
    overrides: Sequence[str] = ()

    @property
    def agrees(self) -> bool:
        return max(self.greedy, self.sampled) <= self.limit


def ranked(evidence: Evidence) -> list[Cause]:
    """Return all causes, sorted with the most likely first. Trainer and engine always use different kernels. Therefore,
    kernels count as the cause only if the forward passes differ and no other cause is found."""
    causes = [_weights(evidence), _sampling(evidence), _tokens(evidence), _head(evidence)]
    if evidence.has_experts:
        causes.append(_experts(evidence))
    is_explained = any(cause.verdict is Verdict.FOUND for cause in causes)
    if evidence.overrides and evidence.greedy > evidence.limit:
        causes.append(_overrides(evidence, is_explained))
    causes.append(_kernels(evidence, is_explained))
    return sorted(causes, key=lambda cause: -cause.verdict)


def describe(causes: Sequence[Cause]) -> str:
    """Return one line for each cause that is not excluded, and one line for all excluded causes."""
    left = [cause for cause in causes if cause.verdict is not Verdict.EXCLUDED]
    lines = [f"  {number}. {cause.name}: {cause.evidence}" for number, cause in enumerate(left, start=1)]
    excluded = [f"{cause.name} ({cause.evidence})" for cause in causes if cause.verdict is Verdict.EXCLUDED]
    return "\n".join([*lines, *([f"  excluded: {'; '.join(excluded)}"] if excluded else [])])


def _weights(evidence: Evidence) -> Cause:
    name = "weights"
    if evidence.differing is None:
        reason = "not compared, because this engine changes the weights that it receives"
        return Cause(name, Verdict.UNKNOWN, reason)
    if not evidence.differing:
        return Cause(name, Verdict.EXCLUDED, f"the checksums of all {evidence.num_regions} regions match the trainer's")
    count = len(evidence.differing)
    return Cause(
        name,
        Verdict.FOUND,
        f"the checksums of {count} out of {evidence.num_regions} regions differ from the trainer's, for example "
        f"{evidence.differing[0]}. Fix: set rollout.verify_refit=always, and try a different rollout.transport",
    )


def _sampling(evidence: Evidence) -> Cause:
    name = "temperature or truncation"
    if evidence.sampled <= evidence.limit:
        return Cause(name, Verdict.EXCLUDED, f"tokens sampled with the run's settings differ by {evidence.sampled:.1e}")
    nearest = min(evidence.rescored, key=lambda scoring: evidence.rescored[scoring], default=None)
    if nearest is not None and evidence.rescored[nearest] <= evidence.limit:
        return Cause(
            name,
            Verdict.FOUND,
            f"the engine's log-probs match the trainer's {nearest} (difference {evidence.rescored[nearest]:.1e} "
            f"instead of {evidence.sampled:.1e}). Fix: check rollout.temperature, top_k, top_p and vllm_overrides",
        )
    if evidence.greedy <= evidence.limit:
        return Cause(
            name,
            Verdict.FOUND,
            f"greedy tokens, which neither affects, differ by only {evidence.greedy:.1e}, but sampled tokens differ by "
            f"{evidence.sampled:.1e}. Fix: check rollout.temperature, top_k, top_p and vllm_overrides",
        )
    return Cause(name, Verdict.EXCLUDED, f"greedy tokens, which neither affects, also differ by {evidence.greedy:.1e}")


def _tokens(evidence: Evidence) -> Cause:
    name = "chat template or tokenization"
    if not evidence.other_tokens:
        reason = f"engines receive token ids, and both tokenizers agree on {evidence.num_texts} prompts"
        return Cause(name, Verdict.EXCLUDED, reason)
    return Cause(
        name,
        Verdict.FOUND,
        f"the engine tokenizes {len(evidence.other_tokens)} of {evidence.num_texts} prompts differently, for example "
        f"{evidence.other_tokens[0]!r}. Fix: use the same tokenizer files and version of transformers",
    )


def _head(evidence: Evidence) -> Cause:
    trainer, engine = evidence.head_dtypes
    name = "dtype of the head's logits"
    if trainer == engine:
        return Cause(name, Verdict.EXCLUDED, f"both use {trainer}")
    reason = f"the trainer uses {trainer}, but the engine uses {engine}. Fix: check rollout.vllm_overrides"
    return Cause(name, Verdict.FOUND, reason)


def _experts(evidence: Evidence) -> Cause:
    name = "expert routing"
    if evidence.other_routes is None:
        reason = "not checked. Fix: set actor.experts.replay_routes=true to exclude this cause"
        return Cause(name, Verdict.UNKNOWN, reason)
    return Cause(
        name,
        Verdict.EXCLUDED,
        "both use the engine's routes. With the trainer's own routes, tokens would differ by "
        f"{evidence.other_routes:.1e}",
    )


def _overrides(evidence: Evidence, is_explained: bool) -> Cause:
    named = ", ".join(evidence.overrides)
    reason = f"not checked separately: {named}. Fix: remove them one by one"
    return Cause("rollout.vllm_overrides", Verdict.UNKNOWN if is_explained else Verdict.LEFT_OVER, reason)


def _kernels(evidence: Evidence, is_explained: bool) -> Cause:
    name = "kernels"
    if evidence.greedy <= evidence.limit:
        return Cause(name, Verdict.EXCLUDED, f"greedy tokens differ by {evidence.greedy:.1e}")
    trainer, engine = evidence.kernels
    remedy = "Fix: run megarl diagnose on a run with a completed step, to find the first layer that differs"
    kernels = f"The trainer uses {trainer}, but the engine uses {engine}. {remedy}"
    if is_explained:
        return Cause(name, Verdict.UNKNOWN, f"not checked separately. {kernels}")
    return Cause(
        name,
        Verdict.LEFT_OVER,
        f"{'a' if evidence.overrides else 'the only'} remaining cause, because greedy tokens differ by "
        f"{evidence.greedy:.1e}. {kernels}",
    )
