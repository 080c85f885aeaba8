"""Types passed between subpackages: prompts, samples and their scores.

Prompts and samples hold their tokens as read-only numpy arrays. The reward process and the data code handle them
without torch, and processes on one machine read them from Ray's object store without copying. A `TokenBatch` holds
torch tensors and exists only where a model runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    from megarl.core.latents import LatentSample

FinishReason = Literal["stop", "length"]

NO_ROUTE = -1
"""Expert index of a token without a route."""

FAILED, LOST = "failed", "lost"
"""Stop reasons of a rollout without a reward: the environment failed, or the infrastructure did. See StopReason in
megarl.environments.protocol."""


@dataclass(frozen=True, slots=True, eq=False)
class HoldsArrays:
    """Base of dataclasses with array fields: provides equality, pickling and read-only arrays."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    def __reduce__(self) -> tuple:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def _freeze(self, name: str, dtype: DTypeLike, axes: int = 1) -> None:
        """Convert a field, given as any sequence, to a read-only array."""
        array = np.asarray(getattr(self, name), dtype).view()
        assert array.ndim == axes, f"{name} has shape {array.shape}"
        array.setflags(write=False)
        object.__setattr__(self, name, array)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(HoldsArrays):
    """One prompt, tokenized once: the engine reads these ids and the trainer trains on them.

    Attributes:
        id: unique within the data set, stable across runs with the same seed.
        text: the decoded `token_ids`, including special tokens.
        token_ids: int32 [P]; any sequence is accepted.
        messages: the conversation that the prompt continues; each message has a role and content.
        answer: the reference answer for reward functions; None if they need none.
        columns: the columns of the data row that reward functions require, as JSON values.
    """

    id: str
    text: str
    token_ids: NDArray[np.int32]
    answer: Any = None
    messages: tuple[Mapping[str, str], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._freeze("token_ids", np.int32)

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`count` consecutive response tokens sampled under weight version `version`."""

    version: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class CandidateIds(HoldsArrays):
    """The candidates for each of R response tokens: the tokens left after the engine truncated its distribution.

    A token has no candidates if the engine kept the whole vocabulary.

    Attributes:
        ids: int32, the candidates of all tokens, concatenated.
        offsets: int32 [R + 1]; the candidates of token t are ids[offsets[t] : offsets[t + 1]].
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def __post_init__(self) -> None:
        self._freeze("ids", np.int32)
        self._freeze("offsets", np.int32)
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.ids), "offsets do not span ids"

    @classmethod
    def of(cls, ids_by_token: Sequence[ArrayLike]) -> CandidateIds:
        ids = [np.asarray(ids, np.int32) for ids in ids_by_token]
        return cls(np.concatenate([np.empty(0, np.int32), *ids]), np.cumsum([0, *map(len, ids)]))

    @classmethod
    def none(cls, num_tokens: int) -> CandidateIds:
        """Return the candidates for a response in which every token was sampled from the whole vocabulary."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens + 1, np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return iter(np.split(self.ids, self.offsets[1:-1])) if len(self) else iter(())


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Draft tokens that an engine verified, and the forward passes in which it did so.

    Attributes:
        num_accepted: draft tokens that became part of the response. Each pass adds one more token, which is sampled.
    """

    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_passes + other.num_passes,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
        )

    def metrics(self, fraction: str, length: str) -> dict[str, float]:
        """Return the accepted fraction of the draft tokens and the mean number of tokens that a pass added to the
        response, under these names; empty if no draft token was verified."""
        if not self.num_passes:
            return {}
        return {fraction: self.num_accepted / self.num_drafted, length: 1 + self.num_accepted / self.num_passes}


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True, eq=False)
class Completion(HoldsArrays):
    """R tokens sampled by an engine in one request, including the end-of-sequence token if it was sampled.

    Fields not listed here are as in `Sample`.

    Attributes:
        stop: the stop string at the end of the completion, which ended it; None if a token or a limit ended it.
        num_cached_tokens: number of preceding tokens that were in the engine's KV cache.
        routes: routes of the preceding tokens and of the completion.
        drafts: draft tokens that the engine verified.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    candidate_ids: CandidateIds | None = None
    stop: str | None = None
    num_cached_tokens: int = 0
    routes: NDArray[np.signedinteger] | None = None
    drafts: DraftCounts = NO_DRAFTS

    def __post_init__(self) -> None:
        self._freeze("token_ids", np.int32)
        self._freeze("logprobs", np.float32)
        if self.routes is not None:
            self._freeze("routes", self.routes.dtype, axes=3)

    @property
    def text_ids(self) -> NDArray[np.int32]:
        """The token ids without the stop token, which need not be a special token."""
        is_ended_by_token = self.finish_reason == "stop" and self.stop is None
        return self.token_ids[:-1] if is_ended_by_token else self.token_ids


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """Statistics of a rollout in an environment, shared by all of its samples.

    Attributes:
        stop_reason: reason why the rollout ended; a StopReason.
        num_samples: number of training sequences in the rollout; more than one if the context of a turn did not start
            with the tokens sampled so far.
        num_context_tokens: number of tokens preceding each turn after the first, summed over these turns.
        num_cached_tokens: number of context tokens that were in the engine's KV cache.
        num_restarts: number of times that the rollout started over, because its process was lost or a service was
            unavailable.
    """

    stop_reason: str
    num_turns: int
    num_samples: int
    tool_calls: Mapping[str, int]
    num_context_tokens: int
    num_cached_tokens: int
    num_restarts: int = 0

    @property
    def has_failed(self) -> bool:
        return self.stop_reason in (FAILED, LOST)


@dataclass(frozen=True, slots=True)
class Episode:
    """An environment's record of a rollout, for rewards and for display.

    Attributes:
        rewards: reward for each turn; None for a turn without a reward.
        parts: named components of the reward, summed over turns.
        failure: one line that explains why the rollout has no reward; None if it has one.
        stack: stack trace of the environment's error, if it raised one.
        outcome: reward for the rollout as a whole, in addition to the turn rewards.
        messages: the conversation, as text.
        first_turn: index within the rollout of this sample's first trained turn.
        is_last: whether this is the rollout's last sample, whose text reward functions read.
    """

    info: RolloutInfo
    rewards: tuple[float | None, ...]
    parts: Mapping[str, float]
    failure: str | None
    messages: tuple[Mapping[str, Any], ...]
    first_turn: int
    is_last: bool
    stack: str = ""
    outcome: float = 0.0


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
        routes: int8 or int16 [P + R, layers, experts per token], the indices of the experts to which the engine routed
            each token in the prompt and response, in each MoE layer. NO_ROUTE if a token's experts are unknown, such as
            those of the last token, which was never an input. None if the run does not replay routes.
        labels: float32 [R] in [0, 1], labels of the response tokens from the data, NaN for unlabeled tokens. None
            unless the data has labels.
        drafts: draft tokens that the engine verified, summed over turns.
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

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def group(self) -> str:
        """Name of the sample's group; see `group_of`."""
        return group_of(self.prompt.id, self.rollout_id)

    @property
    def response(self) -> str:
        """What reward functions receive."""
        return self.text

    @property
    def num_sampled(self) -> int:
        """Number of response tokens."""
        return len(self.response_ids)

    @property
    def ref(self) -> SampleRef:
        """The sample's names and counts."""
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
            beginning=_prefix_checksum(self),
            drafts=self.drafts,
        )

    def __reduce__(self) -> tuple:
        return _unpack_sample, (
            np.packbits(self.response_mask),
            *(self.id, self.prompt, self.response_ids, self.response_logprobs, self.versions, self.finish_reason),
            *(self.text, self.candidate_ids, self.rollout_id, self.episode, self.routes, self.labels, self.drafts),
        )

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Token ids of the prompt followed by the response, int32 [P + R]."""
        return np.concatenate((self.prompt.token_ids, self.response_ids))

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the prompt and response."""
        return len(self.prompt.token_ids) + len(self.response_ids)


