"""What each objective learns from, which options it reads, and what its paper gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.schema import Objective

Option = float | str | None


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """paper             where the objective comes from
    options           keys of algorithm.objective that it reads -> the value that null stands for (None: nothing is
                      bounded)
    rows              the values of data.rows that it learns from; prompts: from sampled responses
    reads_reference   whether its loss is of log-probs against those of the reference
    """

    paper: str
    options: Mapping[str, Option]
    rows: tuple[str, ...] = ("prompts",)
    reads_reference: bool = False

    @property
    def is_policy_objective(self) -> bool:
        """Whether it learns from advantages of sampled tokens."""
        return self.rows == ("prompts",)

    @property
    def is_pairwise(self) -> bool:
        """Whether it learns from pairs of responses to one prompt, the better one and the worse one."""
        return "preferences" in self.rows


OBJECTIVES: Mapping[str, ObjectiveSpec] = {
    "clip": ObjectiveSpec("PPO, arXiv 1707.06347", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}),
    "unclipped": ObjectiveSpec("the surrogate of TRPO, arXiv 1502.05477, without its bound", {}),
    "kl_penalty": ObjectiveSpec(
        "TRPO's penalty form, arXiv 1502.05477; PPO, arXiv 1707.06347, eq. 8", {"penalty": 1.0}
    ),
    "gspo": ObjectiveSpec("GSPO, arXiv 2507.18071", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gmpo": ObjectiveSpec("GMPO, arXiv 2507.20673", {"clip_low": 0.4, "clip_high": 0.4}),
    "cispo": ObjectiveSpec("CISPO of MiniMax-M1, arXiv 2506.13585", {"clip_low": None, "clip_high": 4.0}),
    "sapo": ObjectiveSpec("SAPO, arXiv 2511.20347", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "dppo_tv": ObjectiveSpec("DPPO, arXiv 2602.04879", {"divergence_limit": 0.15}),
    "dppo_kl": ObjectiveSpec("DPPO, arXiv 2602.04879", {"divergence_limit": 0.05}),
    "clip_cov": ObjectiveSpec(
        "Clip-Cov, arXiv 2505.22617",
        {"clip_low": 0.2, "clip_high": 0.2, "covariance_low": 1.0, "covariance_high": 5.0, "covariance_share": 2e-4},
    ),
    "kl_cov": ObjectiveSpec("KL-Cov, arXiv 2505.22617", {"penalty": 1.0, "covariance_share": 2e-3}),
    "dro": ObjectiveSpec("DRO, arXiv 2405.19107", {"tau": 1.0, "level": "sequence"}),
    "sft": ObjectiveSpec("supervised fine-tuning: −log-prob of the assistant's tokens", {}, ("messages",)),
    "reward_model": ObjectiveSpec(
        "a reward model of Bradley and Terry's; InstructGPT, arXiv 2203.02155, eq. 1",
        {"label_smoothing": 0.0},
        ("preferences",),
    ),
    "dpo": ObjectiveSpec(
        "DPO, arXiv 2305.18290; from sampled responses: online DPO, arXiv 2402.04792",
        {"beta": 0.1, "label_smoothing": 0.0, "length_normalised": False},
        ("preferences", "prompts"),
        reads_reference=True,
    ),
    "ipo": ObjectiveSpec(
        "IPO, arXiv 2310.12036",
        {"beta": 0.1, "length_normalised": False},
        ("preferences", "prompts"),
        reads_reference=True,
    ),
}

OPTIONS = tuple(dict.fromkeys(option for reads in OBJECTIVES.values() for option in reads.options))
"""Every key of algorithm.objective that only some objectives read."""


def options(objective: Objective) -> dict[str, Option]:
    """What the chosen objective reads: what is given, and its paper's value where nothing is."""
    given = {name: getattr(objective, name) for name in OBJECTIVES[objective.name].options}
    defaults = OBJECTIVES[objective.name].options
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def selects_tokens(objective: Objective) -> bool:
    """Whether it treats tokens apart that are chosen over a whole update."""
    return "covariance_share" in OBJECTIVES[objective.name].options


def readers(option: str) -> list[str]:
    """The objectives that read an option."""
    return [name for name, reads in OBJECTIVES.items() if option in reads.options]


def learners(rows: str) -> list[str]:
    """The objectives that learn from this value of data.rows."""
    return [name for name, reads in OBJECTIVES.items() if rows in reads.rows]
