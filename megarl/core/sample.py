"""A sample and its reference on the driver.

Prompts and samples hold their tokens as read-only numpy arrays. The reward process and the data code handle them
without torch, and processes on one machine read them from Ray's object store without copying. A `TokenBatch` holds
torch tensors and exists only where a model runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.arrays import HoldsArrays
from megarl.core.completion import NO_DRAFTS, CandidateIds, DraftCounts, FinishReason, VersionRun, newest, oldest
from megarl.core.episode import Episode, RolloutInfo
from megarl.core.prompt import Prompt
from megarl.core.prompt_images import PromptImage, with_files
from megarl.core.score import NO_BASELINE, NO_TOTALS, Baseline, RewardPart, TokenTotals

if TYPE_CHECKING:
    from megarl.core.latents import LatentSample


GIVEN = "given"
"""Last part of the rollout id, STEP.GROUP.given, of a response that comes from the data instead of an engine."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample(HoldsArrays):
    """One training sequence: the completion of a prompt, or turns of a rollout with the tokens between them.

    R = number of response tokens, including the end-of-sequence token if it was sampled. Arrays may be passed as any
    sequences. A pickled response takes 8.2 bytes per token plus its text; the mask is packed into bits.

    Attributes:
        response_ids: int32 [R], the sampled ids; text is never tokenized again.
        response_logprobs: float32 [R], log-probs under the rollout policy at the sampling temperature.
        response_mask: bool [R], True for tokens that the policy sampled and that are trained on.
        versions: runs of tokens with the same weight version; their counts sum to R.
        text: the decoded response without special tokens, as reward functions read it.
        candidate_ids: None if the engine kept the whole vocabulary for every token.
        rollout_id: the sample's rollout, which may have several samples; "" stands for the sample's own id.
        episode: None without an environment.
        routes: int8 or int16 [P + R, layers, experts per token], the experts that the engine chose for each token of
            the prompt and response in each MoE layer. NO_ROUTE if a token's experts are unknown, such as those of the
            last token, which was never an input. None if the run does not replay routes.
        labels: float32 [R] in [0, 1], labels of the response tokens from the data, NaN for unlabeled tokens. None
            unless the data has labels.
        drafts: draft tokens that the engine verified, summed over turns.
        response_images: the images whose placeholders are in the response, in order: those in an environment's
            observations, or those after the first trained token of a conversation in the data. `prompt.images` contains
            the others.
    """

    id: str
    prompt: Prompt
    response_ids: NDArray[np.int32]
    response_logprobs: NDArray[np.float32]
    response_mask: NDArray[np.bool_]
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    text: str
    candidate_ids: CandidateIds | None = None
    rollout_id: str = ""
    episode: Episode | None = None
    routes: NDArray[np.signedinteger] | None = None
    labels: NDArray[np.float32] | None = None
    drafts: DraftCounts = NO_DRAFTS
    response_images: tuple[PromptImage, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_id", self.rollout_id or self.id)
        self._freeze("response_ids", np.int32)
        self._freeze("response_logprobs", np.float32)
        self._freeze("response_mask", np.bool_)
        if self.routes is not None:
            self._freeze("routes", self.routes.dtype, axes=3)
            assert len(self.routes) == self.num_tokens, (
                f"sample {self.id}: {len(self.routes)} routes for {self.num_tokens} tokens"
            )
        if self.labels is not None:
            self._freeze("labels", np.float32)
        lengths = {len(self.response_ids), len(self.response_logprobs), len(self.response_mask)}
        lengths.add(sum(run.count for run in self.versions))
        optional = (values for values in (self.candidate_ids, self.labels) if values is not None)
        lengths.update(len(values) for values in optional)
        assert len(lengths) == 1, (
            f"sample {self.id}: ids, log-probs, mask, versions, candidate ids or labels differ in length: {lengths}"
        )
        num_prompt_tokens = len(self.prompt.token_ids)
        is_split = all(image.stop <= num_prompt_tokens for image in self.prompt.images)
        is_split &= all(image.start >= num_prompt_tokens for image in self.response_images)
        assert is_split, f"sample {self.id}: an image is in prompt.images instead of response_images, or vice versa"

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def group(self) -> str:
        """Name of the sample's group; see `group_of`."""
        return group_of(self.prompt.id, self.rollout_id)

    @property
    def response(self) -> str:
        """The text, as reward functions receive it."""
        return self.text

    @property
    def num_sampled(self) -> int:
        """Number of response tokens."""
        return len(self.response_ids)

    @property
    def ref(self) -> SampleRef:
        """A reference to the sample, without its tokens."""
        return SampleRef(
            id=self.id,
            prompt_id=self.prompt.id,
            num_prompt_tokens=len(self.prompt.token_ids),
            num_response_tokens=len(self.response_ids),
            num_trained_tokens=int(self.response_mask.sum()),
            finish_reason=self.finish_reason,
            version_oldest=oldest(self.versions),
            version_newest=newest(self.versions),
            rollout_id=self.rollout_id,
            rollout=None if self.episode is None else self.episode.info,
            turns=() if self.episode is None else self.episode.turns,
            beginning=_prefix_checksum(self),
            drafts=self.drafts,
            patch_grids=tuple(image.grid for image in self.images),
            largest_id=int(self.token_ids.max(initial=0)),
        )

    def __reduce__(self) -> tuple:
        return _unpack_sample, (
            np.packbits(self.response_mask),
            *(self.id, self.prompt, self.response_ids, self.response_logprobs, self.versions, self.finish_reason),
            *(self.text, self.candidate_ids, self.rollout_id, self.episode, self.routes, self.labels, self.drafts),
            self.response_images,
        )

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Token ids of the prompt followed by the response, int32 [P + R]."""
        return np.concatenate((self.prompt.token_ids, self.response_ids))

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """All images, in the order of their placeholders."""
        return (*self.prompt.images, *self.response_images)

    def with_files(self, files: Sequence[Any]) -> Sample:
        """Return the sample with PromptImage.file set for each image. `files`: one value per image, in order."""
        if not files:
            return self
        count = len(self.prompt.images)
        return replace(
            self,
            prompt=self.prompt.with_files(files[:count]),
            response_images=with_files(self.response_images, files[count:]),
        )

    @property
    def without_files(self) -> Sample:
        """The sample without encoded images or references to them."""
        return self.with_files([None] * len(self.images))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt and response."""
        return len(self.prompt.token_ids) + len(self.response_ids)


def _unpack_sample(
    flags: NDArray[np.uint8], name: str, prompt: Prompt, ids: NDArray[np.int32], logprobs: NDArray[np.float32], *others
) -> Sample:
    mask = np.unpackbits(flags, count=len(ids)).view(np.bool_)
    return Sample(name, prompt, ids, logprobs, mask, *others)


def _prefix_checksum(sample: Sample) -> int:
    tokens = 0
    if sample.episode is not None:
        tokens = prompt_checksum(sample.prompt.token_ids)
        for image in sample.prompt.images:
            tokens = zlib.crc32(f"{image.start} {image.digest}".encode(), tokens)
    routes = b"" if sample.routes is None else sample.routes[: len(sample.prompt.token_ids)].tobytes()
    return zlib.crc32(routes, tokens)


def prompt_checksum(token_ids: NDArray[np.int32]) -> int:
    """Return the value of `SampleRef.beginning` for samples without routes that an environment starts with these
    tokens."""
    return zlib.crc32(token_ids.tobytes())


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A reference to a sample, with its ids, token counts, rewards and weight versions. The driver never holds its
    tokens.

    For an image, denoising steps are counted as tokens, and the number of prompt tokens is 0.

    Attributes:
        prompt_id: id of the prompt, shared by the samples of a group, and by all groups of the prompt.
        rollout_id: as in Sample.
        rollout: statistics of its rollout; None without an environment.
        turns: as in Episode; empty without an environment.
        beginning: checksum of the prompt's tokens and images if an environment may vary them between samples of one
            prompt, and of their routes if the engine reports routes. Samples with equal values can share their prompt.
        drafts: as in Sample.
        patch_grids: grid of each image, as in PromptImage.
        largest_id: largest token id of the prompt and the response; 0 for an image.
        sample: reference to the Sample or LatentSample in Ray's object store; in a rank, the sample itself. For an
            image, only the part for training.
        pictured: reference to an image's part for rewards; None for text.
        image_files: references to the encoded images of the sample, in the order of Sample.images. They are stored
            separately from the sample. Without an environment, the tuple is empty until a step takes the group.
        tokens_per_step: LatentSample.num_tokens; 0 for text.
        step: once an image is dispatched, index of the one trained denoising step that this reference stands for; None:
            the whole sample.

    Rewards, once the sample is scored (`megarl.step.rollout_rewards` defines those of a rollout):
        outcome: combined value of the reward functions.
        length_reward: reward for the lengths of the rollout's samples, added to the outcome. token_reward_totals:
        totals over the per-token rewards in the outcome.
        turn_rewards: as in Score.
        reward_parts: the rewards that make up the outcome, as in Score, if the estimator compares them separately.
        greedy: reward of the greedy response to the same prompt, if the estimator needs it.
        baseline: baseline for the reward.
        turn_advantages: advantage of each turn, added to the advantages of its tokens; empty if turns are not compared.
        reward_from_others: part of the scalar reward that comes from token and KL rewards of the rollout's other
            samples.

    is_stale: whether the step that trains on the sample starts from newer weights than those that sampled its
        oldest token.

    Inputs of the loss, once the sample is dispatched to a rank:
        scalar_reward: the reward without per-token rewards that are dispatched separately.
        weight: share of each trained token in the update's loss.
        imitation_weight: share of each trained token in the update's loss on positive examples.
        scores: references to per-token scores from other models, by field name of TokenBatch; in a rank, float32 [R].
    """

    id: str
    prompt_id: str
    num_prompt_tokens: int
    num_response_tokens: int
    num_trained_tokens: int
    finish_reason: FinishReason
    version_oldest: int
    version_newest: int
    rollout_id: str = ""
    rollout: RolloutInfo | None = None
    turns: tuple[tuple[int, int], ...] = ()
    beginning: int = 0
    drafts: DraftCounts = NO_DRAFTS
    patch_grids: tuple[tuple[int, int, int], ...] = ()
    largest_id: int = 0
    sample: Any = None
    pictured: Any = None
    image_files: tuple[Any, ...] = ()
    tokens_per_step: int = 0
    step: int | None = None
    outcome: float = 0.0
    length_reward: float = 0.0
    token_reward_totals: TokenTotals = NO_TOTALS
    turn_rewards: tuple[float, ...] = ()
    reward_parts: Mapping[str, RewardPart] = field(default_factory=dict)
    greedy: float = 0.0
    baseline: Baseline = NO_BASELINE
    turn_advantages: tuple[float, ...] = ()
    reward_from_others: float = 0.0
    is_stale: bool = False
    scalar_reward: float = 0.0
    weight: float = 0.0
    imitation_weight: float = 0.0
    scores: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_id", self.rollout_id or self.id)

    @property
    def scored(self) -> Any:
        """Reference to the object that reward processes read."""
        return self.sample if self.pictured is None else self.pictured

    @property
    def group(self) -> str:
        """Name of the sample's group; see `group_of`."""
        return group_of(self.prompt_id, self.rollout_id)

    @property
    def is_given(self) -> bool:
        """Whether the response is from the data instead of an engine."""
        return self.rollout_id.endswith(f".{GIVEN}")

    @property
    def has_failed(self) -> bool:
        """Whether the environment failed. A failed reward function does not count."""
        return self.rollout is not None and self.rollout.has_failed

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_response_tokens

    @property
    def reward(self) -> float:
        return self.outcome + self.length_reward

    @classmethod
    def of(cls, sample: Sample | LatentSample, reference: Any = None) -> SampleRef:
        return replace(sample.ref, sample=reference)


def group_of(prompt_id: str, rollout_id: str) -> str:
    """Return the name of a rollout's group. A step may have several groups for a prompt, if it draws the prompt more
    than once. The id of a sampled rollout is STEP.GROUP.NUMBER."""
    return f"{prompt_id}/{rollout_id.rpartition('.')[0]}"
