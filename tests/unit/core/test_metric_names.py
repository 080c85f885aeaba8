"""The declared metrics are those that the code emits."""

from __future__ import annotations

import ast
import re

import pytest

from megarl.core.metric_names import METRICS, is_declared
from tests.metrics import undeclared
from tests.paths import ROOT
from tests.readme import PAGES, text_of

SECTIONS = {metric.name.split("/")[0] for metric in METRICS} - {"MODEL"}
NAME = re.compile(rf"(?:{'|'.join(sorted(SECTIONS))})/[a-z_0-9]+")
MOMENTS = {
    "mismatch/weight_mean",
    "mismatch/weight_square_mean",
    "value/return_square_mean",
    "value/residual_mean",
    "value/residual_square_mean",
}
"""Intermediate metrics, which megarl/step/metrics.py replaces."""


FORMS = {
    "reward/NAME": "reward/{",
    "reward/NAME_unrated_frac": 'UNRATED = "unrated"',
    "reward/NAME_truncated_frac": 'TRUNCATED = "truncated"',
    "reward/reward_model_verbatim_frac": 'VERBATIM = "verbatim"',
    "idle/engines": '"engines": self.engines.take_idle_share()',
    "idle/ROLE": "idle/{",
    "goodput/CAUSE": "goodput/{cause}",
    "memory/ROLE_STATE_offloaded_gb": "}_offloaded_gb",
    **{
        f"{section}/{name}": f"{{section}}/{name}"
        for section in ("mismatch", "policy_lag")
        for name in ("logprob_abs_mean", "logprob_abs_max", "kl")
    },
    "weights/staleness_N_share": "weights/staleness_{",
    "kl/FORM": '"kl/"',
    "kl/teacher_NAME": "kl/teacher_{",
    "environment/stop_REASON": "environment/stop_{",
    "environment/tool_STATUS": "environment/tool_{",
    "evaluation/SET/avg@K": "avg@{",
    "evaluation/SET/pass@K": "pass@{",
    "evaluation/SET/pass^K": "pass^{",
    "evaluation/SET/METRIC_low": "}_low",
    "evaluation/SET/METRIC_high": "}_high",
}
"""How the code writes names with placeholders."""


def sources() -> dict[str, str]:
    files = (ROOT / "megarl").rglob("*.py")
    return {str(file.relative_to(ROOT)): file.read_text() for file in files if file.name != "metric_names.py"}


def texts(source: str) -> set[str]:
    """Return the strings in a source file, without the parts of f-strings."""
    nodes = [*ast.walk(ast.parse(source))]
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts)
    return {node.value for node in constants if isinstance(node.value, str)}


def test_every_metric_in_the_code_is_declared():
    naming = [source for source in sources().values() if NAME.search(source)]
    named = {text for source in naming for text in texts(source) if NAME.fullmatch(text)}
    assert len(named) > 80, named
    # Exclude reward/NAME, which matches every name in its section. No constant in the code is the name of a score.
    declarations = [metric for metric in METRICS if metric.name != "reward/NAME"]
    assert [name for name in sorted(named - MOMENTS) if not any(m.matches(name) for m in declarations)] == []


def test_every_declared_metric_is_emitted_by_some_code():
    emitting = "".join(text for file, text in sources().items() if not file.startswith("megarl/report/"))
    for metric in METRICS:
        section, _, last = metric.name.rpartition("/")
        phrase = FORMS.get(metric.name) or f'"{metric.name}"'
        if section in ("MODEL", "evaluation/SET"):
            phrase = FORMS.get(metric.name) or (f'}}/{last}"' if section == "MODEL" else f'"{last}"')
        found = phrase in emitting or (section == "time" and f'phase("{last}")' in emitting)
        assert found, metric.name


def test_names_are_unique_and_documented_ones_are_declared():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    folders = {"evaluation/NAME", "reward/NAME", "weights/staleness_N_share"}
    found = {
        (page, name)
        for page in PAGES
        for name in re.findall(rf"`((?:{'|'.join(sorted(SECTIONS))})/[a-zA-Z_0-9@^]+)`", text_of(page))
    }
    assert found and [pair for pair in sorted(found) if not (is_declared(pair[1]) or pair[1] in folders)] == []


@pytest.mark.parametrize(
    ("name", "declared"),
    [
        ("reward/exact_match", True),
        ("reward/my-judge_unrated_frac", True),
        ("reward/my reward.py:f", False),
        ("evaluation/a/b/pass^4_low", True),
        ("policy/grad_norm", True),
        ("actor/grad_norm", False),
        ("weights/staleness_3_share", True),
        ("weights/staleness_x_share", False),
        ("memory/actor_optimizer_offloaded_gb", True),
        ("time/unknown", False),
    ],
)
def test_placeholders_match_their_values(name, declared):
    assert is_declared(name) == declared


def test_undeclared_metrics_of_a_file_are_found(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "reward/mean": 1, "policy/new": 2, "nonfinite": []}\n{"ste')
    assert undeclared(file) == ["policy/new"]
