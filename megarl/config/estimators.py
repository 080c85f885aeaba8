"""The advantage estimators as data: what each needs, and which keys of algorithm.advantage it reads.

Rules, passes, the driver and `megarl algorithms` follow from it. Defaults are the papers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Baseline = Literal["none", "moving_average", "greedy", "group", "values"]
"""What a reward is compared with: nothing, the mean reward of earlier steps, that of a greedy response to the same
prompt, those of the prompt's other samples, or a critic's values."""

BASELINES: Mapping[Baseline, str] = {
    "none": "no baseline",
    "moving_average": "the mean reward of earlier steps as its baseline",
    "greedy": "the reward of a greedy response as its baseline",
    "group": "the group's rewards as its baseline, such as their mean",
    "values": "a critic's values as its baseline",
}

_OF_ALL = {"gamma": 1.0, "whiten": False, "std": "sample", "std_epsilon": 1e-6}
_OF_WHOLE = _OF_ALL | {"credit": "whole"}
_OF_GROUP = _OF_WHOLE | {"group_of_one": "zero"}


@dataclass(frozen=True, slots=True)
class Estimator:
    """options: the keys that it reads besides `estimator`, with the value that null stands for. by_token: it places a
    sample's reward on its last token, and each token is credited with what comes after it."""

    formula: str
    paper: str
    baseline: Baseline
    options: Mapping[str, Any]
    by_token: bool = False

    @property
    def compares_samples(self) -> bool:
        return self.baseline == "group"


ESTIMATORS: Mapping[str, Estimator] = {
    "policy_gradient": Estimator("r_i", "Williams 1992, REINFORCE", "none", _OF_WHOLE),
    "reinforce": Estimator(
        "r_i − b, b an exponential moving average of the mean rewards of earlier steps",
        "Williams 1992, REINFORCE with a baseline",
        "moving_average",
        _OF_WHOLE | {"baseline_decay": 0.9},
    ),
    "reinforce_plus_plus": Estimator(
        "Σ_{s≥t} γ^(s−t)·r_s, whitened over the update",
        "REINFORCE++, arXiv 2501.03262",
        "none",
        _OF_ALL | {"whiten": True},
        by_token=True,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "r_i − mean(r), whitened over the update",
        "REINFORCE++, arXiv 2501.03262",
        "group",
        _OF_GROUP | {"whiten": True},
    ),
    "rloo": Estimator("r_i − mean of the others' r", "RLOO, arXiv 2402.14740", "group", _OF_GROUP),
    "remax": Estimator("r_i − r of the greedy response", "ReMax, arXiv 2310.10505", "greedy", _OF_WHOLE),
    "grpo": Estimator("(r_i − mean(r)) / (std(r) + std_epsilon)", "GRPO, arXiv 2402.03300", "group", _OF_GROUP),
    "opo": Estimator("r_i − Σ l_j·r_j / Σ l_j, l the lengths", "OPO, arXiv 2505.23585", "group", _OF_GROUP),
    "gpg": Estimator(
        "(r_i − mean(r)) · samples / samples in groups of unequal rewards", "GPG, arXiv 2504.02546", "group", _OF_GROUP
    ),
    "pass_at_k": Estimator(
        "(E[max r of k samples, i among them] − E[max r of k samples]) / (std[max r of k samples] + std_epsilon)",
        "Pass@k training, arXiv 2508.10751",
        "group",
        _OF_GROUP | {"std": "population", "k": 4, "pass_at_k_baseline": "all"},
    ),
    "gae": Estimator(
        "Σ_l (γλ)^l·δ_{t+l}, δ_t = r_t + γ·V_{t+1} − V_t, whitened over the update",
        "GAE, arXiv 1506.02438",
        "values",
        _OF_ALL | {"whiten": True, "gae_lambda": 0.95, "critic_lambda": None, "length_alpha": None},
        by_token=True,
    ),
}
"""By name. r_i is the reward of sample i and r_t that of token t."""