def _unpack_sample(
    flags: NDArray[np.uint8], name: str, prompt: Prompt, ids: NDArray[np.int32], logprobs: NDArray[np.float32], *others
) -> Sample:
    mask = np.unpackbits(flags, count=len(ids)).view(np.bool_)
    return Sample(name, prompt, ids, logprobs, mask, *others)


def group_of(prompt_id: str, rollout_id: str) -> str:
    """Return the name of a rollout's group. A step may have several groups for a prompt, if it draws the prompt more
    than once. The id of a sampled rollout is STEP.GROUP.NUMBER."""
    return f"{prompt_id}/{rollout_id.rpartition('.')[0]}"


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Count, sum and sum of squares of a sample's per-token rewards. Tokens without a reward are not counted. A token
    with rewards from several models is counted once for each."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, rewards: Sequence[float]) -> TokenTotals:
        return cls(len(rewards), math.fsum(rewards), math.fsum(reward * reward for reward in rewards))

    def __add__(self, other: TokenTotals) -> TokenTotals:
        return TokenTotals(self.count + other.count, self.total + other.total, self.squares + other.squares)


NO_TOTALS = TokenTotals()


@dataclass(frozen=True, slots=True)
class Score:
    """The rewards of one sample: either a value, or the reason why it is missing. A failure is not a score of 0.

    Attributes:
        value: weighted sum of the parts; None if any part failed.
        parts: value of each reward function, by name.
        failure: None, or one line that names the reward function and the error.
        is_infrastructure: whether the infrastructure caused the failure, rather than a reward function.
        token_reward_totals: totals of the rewards that are assigned to single tokens.
        issues: problems that a response may cause without a failure, keyed by FUNCTION_PROBLEM: a description, or None
            if the problem did not occur.
    """

    value: float | None
    parts: dict[str, float]
    failure: str | None = None
    token_reward_totals: TokenTotals = NO_TOTALS
    is_infrastructure: bool = False
    issues: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """Baseline for a sample's reward: advantage = (reward − center) / scale. token_center and token_scale are the
    corresponding values for per-token rewards, each of which is compared separately."""

    center: float = 0.0
    scale: float = 1.0
    token_center: float = 0.0
    token_scale: float = 1.0


