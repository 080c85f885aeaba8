"""`megarl diagnose`: runs a saved rollout through trainer, engine and transformers and finds the first difference."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from megarl.config import document
from megarl.config.saved import validated
from megarl.config.schema import Config
from megarl.core.checkpoint import FORMAT
from megarl.core.errors import RunFailure, UserError, print_error
from megarl.core.files import is_plain, numbered, read_text
from megarl.core.interpreter import PYTHON
from megarl.core.jsonl import read_objects
from megarl.models.folder import resolve
from megarl.rewards.prompt_thumbnails import OBSERVATION_IMAGES, PROMPT_IMAGES
from megarl.rewards.rollout_file import LOGPROB_DIFFERENCES, PROMPT_IDS, RESPONSE_IDS
from megarl.run.diagnosis.comparison import Stage, compare, first_different, table, verdict
from megarl.run.diagnosis.side import OUTPUTS, REQUEST, SIDES, Request
from megarl.run.evaluate import with_engines_only
from megarl.run.folder import ROLLOUTS

MAX_TOKENS = 512
"""Maximum number of leading tokens to compare. The outputs of all layers for these tokens are kept in memory."""

DEADLINE_S = 3600.0

KEPT_OVERRIDES = {
    *("attention_backend", "block_size", "enable_prefix_caching", "kv_cache_dtype", "load_format"),
    *("max_num_batched_tokens", "max_num_seqs", "quantization"),
}
"""The rollout.vllm_overrides that are passed to the engine. Other arguments, such as trust_remote_code, can make vLLM
execute code, and the run folder may come from an untrusted source."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A saved rollout: its step, its sample id, the token ids in its prompt and response, and the recorded differences
    between the trainer's and the engine's log-probs of the response's tokens (empty if not recorded)."""

    step: int
    sample_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    differences: list[float]

    @property
    def token_ids(self) -> list[int]:
        """Token ids to compare."""
        return (self.prompt_ids + self.response_ids)[:MAX_TOKENS]


def main(folder: Path, step: int | None, sample: str | None, model: Path | None, scratch: Path) -> int:
    """Run `megarl diagnose` and return its exit code: 1 if a stage differs or an implementation fails."""
    config, rollout = read_run_config(folder), find_rollout(folder, step, sample)
    weights = find_weights(folder, config, model)
    print(
        f"sample {rollout.sample_id} of step {rollout.step}: {len(rollout.token_ids)} tokens, weights from {weights}",
        flush=True,
    )
    try:
        stages = diagnose(config, rollout.token_ids, dict.fromkeys(SIDES, weights), scratch)
    except RunFailure as failure:
        print_error(failure)
        return 1
    print(table(stages))
    print(verdict(stages))
    contradiction = None if first_different(stages) else difference_in_run(config, rollout)
    if contradiction is not None:
        print(contradiction)
    return int(first_different(stages) is not None or contradiction is not None)


def difference_in_run(config: Config, rollout: Rollout) -> str | None:
    """Describe the log-prob difference that the run recorded for the sample, if it is above the limit; otherwise return
    None. Also return None for runs with stale samples, whose differences include the effect of later updates."""
    if config.rollout.max_staleness or not rollout.differences:
        return None
    difference = fmean(map(abs, rollout.differences))
    if difference <= config.agreement_limit:
        return None
    dropped = [name for name in config.rollout.vllm_overrides if name not in KEPT_OVERRIDES]
    arguments = f"rollout.vllm_overrides.{', '.join(dropped)} (which this command ignores), " if dropped else ""
    return (
        f"In the run, however, the log-probs of this sample differed by {difference:.1e} per token (limit "
        f"{config.agreement_limit:g}). The layers are not the cause. Likely causes: {arguments}the run's layouts, or "
        "weights that a refit did not update. Fix: repeat a step with "
        f"{'these arguments removed, or with ' if dropped else ''}rollout.verify_refit=always"
    )


def diagnose(config: Config, token_ids: Sequence[int], folders: Mapping[str, Path], scratch: Path) -> list[Stage]:
    """Run a token sequence through trainer, engine and transformers, one after another, and compare the outputs. Raise
    RunFailure if an implementation fails. `folders` maps each implementation to its weights' folder."""
    single_rank = on_one_rank(config, len(token_ids))
    return compare(
        {side: _compute(side, Request(single_rank, folders[side], list(token_ids)), scratch) for side in SIDES},
        config.model.dtype,
        config.agreement_limit,
    )


def on_one_rank(config: Config, num_tokens: int) -> Config:
    """Return the run's config, changed so that the trainer and the engine have one rank each. Adapters are disabled
    because they are already merged in exported models. The engine loads its weights unchanged."""
    single_rank = with_engines_only(config)
    overrides = {name: value for name, value in single_rank.rollout.vllm_overrides.items() if name in KEPT_OVERRIDES}
    budget = max(single_rank.actor.tokens_per_microbatch, num_tokens)
    no_drafts = single_rank.rollout.speculative.model_copy(update={"method": None, "path": None})
    one_token = {"top_k": None, "top_p": 1.0, "speculative": no_drafts}
    changes: dict[str, dict[str, Any]] = {
        "actor": {"tokens_per_microbatch": budget, "threads": None},
        "rollout": {"tp": 1, "replicas": 1, "vllm_overrides": overrides} | one_token,
    }
    sections = {name: getattr(single_rank, name).model_copy(update=update) for name, update in changes.items()}
    return single_rank.model_copy(update=sections)


