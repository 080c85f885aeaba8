"""The vLLM rollout engine. The process must set the variables in `environment` before it imports this module."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from vllm import LLM, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from megarl.config.rollout_schema import Rollout
from megarl.core import device
from megarl.core.completion import NO_DRAFTS, CandidateIds, Completion, DraftCounts, VersionRun
from megarl.core.prompt_images import PromptImage
from megarl.core.sample import Sample
from megarl.environments.transcript import Context, Transcript
from megarl.models.families import completed
from megarl.models.folder import read_config
from megarl.models.huggingface import experts
from megarl.models.tokenizer import response_text
from megarl.resharding.piece import Holder
from megarl.resharding.planning.compact import CompactPlan
from megarl.resharding.transports.transport import Channel, dtype_name
from megarl.resharding.verification import Checksum, Region
from megarl.rollout.engine import EngineInfo, Sampling, SamplingRequest, SyncStats, TurnRequest
from megarl.rollout.routes import expert_layer_routes, whole_routes
from megarl.rollout.stepping import SteppedEngine
from megarl.rollout.vllm.images import ImageInputs
from megarl.rollout.vllm.ranks import has_lost_a_rank
from megarl.rollout.vllm.worker_extension import Failed, RefitExtension

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A request's id in vLLM, and vLLM's record of its draft tokens; None without speculative decoding."""

    vllm_id: str
    drafts: RequestSpecDecodeMetrics | None

    @property
    def draft_counts(self) -> DraftCounts:
        if self.drafts is None:
            return NO_DRAFTS
        passes = self.drafts.histogram  # index: number of accepted tokens
        accepted = sum(number * count for number, count in enumerate(passes))
        return DraftCounts(sum(passes), self.drafts.num_draft_tokens, accepted)


@dataclass(slots=True)
class _PendingRequest:
    """A request that has been submitted to vLLM, and the future for its completion."""

    token_ids: list[int]
    request: SamplingRequest | TurnRequest
    images: Sequence[MultiModalKwargsItem]
    submitted: _Submitted
    completion: asyncio.Future[Completion]

    @property
    def vllm_id(self) -> str:
        return self.submitted.vllm_id


