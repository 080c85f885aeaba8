"""Score evaluation samples. Their reward functions run in separate processes, because functions that score training
samples may keep state that an evaluation must not change."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.cluster.image_files import fetch_images
from megarl.cluster.rank_batch import with_images
from megarl.config.evaluation import config_of_set
from megarl.config.schema import Config
from megarl.core.sample import Sample
from megarl.core.score import Score
from megarl.environments.batch import is_judged, judge_batch, judge_single
from megarl.rewards.pool import FunctionPool, function_pool
from megarl.rewards.result import Result
from megarl.rewards.rollout_images import image_folder
from megarl.rewards.scorer import Scorer, require_ratings

Append = Callable[[Path, int, Sequence[tuple[Sample, Score]]], object]

SampleImages = Mapping[str, Sequence[Any]]
"""References to the samples' encoded images, in the order of Sample.images, by sample id."""

NO_IMAGES: SampleImages = MappingProxyType({})


class SetScorer:
    """The reward functions for one evaluation set, and the pool that runs them."""

    def __init__(self, config: Config, pool: FunctionPool, append: Append):
        """config: the evaluation set's config."""
        self._functions = [entry.label for entry in config.rewards.functions]
        self._single = [name for name in self._functions if name not in pool.batch_functions]
        self._scorer = Scorer(config.rewards.functions, environment_weight=config.environment.weight)
        self._pool, self._append = pool, append

    async def score(
        self, samples: Sequence[Sample], version: int, file: Path, images: SampleImages = NO_IMAGES
    ) -> list[Score]:
        """Score each sample from its rollout's results, and write the samples as text to a JSONL file."""
        judged = [sample for sample in samples if is_judged(sample)]
        if self._pool.image_functions:
            judged = await fetch_images(judged, images)
        judging = asyncio.gather(*(judge_single(self._pool, self._single, sample) for sample in judged))
        single, batch = await asyncio.gather(judging, judge_batch(self._pool, judged))
        by_rollout: dict[str, dict[str, Result]] = {}
        for sample, *parts in zip(judged, single, batch, strict=True):
            results = {name: result for part in parts for name, result in part.items()}
            by_rollout[sample.rollout_id] = {name: results[name] for name in self._functions if name in results}
        scores = [self._scorer.score(sample, by_rollout.get(sample.rollout_id, {}))[0] for sample in samples]
        scores = require_ratings(scores)
        pictured = [with_images(sample, images.get(sample.id, ())) for sample in samples]
        await asyncio.to_thread(write_samples, file, version, pictured, scores, self._append)
        return scores


class EvaluationScorer:
    """The scorers for all evaluation sets. Sets with the same reward functions share processes."""

    def __init__(self, config: Config, num_processes: int, append: Append):
        """append: appends samples with their scores to a file, as `append_rollouts` does."""
        self._pools: dict[str, FunctionPool] = {}
        self._sets: dict[str, SetScorer] = {}
        for evaluation_set in config.evaluation.sets:
            set_config = config_of_set(config, evaluation_set)
            entries = repr((set_config.rewards.functions, set_config.data.source_column))
            if entries not in self._pools:
                self._pools[entries] = function_pool(set_config, num_processes if set_config.rewards.functions else 1)
            self._sets[evaluation_set.name] = SetScorer(set_config, self._pools[entries], append)

    def __getitem__(self, name: str) -> SetScorer:
        return self._sets[name]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def write_samples(file: Path, version: int, samples: Sequence[Sample], scores: Sequence[Score], append: Append) -> None:
    """Write the scored samples. Replace a file and images that a killed attempt has left."""
    with suppress(OSError):  # the disk may be full; append_rollouts reports that
        file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    shutil.rmtree(image_folder(file), ignore_errors=True)
    append(file, version, list(zip(samples, scores, strict=True)))
