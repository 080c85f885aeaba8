"""The classes of SPECs, by which the file of an estimator or of an objective describes it. They are free of torch, as
config reads them.

The options of a function are its keyword arguments, under the names that they have in recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from megarl.core.types import NO_BASELINE, Baseline, TokenTotals

if TYPE_CHECKING:
    import torch

    from megarl.algorithms.baselines import Member
    from megarl.algorithms.policy_loss import PolicyLoss

Option = float | int | str | bool | None
Options = Mapping[str, Option]
"""Options: name of a key -> its value; in a spec, the value that null stands for."""

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
class EstimatorSpec:
    """An advantage estimator. In formulas r_i is the reward of sample i and r_t that of token t.

    arguments   keyword argument of its function -> the value that null stands for, the paper's
    whitens     the paper's value of `whiten`
    rules       (values of all options that it reads, samples of a prompt) -> None, or a line with the key and value
                that do not work, the reason and the remedy
    """

    name: str
    formula: str
    paper: str
    comparison: BaselineKind
    arguments: Options = field(default_factory=dict)
    whitens: bool = False
    rules: tuple[Callable[[Options, int], str | None], ...] = ()

    @property
    def options(self) -> Options:
        """Every key of algorithm.advantage that it reads besides `estimator`."""
        whitening = {"whiten": self.whitens, "whiten_over": "update", "whiten_std": "sample", "whiten_epsilon": 1e-6}
        return {**self.arguments, **self.shared_options(), **whitening}

    def shared_options(self) -> Options:
        """Returns the options that all estimators of its kind read."""
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

    def shared_options(self) -> Options:
        decay = {"baseline_decay": 0.9} if self.comparison == "moving_average" else {}
        return {"gamma": 1.0, "credit": "whole"} | decay

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        return self.compare(group, **{name: options[name] for name in self.arguments})


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

    def shared_options(self) -> Options:
        return {"gamma": 1.0, "credit": "whole", "group_of_one": "zero"}

    def baselines(self, group: Sequence[Member], options: Options) -> list[Baseline]:
        """Returns the baseline of each member. A group of one (the others' rewards failed) has nothing to compare with:
        its advantage is 0, whatever the rewards of its tokens, or with group_of_one=reward its reward."""
        if len(group) == 1:
            return [NO_BASELINE if options["group_of_one"] == "reward" else NO_ADVANTAGE]
        arguments = {name: options[name] for name in self.arguments}
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


Rows = Literal["prompts", "messages", "preferences", "labels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """An objective that the actor minimises.

    arguments         keyword argument of `loss` -> the value that null stands for, the paper's (None: nothing is
                      bounded)
    rows              the values of data.format that it learns from; prompts: from sampled responses
    reads_reference   whether its loss compares log-probs with those of the reference
    classifier        the kind of classifier that the actor is; None: a language model
    clips_log_ratio   whether clip_low and clip_high bound log ρ, which may be far below 0, and not ρ itself
    rules             (values of all options that it reads) -> None, or a line with the key and value that do not work,
                      the reason and the remedy
    """

    name: str
    formula: str
    paper: str
    loss: Callable[..., object]
    arguments: Options = field(default_factory=dict)
    rows: tuple[Rows, ...] = ("prompts",)
    reads_reference: bool = False
    classifier: Kind | None = None
    clips_log_ratio: bool = False
    rules: tuple[Callable[[Options], str | None], ...] = ()

    @property
    def options(self) -> Options:
        """The keys of algorithm.objective that it reads and others may not."""
        return self.arguments

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
    arguments   keyword argument of `order` -> the value that null stands for, the paper's
    share       the paper's share of the tokens
    """

    order: Callable[..., torch.Tensor]
    arguments: Options = field(default_factory=dict)
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective(ObjectiveSpec):
    """An objective that learns from advantages of sampled tokens.

    loss        (log_prob [N], old [N], advantage [N], *inputs, **arguments) -> PolicyLoss
    inputs      further arguments of `loss`: the SampleSegments of the rows, or which tokens are selected
    selection   the rule by which these tokens are selected
    of_steps    options by which arguments change from step to step -> the value that null stands for
    """

    loss: Callable[..., PolicyLoss]
    inputs: tuple[Literal["samples", "selected"], ...] = ()
    selection: Selection | None = None
    of_steps: Options = field(default_factory=dict)

    @property
    def options(self) -> Options:
        if self.selection is None:
            return {**self.arguments, **self.of_steps}
        return {**self.arguments, **self.selection.arguments, "covariance_share": self.selection.share}


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
    def options(self) -> Options:
        """Every option that it reads: its arguments and those of a reward from log-probs."""
        scale = {"beta": 0.1} if self.reads_reference else {}
        implicit = {} if self.classifier is not None else {**scale, "length_normalised": False}
        return {**implicit, **self.arguments}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationObjective(ObjectiveSpec):
    """An objective that learns the responses of the data. loss: (log_prob [N]) -> float32 [N]."""

    loss: Callable[[torch.Tensor], torch.Tensor]
    rows: tuple[Rows, ...] = ("messages",)


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