class VllmEngine(SteppedEngine[SamplingRequest, Sample]):
    """A vLLM engine, which starts without weights (`version` is None) and receives them through `refit`. A step samples
    one token for every running request, or several with speculative decoding."""

    def __init__(self, config: Rollout, arguments: Mapping[str, Any], returns_routes: bool = False):
        """`arguments` is the result of `rollout_arguments` for the same `returns_routes`."""
        super().__init__()
        self._config = config
        self._pending: dict[str, _PendingRequest] = {}
        self._numbers = count()
        self._num_refits = 0
        self._llm = LLM(**arguments)
        self._tokenizer = self._llm.get_tokenizer()
        self._routed = experts(completed(read_config(Path(arguments["model"])))) if returns_routes else None
        """The model's experts if completions contain routes, else None."""
        self._images = ImageInputs.of(arguments)
        """None if the engine has no vision tower."""
        if self._captures_routes:
            self._call_workers(RefitExtension.capture_routes)
        self._descriptions = self._call_workers(RefitExtension.describe)
        for rank, description in enumerate(self._descriptions):
            print(f"engine rank {rank}: {description}", flush=True)

    async def _complete(self, request: SamplingRequest) -> Sample:
        context = [*request.prompt.token_ids.tolist(), *request.prefix]
        images = await self._patches(request.prompt.images)
        return self._sample(request, await self._begin(context, request, images))

    async def _patches(self, images: Sequence[PromptImage]) -> Sequence[MultiModalKwargsItem]:
        if not images:
            return ()
        assert self._images is not None, "config rules must reject images without model.vision"
        return await self._images.load(images)

    def num_unfinished(self, sample_ids: Collection[str]) -> int:
        requested = [item for item in self._pending.values() if item.request.sample_id in sample_ids]
        return sum(
            len(item.completion.result().token_ids) if item.completion.done() else self._num_tokens(item)
            for item in requested
            if not item.completion.cancelled()  # by an earlier call to abort
        )

    def _num_tokens(self, item: _PendingRequest) -> int:
        """Return the number of tokens sampled so far for an unfinished request."""
        detokenizer = self._llm.llm_engine.output_processor.request_states[item.vllm_id].detokenizer
        assert detokenizer is not None, "the request has no detokenizer"
        return detokenizer.num_output_tokens()

    def begin(self, request: TurnRequest) -> asyncio.Future[Completion]:
        if not self._pending:
            self._require_weights()
        if request.images:
            return asyncio.ensure_future(self._begin_with_images(request))
        return self._begin(request.token_ids.tolist(), request)

    async def _begin_with_images(self, request: TurnRequest) -> Completion:
        images = await self._patches(request.images)
        return await self._begin(request.token_ids.tolist(), request, images)

    def _begin(
        self,
        token_ids: list[int],
        request: SamplingRequest | TurnRequest,
        images: Sequence[MultiModalKwargsItem] = (),
    ) -> asyncio.Future[Completion]:
        """Submit a request and return the future for its completion. `images` contains the patches of its images."""
        if not self._is_paused:
            self._wake()
        name, completion = str(next(self._numbers)), asyncio.get_running_loop().create_future()
        submitted = self._submit(name, token_ids, request, images)
        self._pending[name] = _PendingRequest(token_ids, request, images, submitted, completion)
        completion.add_done_callback(lambda _: self._remove(name))
        self._ensure_stepping()
        return completion

    def _remove(self, name: str) -> None:
        """Remove a request, and abort it in vLLM if its completion was canceled."""
        if self._pending[name].completion.cancelled():
            self._abort([name])
        del self._pending[name]

    @property
    def _futures(self) -> Iterable[asyncio.Future[Completion]]:
        return [item.completion for item in self._pending.values()]

    def pause(self) -> None:
        self._is_paused = True
        self._finish_steps()

    def sleep(self, keeps_weights: bool) -> None:
        assert self._is_paused or not self._pending, "cannot sleep while sampling. Pause the engine first"
        if not keeps_weights:
            self.version = None
        self._reset_features()  # the encoder cache is not part of vLLM's sleep
        self._llm.sleep(level=1 if keeps_weights else 2, mode="keep")

    def _wake(self, tags: Sequence[Literal["weights", "kv_cache"]] = ("weights", "kv_cache")) -> None:
        for tag in tags:
            if tag in self._llm.llm_engine.model_executor.sleeping_tags:
                self._llm.wake_up(tags=[tag])

    def parameters(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        return self._call_workers(RefitExtension.parameters)

    def repacking(self) -> list[str]:
        return self._call_workers(RefitExtension.repacking)[0]

    def connect(self, plan: CompactPlan, channel: Channel, holders: Sequence[Holder], by_loader: bool) -> None:
        self._call_workers(RefitExtension.connect, plan, channel, holders, by_loader)

    def disconnect(self) -> None:
        self._call_workers(RefitExtension.disconnect)

    def refit(self, version: int, expected: Mapping[Region, Checksum] | None = None) -> list[SyncStats]:
        self.version = None
        # Do not wake the KV cache: the trainer may not have freed its memory yet.
        self._wake(["weights"])
        self._finish_steps()
        stats = self._call_workers(RefitExtension.refit, expected)
        self._num_refits += 1
        self._reset_features()
        if self._config.kv_cache_on_update == "recompute":
            # Running requests recompute the KV cache of their prompts and sampled tokens before their next token.
            self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
        else:
            self._resubmit_tokenless()
        self.hold(version)
        return stats

    def _reset_features(self) -> None:
        """Clear the encoder cache. Requests still in prefill recompute their features."""
        if self._images is not None:
            self._llm.llm_engine.reset_encoder_cache()

    def differing(self, expected: Mapping[Region, Checksum]) -> list[str] | None:
        self._wake(["weights"])
        differences = self._call_workers(RefitExtension.differing, expected)
        return None if None in differences else [line for lines in differences for line in lines]

    def info(self, texts: Sequence[str]) -> EngineInfo:
        head_dtype = dtype_name(self._llm.llm_engine.vllm_config.model_config.head_dtype)
        ids = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return EngineInfo(head_dtype, tuple(ids), self._descriptions[0])

    def hold(self, version: int) -> None:
        """Set the weight version that is recorded for all tokens sampled after this call."""
        self._llm.llm_engine.set_weight_version(str(version))
        self.version = version

    @property
    def has_lost_a_rank(self) -> bool:
        return has_lost_a_rank(self._llm)

    def checksums(self) -> list[dict[str, str]]:
        """Return the SHA-256 of each parameter's bytes, as one mapping per worker: parameter name -> SHA-256."""
        return self._call_workers(RefitExtension.checksums)

    def _call_workers(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method of RefitExtension in every worker and return the results, or raise the first worker error."""
        results = self._llm.collective_rpc(method.__name__, args=args)
        for result in results:
            if isinstance(result, Failed):
                raise result.error
        return results

    def _submit(
        self,
        name: str,
        token_ids: list[int],
        request: SamplingRequest | TurnRequest,
        images: Sequence[MultiModalKwargsItem],
    ) -> _Submitted:
        """Submit a request to vLLM. The cache salt separates prefix-cache entries by refit and purpose. A request must
        not reuse entries from older weights, which stay in the cache because interrupted samples still use and extend
        them."""
        salt = f"{self._num_refits}{request.purpose}"
        if images and self._images is not None:
            prompt = self._images.prompt(token_ids, _images_of(request), images, salt)
        else:
            prompt = tokens_input(token_ids, cache_salt=salt)
        vllm_id = self._llm.llm_engine.add_request(name, prompt, self._sampling(request))
        return _Submitted(vllm_id, self._draft_record(vllm_id))

    def _draft_record(self, vllm_id: str) -> RequestSpecDecodeMetrics | None:
        """Return the scheduler's live record of a request's drafts. The scheduler runs in this process. Outputs contain
        the record only if a token or a limit ended them, not if a stop string did."""
        if self._config.speculative.method is None:
            return None
        core = self._llm.llm_engine.engine_core.engine_core  # pyright: ignore[reportAttributeAccessIssue]
        return core.scheduler.requests[vllm_id].spec_decode_metrics

    def _abort(self, names: Sequence[str]) -> None:
        self._llm.llm_engine.abort_request([self._pending[name].vllm_id for name in names], internal=True)

    def _step(self) -> None:
        stepped = [output for output in self._llm.llm_engine.step() if isinstance(output, RequestOutput)]
        outputs = [output for output in stepped if output.request_id in self._pending]
        for output, routes in zip(outputs, self._routes_of(outputs), strict=True):
            item = self._pending[output.request_id]
            if not item.completion.done():
                item.completion.set_result(_completion(output, routes, item.submitted.draft_counts))

    @property
    def _captures_routes(self) -> bool:
        """Whether RouteCapture reports the routes, instead of vLLM itself."""
        return self._routed is not None and not device.on_cuda()

    def _routes_of(self, outputs: Sequence[RequestOutput]) -> list[NDArray[np.signedinteger] | None]:
        """Return the routes for each finished request, in the format of Completion.routes."""
        if self._routed is None or not outputs:
            return [None] * len(outputs)
        if self._captures_routes:
            names = [self._pending[output.request_id].vllm_id for output in outputs]
            computed = self._call_workers(RefitExtension.take_routes, names)[0]
        else:
            computed = [expert_layer_routes(self._routed, output.outputs[0].routed_experts) for output in outputs]
        prompts = [self._pending[output.request_id].token_ids for output in outputs]
        return [
            whole_routes(self._routed, routes, len(prompt) + len(output.outputs[0].token_ids))
            for prompt, routes, output in zip(prompts, computed, outputs, strict=True)
        ]

    def _sample(self, request: SamplingRequest, completion: Completion) -> Sample:
        ids = completion.token_ids
        prompt = request.prompt.with_files([None] * len(request.prompt.images))  # samples do not carry image files
        text = response_text(
            self._tokenizer,  # pyright: ignore[reportArgumentType]  # vLLM's protocol for tokenizers lacks methods
            request.prompt.token_ids.tolist(),
            [*request.prefix, *completion.text_ids.tolist()],
        )
        if request.prefix:
            transcript = Transcript(request.prompt.token_ids.tolist(), prompt.images)
            transcript.add_context(Context(request.prefix))
            transcript.add_turn(completion)
            return transcript.sample(request.sample_id, prompt, text, request.sample_id, None)
        return Sample(
            id=request.sample_id,
            prompt=prompt,
            response_ids=ids,
            response_logprobs=completion.logprobs,
            response_mask=np.ones(len(ids), np.bool_),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            candidate_ids=completion.candidate_ids,
            routes=completion.routes,
            drafts=completion.drafts,
        )

    def _finish_steps(self) -> None:
        """Finish all scheduled steps. On GPU, vLLM schedules steps before earlier ones have returned."""
        self._llm.sleep(level=0, mode="keep")
        for _ in range(self._llm.llm_engine.vllm_config.max_concurrent_batches):
            self._step()
        self._llm.wake_up(tags=["scheduling"])

    def _resubmit_tokenless(self) -> None:
        """Resubmit requests that have no tokens yet, so that samples from the new weights do not use an older KV
        cache."""
        unfinished = {name: item for name, item in self._pending.items() if not item.completion.done()}
        tokenless = {name: item for name, item in unfinished.items() if not self._num_tokens(item)}
        self._abort(list(tokenless))
        for name, item in tokenless.items():
            item.submitted = self._submit(name, item.token_ids, item.request, item.images)

    def _sampling(self, request: Sampling) -> SamplingParams:
        stop = [*self._config.stop, *request.stop]
        return SamplingParams(
            temperature=0.0 if request.is_greedy else _value_or(request.temperature, self._config.temperature),
            top_p=_value_or(request.top_p, self._config.top_p),
            top_k=_value_or(request.top_k, self._config.top_k or 0),
            max_tokens=_value_or(request.max_new_tokens, self._config.max_new_tokens),
            stop=stop,
            include_stop_str_in_output=True,
            # Number of most likely tokens to return besides the sampled one. Requests with their own top_k need none.
            logprobs=0 if request.is_greedy or request.top_k is not None else self._config.top_k or 0,
            flat_logprobs=True,
            # vLLM decodes all sampled tokens and candidate tokens between steps. Only stop strings need this text.
            detokenize=bool(stop),
            seed=request.seed,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # these parameters are not shared between requests
        )


def _images_of(request: SamplingRequest | TurnRequest) -> Sequence[PromptImage]:
    return request.prompt.images if isinstance(request, SamplingRequest) else request.images


def _value_or(value: T | None, default: T) -> T:
    return default if value is None else value


def _completion(
    output: RequestOutput, routes: NDArray[np.signedinteger] | None, drafts: DraftCounts = NO_DRAFTS
) -> Completion:
    [sampled] = output.outputs
    assert sampled.finish_reason in ("stop", "length"), (
        f"request {output.request_id}: unexpected finish reason {sampled.finish_reason}"
    )
    logprobs = sampled.logprobs  # each position has the sampled token first, then the most likely tokens
    assert isinstance(logprobs, FlatLogprobs), "the output has no flat log-probs"
    assert sampled.weight_versions is not None, "the output has no weight versions"
    return Completion(
        token_ids=np.array(sampled.token_ids, np.int32),
        logprobs=np.array([logprobs.logprobs[start] for start in logprobs.start_indices], np.float32),
        versions=tuple(VersionRun(int(run.version), run.end - run.start) for run in sampled.weight_versions),
        finish_reason=sampled.finish_reason,
        candidate_ids=_candidate_ids(logprobs),
        stop=sampled.stop_reason if isinstance(sampled.stop_reason, str) else None,
        num_cached_tokens=output.num_cached_tokens or 0,
        routes=routes,
        drafts=drafts,
    )


def _candidate_ids(logprobs: FlatLogprobs) -> CandidateIds | None:
    """Return the candidate tokens, which are the most likely tokens with nonzero probability. If other tokens tie with
    the least likely candidate, the engine samples from more tokens than it reports."""
    starts, ends = (np.asarray(indices, np.int64) for indices in (logprobs.start_indices, logprobs.end_indices))
    is_kept = np.asarray(logprobs.logprobs) > -np.inf
    is_kept[starts] = False  # exclude the sampled token
    if not is_kept.any():
        return None
    counts = np.append(0, np.cumsum(is_kept))
    return CandidateIds(np.asarray(logprobs.token_ids)[is_kept], np.append(0, counts[ends]))
