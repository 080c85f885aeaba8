"""The evaluation section of the report: samples, and one chart with a confidence interval per estimate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megarl.core.jsonl import read_objects
from megarl.report.charts import Chart
from megarl.report.history import History
from megarl.report.viewer import FileCache, number_or_none, score_of, select_turn_fields, shorten, spread, spread_stably

PREFIX = "evaluation/"
ESTIMATE = re.compile(r"evaluation/([^/]+)/((avg@|pass@|pass\^)([0-9]{1,9}))")
MAX_STEPS = 6  # per evaluation set
MAX_SAMPLES = 24  # per step
MAX_CHARACTERS = 1500  # per prompt or response
EXPLANATION = {
    "avg@": "Mean score over prompts with {k} samples each.",
    "pass@": "Probability that at least one of {k} samples of a prompt succeeds.",
    "pass^": "Probability that all {k} samples of a prompt succeed.",
}
"""Maps the name prefix of each kind of estimate to its explanation."""


@dataclass(frozen=True, slots=True)
class SetSamples:
    """Selected samples from one evaluation set. Steps are evenly spaced and in ascending order. Within each step, the
    worst samples come first."""

    name: str
    steps: Mapping[int, list[dict[str, Any]]]
    num_steps: int


def read_evaluations(files: Mapping[str, Mapping[int, Path]], cache: FileCache | None = None) -> list[SetSamples]:
    """Read samples from all evaluation sets. `files` maps a set name and a step to a sample file."""
    cache = FileCache() if cache is None else cache
    chosen = {name: spread_stably(sorted(by_step), MAX_STEPS) for name, by_step in files.items()}
    return [
        SetSamples(name, {step: cache.get(_read, by_step[step]) for step in chosen[name]}, len(by_step))
        for name, by_step in files.items()
    ]


def render_samples(sets: list[SetSamples]) -> str:
    """Return the samples as HTML without scripts."""
    return "".join(_set(item) for item in sets)


def evaluation_charts(history: History) -> Iterator[Chart]:
    """Yield the charts for each evaluation set. They show the mean score, and pass@k and pass^k for the largest k."""
    matches = [match for match in map(ESTIMATE.fullmatch, history.columns) if match is not None]
    max_k = {match[1]: int(match[4]) for match in matches if match[3] == "avg@"}
    for metric, name, estimate, kind, k in ((match[0], *match.groups()) for match in matches):
        if int(k) == max_k.get(name, int(k)) and len(history.finite(metric)):
            yield Chart(
                f"Evaluation: {name}, {estimate}",
                EXPLANATION[kind].format(k=k),
                ((metric, estimate),),
                band=(f"{metric}_low", f"{metric}_high"),
                share=kind != "avg@",
                place="evaluation-charts",
            )


def _read(file: Path) -> list[dict[str, Any]]:
    """Read samples from a step's file. The samples are evenly spaced when ordered by score, and samples without a score
    come first."""
    records, _ = read_objects(file, keep=_select_fields)
    records.sort(key=score_of)
    return spread(records, MAX_SAMPLES)


def _select_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    fields = ("prompt", "response", "answer", "reward", "failure", "finish_reason", "stop_reason", "sample_id")
    turns = [select_turn_fields(turn, MAX_CHARACTERS) for turn in record.get("messages") or ()]
    reward = number_or_none(record.get("reward"))
    return {field: record.get(field) for field in fields} | {"reward": reward, "turns": turns}


def _set(item: SetSamples) -> str:
    selection = "" if len(item.steps) == item.num_steps else f", {len(item.steps)} of {item.num_steps} steps"
    steps = "".join(
        f"<details><summary>{'before step 1' if step == 0 else f'after step {step}'}</summary>"
        f"{''.join(map(_sample, samples))}</details>"
        for step, samples in item.steps.items()
    )
    summary = f"Samples from {item.name}, worst first{selection} (all samples: evaluations/{item.name}/)"
    return f"<details><summary>{escape(summary)}</summary>{steps}</details>"


def _sample(sample: Mapping[str, Any]) -> str:
    score = sample["reward"]
    labels = ["no score" if score is None else f"{score:.4g}", f"answer {sample['answer']}", sample["failure"]]
    labels += [sample["stop_reason"], "truncated" if sample["finish_reason"] == "length" else None, sample["sample_id"]]
    first, *others = (escape(str(label)) for label in labels if label is not None)
    facts = f'<span class="reward{" failed" if score is None else ""}">{first}</span>'
    facts += "".join(f"<span>{label}</span>" for label in others)
    sections = {"Prompt": _text(sample["prompt"]), "Response": _conversation(sample) or _text(sample["response"])}
    texts = "".join(f"<div><h3>{title}</h3>{text}</div>" for title, text in sections.items())
    return f'<article class="sample"><div class="facts">{facts}</div><div class="texts">{texts}</div></article>'


def _text(value: Any) -> str:
    return f"<pre>{escape(shorten(str(value), MAX_CHARACTERS))}</pre>"


def _conversation(sample: Mapping[str, Any]) -> str:
    """Return an HTML block for each message in a multi-turn rollout, styled as in the rollout viewer."""
    blocks = []
    for turn in sample["turns"]:
        content = turn["content"]
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        calls = "".join(
            f'<span class="toolcall">{escape(json.dumps(call))}</span>' for call in turn.get("tool_calls", ())
        )
        role = escape(turn["role"])
        blocks.append(f'<div class="block role-{role}"><h4>{role}</h4><pre>{escape(text)}{calls}</pre></div>')
    return f'<div class="response">{"".join(blocks)}</div>' if blocks else ""
