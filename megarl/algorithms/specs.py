"""The classes of SPECs, by which the file of an estimator or of an objective describes it. They are free of torch, as
config reads them.

The options of a function are its keyword arguments, under the names that they have in recipes.
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
"""The kind of a classifier, which scores a sample by its last token, or each of its tokens."""

BaselineKind = Literal["none", "moving_average", "greedy", "group", "values"]

BASELINE_KINDS: Mapping[BaselineKind, str] = {
    "none": "no baseline",
    "moving_average": "the mean reward of earlier steps as its baseline",
    "greedy": "the reward of a greedy response as its baseline",
    "group": "the group's rewards as its baseline, such as their mean",
    "values": "a critic's values as its baseline",
}
"""The comparisons of a reward: with nothing, the mean reward of earlier steps, the reward of a greedy response to the
same prompt, the rewards of the prompt's other samples, or a critic's values."""

NO_ADVANTAGE = Baseline(scale=math.inf, token_scale=math.inf)
"""The baseline that makes every advantage 0, whatever the rewards of a sample and of its tokens."""


class TokenAdvantages(NamedTuple):
    """Advantages, and the returns that a critic learns, if there is one: float32 [N], 0 for tokens that are not trained
    on."""

    advantage: torch.Tensor
    returns: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An entry of algorithm.advantage or algorithm.objective.

    parameters  keyword arguments of its function
    """

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
        """Its functions and what they are called with."""
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
    """An advantage estimator. In formulas r_i is the reward of sample i and r_t that of token t.

    whitens     the paper's value of `whiten`
    rules       (values of all options that it reads, samples of a prompt) -> None, or a line with the key and value
                that do not work, the reason and the remedy
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
        """Returns the baseline of each sample of a group. options: the values of all options that it reads."""
        return [NO_BASELINE] * len(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEstimator(EstimatorSpec):
    """Compares whole samples: advantage = (reward − center) / scale, the same for all tokens of a sample.

    compare   (group, **arguments) -> the Baseline of each of its members
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
    """Returns for each sample the mean over all rewards of the group's tokens, and a scale of 1."""
    count = sum(totals.count for totals in group)
    return [(math.fsum(totals.total for totals in group) / max(count, 1), 1.0)] * len(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEstimator(SampleEstimator):
    """Compares the samples of one prompt with each other; with credit=reward_to_go, rewards of single tokens by themselves.

    compare_tokens   (TokenTotals of each sample, **arguments) -> (center, scale) of each sample's token rewards
    amplify          (groups of an update) -> the factor of all of its advantages
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
        """Returns the baseline of each member. A group of one (the others' rewards failed) has nothing to compare with:
        its advantage is 0, whatever the rewards of its tokens, or with group_of_one=reward its reward."""
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
    """Places a sample's reward on its last token, and credits each token with what comes after it.

    estimate   (reward [N], mask [N], row_sample [N], **arguments) -> TokenAdvantages; with comparison="values" also
               value [N], by keyword
    """

    estimate: Callable[..., TokenAdvantages]

    @property
    def functions(self) -> list[Signature]:
        return [(self.estimate, 4 if self.comparison == "values" else 3, self.parameters)]


Rows = Literal["prompts", "messages", "preferences", "labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec(Spec):
    """An objective that the actor minimises.

    rows              the values of data.format that it learns from; prompts: from sampled responses
    reads_reference   whether its loss compares log-probs with those of the reference
    classifier        the kind of classifier that the actor is; None: a language model
    rules             (values of all options that it reads) -> None, or a line with the key and value that do not work,
                      the reason and the remedy
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
        """Whether it learns from pairs of responses to one prompt, the better one and the worse one."""
        return isinstance(self, PairObjective)

    @property
    def learns_labels(self) -> bool:
        """Whether it learns labels of a response's tokens."""
        return isinstance(self, LabelObjective)

    @property
    def selects_tokens(self) -> bool:
        """Whether it treats tokens apart that are chosen over a whole update."""
        return isinstance(self, PolicyObjective) and self.selection is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The tokens of an update that an objective treats apart: a share of them, those that are highest in an order.

    order       (covariance [N], draw [N], **arguments) -> float32 [N]. draw is random, of [0, 1)
    parameters  keyword arguments of `order`
    share       the paper's share of the tokens
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

    loss        (log_prob [N], old [N], advantage [N], *inputs, **arguments) -> PolicyLoss
    inputs      further arguments of `loss`: the SampleSegments of the rows, or which tokens are selected
    selection   the rule by which these tokens are selected
    of_steps    options by which arguments change from step to step
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
    """An objective that learns from pairs of responses, by how much more the model rewards the better than the worse
    one.

    The model's reward of a response is a classifier's score, or log π, or with reads_reference β·(log π − log π_ref).

    loss     (margin [P], *inputs, **arguments) -> float32 [P]
    inputs   further arguments of `loss`: the rewards of the better responses, float32 [P]
    """

    loss: Callable[..., torch.Tensor]
    inputs: tuple[Literal["better"], ...] = ()
    rows: tuple[Rows, ...] = ("preferences",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 1 + len(self.inputs), self.parameters)]

    @property
    def all_parameters(self) -> Parameters:
        """Its own options, and those of a reward that is computed from log-probs."""
        scale = {"beta": (PositiveFloat, 0.1)} if self.reads_reference else {}
        implicit = {} if self.classifier is not None else {**scale, "length_normalised": (bool, False)}
        return {**implicit, **self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationObjective(ObjectiveSpec):
    """An objective that learns the responses of the data. loss: (log_prob [N]) -> float32 [N]."""

    loss: Callable[[torch.Tensor], torch.Tensor]
    rows: tuple[Rows, ...] = ("messages",)

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 1, self.parameters)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelObjective(ObjectiveSpec):
    """An objective that learns the labels which the data gives to steps of responses: the actor is a classifier of
    tokens.

    loss       (score [N], label [N], **arguments) -> float32 [N]
    labelled   the tokens of a step that have its label: the one that ends it, or all
    """

    loss: Callable[..., torch.Tensor]
    rows: tuple[Rows, ...] = ("labels",)
    classifier: Kind | None = "token"
    labelled: Literal["end", "all"]

    @property
    def functions(self) -> list[Signature]:
        return [(self.loss, 2, self.parameters)]
