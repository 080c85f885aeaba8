"""The classes of specs, which describe estimators and objectives. The configuration reads them, so they do not import
torch.

A function's options are its keyword arguments. Recipes use the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from megarl.core.ranges import NonNegativeFloat, PositiveFloat, Share
from megarl.core.types import NO_BASELINE, Baseline, TokenTotals

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.baselines import Member
    from megarl.algorithms.policy_loss import PolicyLoss

Option = float | int | str | bool | None
Options = Mapping[str, Option]
"""Option name -> value."""

Parameters = Mapping[str, tuple[Any, Option]]
"""Option name -> (type, default), as `pydantic.create_model` takes them. The default is the paper's value."""

Deviation = Literal["sample", "population", "none"]
"""A standard deviation that divides by n − 1 or by n, or no division by one."""

ClipLow = Annotated[float, Field(gt=0, lt=1)]
"""Below 1, because the ratio's lower bound 1 − clip_low must be positive."""

Credit = Literal["whole", "reward_to_go"]
"""Whether a token's reward counts for its whole sample, or for the tokens up to it."""

LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]


Signature = tuple[Callable[..., object], int, Parameters]
"""A function with the number of its positional arguments and its keyword arguments."""


def defaults(parameters: Parameters) -> dict[str, Option]:
    """Return the default of each option."""
    return {name: default for name, (_, default) in parameters.items()}


Kind = Literal["sequence", "token"]
"""The kind of a classifier: it scores a sample's last token, or each of its tokens."""

BaselineKind = Literal["none", "moving_average", "greedy", "group", "values"]

BASELINE_KINDS: Mapping[BaselineKind, str] = {
    "none": "no baseline",
    "moving_average": "the mean reward of earlier steps as its baseline",
    "greedy": "the reward of a greedy response as its baseline",
    "group": "the group's rewards as its baseline, such as their mean",
    "values": "a critic's values as its baseline",
}
"""What an estimator compares a reward with."""

NO_ADVANTAGE = Baseline(scale=math.inf, token_scale=math.inf)
"""The baseline with which every advantage is 0."""


