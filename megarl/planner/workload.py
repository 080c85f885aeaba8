"""The number of samples and tokens that a recipe processes per step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megarl.config.model_schema import Teachers, Trained
from megarl.config.schema import Config
from megarl.models.denoiser import DenoiserShape
from megarl.models.flops import pairs_outside_window
from megarl.models.huggingface import WindowedAttention
from megarl.models.shape import ModelShape
from megarl.step.needed_passes import passes

USUAL_PROMPT = 512
"""Default mean number of tokens per prompt. A lower value is used if the context is shorter."""

USUAL_IMAGE = 768 * 768
"""Assumed image area in pixels, limited by data.min_pixels and data.max_pixels. Each prompt is assumed to have one
image. Plans do not read the data; `megarl check` prints the actual mean number of tokens per image."""

USUAL_CAPTION = 64
"""Default mean number of tokens per caption, with the text encoder's chat template."""

USUAL_SHARE = 0.5
"""Default mean response length as a fraction of the maximum response length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The work in one step.

    Attributes:
        samples: number of rollouts per step, or number of samples per step for offline data.
        prompts: number of prompts per step. An engine processes each prompt once.
        prompt_tokens: mean number of tokens per prompt or caption.
        trained: number of samples that the models train on.
        updates: number of optimizer steps per epoch.
        epochs: number of times that actor and critic train on each sample.
        passes: number of forward-only passes through the actor before its updates.
        is_offline: whether the run trains on offline data and therefore samples no rollouts.
    """

    samples: int
    prompts: int
    prompt_tokens: float
    trained: int
    updates: int
    epochs: int
    passes: int
    is_offline: bool

    @property
    def num_tokens(self) -> float:
        """Number of tokens in all samples, or in the trained denoising steps of all images."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """Maximum number of tokens that a microbatch must hold."""
        raise NotImplementedError

    def packed(self, settings: Trained | Teachers) -> Packed:
        """Return the microbatches into which a model packs the samples of an update, assuming full microbatches."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    @property
    def _in_updates(self) -> str:
        epochs = "" if self.epochs == 1 else f" in each of {self.epochs} epochs"
        return f"in {self.updates} {'update' if self.updates == 1 else 'updates'}{epochs}"


