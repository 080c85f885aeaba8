"""The evaluation section of the report: samples, and one chart with a confidence interval per estimate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megarl.core.jsonl import read_objects
from megarl.report.charts import Chart
from megarl.report.history import History
from megarl.report.images import IMAGE, IS_SMALL, URI, embed_images, image_fields
from megarl.report.prompts import PARTS, embed_in_place, render_parts, select_prompt, select_turns, shorten
from megarl.report.viewer import FileCache, number_or_none, score_of, spread, spread_stably
from megarl.rewards.prompt_thumbnails import PROMPT_IMAGES

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
    worst samples come first. If the set has images, each step has the same samples, in the order of the set."""

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
    come first. If the file has images, the first samples with an image are chosen, from as many prompts as possible."""
    records, _ = read_objects(file, keep=select_fields)
    samples = spread_over_prompts(record for record in records if IMAGE in record)
    if samples:
        embed_images(file, samples)
        return samples
    records.sort(key=score_of)
    chosen = spread(records, MAX_SAMPLES)
    embed_in_place(file, chosen)
    return chosen


def spread_over_prompts(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most MAX_SAMPLES samples: the first of each prompt, then the second of each, and so on."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        by_prompt.setdefault(str(sample["prompt_id"]), []).append(sample)
    rounds = zip_longest(*by_prompt.values())
    return [sample for each in rounds for sample in each if sample is not None][:MAX_SAMPLES]


def select_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a line that the page shows."""
    fields = (
        "prompt",
        "response",
        "answer",
        "reward",
        "failure",
        "finish_reason",
        "stop_reason",
        "sample_id",
        "prompt_id",
    )
    turns, reward = select_turns(record, MAX_CHARACTERS), number_or_none(record.get("reward"))
    prompt = select_prompt(record, MAX_CHARACTERS) if PROMPT_IMAGES in record else {}
    selected = {field: record.get(field) for field in fields} | prompt | image_fields(record)
    return selected | {"reward": reward, "turns": turns}


def _set(item: SetSamples) -> str:
    selection = "" if len(item.steps) == item.num_steps else f", {len(item.steps)} of {item.num_steps} steps"
    files = f"{selection} (all samples: evaluations/{item.name}/)"
    rows = _image_rows(item)
    if rows:
        summary = f"Images from {item.name}, each row from the same noise{files}"
        return f"<details open><summary>{escape(summary)}</summary>{rows}</details>"
    steps = "".join(
        f"<details><summary>{time_of(step)}</summary>{''.join(map(_sample, samples))}</details>"
        for step, samples in item.steps.items()
    )
    return f"<details><summary>{escape(f'Samples from {item.name}, worst first{files}')}</summary>{steps}</details>"


def time_of(step: int) -> str:
    """Return the time of an evaluation in words."""
    return "before step 1" if step == 0 else f"after step {step}"


def _image_rows(item: SetSamples) -> str:
    """Return a section per prompt. It has a row for each sample, with its images in the order of the steps. Evaluations
    use the same seeds, so only the weights differ within a row."""
    prompts: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for step, samples in item.steps.items():
        for sample in samples:
            if IMAGE in sample:
                rows = prompts.setdefault(str(sample["prompt_id"]), {})
                rows.setdefault(str(sample["sample_id"]), {})[step] = sample
    return "".join(map(_prompt, prompts.values()))


def _prompt(rows: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> str:
    """Return the section of a prompt. rows: the samples by sample id and step."""
    prompt = next(iter(next(iter(rows.values())).values()))["prompt"]
    strips = (strip(name, [(time_of(step), sample) for step, sample in row.items()]) for name, row in rows.items())
    return prompt_section(prompt, strips)


def prompt_section(prompt: Any, rows: Iterable[str]) -> str:
    """Return the section of a prompt, with rows of images as HTML below the prompt."""
    head = f'<div class="prompt"><h3>Prompt</h3>{_text(prompt)}</div>'
    return f'<section class="group">{head}{"".join(rows)}</section>'


def strip(name: str, samples: Iterable[tuple[str, Mapping[str, Any]]], when: str = "") -> str:
    """Return images side by side, styled as in the rollout viewer. Each has its label and its reward below it.

    Args:
        name: id of the samples, shown as a tooltip.
        samples: pairs (label, sample). Each sample has an image.
        when: heading of the strip.
    """
    head = f'<h4 class="when">{escape(when)}</h4>' if when else ""
    pictures = "".join(_picture(label, sample, when) for label, sample in samples)
    return f'<div class="strip" title="{escape(name)}">{head}{pictures}</div>'


def _picture(label: str, sample: Mapping[str, Any], when: str) -> str:
    score = sample["reward"]
    if URI in sample:
        size = ' class="small"' if sample[IS_SMALL] else ""
        alternative = f"{label}, {when}" if when else label
        image = f'<img{size} src="{sample[URI]}" alt="{escape(alternative)}">'
    else:
        image = f'<p class="note">not shown: {escape(sample[IMAGE].rpartition("/")[2])}</p>'
    reward = f'<span class="failed">{escape(str(sample["failure"]))}</span>' if score is None else f"{score:.4g}"
    return f'<div class="picture">{image}<span>{escape(label)}</span><b class="reward">{reward}</b></div>'


def _sample(sample: Mapping[str, Any]) -> str:
    score = sample["reward"]
    labels = ["no score" if score is None else f"{score:.4g}", f"answer {sample['answer']}", sample["failure"]]
    labels += [sample["stop_reason"], "truncated" if sample["finish_reason"] == "length" else None, sample["sample_id"]]
    first, *others = (escape(str(label)) for label in labels if label is not None)
    facts = f'<span class="reward{" failed" if score is None else ""}">{first}</span>'
    facts += "".join(f"<span>{label}</span>" for label in others)
    is_pictured = PARTS in sample
    sections = {"Prompt": f"<pre>{render_parts(sample[PARTS])}</pre>" if is_pictured else _text(sample["prompt"])}
    if sample["turns"] or sample["response"] is not None:  # an image may not be stored
        sections["Response"] = _conversation(sample) or _text(sample["response"])
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
        contents = render_parts(turn.get(PARTS, [text]))
        calls = "".join(
            f'<span class="toolcall">{escape(json.dumps(call))}</span>' for call in turn.get("tool_calls", ())
        )
        role = escape(turn["role"])
        blocks.append(f'<div class="block role-{role}"><h4>{role}</h4><pre>{contents}{calls}</pre></div>')
    return f'<div class="response">{"".join(blocks)}</div>' if blocks else ""