def read_run_config(folder: Path) -> Config:
    """Return the config of a run, without executing files that it names."""
    path = folder / "config.resolved.yaml"
    if not path.is_file():
        raise UserError(
            f"{folder}: not a run folder (no config.resolved.yaml). Fix: pass a run folder such as runs/latest"
        )
    config = validated(document.parse(read_text(path), str(path)).values, FORMAT, path)
    if config.is_offline:
        raise UserError(f"{folder}: a run on offline data has no rollouts. Fix: pass the folder of an RL run")
    return config


def find_rollout(folder: Path, step: int | None, sample: str | None) -> Rollout:
    """Return a saved sample with token ids, by default the first one in the newest step's file. Skip samples with fewer
    than three tokens, which are too short for a comparison, and samples with images, whose log-probs cannot be
    recomputed from token ids alone. Raise UserError if no sample is left."""
    files = numbered(folder / "rollouts", ROLLOUTS)
    if not files:
        raise UserError(
            f"{folder}: the run has no rollouts yet. Fix: wait until it has completed a step. If it has already "
            "ended, start it under another run.name with logprob_check.canaries=off run.steps=1"
        )
    number = max(files) if step is None else step
    if number not in files:
        raise UserError(
            f"--step {number}: the run has no rollouts of this step. Fix: pass a step from {min(files)} to {max(files)}"
        )
    rows, _ = read_objects(files[number], keep=_token_fields)
    if sample is not None:
        rows = [row for row in rows if row.get("sample_id") == sample]
        if not rows:
            raise UserError(
                f"--sample {sample}: step {number} has no such sample. Fix: pass a sample_id from {files[number]}"
            )
    long = [row for row in rows if len(row[PROMPT_IDS]) + len(row[RESPONSE_IDS]) >= 3]
    chosen = next((row for row in long if not row[PROMPT_IMAGES]), None)
    if chosen is None and long:
        pictured = f"the prompt of sample {sample} contains" if sample else "the prompts of all samples contain"
        raise UserError(
            f"{files[number]}: {pictured} images, which megarl diagnose does not support. Fix: pass a --sample or "
            "--step whose prompt is text"
        )
    if chosen is None:
        missing = f"sample {sample} has no token ids" if sample else "no sample has token ids"
        raise UserError(
            f"{files[number]}: {missing}. megarl saves them for run.token_samples samples per step. Fix: pass a "
            "different --sample or --step, or set run.token_samples above 0 in the next run"
        )
    return Rollout(number, chosen["sample_id"], chosen[PROMPT_IDS], chosen[RESPONSE_IDS], chosen[LOGPROB_DIFFERENCES])


def _token_fields(record: dict[str, Any]) -> dict[str, Any]:
    """Return a sample's name, token ids and log-prob differences; the lists are empty if it has none. Also return
    whether it contains images. Raise ValueError if the lists are malformed."""
    ids = {name: record.get(name) or [] for name in (PROMPT_IDS, RESPONSE_IDS)}
    if not all(isinstance(row, list) and all(type(token) is int for token in row) for row in ids.values()):
        raise ValueError("malformed token ids")
    recorded = record.get(LOGPROB_DIFFERENCES) or []
    if not isinstance(recorded, list) or not all(value is None or is_plain(value, float) for value in recorded):
        raise ValueError("malformed log-prob differences")
    differences = [value for value in recorded if value is not None]  # null stands for a number that is not finite
    has_images = bool(record.get(PROMPT_IMAGES) or record.get(OBSERVATION_IMAGES))
    return {"sample_id": record["sample_id"], **ids, LOGPROB_DIFFERENCES: differences, PROMPT_IMAGES: has_images}


def find_weights(folder: Path, config: Config, model: Path | None) -> Path:
    """Return the folder with the weights: `model`, else the exported model, else the initial model."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise UserError(
                f"--model {model}: not a Hugging Face model folder (no config.json). Fix: pass a folder with "
                "config.json and weights"
            )
        return model
    exported = folder / "model"
    is_whole = (exported / "config.json").is_file()  # a PEFT folder has no config.json
    return exported if is_whole else resolve(config.model.path, revision=config.model.revision)


def _compute(side: str, request: Request, scratch: Path) -> dict[str, np.ndarray]:
    folder = scratch / side
    folder.mkdir()
    (folder / REQUEST).write_bytes(pickle.dumps(request))
    command = [*PYTHON, "-m", "megarl.run.diagnosis.side", side, str(folder)]
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        finished = subprocess.run(command, stdout=log, stderr=log, timeout=DEADLINE_S)
        if finished.returncode:
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()] or ["no output"]
            raise RunFailure(f"diagnose: the {side} exited with status {finished.returncode}: {lines[-1]}")
    with np.load(folder / OUTPUTS) as outputs:
        return {name: outputs[name] for name in outputs.files}