NO_BASELINE = Baseline()


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A reference to a sample, with its names, counts, rewards and weights. The driver never holds its tokens.

    For an image, denoising steps are counted as tokens, and the number of prompt tokens is 0.

    Attributes:
        prompt_id: id of the prompt, shared by the samples of a group, and by all groups of the prompt.
        rollout_id: as in Sample.
        rollout: statistics of its rollout; None without an environment.
        beginning: checksum of the prompt's tokens if an environment may vary them between samples of one prompt, and
            of their routes if the engine reports routes. Samples with equal values can share their prompt.
        drafts: as in Sample.
        sample: reference to the Sample or LatentSample in Ray's object store; in a rank, the sample itself. Of an
            image, it has only the part for training.
        pictured: reference to the image's part for rewards; None for a text.
        tokens_per_step: LatentSample.num_tokens; 0 for a text.
        step: index of the single trained denoising step to which the reference refers, once an image is dispatched;
            None: the whole sample.

    Rewards, once the sample is scored (`megarl.step.rollout_rewards` defines those of a rollout):
        outcome: combined value of the reward functions.
        length_reward: reward for the lengths of the rollout's samples, which is added to the outcome.
        token_reward_totals: totals over per-token rewards, which are part of the outcome.
        greedy: reward of the greedy response to the same prompt, if the estimator needs it.
        baseline: baseline for the reward.
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
    beginning: int = 0
    drafts: DraftCounts = NO_DRAFTS
    sample: Any = None
    pictured: Any = None
    tokens_per_step: int = 0
    step: int | None = None
    outcome: float = 0.0
    length_reward: float = 0.0
    token_reward_totals: TokenTotals = NO_TOTALS
    greedy: float = 0.0
    baseline: Baseline = NO_BASELINE
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


def oldest(versions: Sequence[VersionRun]) -> int:
    return min((run.version for run in versions), default=0)


def newest(versions: Sequence[VersionRun]) -> int:
    return max((run.version for run in versions), default=0)


def _prefix_checksum(sample: Sample) -> int:
    tokens = b"" if sample.episode is None else sample.prompt.token_ids.tobytes()
    routes = b"" if sample.routes is None else sample.routes[: len(sample.prompt.token_ids)].tobytes()
    return zlib.crc32(routes, zlib.crc32(tokens))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the trainer computes log-probs for sampled tokens.

    Attributes:
        truncates: whether to normalize over the engine's candidate tokens only.
        replays: whether to route tokens to the experts that the engine used.
    """

    temperature: float
    truncates: bool = True
    replays: bool = True
