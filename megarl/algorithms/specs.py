"""Classes that describe estimators and objectives. This module does not import torch, because loading a config imports
this module.

The options of an estimator or objective are the keyword arguments of its function. Recipes use the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from megarl.algorithms.baselines import Normalization
from megarl.core.ranges import NonNegativeFloat, PositiveFloat, Share
from megarl.core.score import NO_BASELINE, Baseline, TokenTotals

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.baselines import Member, Turn
    from megarl.algorithms.policy_loss import PolicyLoss

Option = float | int | str | bool | None
Options = Mapping[str, Any]
"""Option name -> value. The entry's `parameters` contain the types."""

Parameters = Mapping[str, tuple[Any, Option]]
"""Option name -> (type, default), as `pydantic.create_model` takes them. The default is the paper's value."""

Deviation = Literal["sample", "population", "none"]
"""Standard deviation to divide by, computed with n − 1 ("sample") or n ("population"); "none" skips the division."""

ClipLow = Annotated[float, Field(gt=0, lt=1)]
"""Below 1, because the ratio's lower bound 1 − clip_low must be positive."""

Credit = Literal["whole", "reward_to_go"]
"""Whether a token's reward is credited to its whole sample, or only to the tokens up to and including it."""

Limit = PositiveFloat | None

LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]


Signature = tuple[Callable[..., object], int, Parameters]
"""A function, the number of its positional arguments, and its keyword arguments."""


def defaults(parameters: Parameters) -> dict[str, Option]:
    """Return the default of each option."""
    return {name: default for name, (_, default) in parameters.items()}


Kind = Literal["sequence", "token"]
"""Kind of classifier: it scores a sample's last token ("sequence") or each of its tokens ("token")."""

BaselineKind = Literal["none", "moving_average", "greedy", "group", "values"]

BASELINE_KINDS: Mapping[BaselineKind, str] = {
    "none": "no baseline",
    "moving_average": "the mean reward of earlier steps as its baseline",
    "greedy": "the reward of a greedy response as its baseline",
    "group": "the group's rewards as its baseline, such as their mean",
    "values": "a critic's values as its baseline",
}
"""Kind of baseline -> its description."""

NO_ADVANTAGE = Baseline(scale=math.inf, token_scale=math.inf)
"""The baseline that makes every advantage 0."""