def workload_of(
    config: Config, shape: ModelShape, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Workload:
    """Return the work in one step of a recipe. See `TextWorkload.of` and `ImageWorkload.of`."""
    if isinstance(shape, DenoiserShape):
        return ImageWorkload.of(config, shape, prompt_tokens)
    features = image_features(config, shape)
    workload = TextWorkload.of(config, prompt_tokens, response_tokens, features)
    return replace(workload, is_recurrent=shape.linear is not None, windows=shape.windows)


def image_features(config: Config, shape: ModelShape) -> float:
    """Return the mean number of image features per prompt; 0 without images."""
    vision = shape.vision
    if vision is None or not config.trains_on_images:
        return 0.0
    pixels = max(config.data.min_pixels or 0, min(USUAL_IMAGE, config.data.max_pixels or USUAL_IMAGE))
    return max(1.0, pixels / (vision.patch * vision.merge) ** 2)


def _counts(config: Config) -> dict[str, Any]:
    """Return the fields that are computed in the same way for text and for images."""
    batch = config.batch
    trained = batch.prompts_per_step * config.trained_per_prompt
    sampled = batch.prompts_per_step * (batch.samples_per_prompt + config.samples_greedily)
    actor_passes = [p for p in passes(config) if p.needed and p.name in ("old log-probs", "reference log-probs")]
    return dict(
        samples=trained if config.is_offline else sampled,
        prompts=batch.prompts_per_step,
        trained=trained,
        updates=batch.prompts_per_step // batch.prompts_per_update,
        epochs=batch.epochs,
        passes=len(actor_passes) + len(config.self_teachers),
        is_offline=config.is_offline,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkload(Workload):
    """The work in one step of a language model.

    Attributes:
        context: maximum number of tokens per sample.
        longest_response: number of tokens in the longest response. The step waits for this response.
        sharing: number of trained samples per prompt. A microbatch processes their common prompt only once.
        is_recurrent: whether the model has recurrent states, so that each sample needs a copy of its prompt.
        windows: the model's layers with a sliding window.
        image_features: mean number of image features per prompt. Each feature is a token of the prompt.
    """

    context: int
    response_tokens: float
    longest_response: float
    sharing: int
    is_recurrent: bool = False
    windows: WindowedAttention | None = None
    image_features: float = 0.0

    @classmethod
    def of(
        cls,
        config: Config,
        prompt_tokens: float | None = None,
        response_tokens: float | None = None,
        image_features: float = 0.0,
    ) -> TextWorkload:
        """Return the work in one step of a recipe, excluding additional rounds of dynamic sampling.

        Args:
            prompt_tokens: mean number of tokens per prompt, including images. Default: USUAL_PROMPT and the images.
            response_tokens: mean number of tokens per response. Default: the fraction USUAL_SHARE of the maximum.
            image_features: as in the class.
        """
        context = config.rollout.context_length
        longest = min(config.rollout.max_new_tokens, context - 1)
        prompt = min(USUAL_PROMPT + image_features, context - longest) if prompt_tokens is None else prompt_tokens
        return cls(
            **_counts(config),
            context=context,
            prompt_tokens=prompt,
            image_features=min(image_features, prompt),
            response_tokens=USUAL_SHARE * longest if response_tokens is None else min(response_tokens, longest),
            longest_response=longest,
            sharing=config.trained_per_prompt,
        )

    @property
    def longest(self) -> int:
        return self.context

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens

    @property
    def num_tokens(self) -> float:
        return self.samples * self.sample_tokens

    @property
    def trained_tokens(self) -> float:
        return self.trained * self.sample_tokens

    def packed(self, settings: Trained | Teachers) -> Packed:
        layout, budget = settings.layout, settings.tokens_per_microbatch * settings.layout.cp
        replica_samples = self.trained / self.updates / layout.dp
        capacity = (budget - self.prompt_tokens) / max(1.0, self.response_tokens)
        # With context parallelism, attention in Transformer Engine needs a copy of the prompt for each sample.
        shares = layout.cp == 1 and not self.is_recurrent
        per_prompt = max(1.0, min(self.sharing, capacity, replica_samples)) if shares else 1.0
        prompt, response = self.prompt_tokens, self.response_tokens
        tokens = prompt / per_prompt + response
        count = max(1, -(-int(replica_samples * tokens) // budget))
        pairs = (prompt**2 / per_prompt + 2 * prompt * response + response**2) / 2
        in_prompt, in_sample = (pairs_outside_window(self.windows, n) for n in (prompt, prompt + response))
        pairs -= in_prompt / per_prompt + in_sample - in_prompt
        return Packed(
            microbatches=count,
            tokens=replica_samples * tokens / count,
            scored_share=response / tokens,
            pairs_per_token=pairs / tokens,
            features=replica_samples / per_prompt * self.image_features / count,
            most_features=budget * self.image_features / prompt,
            image_features=self.image_features,
        )

    def describe(self) -> str:
        image = f" (including {self.image_features:,.0f} for one assumed image)" if self.image_features else ""
        text = (
            f"{self.trained:,} samples with {self.prompt_tokens:,.0f} + {self.response_tokens:,.0f} tokens on "
            f"average{image}, {self.trained_tokens / 1e6:,.2f} million in total, {self._in_updates}"
        )
        return text if self.is_offline else f"{text}; the longest response has {self.longest_response:,.0f} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWorkload(Workload):
    """The work in one step of an image model.

    Attributes:
        size: height and width of an image in pixels.
        image_tokens: number of tokens per image, with padding.
        caption_tokens, empty_caption_tokens, longest_caption_tokens: number of tokens of a mean caption, of the empty
            caption and of the longest caption, with padding.
        num_steps: number of denoising steps per image.
        num_trained: number of trained denoising steps per image.
        is_guided: whether each denoising step also has a document with an empty caption.
    """

    size: tuple[int, int]
    image_tokens: int
    caption_tokens: int
    empty_caption_tokens: int
    longest_caption_tokens: int
    num_steps: int
    num_trained: int
    is_guided: bool

    @classmethod
    def of(cls, config: Config, shape: DenoiserShape, prompt_tokens: float | None = None) -> ImageWorkload:
        """Return the work in one step of a recipe. prompt_tokens: mean number of tokens per caption, with the chat
        template. Default: USUAL_CAPTION."""
        denoising = config.rollout.denoising
        caption = min(shape.max_caption_tokens, USUAL_CAPTION if prompt_tokens is None else prompt_tokens)
        return cls(
            **_counts(config),
            prompt_tokens=caption,
            size=(denoising.height, denoising.width),
            image_tokens=shape.image_tokens(denoising.height, denoising.width),
            caption_tokens=shape.caption_tokens(caption),
            empty_caption_tokens=shape.caption_tokens(1),
            longest_caption_tokens=shape.max_caption_tokens,
            num_steps=denoising.num_steps,
            num_trained=denoising.num_trained,
            is_guided=denoising.guidance != 1,
        )

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents of a denoising step."""
        captioned = Document(self.image_tokens, self.caption_tokens)
        return (captioned, Document(self.image_tokens, self.empty_caption_tokens)) if self.is_guided else (captioned,)

    @property
    def step_tokens(self) -> int:
        """Number of tokens in a denoising step."""
        return sum(document.tokens for document in self.documents)

    @property
    def longest(self) -> int:
        return self.step_tokens + self.longest_caption_tokens - self.caption_tokens

    @property
    def num_tokens(self) -> float:
        return self.samples * self.num_trained * self.step_tokens

    def packed(self, settings: Trained | Teachers) -> Packed:
        layout, tokens = settings.layout, self.step_tokens
        steps = self.trained * self.num_trained / self.updates / layout.dp
        per_microbatch = max(1, settings.tokens_per_microbatch * layout.cp // tokens)
        count = max(1, -(-int(steps) // per_microbatch))
        return Packed(
            microbatches=count,
            tokens=steps * tokens / count,
            scored_share=0.0,
            pairs_per_token=sum(document.tokens**2 for document in self.documents) / tokens,
            documents=self.documents,
        )

    def describe(self) -> str:
        height, width = self.size
        branches = ", with and without its caption" if self.is_guided else ""
        steps = self.trained * self.num_trained
        return (
            f"{self.trained:,} images of {height} x {width} pixels and {self.num_steps} denoising steps; training on "
            f"{steps:,} denoising steps with {self.step_tokens:,} tokens each{branches}, "
            f"{steps * self.step_tokens / 1e6:,.2f} million in total, {self._in_updates}"
        )


@dataclass(frozen=True, slots=True)
class Document:
    """An image and its caption, whose tokens attend to each other. The fields are numbers of tokens, with padding."""

    image: int
    caption: int

    @property
    def tokens(self) -> int:
        return self.image + self.caption


@dataclass(frozen=True, slots=True)
class Packed:
    """The microbatches that one replica processes in one update.

    Attributes:
        scored_share: fraction of tokens that belong to responses.
        pairs_per_token: mean number of tokens to which a token attends.
        documents: the documents of one denoising step. They share a microbatch. Empty for language models.
        features: mean number of image features in a microbatch.
        most_features: upper bound on the number of image features in a microbatch, reached if responses are empty.
        image_features: number of features in an image.
    """

    microbatches: int
    tokens: float
    scored_share: float
    pairs_per_token: float
    documents: tuple[Document, ...] = ()
    features: float = 0.0
    most_features: float = 0.0
    image_features: float = 0.0
