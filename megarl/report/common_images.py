"""Evaluation images of several runs side by side. Evaluations use the same seeds, so runs with equal NOISE_KEYS start
each sample from the same noise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from megarl.core.jsonl import read_objects
from megarl.core.text import counted
from megarl.report.evaluations import prompt_section, select_fields, spread_over_prompts, strip, time_of
from megarl.report.images import IMAGE, embed_images
from megarl.rewards.rollout_images import image_path

NOISE_KEYS = ("run.seed", "rollout.denoising.height", "rollout.denoising.width")
"""Config keys that determine the noise of evaluation samples."""

Key = tuple[str, str]
"""Sample id and prompt of a sample. Samples with equal keys are compared."""

Samples = dict[Key, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CommonImages:
    """The images that R runs share in an evaluation set, from the first and the last evaluation that all runs have.

    Attributes:
        rows: maps each sample to its evaluations: pairs of a step and R samples, one per run.
        num_common: number of samples that all runs share. Some of them may not be in `rows`.
        num_different: number of sample ids whose image or prompt is not in all runs.
        num_omitted: number of images that are too large for the page or were removed.
    """

    name: str
    rows: Mapping[Key, list[tuple[int, list[dict[str, Any]]]]]
    num_common: int = 0
    num_different: int = 0
    num_omitted: int = 0


def read_common_images(runs: Sequence[Mapping[str, Mapping[int, Path]]]) -> list[CommonImages]:
    """Read the images of all evaluation sets that have images in at least one run. Sets that the runs do not share have
    no rows. runs: maps a set name and a step to a sample file, for each run."""
    names = dict.fromkeys(name for files in runs for name in files)
    return [item for name in names for item in _read_set(name, [files.get(name, {}) for files in runs])]


def _read_set(name: str, runs: Sequence[Mapping[int, Path]]) -> Iterator[CommonImages]:
    steps = sorted(set.intersection(*map(set, runs)))
    if not steps:
        if any(_read(files[max(files)]) for files in runs if files):
            yield CommonImages(name, {})
        return
    evaluations = {step: [_read(files[step]) for files in runs] for step in dict.fromkeys((steps[0], steps[-1]))}
    common: Samples = {}
    for samples in reversed(evaluations.values()):
        common |= {key: sample for key, sample in samples[0].items() if all(key in other for other in samples)}
    everything = {key for samples in evaluations.values() for each in samples for key in each}
    if not everything:
        return
    rows: dict[Key, list[tuple[int, list[dict[str, Any]]]]] = {
        _key(each): [] for each in spread_over_prompts(common.values())
    }
    num_omitted = 0
    for step, samples in evaluations.items():
        shown = [key for key in rows if all(key in each for each in samples)]
        num_omitted += sum(
            embed_images(files[step], [each[key] for key in shown]) for files, each in zip(runs, samples, strict=True)
        )
        for key in shown:
            rows[key].append((step, [each[key] for each in samples]))
    num_different = len({sample_id for sample_id, _ in everything} - {sample_id for sample_id, _ in common})
    yield CommonImages(name, rows, len(common), num_different, num_omitted)


def _read(file: Path) -> Samples:
    """Read the samples that have an image."""
    records, _ = read_objects(file, keep=select_fields)
    return {_key(record): record for record in records if image_path(file, record.get(IMAGE)) is not None}


def _key(sample: Mapping[str, Any]) -> Key:
    return str(sample["sample_id"]), str(sample["prompt"])


def render_common_images(sets: Sequence[CommonImages], names: Sequence[str], differing: Sequence[str]) -> str:
    """Return the section as HTML without scripts. Return "" if no run has evaluation images.

    Args:
        names: labels of the runs.
        differing: the NOISE_KEYS whose values differ between the runs.
    """
    if not sets:
        return ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _notes(sets, differing))
    shown = "".join(_set(item, names, differing) for item in sets if item.rows)
    return f'<section id="common-images">\n<h2>Evaluation images</h2>\n{notes}{shown}\n</section>'


def _notes(sets: Sequence[CommonImages], differing: Sequence[str]) -> Iterator[str]:
    """Yield the explanations above the images."""
    if differing:
        yield f"The images of a row start from different noise, because the runs differ in {', '.join(differing)}."
    parts = [f"set {item.name}" for item in sets if not (item.num_common or item.num_different)]
    parts += [f"{counted(item.num_different, 'sample')} of {item.name}" for item in sets if item.num_different]
    if parts:
        yield f"Images that some runs lack for the same step and prompt are omitted: {', '.join(parts)}."
    if num_omitted := sum(item.num_omitted for item in sets):
        verb = "is" if num_omitted == 1 else "are"
        yield f"{counted(num_omitted, 'image')} {verb} missing or omitted to limit the page's size."


def _set(item: CommonImages, names: Sequence[str], differing: Sequence[str]) -> str:
    noise = "" if differing else ", each row from the same noise"
    selection = "" if len(item.rows) == item.num_common else f", {len(item.rows)} of {item.num_common} samples"
    summary = f"Images from {item.name}, one column per run{noise}{selection}"
    prompts: dict[str, list[str]] = {}  # the rows of each prompt
    for (sample_id, prompt), evaluations in item.rows.items():
        strips = [strip(sample_id, zip(names, samples, strict=True), time_of(step)) for step, samples in evaluations]
        prompts.setdefault(prompt, []).append(f'<div class="evaluations">{"".join(strips)}</div>')
    sections = "".join(prompt_section(prompt, rows) for prompt, rows in prompts.items())
    return f"<details open><summary>{escape(summary)}</summary>{sections}</details>"