class TokenAdvantages(NamedTuple):
    """Advantages and, if there is a critic, its target returns, float32 [N]; 0 for untrained tokens."""

    advantage: torch.Tensor
    returns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A registry entry that algorithm.advantage or algorithm.objective can name. `parameters` are the keyword arguments
    of its function, each with its type and default."""

    name: str
    formula: str
    paper: str
    parameters: Parameters = field(default_factory=dict)

    @property
    def all_parameters(self) -> Parameters:
        """All config keys that this entry adds to its section, with types and defaults."""
        return self.parameters

    @property
    def functions(self) -> list[Signature]:
        """The entry's functions and their expected signatures."""
        raise NotImplementedError

    @property
    def arguments(self) -> Options:
        """The keyword arguments of the entry's function, with their default values."""
        return defaults(self.parameters)

    @property
    def options(self) -> Options:
        """All config keys that this entry adds to its section, with their default values."""
        return defaults(self.all_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSpec(Spec):
    """An advantage estimator. In formulas, r_i is the reward of sample i and r_t the reward of token t.

    Args:
        comparison: the kind of baseline that a reward is compared with.
        whitens: the default of `whiten`.
        separates_rewards: whether it reads the `parts` of a Member, not just their sum.
        rules: (options, samples per prompt) -> None, or an error message with key, value, reason and remedy.
    """

    comparison: BaselineKind
    whitens: bool = False
    separates_rewards: bool = False
    rules: tuple[Callable[[Options, int], str | None], ...] = ()

    @property
    def all_parameters(self) -> Parameters:
        return {
            **self.parameters,
            **self.shared_parameters(),
            "whiten": (bool, self.whitens),
            "whiten_over": (Literal["update", "step"], "update"),
            "whiten_std": (Deviation, "sample"),
            "whiten_epsilon": (NonNegativeFloat, 1e-6),
        }

    def shared_parameters(self) -> Parameters:
        """Return the options that all estimators of this kind share."""
        return {}

    @property
    def compares_samples(self) -> bool:
        return self.comparison == "group"

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        """Return a baseline for each sample in a group. `options` maps all options to their values."""
        return [NO_BASELINE] * len(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEstimator(EstimatorSpec):
    """An estimator of one advantage per sample: (reward − center) / scale, shared by all tokens in the sample.
    `compare` maps (group, **arguments) to the Baseline of each member."""

    compare: Callable[..., list[Baseline]]

    @property
    def functions(self) -> list[Signature]:
        return [(self.compare, 1, self.parameters)]

    def shared_parameters(self) -> Parameters:
        decay = {"baseline_decay": (Share, 0.9)} if self.comparison == "moving_average" else {}
        return {"gamma": (Share, 1.0), "credit": (Credit, "whole"), "limit": (Limit, None)} | decay

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        return self.compare(group, **{name: options[name] for name in self.parameters})


def mean_of_tokens(group: Sequence[TokenTotals], **_: Option) -> list[tuple[float, float]]:
    """Return, for each sample, the mean of all token rewards in the group and a scale of 1."""
    count = sum(totals.count for totals in group)
    return [(math.fsum(totals.total for totals in group) / max(count, 1), 1.0)] * len(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEstimator(SampleEstimator):
    """An estimator that compares the samples of one prompt. With credit=reward_to_go, it also compares their token
    rewards, separately from the sample rewards.

    Args:
        compare_tokens: (TokenTotals of each sample, **arguments) -> (center, scale) of each sample's token rewards.
        amplify: (groups in an update) -> factor that multiplies all advantages in the update.
        step_scale: (groups in a step, **arguments) -> the common scale of all samples in the step, for std_over=step.
        step_moments: (groups in a step, **arguments) -> mean and scale for normalizing the advantages in the step. None
            skips the normalization. The scales of `compare` must be 1.
        compare_turns: (turns of each rollout, **arguments) -> advantage of each turn, added to that of each of the
            turn's tokens.
    """

    comparison: BaselineKind = "group"
    compare_tokens: Callable[..., list[tuple[float, float]]] = mean_of_tokens
    amplify: Callable[[Sequence[Sequence[Member]]], float] | None = None
    step_scale: Callable[..., float] | None = None
    step_moments: Callable[..., tuple[float, float] | None] | None = None
    compare_turns: Callable[..., list[list[float]]] | None = None

    @property
    def functions(self) -> list[Signature]:
        functions = (self.compare, self.compare_tokens, self.step_scale, self.step_moments, self.compare_turns)
        return [(function, 1, self.parameters) for function in functions if function is not None]

    def shared_parameters(self) -> Parameters:
        over = {} if self.step_scale is None else {"std_over": (Literal["group", "step"], "group")}
        shared = SampleEstimator.shared_parameters(self)
        return {**over, **shared, "group_of_one": (Literal["zero", "reward"], "zero")}

    def normalization(self, groups: Sequence[Sequence[Member]], options: Options) -> Normalization | None:
        """Return the normalization over a step, given its groups; None if each group is normalized separately."""
        arguments = {name: options[name] for name in self.parameters}
        if self.step_moments is not None:
            moments = self.step_moments(groups, **arguments)
            return None if moments is None else Normalization(*moments)
        if self.step_scale is None or options["std_over"] == "group":
            return None
        return Normalization(0.0, self.step_scale(groups, **arguments))

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        """Return a baseline for each member. If only one member is left because the other rewards failed, its advantage
        is 0, or its reward with group_of_one=reward."""
        if len(group) == 1:
            return [NO_BASELINE if options["group_of_one"] == "reward" else NO_ADVANTAGE]
        arguments = {name: options[name] for name in self.parameters}
        baselines = self.compare(group, **arguments)
        if options["credit"] == "whole":
            return baselines
        compared = self.compare_tokens([member.token_reward_totals for member in group], **arguments)
        return [
            replace(baseline, token_center=center, token_scale=scale)
            for baseline, (center, scale) in zip(baselines, compared, strict=True)
        ]

    def turn_advantages(self, group: Sequence[Sequence[Turn]], options: Options) -> list[list[float]]:
        """Return the advantage of each turn, given the turns of each rollout in a group. It is 0 in a group of one
        rollout. Without `compare_turns`, return an empty list for each rollout."""
        if self.compare_turns is None:
            return [[] for _ in group]
        if len(group) == 1:
            return [[0.0] * len(turns) for turns in group]
        return self.compare_turns(group, **{name: options[name] for name in self.parameters})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimator(EstimatorSpec):
    """An estimator of one advantage per token. The sample's reward is assigned to its last trained token. `estimate`
    maps (reward [N], mask [N], row_sample [N], **arguments) to TokenAdvantages; with comparison="values" it also takes
    value [N], by keyword."""

    estimate: Callable[..., TokenAdvantages]

    @property
    def functions(self) -> list[Signature]:
        return [(self.estimate, 4 if self.comparison == "values" else 3, self.parameters)]


Rows = Literal["prompts", "messages", "preferences", "labels"]

Action = Literal["tokens", "steps"]
"""The action that a row of a batch represents: a sampled token or a denoising step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec(Spec):
    """An objective that the actor minimizes.

    Args:
        rows: the values of data.format that the objective supports; "prompts" stands for sampled responses.
        reads_reference: whether its loss compares the actor's log-probs with the reference's.
        classifier: the kind of classifier that the actor must be; None for a language model.
        rules: (options) -> None, or an error message with key, value, reason and remedy.
    """

    loss: Callable[..., object]
    rows: tuple[Rows, ...] = ("prompts",)
    reads_reference: bool = False
    classifier: Kind | None = None
    rules: tuple[Callable[[Options], str | None], ...] = ()

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions that the objective can train on."""
        return ("tokens",)

    @property
    def is_policy_objective(self) -> bool:
        """Whether the objective learns from advantages of sampled tokens or denoising steps."""
        return isinstance(self, PolicyObjective | VelocityObjective)

    @property
    def adds_noise(self) -> bool:
        """Whether the objective learns from sampled images after the trainer adds new noise to them."""
        return isinstance(self, VelocityObjective)

    @property
    def is_pairwise(self) -> bool:
        """Whether the objective learns from pairs of a better and a worse response to the same prompt."""
        return isinstance(self, PairObjective)

    @property
    def selects_tokens(self) -> bool:
        """Whether the objective treats selected tokens in an update differently."""
        return isinstance(self, PolicyObjective) and self.selection is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The tokens in an update that an objective treats differently: the fraction with the highest selection keys.

    Args:
        order: (covariance [N], draw [N], **arguments) -> selection key, float32 [N]. `draw` is uniform in [0, 1).
        parameters: the keyword arguments of `order`.
        share: the default fraction of tokens to select.
    """

    order: Callable[..., torch.Tensor]
    parameters: Parameters = field(default_factory=dict)
    share: float

    @property
    def arguments(self) -> Options:
        """The keyword arguments of `order`, with their default values."""
        return defaults(self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(ObjectiveSpec):
    """An objective that learns from advantages and log-probs of sampled tokens or denoising steps.

    Args:
        loss: (log_prob [N], old [N], advantage [N], *inputs, **arguments) -> PolicyLoss.
        inputs: additional arguments of `loss`. For tokens: the SampleSegments of the rows, or the mask of selected
            tokens. For denoising steps: the standard deviation of the step, or the exact KL to the old policy.
        selection: how the selected tokens are chosen.
        step_parameters: options that adapt arguments of `loss` between steps.
        discrete: whether `loss` is only correct for the log-probs of discrete actions.
    """

    loss: Callable[..., PolicyLoss]
    inputs: tuple[Literal["samples", "selected", "std", "divergence"], ...] = ()
    selection: Selection | None = None
    step_parameters: Parameters = field(default_factory=dict)
    discrete: bool = False

    @property
    def actions(self) -> tuple[Action, ...]:
        """Denoising steps have no sequence-level log-probs, and tokens have no exact KL."""
        if self.discrete or "samples" in self.inputs or self.selects_tokens:
            return ("tokens",)
        return ("steps",) if {"std", "divergence"} & {*self.inputs} else ("tokens", "steps")

    @property
    def functions(self) -> list[Signature]:
        selection = [] if self.selection is None else [(self.selection.order, 2, self.selection.parameters)]
        return [(self.loss, 3 + len(self.inputs), self.parameters), *selection]

    @property
    def all_parameters(self) -> Parameters:
        if self.selection is None:
            return {**self.parameters, **self.step_parameters}
        share = (Annotated[float, Field(gt=0, le=1)], self.selection.share)
        return {**self.parameters, **self.selection.parameters, "covariance_share": share}


@dataclass(frozen=True, slots=True, kw_only=True)
class VelocityObjective(ObjectiveSpec):
    """An objective of image models that learns from advantages, without log-probs. `loss` maps the policy's and the old
    policy's velocities, sampled latents x0, latents x and their σ (v, old_v, x0, x [N, …], sigma [N]) and the advantage
    [N] to the loss per step [N]."""

    loss: Callable[..., torch.Tensor]

    @property
    def actions(self) -> tuple[Action, ...]:
        return ("steps",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 6, self.parameters)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective(ObjectiveSpec):
    """An objective that learns from the difference between the model's rewards for a better and a worse response.

    The model's reward is a classifier's score, log π, or with reads_reference β·(log π − log π_ref).

    Args:
        loss: (margin [P], *inputs, **arguments) -> float32 [P].
        inputs: additional arguments of `loss`: the rewards of the better responses, float32 [P].
    """

    loss: Callable[..., torch.Tensor]
    inputs: tuple[Literal["better"], ...] = ()
    rows: tuple[Rows, ...] = ("preferences",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 1 + len(self.inputs), self.parameters)]

    @property
    def all_parameters(self) -> Parameters:
        """The objective's own options and those for rewards computed from log-probs."""
        scale = {"beta": (PositiveFloat, 0.1)} if self.reads_reference else {}
        implicit = {} if self.classifier is not None else {**scale, "length_normalised": (bool, False)}
        return {**implicit, **self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationObjective(ObjectiveSpec):
    """An objective that imitates the responses in the data. `loss` maps (log_prob [N], **arguments) to float32 [N]."""

    loss: Callable[..., torch.Tensor]
    rows: tuple[Rows, ...] = ("messages",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 1, self.parameters)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelObjective(ObjectiveSpec):
    """An objective that learns labels of the steps in responses. The actor is a token classifier. `loss` maps (score
    [N], label [N], **arguments) to float32 [N]. `labeled` selects the tokens that get a step's label: its last token
    ("end") or all of its tokens ("all")."""

    loss: Callable[..., torch.Tensor]
    rows: tuple[Rows, ...] = ("labels",)
    classifier: Kind | None = "token"
    labeled: Literal["end", "all"]

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 2, self.parameters)]
