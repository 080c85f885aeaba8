"""Canary prompts: a few fixed prompts to which every engine responds. The trainer then scores the response tokens with
the same weights, so any log-prob difference is a mismatch between engine and trainer, not an effect of training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np

from megarl.cluster.image_files import attach_images, put_images
from megarl.cluster.pending import Pending, join
from megarl.cluster.rank_batch import RankBatch
from megarl.cluster.workers import Workers
from megarl.config.schema import Config
from megarl.core.prompt import Prompt
from megarl.core.sample import SampleRef
from megarl.core.token_batch import Scoring
from megarl.data.image_files import ImageFiles
from megarl.data.image_rows import ImageRows, LoadedImage, load_processor
from megarl.data.prompts import PromptSet
from megarl.models.families import completed
from megarl.models.folder import read_config
from megarl.models.huggingface import experts
from megarl.models.tokenizer import load_tokenizer
from megarl.resharding.verification import regions
from megarl.rollout.engine import EngineInfo, SamplingRequest
from megarl.step.causes import Evidence

NUM_PROMPTS, NUM_TOKENS = 4, 16
"""Number of prompts, and maximum number of tokens per response. About a hundred tokens in total suffice to compare the
mean difference with its limit, and take about a second."""

PURPOSE = "canaries"
GREEDY, SAMPLED = "greedy", "sampled"
KINDS = (GREEDY, SAMPLED)

TEXTS = ("The capital of France is", "12 + 30 =", "def add(a, b):", "A triangle has three sides, and a square")
"""Prompts for runs whose tasks come from an environment instead of a data set."""

IMAGE_TEXT, IMAGE_SIZES = "Describe the image:", ((96, 64), (50, 120))
"""Text before a synthetic image, and the images' widths and heights in pixels."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One engine's responses by kind: greedy responses, and responses with the run's sampling settings."""

    samples: Mapping[str, Sequence[SampleRef]]

    @classmethod
    def of(cls, samples: Sequence[SampleRef]) -> Answers:
        """Split the responses to `Canaries._requests` by kind."""
        each = len(samples) // len(KINDS)
        return cls({kind: samples[i * each : (i + 1) * each] for i, kind in enumerate(KINDS)})


