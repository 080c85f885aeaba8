"""`megarl diagnose`: finds a rollout of a run, has the sides compute it, and says where they part."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.cluster.failure import RunFailure
from megarl.config.load import load
from megarl.config.schema import Config
from megarl.core.errors import UserError
from megarl.core.files import numbered
from megarl.core.jsonl import read_objects
from megarl.models.folder import resolve
from megarl.rewards.rollout_file import PROMPT_IDS, RESPONSE_IDS
from megarl.run.diagnosis.comparison import Stage, compare, first_different, table, verdict
from megarl.run.diagnosis.side import ANSWER, REQUEST, SIDES, Request
from megarl.run.evaluate import with_engines_alone
from megarl.run.folder import ROLLOUTS

MAX_TOKENS = 512
"""The tokens of a rollout, from its first on, that the sides compute: they keep what comes out of every layer."""

DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """A saved rollout: its step, its sample's id, and the tokens of its prompt and response."""

    step: int
    sample_id: str
    prompt_ids: list[int]
    response_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        """The tokens that are computed."""
        return (self.prompt_ids + self.response_ids)[:MAX_TOKENS]


def main(folder: Path, step: int | None, sample: str | None, model: Path | None, scratch: Path) -> int:
    """Diagnoses a run, as `megarl diagnose` does. Return the exit code: 1 where a stage differs."""
    config, rollout = read_config(folder), find_rollout(folder, step, sample)
    weights = find_weights(folder, config, model)
    print(
        f"sample {rollout.sample_id} of step {rollout.step}: {len(rollout.token_ids)} tokens, weights of {weights}",
        flush=True,
    )
    try:
        stages = diagnose(config, rollout.token_ids, dict.fromkeys(SIDES, weights), scratch)
    except RunFailure as failure:
        print(f"megarl: error: {failure}", file=sys.stderr)
        return 1
    print(table(stages))
    print(verdict(stages))
    return int(first_different(stages) is not None)


def diagnose(config: Config, token_ids: Sequence[int], folders: Mapping[str, Path], scratch: Path) -> list[Stage]:
    """Has each side compute the sequence, one after the other, and compares them.

    folders   the folder of each side's weights

    Raise RunFailure for a side that fails.
    """
    alone = on_one_rank(config, len(token_ids))
    return compare(
        {side: _computed(side, Request(alone, folders[side], list(token_ids)), scratch) for side in SIDES},
        config.model.dtype,
    )


def on_one_rank(config: Config, num_tokens: int) -> Config:
    """Return the run's config of a trainer and an engine of one rank each, without adapters, which are merged in what
    a run exports, and with the engine's weights as they are in the folder."""
    alone = with_engines_alone(config)
    budget = max(alone.actor.tokens_per_microbatch, num_tokens)
    changes: dict[str, dict[str, Any]] = {
        "actor": {"tokens_per_microbatch": budget, "threads": None},
        "rollout": {"tp": 1, "replicas": 1, "top_k": None, "top_p": 1.0},
    }
    sections = {name: getattr(alone, name).model_copy(update=update) for name, update in changes.items()}
    return alone.model_copy(update=sections)


def read_config(folder: Path) -> Config:
    path = folder / "config.resolved.yaml"
    if not path.is_file():
        raise UserError(f"{folder}: not a run, as it has no config.resolved.yaml; name a run's folder, as runs/latest")
    config = load(path)
    if config.is_offline:
        raise UserError(f"{folder}: a run on offline data has no rollouts; diagnose one that samples")
    return config


def find_rollout(folder: Path, step: int | None, sample: str | None) -> Rollout:
    """Return the sample with this id, or the first that has token ids, of this step or of the newest one. One of fewer
    than three tokens has nothing to compare. Raise UserError where there is none."""
    files = numbered(folder / "rollouts", ROLLOUTS)
    if not files:
        raise UserError(f"{folder}: it has no rollouts yet; wait for its first step")
    number = max(files) if step is None else step
    if number not in files:
        raise UserError(f"--step {number}: {folder} has the rollouts of the steps {min(files)} to {max(files)}")
    rows, _ = read_objects(files[number])
    if sample is not None:
        rows = [row for row in rows if row.get("sample_id") == sample]
        if not rows:
            raise UserError(f"--sample {sample}: step {number} has no such sample; see {files[number]}")
    found = next((row for row in rows if len(row.get(PROMPT_IDS, ())) + len(row.get(RESPONSE_IDS, ())) >= 3), None)
    if found is None:
        whose = f"sample {sample}" if sample else "no sample"
        raise UserError(
            f"{files[number]}: {whose} {'lacks' if sample else 'has'} token ids, which run.token_samples of a step's "
            "samples have; choose another one, or set run.token_samples above 0 in the next run"
        )
    return Rollout(number, found["sample_id"], found[PROMPT_IDS], found[RESPONSE_IDS])


def find_weights(folder: Path, config: Config, model: Path | None) -> Path:
    """Return the folder of the weights: the one that is named, the model that the run has exported, or the one that it
    started from."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise UserError(f"--model {model}: no Hugging Face folder, as it has no config.json")
        return model
    exported = folder / "model"
    is_whole = (exported / "config.json").is_file()  # not a PEFT folder
    return exported if is_whole else resolve(config.model.path, revision=config.model.revision)


def _computed(side: str, request: Request, scratch: Path) -> dict[str, np.ndarray]:
    own = scratch / side
    own.mkdir()
    (own / REQUEST).write_bytes(pickle.dumps(request))
    command = [sys.executable, "-m", "megarl.run.diagnosis.side", side, str(own)]
    with (own / "log").open("w+", encoding="utf-8", errors="replace") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=DEADLINE_S)
        if done.returncode:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()] or ["it said nothing"]
            raise RunFailure(f"diagnose: the {side} ended with status {done.returncode}: {lines[-1]}")
    with np.load(own / ANSWER) as answer:
        return {name: answer[name] for name in answer.files}
