"""The types that travel between rooms: prompts, samples and packed token batches.

Prompts and samples hold their tokens as numpy arrays that nobody can write, so that the reward process and the data
room handle them without torch, and processes of one machine read them where Ray has put them. A `TokenBatch` holds
torch tensors and exists only where a model runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]

NO_ROUTE = -1
"""The number in place of an expert's where a token has no route."""

FAILED = "failed"
"""The stop reason of a rollout whose environment raised an error, hung, or ended its process."""


class _HoldsArrays:
    """A base of dataclasses some of whose fields are arrays: their equality, and read-only fields."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)

    __hash__ = None

    def _freeze(self, name: str, dtype: DTypeLike, axes: int = 1) -> None:
        """Replaces a field's values, of any sequence, by an array that cannot be written."""
        array = np.asarray(getattr(self, name), dtype).view()
        assert array.ndim == axes, f"{name} has shape {array.shape}"
        array.setflags(write=False)
        object.__setattr__(self, name, array)


@dataclass(frozen=True, slots=True, eq=False)
class Prompt(_HoldsArrays):
    """One prompt, tokenised once: these ids are what the engine reads and what the trainer trains on.

    id         unique within the data set, stable over runs with the same seed
    text       what `token_ids` decode to, special tokens included
    token_ids  int32 [P], which may be given as any sequence
    messages   the conversation that the prompt continues, each message with its role and content
    answer     the reference that rewards compare with (None if they need none)
    columns    those columns of the data's row that a reward function asks for, as JSON values
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

    def __reduce__(self) -> tuple:
        return Prompt, (self.id, self.text, self.token_ids, self.answer, self.messages, self.columns)


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`count` consecutive response tokens that were sampled under weight version `version`."""

    version: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class CandidateIds(_HoldsArrays):
    """The candidates of each of R response tokens: the tokens that the engine kept when it truncated the distribution
    that it sampled from; none where it kept the whole vocabulary.

    ids       int32, the candidates of all tokens, one token after the other
    offsets   int32 [R + 1]: the candidates of token t are ids[offsets[t] : offsets[t + 1]]
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def __post_init__(self) -> None:
        self._freeze("ids", np.int32)
        self._freeze("offsets", np.int32)
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.ids), "the offsets do not cover the ids"

    @classmethod
    def of(cls, ids_by_token: Sequence[ArrayLike]) -> CandidateIds:
        ids = [np.asarray(ids, np.int32) for ids in ids_by_token]
        return cls(np.concatenate([np.empty(0, np.int32), *ids]), np.cumsum([0, *map(len, ids)]))

    @classmethod
    def none(cls, num_tokens: int) -> CandidateIds:
        """Returns the candidates of a response for which the engine kept the whole vocabulary at every token."""
        return cls(np.empty(0, np.int32), np.zeros(num_tokens + 1, np.int32))

    def __reduce__(self) -> tuple:
        return CandidateIds, (self.ids, self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return iter(np.split(self.ids, self.offsets[1:-1])) if len(self) else iter(())


@dataclass(frozen=True, slots=True, eq=False)
class Completion(_HoldsArrays):
    """R tokens that an engine sampled in one go, the end of the sequence included if it was sampled. Fields as in
    Sample.

    stop                the text that ended it, which it ends with; None if a token or its limit did
    num_cached_tokens   the tokens before them whose keys and values the engine had already
    routes              those of all tokens before them, and of theirs
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: tuple[VersionRun, ...]
    finish_reason: FinishReason
    candidate_ids: CandidateIds | None = None
    stop: str | None = None
    num_cached_tokens: int = 0
    routes: NDArray[np.signedinteger] | None = None

    def __post_init__(self) -> None:
        self._freeze("token_ids", np.int32)
        self._freeze("logprobs", np.float32)
        if self.routes is not None:
            self._freeze("routes", self.routes.dtype, axes=3)

    @property
    def text_ids(self) -> NDArray[np.int32]:
        """The tokens without the one that ended it, which may be no special one."""
        is_ended_by_token = self.finish_reason == "stop" and self.stop is None
        return self.token_ids[:-1] if is_ended_by_token else self.token_ids

    def __reduce__(self) -> tuple:
        return Completion, tuple(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class RolloutInfo:
    """The numbers of a rollout in an environment, which each of its samples has.

    stop_reason         why it ended: a StopReason
    num_turns           turns of the policy
    num_samples         the sequences that it is trained on as: more than one where a turn's context did not begin with
                        what had been sampled
    tool_calls          how many calls of tools ended in which way
    num_context_tokens  tokens before its turns after the first, summed over these
    num_cached_tokens   those of them whose keys and values the engine had already
    """

    stop_reason: str
    num_turns: int
    num_samples: int
    tool_calls: Mapping[str, int]
    num_context_tokens: int
    num_cached_tokens: int

    @property
    def has_failed(self) -> bool:
        return self.stop_reason == FAILED


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment says of a rollout, for its rewards and for people to read.

    info           its numbers
    rewards        of each turn, None for one without its own
    parts          the sums of rewards over turns, by the name that the environment gives them
    failure        why it has no reward, in one line; None if it has one
    stack          of what the environment raised, if it did
    outcome        the reward of the rollout as a whole, beside those of turns
    messages       the conversation, as text
    first_turn     the rollout's number of the first turn that this sample is trained on
    is_last        whether this is the last of the rollout's samples, whose text reward functions read
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
class Sample(_HoldsArrays):
    """One sequence that is trained on: the completion of a prompt, or turns of a rollout in an environment with what
    stands between them. R = number of response tokens, end-of-sequence included if it was sampled.

    Arrays may be given as any sequences. Pickled, a response costs 8.2 bytes a token beside its text: flags travel as
    bits.

    response_ids        int32 [R], the ids that were sampled; text is never tokenised again
    response_logprobs   float32 [R]: log-probabilities under the rollout_logprobs policy, at the sampling temperature
    response_mask       bool [R]: True for a token that the policy produced and that is trained on
    versions            runs of weight versions, whose counts sum to R
    text                the decoded response that rewards read, special tokens left out
    candidate_ids       None if the engine kept the whole vocabulary at every token
    rollout_id          the rollout that it is of, which may have several samples; "" stands for the sample's own id
    episode             None without an environment
    routes              int8 or int16 [P + R, layers, experts per token]: the numbers of the experts that each token of
                        prompt and response went to in the engine, in each layer that has experts; NO_ROUTE for all of
                        a token whose experts are not known, such as the last one, from which nothing was sampled. None
                        if the run does not replay routes
    labels              float32 [R] in [0, 1]: what the data says of the response's tokens, NaN for one of which it says
                        nothing. None but in data of labels
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_id", self.rollout_id or self.id)
        self._freeze("response_ids", np.int32)
        self._freeze("response_logprobs", np.float32)
        self._freeze("response_mask", np.bool_)
        if self.routes is not None:
            self._freeze("routes", self.routes.dtype, axes=3)
            assert len(self.routes) == self.num_tokens, f"sample {self.id}: {len(self.routes)} tokens have routes"
        if self.labels is not None:
            self._freeze("labels", np.float32)
        lengths = {len(self.response_ids), len(self.response_logprobs), len(self.response_mask)}
        lengths.add(sum(run.count for run in self.versions))
        optional = (values for values in (self.candidate_ids, self.labels) if values is not None)
        lengths.update(len(values) for values in optional)
        assert len(lengths) == 1, (
            f"sample {self.id}: ids, log-probs, mask, versions, kept ids or labels differ in length: {lengths}"
        )

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple:
        return _unpack_sample, (
            np.packbits(self.response_mask),
            *(self.id, self.prompt, self.response_ids, self.response_logprobs),
            *(self.versions, self.finish_reason, self.text, self.candidate_ids, self.rollout_id, self.episode),
            self.routes,
            self.labels,
        )

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The token ids of prompt and response, int32 [P + R]."""
        return np.concatenate((self.prompt.token_ids, self.response_ids))

    @property
    def num_tokens(self) -> int:
        """The number of prompt and response tokens together."""
        return len(self.prompt.token_ids) + len(self.response_ids)


def _unpack_sample(
    flags: NDArray[np.uint8], name: str, prompt: Prompt, ids: NDArray[np.int32], logprobs: NDArray[np.float32], *others
) -> Sample:
    mask = np.unpackbits(flags, count=len(ids)).view(np.bool_)
    return Sample(name, prompt, ids, logprobs, mask, *others)


@dataclass(frozen=True, slots=True)
class SampleInfo:
    """The driver's knowledge of a sample: numbers and names, never its tokens.

    prompt_id    the prompt's, which the samples of a group have in common
    rollout_id   as Sample's
    rollout      the numbers of its rollout; None without an environment
    beginning    tells the prompts' tokens apart where an environment gives samples of one prompt different ones, and
                 their routes where an engine does
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "rollout_id", self.rollout_id or self.id)

    @property
    def has_failed(self) -> bool:
        """Whether its environment has failed, and not its reward."""
        return self.rollout is not None and self.rollout.has_failed

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_response_tokens

    @classmethod
    def of(cls, sample: Sample) -> SampleInfo:
        return cls(
            id=sample.id,
            prompt_id=sample.prompt.id,
            num_prompt_tokens=len(sample.prompt.token_ids),
            num_response_tokens=len(sample.response_ids),
            num_trained_tokens=int(sample.response_mask.sum()),
            finish_reason=sample.finish_reason,
            version_oldest=min((run.version for run in sample.versions), default=0),
            version_newest=max((run.version for run in sample.versions), default=0),
            rollout_id=sample.rollout_id,
            rollout=None if sample.episode is None else sample.episode.info,
            beginning=_beginning(sample),
        )


def _beginning(sample: Sample) -> int:
    tokens = b"" if sample.episode is None else sample.prompt.token_ids.tobytes()
    routes = b"" if sample.routes is None else sample.routes[: len(sample.prompt.token_ids)].tobytes()
    return zlib.crc32(routes, zlib.crc32(tokens))


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Number, sum and sum of squares of the rewards that a sample's tokens have one by one. A token without a reward is
    not counted; a token with rewards from several models is counted once for each."""

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
    """The result of the rewards for one sample: either a value, or why there is none. A failure is not a zero.

    value      the weighted sum of the parts; None if any part failed
    parts      reward function name -> its own value
    failure    None, or one line that names the reward function and the error
    token_reward_totals  the part of the value that the tokens have as rewards one by one
    """

    value: float | None
    parts: dict[str, float]
    failure: str | None = None
    token_reward_totals: TokenTotals = NO_TOTALS


@dataclass(frozen=True, slots=True)
class Baseline:
    """The baseline of a sample's rewards: advantage = (reward − center) / scale.

    token_center, token_scale   the same for rewards of single tokens, where each is compared by itself
    """

    center: float = 0.0
    scale: float = 1.0
    token_center: float = 0.0
    token_scale: float = 1.0


NO_BASELINE = Baseline()


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the trainer scores what an engine sampled: at which temperature, whether over the tokens alone that the
    engine kept, and whether through the experts that it sent tokens to."""

    temperature: float
    truncates: bool = True
    replays: bool = True


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A sample with the scalars and scores that are dispatched with it.

    weight             one trained token's share of the update's loss
    scores             other models' scores of its response tokens: name as in TokenBatch -> float32 [R]
    imitation_weight   one trained token's share of the update's loss of positive examples
    """

    sample: Sample
    reward: float
    baseline: Baseline
    weight: float
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)
    imitation_weight: float = 0.0
