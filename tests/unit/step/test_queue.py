"""With a queue of rollouts that start ahead, a run trains on each row once, even if the run is killed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.load import load
from megarl.core.checkpoint import FORMAT, FileRecord
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import SampleRef
from megarl.data.cursor import PromptCursor
from megarl.data.prompts import GivenResponse, PromptSet
from megarl.data.weighted_cursor import WeightedCursor
from megarl.rollout.router import Aborted
from megarl.run.context import RunContext
from megarl.step.finished import FinishedRollouts
from megarl.step.queue import WAITING, RolloutQueue, describe
from megarl.step.state import PendingPrompt, RunState
from tests.paths import BASE

STEPS, PER_STEP, SAMPLES = 12, 3, 2
DATA = PromptSet(tuple(Prompt(str(i), "", (1,), "") for i in range(1000)), "hash")


class Rollouts:
    """Fake engines whose groups finish in a random order. The versions of a group's samples are those at its start and
    end."""

    def __init__(self, rng: random.Random):
        self.rng, self.version, self.under_way, self.router = rng, 0, [], self
        self.begun: list[int] = []
        self.forgotten: list[str] = []

    def generate(self, groups, listener):
        pendings = Submitted(self, groups, self.version)
        self.begun += [int(group[0].prompt.id) for group in groups]
        self.under_way.append(pendings)
        return pendings

    def wait(self, wanted, meanwhile):
        meanwhile()
        self.end(self.rng.choice(self.under_way))

    def end(self, pending):
        pending.ended = self.version
        self.under_way.remove(pending)

    def reassign_stragglers(self, groups):
        """Check that the given samples, which a step waits for, are pending."""
        names = [[r.sample_id for r in group] for pending in self.under_way for group in pending.groups]
        assert groups and all(group in names for group in groups)

    def abort(self, groups):
        """Abort groups by the names of their samples."""
        for pending in [*self.under_way]:
            if [request.sample_id for request in pending.groups[0]] in groups:
                self.end(pending)
                pending.is_aborted = True

    def finish_some(self):
        """Finish some groups, as happens while a step trains."""
        for pending in self.rng.sample(self.under_way, self.rng.randint(0, len(self.under_way))):
            self.end(pending)


class Submitted:
    """A fake of the Pending of submitted groups."""

    def __init__(self, rollouts: Rollouts, groups, version: int):
        self.rollouts, self.groups, self.begun, self.ended = rollouts, groups, version, None
        self.is_aborted = False

    @property
    def current(self):
        return SimpleNamespace(session=self.rollouts)

    def advance(self) -> bool:
        return self.ended is not None

    def result(self):
        assert self.ended is not None
        if self.is_aborted:
            return [Aborted(5)]
        return [[self._ref(r) for r in group] for group in self.groups]

    def _ref(self, request) -> SampleRef:
        name, prompt = request.sample_id, request.prompt.id
        return SampleRef(name, prompt, 1, 1, 1, "stop", self.begun, self.ended, rollout_id=name, sample=request.seed)


def queue_of(
    config, rollouts: Rollouts, state: RunState, saves: Saves | None = None, data: PromptSet = DATA
) -> RolloutQueue:
    rewards = SimpleNamespace(listener=None, forget=rollouts.forgotten.extend)
    if saves is not None:
        for name in ("save_groups", "load_groups", "begin_finished", "load_finished"):
            setattr(rewards, name, getattr(saves, name))
    folder = Path("unused") if saves is None else saves.folder
    finished = FinishedRollouts(config, rewards, folder, {"data": "hash", "code": []}, reproduces=True)
    workers = SimpleNamespace(engines=rollouts, environments=None, rewards=rewards)
    return RolloutQueue(config, workers, data, state, finished)


def attempt(
    config, rollouts: Rollouts, state: RunState, until: int, data: PromptSet = DATA
) -> tuple[list[list[SampleRef]], list[str]]:
    """Run up to the step `until`. Return the samples that each step trained on, and the state after each step as a
    checkpoint stores it."""
    queue, trained, states = queue_of(config, rollouts, state, data=data), [], []
    while state.step < until:
        state.step += 1
        rollouts.version = state.step - 1
        queue.begin(state.step, PER_STEP)
        groups = queue.take(state.step, PER_STEP, lambda: None)
        trained.append([sample for group in groups for sample in group])
        queue.drop(state.step)
        rollouts.finish_some()
        states.append(json.dumps(state.dump()))
    return trained, states


@cache
def config_of(max_staleness: int, *overrides: str):
    keys = [f"rollout.max_staleness={max_staleness}", "cluster.placement=disaggregated", f"run.steps={STEPS}"]
    batch = f"batch={{prompts_per_step: {PER_STEP}, prompts_per_update: {PER_STEP}, samples_per_prompt: {SAMPLES}}}"
    return load(BASE, ["model.path=m", "data.source=arithmetic", batch, *keys, *overrides])


def fresh() -> RunState:
    return RunState(0, PromptCursor(1000, seed=0, shuffle=False))


def rows(trained: list[list[SampleRef]]) -> list[int]:
    return sorted(int(info.prompt_id) for step in trained for info in step[::SAMPLES])


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_staleness_reaches_but_never_exceeds_the_bound(max_staleness):
    oldest = []
    for seed in range(20):
        trained, states = attempt(config_of(max_staleness), Rollouts(random.Random(seed)), fresh(), STEPS)
        ages = [version - info.version_oldest for version, step in enumerate(trained) for info in step]
        oldest.append(max(ages))
        assert rows(trained) == list(range(STEPS * PER_STEP))
        names = [info.id for step in trained for info in step]
        assert len(set(names)) == len(names) == STEPS * PER_STEP * SAMPLES
        assert json.loads(states[-1])["under_way"] == [], "no rollout may start without a step for it"
    assert max(oldest) == max_staleness


class Images:
    """Prompts with one image, which neighbors share, and a fake object store that counts its objects."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        images = [(PromptImage(0, 1, (1, 2, 2), f"{i // 2}"),) for i in range(1000)]
        prompts = tuple(Prompt(f"{i}", "", (1,), "", images=image) for i, image in enumerate(images))
        files = SimpleNamespace(read=lambda digest: f"file {digest}".encode())
        self.data, self.num_objects = replace(DATA, prompts=prompts, images=files), 0
        monkeypatch.setattr("ray.put", self.put)

    def put(self, file: bytes) -> str:
        self.num_objects += 1
        return f"ref of {file.decode()}"


def test_trained_samples_refer_to_their_prompts_images(monkeypatch):
    images, rollouts = Images(monkeypatch), Rollouts(random.Random(0))
    trained, _ = attempt(config_of(0), rollouts, fresh(), 2, images.data)
    for sample in (sample for step in trained for sample in step):
        assert sample.image_files == (f"ref of file {int(sample.prompt_id) // 2}",)
    assert images.num_objects == 4  # the images 0 and 1 of prompts 0 to 2, and 1 and 2 of prompts 3 to 5
    assert all(image.file is None for prompt in images.data.prompts for image in prompt.images)


def test_restored_samples_refer_to_their_prompts_images(monkeypatch, tmp_path):
    images, saves = Images(monkeypatch), Saves(tmp_path)
    samples = [SampleRef(f"1.0.{k}", "7", 1, 1, 1, "stop", 0, 0, rollout_id=f"1.0.{k}") for k in range(SAMPLES)]
    saves.files, saves.groups = (FileRecord(WAITING, 1, ""),), [(7, 0, samples)]
    state = fresh()
    state.again.append(PendingPrompt(7, 0, 0))
    queue = queue_of(config_of(0), Rollouts(random.Random(0)), state, saves, images.data)
    queue.restore(saves)
    [taken] = queue.take(1, 1, lambda: None)
    assert taken == [replace(sample, image_files=("ref of file 3",)) for sample in samples]


DROPS = "rollout.on_stale=drop"


class Killed(Exception):
    pass


class Clocked(Rollouts):
    """Fake engines on a virtual clock. A group finishes after its row's duration. The engines die at call number
    `killed_at`."""

    def __init__(
        self, rng: random.Random, seconds: list[float], killed_at: float = math.inf, saves: Saves | None = None
    ):
        super().__init__(rng)
        self.saves = saves
        self.seconds, self.now, self.killed_at, self.ends = seconds, 0.0, killed_at, {}

    def generate(self, groups, listener):
        self.live()
        pending = super().generate(groups, listener)
        self.ends[pending] = self.now + max(self.seconds[int(group[0].prompt.id)] for group in groups)
        return pending

    def first(self, pendings, meanwhile):
        self.live()
        self.pass_until(min(self.ends[pending] for pending in pendings))
        return next(pending for pending in pendings if pending.advance())

    def abort(self, groups):
        self.live()
        super().abort(groups)

    def finish_some(self):
        """Advance the clock by the duration of a training step."""
        self.live()
        self.pass_until(self.now + 1.0)

    def pass_until(self, now: float) -> None:
        self.now = now
        for pending in [pending for pending in self.under_way if self.ends[pending] <= now]:
            self.end(pending)
            if self.saves is not None:
                self.saves.write(pending)

    def live(self) -> None:
        self.killed_at -= 1
        if self.killed_at < 0:
            raise Killed


class Saves:
    """Saved checkpoints, of which only the latest one can be loaded, and the groups written since."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.target = folder, None
        self.written: dict[str, list[SampleRef]] = {}
        """Groups by file name."""
        self.run, self.files, self.format, self.path = json.dumps(fresh().dump()), (), FORMAT, Path()
        self.state = {"config": config_of(0).model_dump()}
        self.groups: list = []

    def save_groups(self, groups, file):
        self.groups = [(row, version, list(samples)) for row, version, samples in groups]
        return FileRecord(str(file), 1, "")

    def load_groups(self, file):
        return self.groups

    def verify(self, records):
        assert len(records) == 1

    @property
    def step(self) -> int:
        return json.loads(self.run)["step"]

    def begin_finished(self, folder, version):
        self.target = folder, version

    def load_finished(self, files):
        assert all(file.path.exists() for file in files)
        return [self.written[file.path.name] for file in files]

    def write(self, pending) -> None:
        """Write finished groups, as the reward process does."""
        for group in pending.result() if self.target else ():
            if group[0].version_newest <= self.target[1]:
                self.put(group)

    def put(self, group: list[SampleRef]) -> None:
        folder, _ = self.target
        name, version = group[0].id.rpartition(".")[0], group[0].version_newest
        file = folder / f"{name}-{version}-{len(self.written):08x}.safetensors"
        file.touch()
        self.written[file.name] = group


def weights_of(trained: list[list[SampleRef]]) -> dict[str, dict[str, str]]:
    """Return the digests of weights that have trained on these groups."""
    return {
        "sample": {"regions": "", "trainer": str([(ref.id, ref.version_newest) for step in trained for ref in step])}
    }


@pytest.mark.parametrize("seed", range(50))
def test_killed_run_trains_on_each_row_once_and_in_time(seed, tmp_path):
    """The run is killed repeatedly at random times and resumes from its last checkpoint."""
    rng = random.Random(seed)
    staleness, drops, save_every = rng.randint(0, 3), rng.random() < 0.5, rng.randint(1, 3)
    factor = rng.choice([1.5, 2]) if drops and not staleness else 1 + staleness
    keys = (DROPS, f"batch.oversampling={factor}") if drops and factor > 1 else ()
    config = config_of(staleness, *keys)
    seconds = [rng.lognormvariate(0, 1.5) for _ in range(len(DATA))]
    saves, trained = Saves(tmp_path), []
    while (saved := json.loads(saves.run))["step"] < STEPS:
        state = RunState.restore(saved, config, DATA)
        del trained[state.step :]
        waited = [row for row, *_ in saves.groups]
        rollouts = Clocked(rng, seconds, killed_at=rng.randint(0, 25 * save_every), saves=saves)
        queue = queue_of(config, rollouts, state, saves)
        queue.finished.restore(state.step)
        queue.finished.note_weights(state.step, weights_of(trained))
        if state.step:
            queue.restore(saves)
        waited += [int(group[0].prompt_id) for group in queue.finished._found.values()]
        try:
            while state.step < STEPS:
                state.step += 1
                rollouts.version = state.step - 1
                queue.begin(state.step, PER_STEP)
                groups = queue.take(state.step, PER_STEP, lambda: None)
                queue.drop(state.step)
                trained.append([group[0] for group in groups])
                queue.finished.note_weights(state.step, weights_of(trained))
                names = [sample.id for group in groups for sample in group]
                assert len(set(names)) == len(names), "names must be unique in a step"
                rollouts.finish_some()
                if state.step % save_every == 0 or state.step == STEPS:
                    files = queue.save(Path())
                    saves.groups = saves.groups if files else []
                    saves.run, saves.files = json.dumps(state.dump()), files
        except Killed:
            pass
        assert not set(rollouts.begun) & set(waited) or drops, "saved samples must not be sampled again"
    rows = [[int(info.prompt_id) for info in step] for step in trained]
    everything = sorted(row for step in rows for row in step)
    ages = [version - info.version_oldest for version, step in enumerate(trained) for info in step]
    assert max(ages) <= staleness
    left = json.loads(saves.run)["under_way"]
    assert sorted([*everything, *left]) == list(range(len(everything) + len(left))), (
        "every row must be trained exactly once"
    )
    assert len(left) <= (config.prompts_ahead if drops else 0)
    # With drops, a row may be dropped and restarted, and after a kill, it may be queued behind older groups.
    late = 3 * staleness + 1 if drops else staleness
    latest = max(step - row // PER_STEP for step, found in enumerate(rows) for row in found)
    assert latest <= late, (staleness, drops, factor)


def test_groups_beyond_a_lowered_bound_are_sampled_again(tmp_path):
    config, saves, rollouts = config_of(3), Saves(tmp_path), Rollouts(random.Random(0))
    state = fresh()
    queue = queue_of(config, rollouts, state, saves)
    state.step = 1
    queue.begin(1, PER_STEP)
    for pending in [*rollouts.under_way]:
        rollouts.end(pending)
    queue.take(1, PER_STEP, lambda: None)
    saves.files, saves.run = queue.save(Path()), json.dumps(state.dump())
    assert [row for row, *_ in saves.groups] == list(range(3, 12))
    for max_staleness, format_number, kept in ((3, FORMAT, 9), (1, FORMAT, 3), (0, FORMAT, 0), (3, FORMAT - 1, 0)):
        lower, saves.format = config_of(max_staleness), format_number
        state, rollouts = RunState.restore(json.loads(saves.run), lower, DATA), Rollouts(random.Random(0))
        queue = queue_of(lower, rollouts, state, saves)
        queue.restore(saves)
        state.step = 2
        queue.begin(2, PER_STEP)
        assert rollouts.begun[:1] == [3 + kept], "the remaining groups must be requested in order"
        assert [item.row for item in state.under_way[:kept]] == list(range(3, 3 + kept))


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_stale_groups_are_aborted_counted_and_requeued(max_staleness):
    """Three of five groups finish. The others are too old after max_staleness more steps."""
    config = config_of(max_staleness, DROPS, "batch.oversampling=1.6")
    rollouts, state = Rollouts(random.Random(0)), fresh()
    queue = queue_of(config, rollouts, state)
    for state.step in range(1, 2 + max_staleness):
        queue.begin(state.step, PER_STEP)
        assert rollouts.begun == list(range(5 + 3 * (state.step - 1)))
        for pending in [*rollouts.under_way[2:]]:
            rollouts.end(pending)
        queue.take(state.step, PER_STEP, lambda: pytest.fail("it waits"))
        queue.drop(state.step)
        rollouts.version = state.step
    metrics = {name: metric.value for name, metric in queue.metrics().items()}
    names = [f"1.{i}.{k}" for i in range(2) for k in range(SAMPLES)]
    assert rollouts.forgotten == names and not rollouts.under_way
    counts = {"dropped_samples": 4, "dropped_tokens": 10, "aborted_samples": 4, "aborted_tokens": 10}
    assert {name: metrics[f"rollout/{name}"] for name in counts} == counts
    assert queue.metrics()["rollout/dropped_tokens"].value == 0, "dropped tokens must be counted once"
    state.step += 1
    queue.begin(state.step, PER_STEP)
    assert rollouts.begun[-5:][:2] == [0, 1]
    waited = []

    def end_one() -> None:
        waited.append(rollouts.under_way[0].groups[0][0].prompt.id)
        rollouts.end(rollouts.under_way[0])

    for pending in [*rollouts.under_way[2:]]:
        rollouts.end(pending)
    if not max_staleness:
        rollouts.wait = lambda *_: end_one()
        taken = queue.take(state.step, PER_STEP, lambda: None)
        assert waited == ["0", "1"] == [group[0].prompt_id for group in taken[:2]]


def test_late_group_is_dropped_with_its_samples():
    config = config_of(0, DROPS, "batch.oversampling=2")
    rollouts = Rollouts(random.Random(0))
    queue = queue_of(config, rollouts, fresh())
    queue.begin(1, PER_STEP)
    for pending in [*rollouts.under_way]:
        rollouts.end(pending)
    taken = queue.take(1, PER_STEP, lambda: None)
    assert [group[0].prompt_id for group in taken] == ["0", "1", "2"]
    queue.drop(1)
    metrics = {name: metric.value for name, metric in queue.metrics().items()}
    assert (metrics["rollout/dropped_samples"], metrics["rollout/dropped_tokens"]) == (3 * SAMPLES, 3 * SAMPLES)
    assert metrics["rollout/aborted_samples"] == metrics["rollout/aborted_tokens"] == 0


def test_prompts_drawn_by_solve_rate_can_start_ahead():
    """Solve rates arrive several steps after the draw, even for rows that an earlier attempt drew."""
    config = config_of(2, "data.solved_weight=0.1")
    state = RunState(0, WeightedCursor(len(DATA), 0, None, 0.1))
    loop = SimpleNamespace(data=DATA, state=state)
    for until in (2, 4):
        trained, _ = attempt(config, Rollouts(random.Random(until)), state, until)
        for step in trained:
            RunContext.note_solved(loop, {info.prompt_id: 1.0 for info in step})
        state = loop.state = RunState.restore(json.loads(json.dumps(state.dump())), config, DATA)
    assert state.cursor.state()["takes"] >= 2
    assert (
        len(state.cursor.state()["rates"]) == len({info.prompt_id for step in trained for info in step}) + 2 * PER_STEP
    )


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_longest_rows_are_submitted_first(max_staleness):
    """Two steps use six rows. Only the first three have known lengths: 1, 9 and 5."""
    config = config_of(max_staleness, "rollout.longest_first=true")
    state, rollouts = RunState(2, PromptCursor(6, seed=0, shuffle=False)), Rollouts(random.Random(0))
    state.lengths = {0: 1.0, 1: 9.0, 2: 5.0}
    state = RunState.restore(json.loads(json.dumps(state.dump())), config, DATA)
    queue = queue_of(config, rollouts, state)
    queue.begin(3, PER_STEP)
    if max_staleness:
        assert rollouts.begun == [1, 2, 3, 4, 5, 0], "unknown lengths count as the mean"
    else:
        asked = [int(group[0].prompt.id) for group in rollouts.under_way[0].groups]
        assert asked == [1, 2, 0]
    for pending in [*rollouts.under_way]:
        rollouts.end(pending)
    taken = queue.take(3, PER_STEP, lambda: None)
    assert [group[0].prompt_id for group in taken] == ["0", "1", "2"]
    assert [group[0].id for group in taken] == ["3.0.0", "3.1.0", "3.2.0"]
    assert state.lengths == {0: 1.0, 1: 1.0, 2: 1.0}


def test_length_of_a_row_is_the_mean_over_its_groups():
    """The step draws the only row twice, with responses of 2 and 6 tokens."""

    class Lengths(Submitted):
        def _ref(self, request) -> SampleRef:
            return replace(super()._ref(request), num_response_tokens=2 + 4 * request.sample_id.startswith("1.1."))

    config = config_of(0, "rollout.longest_first=true")
    state, rollouts = RunState(0, PromptCursor(1, seed=0, shuffle=False)), Rollouts(random.Random(0))
    queue = queue_of(config, rollouts, state)
    queue.begin(1, 2)
    [pending] = rollouts.under_way
    pending.__class__ = Lengths
    rollouts.end(pending)
    queue.take(1, 2, lambda: None)
    assert state.lengths == {0: 4.0}


def test_run_without_correction_warns():
    assert describe(config_of(0)) == []
    assert len(describe(config_of(2))) == 1
    assert "without a correction" in describe(config_of(2, "algorithm.correction.weight=null"))[1]
    assert "without a correction" in describe(config_of(2, "algorithm.correction.old=rollout"))[1]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_given_responses_need_no_engine(monkeypatch, max_staleness):
    """Each row is trained on once, with either its response or samples. A resumed run repeats the decisions."""
    monkeypatch.setattr("megarl.step.queue.put_sample", lambda sample: SampleRef.of(sample, sample))
    distillation = "algorithm.distillation={divergence: jsd, placement: loss, on_policy_share: 0.75}"
    alone = ("algorithm.advantage.estimator=policy_gradient", "rewards.functions=[]", "data.source=rows.jsonl")
    teachers = ("teachers.models=[{name: t, path: x}]", distillation, "data.response_column=solution")
    config = config_of(max_staleness, *alone, *teachers)
    responses = {p.id: GivenResponse((int(p.id), 1), (True, False), f"text {p.id}") for p in DATA.prompts}
    data = replace(DATA, responses=responses)

    def run(state: RunState, until: int) -> tuple[list[list[SampleRef]], list[str], Rollouts]:
        rollouts = Rollouts(random.Random(state.step))
        return *attempt(config, rollouts, state, until, data), rollouts

    trained, states, rollouts = run(fresh(), STEPS)
    items = [item for step in trained for item in step]
    given = {int(item.prompt_id): item for item in items if item.is_given}
    drawn = {row for row in range(STEPS * PER_STEP) if random.Random(f"{config.run.seed}.given.{row}").random() >= 0.75}
    assert given.keys() == drawn and len(drawn) > 3 and not drawn & set(rollouts.begun)
    assert sorted({int(item.prompt_id) for item in items}) == list(range(STEPS * PER_STEP))
    assert len(items) == SAMPLES * STEPS * PER_STEP - (SAMPLES - 1) * len(drawn)
    for row, item in given.items():
        assert item.id.count(".") == 2 and item.id.endswith(".given") and item.num_trained_tokens == 1
        assert item.sample.response_ids.tolist() == [row, 1] and item.sample.text == f"text {row}"
    again, _, _ = run(RunState.restore(json.loads(states[5]), config, data), STEPS)
    rest = {int(item.prompt_id) for step in again for item in step if item.is_given}
    assert rest == {row for row in drawn if row in {int(item.prompt_id) for step in again for item in step}} != set()