class TokenAdvantages(NamedTuple):
    """Advantages and, with a critic, its target returns: float32 [N], 0 for tokens that are not trained on."""

    advantage: torch.Tensor
    returns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An entry of algorithm.advantage or algorithm.objective. parameters: the keyword arguments of its function."""

    name: str
    formula: str
    paper: str
    parameters: Parameters = field(default_factory=dict)

    @property
    def all_parameters(self) -> Parameters:
        """The section's keys that depend on the entry."""
        return self.parameters

    @property
    def functions(self) -> list[Signature]:
        """Its functions with their signatures."""
        raise NotImplementedError

    @property
    def arguments(self) -> Options:
        """The keyword arguments of its function with their defaults."""
        return defaults(self.parameters)

    @property
    def options(self) -> Options:
        """The section's keys that depend on the entry, with their defaults."""
        return defaults(self.all_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorSpec(Spec):
    """An advantage estimator. In formulas, r_i is the reward of sample i and r_t that of token t.

    Args:
        comparison: what it compares a reward with.
        whitens: the default of `whiten`.
        rules: (options, samples per prompt) -> None, or an error message with key, value, reason and remedy.
    """

    comparison: BaselineKind
    whitens: bool = False
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
        """Return the options of all estimators of this kind."""
        return {}

    @property
    def compares_samples(self) -> bool:
        return self.comparison == "group"

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        """Return the baseline of each sample of a group. options: the values of all options."""
        return [NO_BASELINE] * len(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEstimator(EstimatorSpec):
    """An estimator of whole samples: advantage = (reward − center) / scale for all tokens of a sample.

    Args:
        compare: (group, **arguments) -> the Baseline of each member.
    """

    compare: Callable[..., list[Baseline]]

    @property
    def functions(self) -> list[Signature]:
        return [(self.compare, 1, self.parameters)]

    def shared_parameters(self) -> Parameters:
        decay = {"baseline_decay": (Share, 0.9)} if self.comparison == "moving_average" else {}
        return {"gamma": (Share, 1.0), "credit": (Credit, "whole")} | decay

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        return self.compare(group, **{name: options[name] for name in self.parameters})


def mean_of_tokens(group: Sequence[TokenTotals], **_: Option) -> list[tuple[float, float]]:
    """Return for each sample the mean of all token rewards in the group, and scale 1."""
    count = sum(totals.count for totals in group)
    return [(math.fsum(totals.total for totals in group) / max(count, 1), 1.0)] * len(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEstimator(SampleEstimator):
    """An estimator that compares the samples of a prompt, and with credit=reward_to_go their token rewards separately.

    Args:
        compare_tokens: (TokenTotals of each sample, **arguments) -> (center, scale) of each sample's token rewards.
        amplify: (groups of an update) -> a factor for all of its advantages.
    """

    comparison: BaselineKind = "group"
    compare_tokens: Callable[..., list[tuple[float, float]]] = mean_of_tokens
    amplify: Callable[[Sequence[Sequence[Member]]], float] | None = None

    @property
    def functions(self) -> list[Signature]:
        return [(self.compare, 1, self.parameters), (self.compare_tokens, 1, self.parameters)]

    def shared_parameters(self) -> Parameters:
        return {
            "gamma": (Share, 1.0),
            "credit": (Credit, "whole"),
            "group_of_one": (Literal["zero", "reward"], "zero"),
        }

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        """Return the baseline of each member. In a group of one, because the other rewards failed, the advantage is 0,
        or with group_of_one=reward the reward."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEstimator(EstimatorSpec):
    """An estimator of single tokens. The sample's reward is that of its last token.

    Args:
        estimate: (reward [N], mask [N], row_sample [N], **arguments) -> TokenAdvantages; with comparison="values" also
            value [N], by keyword.
    """

    estimate: Callable[..., TokenAdvantages]

    @property
    def functions(self) -> list[Signature]:
        return [(self.estimate, 4 if self.comparison == "values" else 3, self.parameters)]


Rows = Literal["prompts", "messages", "preferences", "labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec(Spec):
    """An objective that the actor minimises.

    Args:
        rows: the values of data.format that it learns from; prompts: sampled responses.
        reads_reference: whether its loss compares log-probs with the reference's.
        classifier: the kind of classifier that the actor is; None: a language model.
        rules: (options) -> None, or an error message with key, value, reason and remedy.
    """

    loss: Callable[..., object]
    rows: tuple[Rows, ...] = ("prompts",)
    reads_reference: bool = False
    classifier: Kind | None = None
    rules: tuple[Callable[[Options], str | None], ...] = ()

    @property
    def is_policy_objective(self) -> bool:
        """Whether it learns from advantages of sampled tokens."""
        return isinstance(self, PolicyObjective)

    @property
    def is_pairwise(self) -> bool:
        """Whether it learns from pairs of a better and a worse response to the same prompt."""
        return isinstance(self, PairObjective)

    @property
    def learns_labels(self) -> bool:
        """Whether it learns labels of tokens."""
        return isinstance(self, LabelObjective)

    @property
    def selects_tokens(self) -> bool:
        """Whether it treats selected tokens of an update differently."""
        return isinstance(self, PolicyObjective) and self.selection is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The tokens of an update that an objective treats differently: the highest-ranked share.

    Args:
        order: (covariance [N], draw [N], **arguments) -> rank, float32 [N]. draw is uniform in [0, 1).
        parameters: the keyword arguments of `order`.
        share: the default share of the tokens.
    """

    order: Callable[..., torch.Tensor]
    parameters: Parameters = field(default_factory=dict)
    share: float

    @property
    def arguments(self) -> Options:
        """The keyword arguments of `order` with their defaults."""
        return defaults(self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(ObjectiveSpec):
    """An objective that learns from advantages of sampled tokens.

    Args:
        loss: (log_prob [N], old [N], advantage [N], *inputs, **arguments) -> PolicyLoss.
        inputs: further arguments of `loss`: the SampleSegments of the rows, or the mask of selected tokens.
        selection: how these tokens are selected.
        of_steps: options that adapt arguments from step to step.
    """

    loss: Callable[..., PolicyLoss]
    inputs: tuple[Literal["samples", "selected"], ...] = ()
    selection: Selection | None = None
    of_steps: Parameters = field(default_factory=dict)

    @property
    def functions(self) -> list[Signature]:
        selection = [] if self.selection is None else [(self.selection.order, 2, self.selection.parameters)]
        return [(self.loss, 3 + len(self.inputs), self.parameters), *selection]

    @property
    def all_parameters(self) -> Parameters:
        if self.selection is None:
            return {**self.parameters, **self.of_steps}
        share = (Annotated[float, Field(gt=0, le=1)], self.selection.share)
        return {**self.parameters, **self.selection.parameters, "covariance_share": share}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObjective(ObjectiveSpec):
    """An objective that learns from the difference of the model's rewards for a better and a worse response.

    The model's reward is a classifier's score, log π, or with reads_reference β·(log π − log π_ref).

    Args:
        loss: (margin [P], *inputs, **arguments) -> float32 [P].
        inputs: further arguments of `loss`: the rewards of the better responses, float32 [P].
    """

    loss: Callable[..., torch.Tensor]
    inputs: tuple[Literal["better"], ...] = ()
    rows: tuple[Rows, ...] = ("preferences",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 1 + len(self.inputs), self.parameters)]

    @property
    def all_parameters(self) -> Parameters:
        """Its own options and those of rewards from log-probs."""
        scale = {"beta": (PositiveFloat, 0.1)} if self.reads_reference else {}
        implicit = {} if self.classifier is not None else {**scale, "length_normalised": (bool, False)}
        return {**implicit, **self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationObjective(ObjectiveSpec):
    """An objective that imitates the responses in the data. loss: (log_prob [N]) -> float32 [N]."""

    loss: Callable[[torch.Tensor], torch.Tensor]
    rows: tuple[Rows, ...] = ("messages",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 1, self.parameters)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelObjective(ObjectiveSpec):
    """An objective that learns the data's labels of response steps; the actor is a token classifier.

    Args:
        loss: (score [N], label [N], **arguments) -> float32 [N].
        labelled: the tokens of a step that have its label: the last one, or all.
    """

    loss: Callable[..., torch.Tensor]
    rows: tuple[Rows, ...] = ("labels",)
    classifier: Kind | None = "token"
    labelled: Literal["end", "all"]

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 2, self.parameters)]
