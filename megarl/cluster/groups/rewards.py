"""Reward computation in a separate process, so that the driver need not load the samples' text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from megarl.cluster.groups.evaluation import NO_IMAGES, EvaluationScorer, SampleImages
from megarl.cluster.groups.group import ASYNC_OPTIONS, AsyncProcessActor, WorkerGroup
from megarl.cluster.groups.remote import remote
from megarl.cluster.groups.reward_models import RewardEngineGroup, RewardModelGroup
from megarl.cluster.image_files import fetch_files, fetch_images
from megarl.cluster.pending import Pending, ready
from megarl.cluster.placement import Process
from megarl.cluster.rank_batch import Scores, get_samples, get_scores, put_sample, put_samples, put_scores, with_images
from megarl.cluster.session import Session
from megarl.config.schema import Config
from megarl.core.checkpoint import FileRecord, seal
from megarl.core.errors import UserError
from megarl.core.files import retry_when_full
from megarl.core.latents import AnySample
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample, SampleRef
from megarl.core.score import Score
from megarl.environments.batch import is_judged, judge_batch, judge_single
from megarl.models.run_models import ModelFolders
from megarl.models.tokenizer import load_decoder
from megarl.rewards import judge
from megarl.rewards.classifier import ModelReward
from megarl.rewards.feedback import FeedbackPrompts, feedback_on
from megarl.rewards.finished_files import GroupFile
from megarl.rewards.finished_groups import FinishedGroups
from megarl.rewards.model_judge import ModelJudge
from megarl.rewards.model_reward import classifier_reward, model_judge, model_reader
from megarl.rewards.pool import function_pool
from megarl.rewards.prompt_thumbnails import MAX_SECONDS, available_files
from megarl.rewards.reading import Reader, Reading, Unreadable
from megarl.rewards.result import Result
from megarl.rewards.rollout_file import MAX_TOKENS, append_rollouts, has_token_details, token_texts, write_advantages
from megarl.rewards.sample_file import load_samples, save_samples
from megarl.rewards.scorer import Scorer, require_ratings

if TYPE_CHECKING:
    import torch


@ray.remote(**ASYNC_OPTIONS)
class RewardActor(AsyncProcessActor):
    """The process that scores samples with a RewardWorker. It accepts new samples while it scores earlier ones."""

    async def start(self, config: Config, models: ModelFolders) -> None:
        self._worker = RewardWorker(config, models, self._process.threads)

    async def begin(self, samples: Sequence[Sample], images: SampleImages = NO_IMAGES) -> None:
        self._worker.receive(samples, images)

    async def forget(self, rollout_ids: Collection[str]) -> None:
        self._worker.forget(rollout_ids)


WaitingGroup = tuple[int, int, list[SampleRef]]
"""(prompt's row in the data, weight version when sampling started, samples)."""

MAX_ENDED = 2**18
"""Number of rollout ids to remember for recognizing late samples."""


class RewardWorker:
    """Scores samples with reward functions, a judge and a reward model, and writes rollouts to files."""

    def __init__(self, config: Config, models: ModelFolders, num_processes: int):
        """num_processes: number of processes that run the user's functions."""
        self._models, self._seed = models, config.run.seed
        self._readings: dict[str, Reading | Unreadable] = {}
        """This step's samples, retokenized for the reward model. Empty if the model reads the sampled token ids."""
        self._begun: dict[str, tuple[Sample, asyncio.Task[dict[str, Result]]]] = {}
        """Samples that the reward functions have started to score, by rollout id."""
        self._ended: dict[str, None] = {}
        """Ids of the most recent rollouts that were scored or dropped, oldest first."""
        self._finished = FinishedGroups(config.batch.samples_per_prompt + config.samples_greedily, fetch_files)
        self._num_detailed_groups = config.num_detailed_groups
        rewards = self._rewards = config.rewards
        rewards_tokens = config.algorithm.advantage.credits_to_go
        self._scorer = Scorer(rewards.functions, config.reward_model.weight, rewards_tokens, config.environment.weight)
        self._functions = [entry.label for entry in rewards.functions]
        self._pool = function_pool(config, num_processes)
        self._single_functions = [name for name in self._functions if name not in self._pool.batch_functions]
        self._single_see_images = any(name in self._pool.image_functions for name in self._single_functions)
        self._append = partial(append_rollouts, decode=lambda ids: self._decoder(ids), fetch=_fetch_images)
        self._evaluation = EvaluationScorer(config, num_processes, self._append)
        teachers = config.teachers.models if config.teachers_see_feedback else []
        self._feedback = FeedbackPrompts(teachers, config.data, models.actor)
        self._reader: Reader | ModelJudge | None = None
        folder = models.reward_model
        if folder is not None and config.reward_model.judges:
            self._reader = self._model_score = model_judge(config, folder, models.actor)
        elif folder is not None:
            self._reader = reader = model_reader(config, folder, models.actor)
            self._model_score = classifier_reward(config, folder, reader)

    def receive(self, samples: Sequence[Sample], images: SampleImages = NO_IMAGES) -> None:
        """Start scoring finished samples. Ignore samples that were already scored or dropped, because an engine's
        message may arrive after the driver's request for scores. Leave a sample to `score` if a function needs its
        images and `images` lacks them. Files of finished groups include images from environments."""
        samples = [sample for sample in samples if sample.rollout_id not in self._ended]
        for sample in samples:
            is_ready = sample.id in images or not (self._single_see_images and sample.prompt.images)
            if is_judged(sample) and is_ready:
                self.begin(sample, images)
        own = [
            sample if sample.episode is None else with_images(sample, images.get(sample.id, ())) for sample in samples
        ]
        for group in self._finished.add(own):
            names = [sample.rollout_id for sample in group if is_judged(sample)]
            if self._single_functions and self._begun.keys() >= set(names):
                self._finished.record(group, {name: self._begun[name][1] for name in names})

    def begin(self, sample: Sample, images: SampleImages = NO_IMAGES) -> asyncio.Task[dict[str, Result]]:
        """Start scoring a sample with the reward functions. An equal sample of the same rollout is scored only once."""
        begun, task = self._begun.get(sample.rollout_id, (None, None))
        if task is None or begun != sample:
            task = asyncio.create_task(self._judge_single(sample, images))
            self._begun[sample.rollout_id] = sample, task
        return task

    async def _judge_single(self, sample: Sample, images: SampleImages) -> dict[str, Result]:
        if self._single_see_images:
            [sample] = await fetch_images([sample], images)
        return await judge_single(self._pool, self._single_functions, sample)

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Cancel the scoring of samples from dropped rollouts."""
        self._end(rollout_ids)
        self._finished.forget(rollout_ids)
        for name in self._begun.keys() & set(rollout_ids):
            _, task = self._begun.pop(name)
            task.cancel()

    def _end(self, rollout_ids: Iterable[str]) -> None:
        self._ended |= dict.fromkeys(rollout_ids)
        for name in list(islice(self._ended, max(0, len(self._ended) - MAX_ENDED))):
            del self._ended[name]

    def close(self) -> None:
        """Stop the processes that run the user's functions. Without this call, they exit when this process exits."""
        self._pool.close()
        self._evaluation.close()

    def read(self, refs: Sequence[ray.ObjectRef]) -> list[SampleRef]:
        """Return the samples retokenized for the reward model, without samples that it cannot read."""
        reader = self._reader
        assert reader is not None, "the reward model reads the sampled token ids"
        self._readings = {sample.id: _read(reader, sample) for sample in ray.get(list(refs))}
        read = [reading.sample for reading in self._readings.values() if isinstance(reading, Reading)]
        return [put_sample(sample) for sample in read]

    async def score(
        self,
        refs: Sequence[ray.ObjectRef],
        model_scores: Scores,
        step: int,
        rollouts: Path,
        images: SampleImages = NO_IMAGES,
    ) -> tuple[list[Score], Scores]:
        """Score the samples and append them as text to a JSONL file. Return their scores, and references to per-token
        rewards if the reward model or a reward function returns any. `model_scores` refers to the reward model's
        scores, and is empty without a reward model."""
        samples: list[Sample] = await asyncio.to_thread(ray.get, list(refs))
        model_rewards = self._model_rewards(samples, model_scores)
        judged = [sample for sample in samples if is_judged(sample)]
        tasks = [self.begin(sample, images) for sample in judged]
        self._end(sample.rollout_id for sample in samples)
        shown = await fetch_images(judged, images) if self._pool.image_functions else judged
        # Batch reward functions need all samples at once.
        verdicts, batch_results = await asyncio.gather(self._verdicts(shown), judge_batch(self._pool, shown))
        by_rollout: dict[str, dict[str, Result]] = {}
        for sample, task, batch_rewards in zip(judged, tasks, batch_results, strict=True):
            results = {**(await task), **batch_rewards}
            by_rollout[sample.rollout_id] = {name: results[name] for name in self._functions if name in results}
            del self._begun[sample.rollout_id]
        scores = [
            self._scorer.score(
                sample, by_rollout.get(sample.rollout_id, {}), model_rewards.get(sample.id), verdicts.get(sample.id)
            )
            for sample in samples
        ]
        required = require_ratings([score for score, _ in scores])
        scored = list(zip(samples, required, strict=True))
        await self._finished.written(samples)
        feedback = {sample.id: feedback_on(sample, by_rollout.get(sample.rollout_id, {})) for sample in samples}
        await asyncio.to_thread(self._feedback.note, samples, feedback)
        pictured = [(with_images(sample, images.get(sample.id, ())), score) for sample, score in scored]
        await asyncio.to_thread(self._append, rollouts, step, pictured, self._token_texts, feedback)
        by_token = {
            sample.id: token_rewards
            for (sample, score), (_, token_rewards) in zip(scored, scores, strict=True)
            if token_rewards is not None and score.value is not None
        }
        return required, put_scores(by_token)

    def take_feedback(self) -> dict[str, Scores]:
        """Return references to prompts with feedback on the samples scored since the last call, int32 [P], by teacher
        and sample id."""
        return {name: put_scores(prompts) for name, prompts in self._feedback.take().items()}

    async def evaluate(
        self, refs: Sequence[ray.ObjectRef], name: str, version: int, file: Path, images: SampleImages = NO_IMAGES
    ) -> list[Score]:
        """Score samples from the evaluation set with this name. See SetScorer.score."""
        samples: list[Sample] = await asyncio.to_thread(ray.get, list(refs))
        return await self._evaluation[name].score(samples, version, file, images)

    def save_groups(self, groups: Sequence[WaitingGroup], file: Path) -> FileRecord:
        fetched = [(row, version, _with_own_images(refs)) for row, version, refs in groups]
        file.parent.mkdir()

        def save() -> FileRecord:
            try:
                save_samples(fetched, file)
                return seal(file, file.parent.parent)
            except Exception:
                file.unlink(missing_ok=True)
                raise

        return retry_when_full(save, file)

    def load_groups(self, file: Path) -> list[WaitingGroup]:
        groups = load_samples(file)
        return [(row, version, put_samples(samples)) for row, version, samples in groups]

    def begin_finished(self, folder: Path, version: int) -> None:
        self._finished.begin(folder, version)

    async def load_finished(self, files: Sequence[GroupFile]) -> list[list[SampleRef]]:
        groups = []
        for file in files:
            try:
                samples = file.load()
            except UserError as error:
                print(f"megarl: warning: a finished group is sampled again. {error}", flush=True)
                continue
            results = file.load_results()
            for sample in filter(is_judged, samples):
                recorded = results.get(sample.rollout_id)
                if recorded is not None and recorded.keys() == set(self._functions_for(sample)):
                    task = asyncio.create_task(_recorded(dict(recorded)))
                    self._begun[sample.rollout_id] = sample.without_files, task
            groups.append(put_samples(samples))
        return groups

    def _functions_for(self, sample: Sample) -> list[str]:
        return [name for name in self._single_functions if self._pool.judges(name, sample.prompt)]

    write_advantages = staticmethod(write_advantages)

    def _token_texts(self, sample: Sample) -> list[str] | None:
        """Return the text of each token in the sample if its line in the file lists tokens; None otherwise."""
        if not has_token_details(sample.id, self._num_detailed_groups):
            return None
        return token_texts(self._decoder, sample.response_ids[:MAX_TOKENS].tolist())

    @cached_property
    def _decoder(self) -> Callable[[tuple[int, ...]], str]:
        return load_decoder(self._models.actor)

    async def _verdicts(self, samples: Sequence[Sample]) -> dict[str, judge.Verdict]:
        """Return the judge's verdicts by sample id, or an empty mapping without a judge. `samples` contains all samples
        of each prompt."""
        if self._rewards.judge is None:
            return {}
        comparisons = judge.comparisons(samples, self._rewards.judge_order, self._seed)
        calls = [
            asyncio.wrap_future(self._pool.call(judge.NAME, *comparison.arguments, columns=comparison.columns))
            for comparison in comparisons
        ]
        return judge.verdicts(samples, zip(comparisons, await asyncio.gather(*calls), strict=True))

    def _model_rewards(self, samples: Sequence[Sample], model_scores: Scores) -> dict[str, ModelReward]:
        if self._models.reward_model is None:
            return {}
        scores = get_scores(model_scores)
        return {sample.id: self._model_reward(sample, scores.get(sample.id)) for sample in samples}

    def _model_reward(self, sample: Sample, scores: torch.Tensor | None) -> ModelReward:
        reading = self._readings.get(sample.id)
        if isinstance(reading, Unreadable):
            return ModelReward(None, failure=str(reading))
        assert scores is not None, f"the reward model returned no score for sample {sample.id}"
        return self._model_score.reward(sample, scores.tolist(), reading)


async def _recorded(results: dict[str, Result]) -> dict[str, Result]:
    return results


def _fetch_images(images: Sequence[PromptImage]) -> Iterator[tuple[PromptImage, bytes]]:
    """Yield the images with their encoded files, fetched one at a time. Skip images that were lost with their node, and
    stop if one does not arrive within MAX_SECONDS of the first request: thumbnails are optional."""
    deadline = time.monotonic() + MAX_SECONDS
    for image in images:
        if not isinstance(image.file, ray.ObjectRef):
            yield from available_files([image])
            continue
        try:
            file = ray.get(image.file, timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError:
            return
        except RayError:
            continue
        yield image, file


def _with_own_images(refs: Sequence[SampleRef]) -> list[AnySample]:
    """Fetch samples. Samples from environments include their encoded images."""
    pairs = zip(get_samples(refs), refs, strict=True)
    samples = [with_images(s, r.image_files) if isinstance(s, Sample) else s for s, r in pairs]
    # Fetch all at once, so that samples share the bytes of equal images.
    fetched = iter(fetch_files([sample for sample in samples if isinstance(sample, Sample)]))
    return [next(fetched) if isinstance(sample, Sample) else sample for sample in samples]


def _images_of(samples: Sequence[SampleRef]) -> SampleImages:
    return {sample.id: sample.image_files for sample in samples if sample.image_files}


def _read(reader: Reader | ModelJudge, sample: Sample) -> Reading | Unreadable:
    if sample.images:
        return Unreadable(
            "the sample has images, but the reward model sees only text. Fix: set reward_model.path=null and score "
            "responses with rewards.functions, such as generative_judge, or use an environment without images"
        )
    try:
        return reader.read(sample)
    except Unreadable as reason:
        return reason


class RewardGroup(WorkerGroup):
    """The process that scores samples, and the reward model, if any. The reward model scores them first."""

    title = "RewardActor"

    def __init__(
        self,
        session: Session,
        config: Config,
        processes: Sequence[Process],
        model: RewardModelGroup | RewardEngineGroup | None,
        models: ModelFolders,
    ):
        actors = {p.name: session.on_node(RewardActor, p).remote(p, session.logs) for p in processes}
        super().__init__(session, "rewards", actors)
        session.watch(self._actors)
        self._model, self._config, self._models = model, config, models
        self._reads_ids = config.reward_model.input_format == "ids"

    @remote(timeout="start")
    def _start(self, config: Config, models: ModelFolders) -> None: ...

    @remote(timeout="rewards")
    def _read(self, refs: Sequence[ray.ObjectRef]) -> list[SampleRef]: ...

    @remote(timeout="rewards", phase="rewards")
    def _score(
        self,
        refs: Sequence[ray.ObjectRef],
        model_scores: Scores,
        step: int,
        rollouts: Path,
        images: SampleImages,
    ) -> tuple[list[Score], Scores]: ...

    @remote(timeout="rewards")
    def _take_feedback(self) -> dict[str, Scores]: ...

    @remote(timeout="rewards", phase="evaluation")
    def _evaluate(
        self, refs: Sequence[ray.ObjectRef], name: str, version: int, file: Path, images: SampleImages
    ) -> list[Score]: ...

    @remote(timeout="checkpoint")
    def _save_groups(self, groups: Sequence[WaitingGroup], file: Path) -> FileRecord: ...

    @remote(timeout="checkpoint")
    def _load_groups(self, file: Path) -> list[WaitingGroup]: ...

    @remote(timeout="checkpoint")
    def _begin_finished(self, folder: Path, version: int) -> None: ...

    @remote(timeout="checkpoint")
    def _load_finished(self, files: Sequence[GroupFile]) -> list[list[SampleRef]]: ...

    @remote(timeout="update")
    def _write_advantages(
        self, path: Path, advantages: Mapping[str, float], details: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> None: ...

    @property
    def listener(self) -> ActorHandle:
        """The actor that starts scoring samples as soon as it receives them."""
        [actor] = self._actors.values()
        return actor

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Cancel the scoring of samples from these rollouts, because their scores are no longer needed."""
        self.listener.forget.remote(set(rollout_ids))

    def start(self) -> Pending[list[None]]:
        return self._start(self._config, self._models)

    def score(self, samples: Sequence[SampleRef], step: int, rollouts: Path) -> Pending[tuple[list[Score], Scores]]:
        """Score the samples with the reward model, then with the reward functions. The result contains their scores,
        and references to per-token rewards, float32 [R], if the model or a function returns any."""
        refs, path, images = [ref.scored for ref in samples], rollouts.resolve(), _images_of(samples)
        if self._model is None:
            return self._score.on_first(refs, {}, step, path, images)
        scored = self._model_scores(self._model, samples)
        return scored.then(lambda model_scores: self._score.on_first(refs, model_scores, step, path, images))

    def take_feedback(self) -> Pending[dict[str, Scores]]:
        """Return references to prompts with feedback on the samples scored since the last call, int32 [P], by teacher
        and sample id."""
        return self._take_feedback.on_first()

    def evaluate(self, samples: Sequence[SampleRef], name: str, version: int, file: Path) -> Pending[list[Score]]:
        """Score evaluation-set samples generated by this weight version, and write the scored samples to the file."""
        refs, images = [ref.scored for ref in samples], _images_of(samples)
        return self._evaluate.on_first(refs, name, version, file.resolve(), images)

    def save_groups(self, groups: Sequence[WaitingGroup], file: Path) -> FileRecord:
        """Write groups that wait for a later step to a file in a new folder of a checkpoint. Return the file's
        record."""
        return self._save_groups.on_first(groups, file.resolve()).result()

    def load_groups(self, file: Path) -> list[WaitingGroup]:
        """Read groups written by `save_groups`."""
        return self._load_groups.on_first(file.resolve()).result()

    def begin_finished(self, folder: Path, version: int) -> None:
        """From now on, write finished groups to this folder, unless a token was sampled with weights newer than
        `version`."""
        self._begin_finished.on_first(folder.resolve(), version).result()

    def load_finished(self, files: Sequence[GroupFile]) -> list[list[SampleRef]]:
        """Return the finished groups in these files. Reward functions are not called again if their results are in the
        files. A damaged file is skipped with a warning."""
        return self._load_finished.on_first(files).result()

    def write_advantages(
        self, rollouts: Path, advantages: Mapping[str, float], details: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> Pending[None]:
        """Add advantages, by sample id, and per-token details to the step's rollout file. No-op without advantages."""
        if not advantages:
            return ready(None)
        return self._write_advantages.on_first(rollouts.resolve(), advantages, details)

    def _model_scores(
        self, model: RewardModelGroup | RewardEngineGroup, samples: Sequence[SampleRef]
    ) -> Pending[Scores]:
        """Start scoring the samples that the reward model can read."""
        if self._reads_ids:
            return model.scores(samples)
        readable = self._read.on_first([ref.sample for ref in samples])
        return readable.then(lambda samples: model.scores(samples) if samples else {})