@dataclass(frozen=True, slots=True)
class Canaries:
    """The canary prompts in a run. `limit` is the largest difference between an engine and the trainer that rounding
    can explain: the mean log-prob difference per token, in nats."""

    config: Config
    workers: Workers
    prompts: Sequence[Prompt]
    limit: float

    @classmethod
    def of(cls, config: Config, workers: Workers, data: PromptSet) -> Canaries:
        """Return canaries from the first prompts in the data or, if any of them has no tokens, from TEXTS. Prompts from
        TEXTS are cut to fit the context, and prompts without tokens are left out. With model.vision, prompts with
        synthetic images are added."""
        prompts = [data[number] for number in range(min(NUM_PROMPTS, len(data)))]
        if not all(len(prompt.token_ids) for prompt in prompts):
            tokenizer = load_tokenizer(workers.model_folder)
            room = config.rollout.context_length - config.rollout.max_new_tokens
            ids = {text: tokenizer.encode(text, add_special_tokens=False)[:room] for text in TEXTS}
            prompts = [
                Prompt(f"{PURPOSE}:{text}", text, np.array(tokens, np.int32)) for text, tokens in ids.items() if tokens
            ]
        prompts = put_images(prompts, data.images)
        if config.model.vision:
            synthetic, files = synthetic_images(config, workers.model_folder)
            prompts += put_images(synthetic, files)
        return cls(config, workers, prompts, config.agreement_limit)

    def sample(self) -> dict[str, Answers]:
        """Sample responses of both kinds on every engine, then put the engines to sleep. Return them by engine name."""
        workers = self.workers
        workers.switch_to_rollout()
        groups = workers.engines.generate_on_each(self._requests).result()
        workers.suspend_engines()
        return {name: Answers.of(self._with_images(samples)) for name, samples in groups.items()}

    def _with_images(self, samples: Sequence[SampleRef]) -> list[SampleRef]:
        """Attach image references to the responses to `_requests`."""
        pairs = zip(samples, [*self.prompts] * len(KINDS), strict=True)
        return [attach_images(sample, prompt) for sample, prompt in pairs]

    def measure(self, answers: Mapping[str, Answers]) -> dict[str, Evidence]:
        """Return each engine's log-prob differences from the trainer, without evidence on their causes."""
        greedy, sampled = self._differences(answers, [(kind, self._scoring(kind)) for kind in KINDS])
        return {name: Evidence(self.limit, greedy[name], sampled[name]) for name in answers}

    def explain(self, answers: Mapping[str, Answers], measured: Mapping[str, Evidence]) -> dict[str, Evidence]:
        """Return the evidence for every possible cause, by engine name."""
        config, workers = self.config, self.workers
        others = self._other_scorings()
        differences = self._differences(answers, [(SAMPLED, scoring) for scoring in others.values()])
        rescored = dict(zip(others, differences, strict=True))
        texts = [prompt.text for prompt in self.prompts]
        infos = workers.engines.info(texts).result()
        workers.trained.stage_actor_for_sync()
        differing = workers.refit.differing()
        workers.suspend_engines()
        tokenizer = load_tokenizer(workers.model_folder)
        trainer_ids = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        has_experts = experts(completed(read_config(workers.model_folder))) is not None
        replays = config.actor.experts.replay_routes
        unreplayed = [(GREEDY, replace(self._scoring(GREEDY), replays=False))] if replays else []
        [other_routes] = self._differences(answers, unreplayed) or [{}]

        def explained(name: str, evidence: Evidence, info: EngineInfo) -> Evidence:
            pairs = zip(texts, trainer_ids, info.token_ids, strict=True)
            return replace(
                evidence,
                rescored={scoring: differences[name] for scoring, differences in rescored.items()},
                differing=differing[name],
                num_regions=len(regions(workers.engines.holders)),
                head_dtypes=(config.model.logits_dtype, info.head_dtype),
                other_tokens=[text for text, expected, ids in pairs if expected != ids],
                num_texts=len(texts),
                other_routes=other_routes.get(name),
                has_experts=has_experts,
                kernels=(workers.actor.kernels, info.description),
                overrides=tuple(config.rollout.vllm_overrides),
            )

        alive = infos.keys() & differing.keys()  # an engine may have been lost
        return {name: explained(name, measured[name], infos[name]) for name in measured if name in alive}

    def _requests(self, engine: str) -> list[SamplingRequest]:
        longest = min(NUM_TOKENS, self.config.rollout.max_new_tokens)
        return [
            SamplingRequest(
                f"{PURPOSE}.{engine}.{kind}.{number}",
                prompt,
                seed=number,
                greedy=kind == GREEDY,
                purpose=PURPOSE,
                max_new_tokens=longest,
            )
            for kind in KINDS
            for number, prompt in enumerate(self.prompts)
        ]

    def _scoring(self, kind: str) -> Scoring:
        return Scoring(1.0 if kind == GREEDY else self.config.rollout.temperature)

    def _other_scorings(self) -> dict[str, Scoring]:
        """Return the scorings that a misconfigured engine may use, by description, such as "at temperature 1"."""
        default = self._scoring(SAMPLED)
        temperatures = dict.fromkeys((1.0, default.temperature**2, 1 / default.temperature))
        others = {
            f"at temperature {t:g}": replace(default, temperature=t) for t in temperatures if t != default.temperature
        }
        if self.config.rollout.top_k is not None:
            others["over the full vocabulary"] = replace(default, truncates=False)
        return others

    def _differences(
        self, answers: Mapping[str, Answers], scorings: Sequence[tuple[str, Scoring]]
    ) -> list[dict[str, float]]:
        """Return the mean absolute log-prob difference per token, in nats, over each engine's responses. The result
        contains one mapping by engine name for each pair of kind and scoring in `scorings`."""
        actor, trained = self.workers.actor, self.workers.trained

        def score() -> Pending[list[dict[str, list[float]]]]:
            return join([actor.differences(self._batches(answers, kind), scoring) for kind, scoring in scorings])

        differences = trained.run({"actor": score}, parts=("parameters",))["actor"] if scorings else []
        return [
            {
                name: fmean(abs(value) for sample in responses.samples[kind] for value in values[sample.id])
                for name, responses in answers.items()
            }
            for (kind, _), values in zip(scorings, differences, strict=True)
        ]

    def _batches(self, answers: Mapping[str, Answers], kind: str) -> list[RankBatch]:
        samples = list(chain.from_iterable(answers[name].samples[kind] for name in answers))
        return RankBatch.split(samples, self.workers.actor.packing)


def synthetic_images(config: Config, folder: Path) -> tuple[list[Prompt], ImageFiles]:
    """Return prompts with one noise image each, and the encoded PNG images by digest. Prompts that do not fit the
    context are left out."""
    from PIL import Image

    rows = ImageRows(config.data, *load_processor(config, folder), ImageFiles())
    text = load_tokenizer(folder).encode(IMAGE_TEXT, add_special_tokens=False)
    prompts = []
    for number, (width, height) in enumerate(IMAGE_SIZES):
        name, stream = f"{PURPOSE}:image {number}", io.BytesIO()
        noise = np.random.default_rng(number).integers(256, size=(height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(stream, "PNG")
        image = LoadedImage(rows.files.add(stream.getvalue(), folder), rows.processor.grid(width, height))
        ids, placed = rows.expand([*text, rows.token], [image], name)
        if len(ids) <= config.rollout.context_length - config.rollout.max_new_tokens:
            prompts.append(Prompt(name, IMAGE_TEXT, np.array(ids, np.int32), images=placed))
    return prompts, rows.files
