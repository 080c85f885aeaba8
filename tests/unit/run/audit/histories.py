"""Runs of the real queue that are killed anywhere, with the files that an audit reads."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.load import dump
from megarl.core.checkpoint import NAME, Checkpoint
from megarl.core.sample import SampleRef
from megarl.core.score import Score
from megarl.data.cursor import PromptCursor
from megarl.run.audit.audit import audit
from megarl.run.checkpoints import Checkpoints
from megarl.run.folder import RunFolder
from megarl.run.loggers import JsonlSink
from megarl.run.sample_ledger import SampleLedger
from megarl.step.record import step_record
from megarl.step.rollouts import choose, further_prompts
from megarl.step.scoring import is_informative
from megarl.step.state import RunState
from tests.unit.step.test_queue import DATA, PER_STEP, STEPS, Clocked, Killed, Saves, config_of, queue_of

NUM_ROWS, ROUNDS = 7, 2
"""Number of rows and of sampling rounds. With 3 prompts per step, an epoch ends within a step."""

WEIGHTS = {"sample": {"regions": "r"}, "all": {"regions": "a"}}


class History:
    """A run in a folder, which is killed repeatedly at random times and resumes from its last checkpoint. It samples in
    up to ROUNDS rounds. Some rollouts fail, and some groups are uninformative."""

    def __init__(self, folder: Path, seed: int, kills: bool = True):
        self.rng = rng = random.Random(seed)
        self.folder, self.kills, self.num_kills = RunFolder(folder), kills, 0
        staleness, drops = rng.randint(0, 3), rng.random() < 0.5
        factor = rng.choice([1.5, 2]) if drops and not staleness else 1 + staleness
        keys = ("rollout.on_stale=drop", f"batch.oversampling={factor}") if drops and factor > 1 else ()
        self.config = config_of(staleness, "data.shuffle=true", *keys)
        self.save_every = rng.randint(1, 3)
        self.drops_in_rounds = seed % 2 == 0
        """Whether stale groups are dropped after each round, as when a reward model shares devices with the engines."""
        self.saves, self.checkpoints = Saves(folder / "finished"), Checkpoints(folder / "checkpoints")
        self.saves.run = json.dumps(RunState(0, PromptCursor(NUM_ROWS, seed, shuffle=True)).dump())
        self.saves.state = {"config": self.config.model_dump()}
        self.weights: dict[int, dict[str, Any]] = {}
        self.seconds = [rng.lognormvariate(0, 1.5) for _ in range(NUM_ROWS)]
        self.attempt = 0
        (folder / "rollouts").mkdir()
        self.folder.config.write_text(dump(self.config))
        while self.attempt_until_killed():
            self.num_kills += 1

    def attempt_until_killed(self) -> bool:
        """Run one attempt. Return whether it was killed."""
        self.attempt += 1
        folder, saves = self.folder, self.saves
        state = RunState.restore(json.loads(saves.run), self.config, DATA)
        if folder.metrics.exists():
            folder.metrics.write_text("".join(folder.metrics_until(state.step or -1)))
        for step, file in folder.rollout_files().items():
            if step > state.step:
                file.unlink()
        checkpoint = None
        if state.step:
            self.checkpoints.roll_back_to(state.step)
            checkpoint = Checkpoint.open(folder.checkpoints / NAME.format(state.step))
        ledger = SampleLedger(folder.samples)
        ledger.begin(self.config, state, self.attempt, "hash", checkpoint, continues=checkpoint is not None)
        killed_at = self.rng.randint(0, 25 * self.save_every) if self.kills else 10**9
        rollouts = Clocked(self.rng, self.seconds, killed_at, saves)
        queue: Any = queue_of(self.config, rollouts, state, saves)
        saves.target = None
        queue.finished.restore(state.step)
        weights = self.weights.setdefault(state.step, self.new_weights(state.step))
        queue.finished.note_weights(state.step, weights)
        if checkpoint is not None:
            queue.restore(saves)
        try:
            self.may_be_killed()
            ledger.refit(state.step, weights)
            while state.step < STEPS:
                state.step += 1
                rollouts.version = state.step - 1
                self.step(ledger, queue, state, rollouts)
                if state.step % self.save_every == 0 or state.step == STEPS:
                    self.save(ledger, queue, state)
            ledger.end(STEPS)
            folder.manifest.write_text(json.dumps({"finished_after_step": STEPS}))
        except Killed:
            if self.rng.random() < 0.3:  # killed while it was writing a line
                with folder.samples.open("a") as file:
                    file.write('{"kind": "step", "st')
            return True
        return False

    def may_be_killed(self) -> None:
        if self.kills and self.rng.random() < 0.02:
            raise Killed

    def new_weights(self, step: int) -> dict[str, Any]:
        """Return new weights, as nondeterministic kernels would compute them."""
        scopes = {name: scope | dict.fromkeys(("trainer", "engines"), self.digest()) for name, scope in WEIGHTS.items()}
        return {"version": step, "num_engines": 2, **scopes}

    def digest(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def step(self, ledger: SampleLedger, queue: Any, state: RunState, rollouts: Clocked) -> None:
        sampled: list[list[SampleRef]] = []
        scores: list[Score] = []
        for _ in range(ROUNDS):
            scored = self.scored(sampled, scores)
            num_informative = sum(map(is_informative, scored))
            further = further_prompts(PER_STEP - num_informative, num_informative, len(sampled), PER_STEP)
            if not further:
                break
            queue.begin(state.step, further)
            groups = queue.take(state.step, further, lambda: None)
            scores += [self.score() for group in groups for _ in group]
            sampled += groups
            if self.drops_in_rounds:
                queue.drop(state.step)
        queue.drop(state.step)
        scored = self.scored(sampled, scores)
        record = step_record(queue.take_draws(), sampled, scores, scored, choose(scored, PER_STEP))
        with self.folder.rollouts(state.step).open("w") as file:
            for sample in (sample for group in sampled for sample in group):
                runs = sorted({sample.version_oldest, sample.version_newest})
                versions = [{"version": version, "count": 1} for version in runs]
                row = {"sample_id": sample.id, "prompt_id": sample.prompt_id, "num_response_tokens": 1}
                file.write(json.dumps({**row, "version": versions}) + "\n")
        rollouts.finish_some()
        self.weights[state.step] = self.new_weights(state.step)
        ledger.step(state.step, record, self.weights[state.step])
        queue.finished.note_weights(state.step, self.weights[state.step])
        self.may_be_killed()
        if self.rng.random() < 0.2:
            ledger.evaluation(state.step, [{"set": "a", "prompts": 2, "rollouts": 2, "failed": 0, "why": None}])
        metrics = {name: metric.value for name, metric in queue.metrics().items()}
        metrics |= {"rollout/prompts": len(sampled), "engines/alive": 2}
        JsonlSink(self.folder.metrics).write(state.step, metrics)

    def score(self) -> Score:
        if self.rng.random() < 0.05:
            return Score(None, {}, "reward: it raised an error")
        return Score(float(self.rng.random() < 0.7), {})

    def scored(self, sampled: list[list[SampleRef]], scores: list[Score]) -> list[list[SampleRef]]:
        remaining = iter(scores)
        pairs = [[(sample, next(remaining)) for sample in group] for group in sampled]
        return [[replace(s, outcome=score.value) for s, score in group if score.value is not None] for group in pairs]

    def save(self, ledger: SampleLedger, queue: Any, state: RunState) -> None:
        folder = self.checkpoints.begin(state.step)
        groups = self.saves.groups
        files = queue.save(Path())
        self.saves.groups = self.saves.groups if files else []

        def seal(checkpoint: Checkpoint) -> None:
            ledger.checkpoint(checkpoint)
            self.may_be_killed()

        try:
            self.checkpoints.commit(state.step, {"run": state.dump(), "attempt": self.attempt}, (), seal)
        except Killed:
            self.saves.groups = groups
            raise
        self.checkpoints.keep(2)
        self.saves.run, self.saves.files = json.dumps(state.dump()), files
        assert not folder.exists()

    def audit(self) -> tuple[bool, list[str]]:
        return audit(self.folder.path)
